"""A clock that a test or the simulator advances."""

from __future__ import annotations


class VirtualClock:
    """Clock that only `advance` moves; for the simulator and for tests of deadlines."""

    def __init__(self, *, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"time does not run backwards: {seconds}"
        self._now += seconds
