"""A `Mailbox` in the thread of the test."""

from __future__ import annotations

from collections import deque

from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.messages import Body
from kintsugi.transport import Delivery, Endpoint
from kintsugi.types import Peer


class Loopback:
    """Receives when it is polled, and keeps outgoing messages until `flush`."""

    keys = (b"", b"")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.process = endpoint.process
        self.unsent: deque[tuple[str, Body]] = deque()
        """`Produced` messages that the test delivers when, and as often as, it likes."""

    def peer(self, process: str) -> Peer | None:
        return self._endpoint.peers.get(process)

    def next_request(self, timeout_s: float) -> Delivery | None:
        return None

    def take_all(self) -> list[Delivery]:
        return self._endpoint.poll(0)

    def reply(self, delivery: Delivery, body: Body) -> None:
        self._endpoint.reply(delivery, body)

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self._endpoint.fail(delivery, error)

    def send(self, process: str, body: Body) -> None:
        self.unsent.append((process, body))

    def submit(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle:
        raise AssertionError("a server fetches weights through the `fetch` that it was given")

    def report(self, *, load: float, gauges: dict[str, float]) -> None:
        pass

    def wake(self) -> None:
        pass

    def flush(self) -> None:
        while self.unsent:
            self._endpoint.send(*self.unsent.popleft())
