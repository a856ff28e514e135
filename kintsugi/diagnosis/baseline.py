"""What is usual: of a figure in its own past, and of the same figure elsewhere at the same time. Pure.

What is usual is taken from the lower part of what was seen. Trouble makes figures high, so that a fault that has lasted
for a third of the time does not become what is usual.
"""

from __future__ import annotations

from statistics import median

import msgspec

from kintsugi.diagnosis.evidence import Bundle, Track, Tracks

KEPT = 0.7
"""Share of the values, the lowest, that count as usual."""
LEAST = 5
"""Fewer values say nothing."""
TO_DEVIATIONS = 1.4826
WARM_STEPS = 2
"""The first steps of a run fill caches and compile."""
COLD_S = 60.0
"""A run that has taken no steps for so long is as warm as it gets."""
WARM_S = 4.0
"""How long a process is new: it loads, connects, and is connected to."""


class Usual(msgspec.Struct, frozen=True):
    """`Usual(0.12, 0.03)`: a middle and how far values are from it (robust deviations)."""

    middle: float
    spread: float

    def is_far(self, value: float, *, factor: float, least: float) -> bool:
        """Far above: by a factor, by an absolute step, and by more than the values usually differ."""
        return value >= factor * self.middle and value - self.middle >= max(least, 4 * self.spread)


def usual(values: list[float]) -> Usual | None:
    """None where too little is known."""
    if len(values) < LEAST:
        return None
    kept = sorted(values)[: max(LEAST, int(KEPT * len(values)))]
    middle = median(kept)
    return Usual(middle, TO_DEVIATIONS * median(abs(value - middle) for value in kept))


class Baselines:
    """What was usual up to a moment, computed when it is first asked for."""

    def __init__(self, bundle: Bundle, *, at: float) -> None:
        self._at = at
        self.settled = settled_at(bundle)
        self._known: dict[int, Usual | None] = {}

    def of(self, track: Track) -> Usual | None:
        key = id(track)
        if key not in self._known:
            self._known[key] = usual(track.between(self.settled, self._at))
        return self._known[key]

    def figure(self, tracks: Tracks, name: str) -> Usual | None:
        return self.of(tracks[name]) if name in tracks else None


def settled_at(bundle: Bundle) -> float:
    """Since when the run is warm."""
    if len(bundle.steps) > WARM_STEPS and bundle.steps[0].number <= 1:
        return bundle.steps[WARM_STEPS].time
    if bundle.steps and bundle.steps[0].number > 1:
        return bundle.began
    return bundle.began + COLD_S
