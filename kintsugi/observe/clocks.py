"""How far another host's clock is from ours, from questions and answers alone; pure.

Who asks at our time t0, is answered with the other's time T, and has the answer at t1, knows that our clock was
somewhere in t0 … t1 when the other's said T. The quickest of the last answers says it best: half of its round trip is
how wrong the middle of it can be.
"""

from __future__ import annotations

from collections import deque

import msgspec

NUM_KEPT = 16


class Reading(msgspec.Struct, frozen=True):
    """What one answer says: `Reading(offset_s=0.004, error_s=0.0002)`."""

    offset_s: float
    """How far our wall clock is ahead of the other's."""
    error_s: float
    """How wrong that can be, either way."""


def reading(*, asked_at: float, round_trip_s: float, told: float) -> Reading:
    """`asked_at` and `told` are wall clock, ours and the other's; the round trip was measured by a monotonic one.

    >>> reading(asked_at=100.0, round_trip_s=0.02, told=99.91)
    Reading(offset_s=0.1, error_s=0.01)
    """
    half_s = max(0.0, round_trip_s) / 2
    return Reading(round(asked_at + half_s - told, 9), half_s)


class ClockEstimate:
    """The best of the last readings. When one contradicts it, a clock was set: what was known before is worthless."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=NUM_KEPT)

    def add(self, new: Reading) -> Reading:
        """Take a reading in; gives the best one that is known now."""
        best = self.best
        if best is not None and abs(new.offset_s - best.offset_s) > new.error_s + best.error_s:
            self._readings.clear()
        self._readings.append(new)
        return min(self._readings, key=lambda one: one.error_s)

    @property
    def best(self) -> Reading | None:
        return min(self._readings, key=lambda one: one.error_s, default=None)
