"""Offset of another host's clock, estimated from request and reply alone. Pure.

A request is sent at local time t0 and its reply, with the remote time T, arrives at t1: the local clock was between t0
and t1 when the remote clock was at T. The fastest of the last replies is the best one: half of its round trip bounds
the error of the midpoint.
"""

from __future__ import annotations

from collections import deque

import msgspec

NUM_KEPT = 16


class ClockReading(msgspec.Struct, frozen=True):
    """Estimate from one reply: `ClockReading(offset_s=0.004, error_s=0.0002)`."""

    offset_s: float
    """Seconds by which the local wall clock is ahead of the remote one."""
    error_s: float
    """Bound of the error in either direction."""


def reading(*, sent_at: float, round_trip_s: float, remote_time: float) -> ClockReading:
    """Estimate the offset. `sent_at` and `remote_time` are local and remote wall clock; the round trip is of a
    monotonic clock.

    >>> reading(sent_at=100.0, round_trip_s=0.02, remote_time=99.91)
    ClockReading(offset_s=0.1, error_s=0.01)
    """
    half_s = max(0.0, round_trip_s) / 2
    return ClockReading(round(sent_at + half_s - remote_time, 9), half_s)


class ClockEstimate:
    """The best of the last readings. A reading that contradicts it means that a clock was set, so earlier ones are
    dropped."""

    def __init__(self) -> None:
        self._readings: deque[ClockReading] = deque(maxlen=NUM_KEPT)

    def add(self, new: ClockReading) -> ClockReading:
        """Add a reading; return the best one now."""
        best = self.best
        if best is not None and abs(new.offset_s - best.offset_s) > new.error_s + best.error_s:
            self._readings.clear()
        self._readings.append(new)
        return min(self._readings, key=lambda one: one.error_s)

    @property
    def best(self) -> ClockReading | None:
        return min(self._readings, key=lambda one: one.error_s, default=None)
