"""An agent's loop without an endpoint: what background threads order is carried out when the test waits."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.transport import Delivery, Reply
from kintsugi.types import Peer

LONGEST_S = 20.0


@dataclass
class Loop:
    """Stands in for `LoopCalls`, and for the endpoint that answers."""

    answers: dict[str, Callable[[Body], Reply]] = field(default_factory=dict)
    """How each process answers a call."""
    replies: dict[int, Body] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    num_sent: int = 0
    _orders: queue.SimpleQueue[Callable[[], object]] = field(default_factory=queue.SimpleQueue)

    def run(self, order: Callable[[], object]) -> None:
        self._orders.put(order)

    def call(self, process: str, body: Body, deadline_s: float) -> Reply:
        return self.answers[process](body)

    def reply(self, delivery: Delivery, body: Body) -> None:
        self.replies[delivery.envelope.sequence] = body

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self.errors[delivery.envelope.sequence] = error

    def delivery(self, sender: str, body: Body) -> Delivery:
        self.num_sent += 1
        envelope = Envelope("job", 0, sender, "a", self.num_sent, MessageKind.REQUEST)
        return Delivery(envelope, body, Peer(sender, "a", "host", "", b""), b"")

    def until_answered(self, number: int) -> Any:
        """Run the loop until a request is answered; return the reply, or raise the error."""
        deadline = time.monotonic() + LONGEST_S
        while number not in self.replies and number not in self.errors:
            assert time.monotonic() < deadline, f"request {number} was not answered"
            self.turn(0.05)
        if number in self.errors:
            raise self.errors[number]
        return self.replies[number]

    def turn(self, timeout_s: float = 0.0) -> None:
        """Carry out what has been ordered."""
        try:
            self._orders.get(timeout=timeout_s)()
        except queue.Empty:
            return
