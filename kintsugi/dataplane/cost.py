"""What a link costs, as an estimate that follows what was measured.

A load of n requests and b bytes takes `latency_s + n · request_s + b · byte_s`. The latency is paid once, because
requests are under way together; `request_s` is paid for each, because who answers does so one by one; bytes share the
link. They are told apart by looking twice at every step: how long the first answer took, with one request and the
latency in it, and how long it took from there to the last, without the latency.
"""

from __future__ import annotations

from collections import deque

import msgspec

WEIGHT = 0.3
"""Of a new measurement in the exponential average."""
NUM_COMPARED = 3
"""Of so many latest measurements the middle one counts: a transfer that stood still for once changes nothing."""


class Load(msgspec.Struct, frozen=True):
    """What is put on a link: requests at the process that has to answer most of them, and bytes in all."""

    requests: int
    size: int


class Cost(msgspec.Struct, frozen=True):
    """`Cost(latency_s=1e-3, request_s=3e-4, byte_s=1e-9)`: a millisecond away, 1 GB/s."""

    latency_s: float
    request_s: float
    byte_s: float

    def estimate(self, load: Load) -> float:
        """Seconds; nothing takes no time."""
        if not load.requests:
            return 0.0
        return self.latency_s + load.requests * self.request_s + load.size * self.byte_s


class Timing(msgspec.Struct, frozen=True):
    """How long a load took: until its first answer, of so many bytes, and until its last."""

    load: Load
    seconds: float
    first_size: int
    first_s: float


Parts = tuple[float, float, float]
"""Of latency, requests and bytes."""


class Measured:
    """The running estimate of one link."""

    def __init__(self, assumed: Cost) -> None:
        self.cost = assumed
        self._scale = assumed
        self._firsts: deque[tuple[Parts, float]] = deque(maxlen=NUM_COMPARED)
        self._rests: deque[tuple[Parts, float]] = deque(maxlen=NUM_COMPARED)

    def take(self, timing: Timing) -> None:
        """Correct the estimate by what this load took."""
        if not timing.load.requests:
            return
        more = (0.0, timing.load.requests - 1.0, max(0.0, float(timing.load.size - timing.first_size)))
        self._firsts.append(((1.0, 1.0, float(timing.first_size)), timing.first_s))
        self._correct(self._firsts)
        if any(more):
            self._rests.append((more, max(0.0, timing.seconds - timing.first_s)))
            self._correct(self._rests)

    def _correct(self, latest: deque[tuple[Parts, float]]) -> None:
        """Go part of the way to what the middle one of the latest measurements says.

        Each part takes the blame by how much it would usually matter in such a load: a large transfer teaches about
        bytes, a small one about latency.
        """
        cost, scale = self.cost, self._scale
        parts = (cost.latency_s, cost.request_s, cost.byte_s)
        errors = sorted((took - _product(row, parts), row) for row, took in latest)
        error, row = errors[(len(errors) - 1) // 2]
        blame = [
            x * unit**2 for x, unit in zip(row, (scale.latency_s, scale.request_s, scale.byte_s), strict=True)
        ]
        step = WEIGHT * error / sum(x * each for x, each in zip(row, blame, strict=True))
        self.cost = Cost(*(max(0.0, part + step * each) for part, each in zip(parts, blame, strict=True)))


def _product(row: Parts, parts: Parts) -> float:
    return sum(x * part for x, part in zip(row, parts, strict=True))


WITHIN_HOST = Cost(latency_s=5e-4, request_s=3e-4, byte_s=3e-9)
"""Between two processes of one host, through a socket, encrypted. As all three, an assumption to begin with."""
BETWEEN_HOSTS = Cost(latency_s=1e-3, request_s=3e-4, byte_s=3e-9)
THROUGH_MEMORY = Cost(latency_s=1e-3, request_s=5e-4, byte_s=5e-10)
"""From the rank that fetched to its neighbours: asking where it lies, mapping it, reading it."""


class Links:
    """The estimate of every link that was ever measured, and what is assumed of the others."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], Measured] = {}
        self._memory: dict[str, Measured] = {}

    def stream(self, source: str, target: str) -> Cost:
        """From processes of one host to those of another, or of the same."""
        measured = self._streams.get((source, target))
        return _assumed(source, target) if measured is None else measured.cost

    def memory(self, host: str) -> Cost:
        """From the rank that fetches for a host to its neighbours."""
        measured = self._memory.get(host)
        return THROUGH_MEMORY if measured is None else measured.cost

    def streamed(self, source: str, target: str, *, timing: Timing) -> None:
        """Take a measurement in."""
        self._streams.setdefault((source, target), Measured(_assumed(source, target))).take(timing)

    def passed_on(self, host: str, *, timing: Timing) -> None:
        """Take a measurement of a host's memory in."""
        self._memory.setdefault(host, Measured(THROUGH_MEMORY)).take(timing)


def _assumed(source: str, target: str) -> Cost:
    return WITHIN_HOST if source == target else BETWEEN_HOSTS
