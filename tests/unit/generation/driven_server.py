"""A server over a back end without a model, and who asks it: driven by hand, on a clock that the test moves."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Literal

import numpy as np

from kintsugi.errors import DeviceError, IntegrityError
from kintsugi.generation.server import GenerationServer
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.generation import Cancel, Generate, Generated, Produced
from kintsugi.protocol.messages import Body
from kintsugi.protocol.weights import LoadWeights
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.transport import Delivery
from kintsugi.types import Completion, FolderSource, Peer, SamplingParams, WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched
from tests.unit.generation.fake_backend import FakeBackend

Policy = Literal["keep", "recompute", "interrupt"]
PROMPT = np.array([1, 10, 2, 11], dtype="<i4").tobytes()


class FakeShell:
    """Requests go in by `ask`; replies and errors are kept by the request's sequence number."""

    process = "server-0"
    keys = (b"", b"")

    def __init__(self) -> None:
        self._requests: deque[Delivery] = deque()
        self._num_requests = 0
        self.replies: dict[int, Body] = {}
        self.errors: dict[int, BaseException] = {}
        self.sent: list[tuple[str, Produced]] = []
        self.load = 0.0
        self.gauges: dict[str, float] = {}
        self.incarnations: dict[str, str] = {}
        """Of askers that were replaced."""

    def ask(self, body: Body, *, requester: str = "manager-0") -> int:
        self._num_requests += 1
        kind = MessageKind.ONE_WAY if isinstance(body, Cancel) else MessageKind.REQUEST
        peer = self.peer(requester)
        envelope = Envelope("job", 0, requester, peer.incarnation, self._num_requests, kind)
        self._requests.append(Delivery(envelope, body, peer, b""))
        return self._num_requests

    def peer(self, process: str) -> Peer:
        return Peer(process, self.incarnations.get(process, "a"), "host-0", "", b"")

    def next_request(self, timeout_s: float) -> Delivery | None:
        return self._requests.popleft() if self._requests else None

    def take_all(self) -> list[Delivery]:
        deliveries = list(self._requests)
        self._requests.clear()
        return deliveries

    def reply(self, delivery: Delivery, body: Body) -> None:
        assert delivery.envelope.sequence not in self.replies, "answered twice"
        self.replies[delivery.envelope.sequence] = body

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        assert delivery.envelope.sequence not in self.errors, "answered twice"
        self.errors[delivery.envelope.sequence] = error

    def send(self, process: str, body: Body) -> None:
        assert isinstance(body, Produced)
        self.sent.append((process, body))

    def report(self, *, load: float, gauges: dict[str, float]) -> None:
        self.load, self.gauges = load, gauges

    def submit(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle:
        raise AssertionError("a server fetches weights through the `fetch` that it was given")

    def wake(self) -> None:
        pass

    def generated(self, requested: int) -> Generated:
        answer = self.replies[requested]
        assert isinstance(answer, Generated)
        return answer

    def told(self, number: int, *, requester: str = "manager-0") -> dict[int, list[int]]:
        """What was said of a request, joined as it came; a repetition is told again."""
        samples: dict[int, list[int]] = {}
        for process, body in self.sent:
            for fragment in body.fragments.get(number, ()) if process == requester else ():
                known = samples.setdefault(fragment.sample, [])
                assert fragment.offset in (0, len(known)), "a token is missing"
                known[fragment.offset :] = array("i", fragment.tokens)
        return samples


class Setup:
    """A server over a back end without a model, on a clock that moves a second with each step."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.shell = FakeShell()
        self.backend = FakeBackend()
        self.server = GenerationServer(
            self.shell,
            self.backend,
            fetch=self._fetch,
            clock=self.clock,
            background=lambda work: work(),
            verify=self._verify,
        )
        self.trusted = True
        self.fetched: list[int] = []
        self.damaged = 0
        self.checks: Iterator[bool] = repeat(True)
        """Whether fetched weights are still there, for each check of them."""

    def _fetch(self, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Fetched:
        self.fetched.append(manifest.version)
        if manifest.version == self.damaged:
            raise IntegrityError("expected xxh3 00, got ff")
        return Fetched(manifest, FolderSource("nowhere"), check=self._check)

    def _check(self) -> None:
        if not next(self.checks):
            raise IntegrityError("overwritten while it was copied")

    def _verify(self) -> None:
        if not self.trusted:
            raise DeviceError("the cpu of this process does not compute any more what it did")

    def load(self, version: int, *, running: Policy = "keep") -> int:
        manifest = WeightManifest(version, version, (), 0, f"digest-{version}")
        return self.shell.ask(LoadWeights(manifest, (), running))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.server.turn(0)
            self.clock.advance(1.0)

    def run(self) -> None:
        self.turn()
        while not self.backend.idle:
            self.turn()
        self.server.turn(0)


def generate(
    ticket: str,
    *,
    version: int = 1,
    samples: tuple[int, ...] = (),
    num_samples: int = 6,
    stream: bool = False,
    number: int = 0,
    max_new_tokens: int = 8,
    produced: tuple[Completion, ...] = (),
    endless: bool = False,
) -> Generate:
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, num_samples=num_samples, seed=5, top_logprobs=2, ignore_end=endless
    )
    return Generate(
        ticket, 0, PROMPT, sampling, version, samples, stream=stream, number=number, produced=produced
    )
