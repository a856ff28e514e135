"""Cost of a link: an estimate that follows measurements.

A load of n requests and b bytes takes `latency_s + n · request_s + b · byte_s`. The latency counts once, because
requests are in flight concurrently; `request_s` counts for each, because a holder answers one by one; bytes share the
link. Each step gives two measurements to separate the three: the time to the first answer, which contains one request
and the latency, and the time from there to the last answer, without the latency.
"""

from __future__ import annotations

from collections import deque

import msgspec

WEIGHT = 0.3
"""Weight of a new measurement in the exponential average."""
NUM_COMPARED = 3
"""The median of this many latest measurements counts, so that a single stalled transfer changes nothing."""


class LinkLoad(msgspec.Struct, frozen=True):
    """Load of a link: requests at the process that has to answer most of them, and total bytes."""

    requests: int
    size: int


class TransferCost(msgspec.Struct, frozen=True):
    """`TransferCost(latency_s=1e-3, request_s=3e-4, byte_s=1e-9)`: one millisecond latency, 1 GB/s."""

    latency_s: float
    request_s: float
    byte_s: float

    def estimate(self, load: LinkLoad) -> float:
        """Estimated seconds; 0 for an empty load."""
        if not load.requests:
            return 0.0
        return self.latency_s + load.requests * self.request_s + load.size * self.byte_s


class TransferTiming(msgspec.Struct, frozen=True):
    """Measured time of a load: until its first answer of `first_size` bytes, and until its last."""

    load: LinkLoad
    seconds: float
    first_size: int
    first_s: float


Parts = tuple[float, float, float]
"""Coefficients of latency, requests and bytes."""


class MeasuredTransfer:
    """The running estimate of one link."""

    def __init__(self, assumed: TransferCost) -> None:
        self.cost = assumed
        self._scale = assumed
        self._firsts: deque[tuple[Parts, float]] = deque(maxlen=NUM_COMPARED)
        self._rests: deque[tuple[Parts, float]] = deque(maxlen=NUM_COMPARED)

    def take(self, timing: TransferTiming) -> None:
        """Correct the estimate by a measurement."""
        if not timing.load.requests:
            return
        more = (0.0, timing.load.requests - 1.0, max(0.0, float(timing.load.size - timing.first_size)))
        self._firsts.append(((1.0, 1.0, float(timing.first_size)), timing.first_s))
        self._correct(self._firsts)
        if any(more):
            self._rests.append((more, max(0.0, timing.seconds - timing.first_s)))
            self._correct(self._rests)

    def _correct(self, latest: deque[tuple[Parts, float]]) -> None:
        """Move the estimate part of the way to the median of the latest measurements.

        The error is attributed to latency, requests and bytes by their usual weight in such a load: a large transfer
        corrects mainly the byte cost, a small one the latency.
        """
        cost, scale = self.cost, self._scale
        parts = (cost.latency_s, cost.request_s, cost.byte_s)
        errors = sorted((took - _product(row, parts), row) for row, took in latest)
        error, row = errors[(len(errors) - 1) // 2]
        weights = [
            x * unit**2 for x, unit in zip(row, (scale.latency_s, scale.request_s, scale.byte_s), strict=True)
        ]
        step = WEIGHT * error / sum(x * each for x, each in zip(row, weights, strict=True))
        self.cost = TransferCost(
            *(max(0.0, part + step * each) for part, each in zip(parts, weights, strict=True))
        )


def _product(row: Parts, parts: Parts) -> float:
    return sum(x * part for x, part in zip(row, parts, strict=True))


WITHIN_HOST = TransferCost(latency_s=5e-4, request_s=3e-4, byte_s=3e-9)
"""Initial assumption, like the next two: between two processes of one host, through an encrypted socket."""
BETWEEN_HOSTS = TransferCost(latency_s=1e-3, request_s=3e-4, byte_s=3e-9)
THROUGH_MEMORY = TransferCost(latency_s=1e-3, request_s=5e-4, byte_s=5e-10)
"""From the relaying rank to its neighbours: one request for the positions, mapping, reading."""


class LinkCosts:
    """Cost of every link: the estimate of measured ones, an assumption for the others."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], MeasuredTransfer] = {}
        self._memory: dict[str, MeasuredTransfer] = {}

    def stream(self, source: str, target: str) -> TransferCost:
        """Cost from processes of one host to those of another, or of the same."""
        measured = self._streams.get((source, target))
        return _assumed(source, target) if measured is None else measured.cost

    def memory(self, host: str) -> TransferCost:
        """Cost from the relaying rank of a host to its neighbours."""
        measured = self._memory.get(host)
        return THROUGH_MEMORY if measured is None else measured.cost

    def streamed(self, source: str, target: str, *, timing: TransferTiming) -> None:
        """Record a measurement of a link."""
        self._streams.setdefault((source, target), MeasuredTransfer(_assumed(source, target))).take(timing)

    def passed_on(self, host: str, *, timing: TransferTiming) -> None:
        """Record a measurement of a host's shared memory."""
        self._memory.setdefault(host, MeasuredTransfer(THROUGH_MEMORY)).take(timing)


def _assumed(source: str, target: str) -> TransferCost:
    return WITHIN_HOST if source == target else BETWEEN_HOSTS
