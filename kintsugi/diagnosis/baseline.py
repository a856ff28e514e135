"""What is usual: of a figure in its own past, and of the same figure elsewhere at the same time. Pure.

Trouble makes figures high. So what is usual is taken from the lower part of what was seen, and who follows a run takes
the lowest of what was usual in the last hour (`Past`): what lasts does not become usual while it is looked at. What
comes again and again, and is gone again each time, is usual too (`Usual.often`): the way to the servers is full while
weights go out.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from kintsugi.diagnosis.evidence import Bundle
from kintsugi.diagnosis.tracks import Track, Tracks

KEPT = 0.7
"""Share of the values, the lowest, that count as usual."""
OFTEN = 0.08
"""What has this share of the values, the highest, comes often …"""
RECENT_S = 40.0
"""… if it did before what is looked at now."""
LEAST = 5
"""Fewer values say nothing."""
LEAST_FOR_OFTEN = 100
MANY = 30
"""From so many values on, a high middle is believed."""
TO_DEVIATIONS = 1.4826
WARM_STEPS = 2
"""The first steps of a run fill caches and compile."""
COLD_S = 60.0
"""A run that has taken no steps for so long is as warm as it gets."""
WARM_S = 4.0
"""How long a process is new: it loads, connects, and is connected to."""
SLOT_S, SLOTS = 600.0, 6
"""The past is remembered in so many parts of this length."""


class Usual(msgspec.Struct, frozen=True):
    """`Usual(0.12, 0.03)`: a middle and how far values are from it (robust deviations)."""

    middle: float
    spread: float
    often: float | None = None
    """What it reaches again and again; None where too little is known."""
    count: int = 0
    """Values from which it is known."""

    def is_as_often(self, value: float, *, factor: float) -> bool:
        """Whether it is not so many times above what it reaches again and again."""
        return self.often is not None and value < factor * self.often

    def is_far(self, value: float, *, factor: float, least: float) -> bool:
        """Far above: by a factor, by an absolute step, and by more than the values usually differ."""
        return value >= factor * self.middle and value - self.middle >= max(least, 4 * self.spread)


def usual(values: list[float], *, before: list[float] | None = None) -> Usual | None:
    """None where too little is known. `before` are those of them that are not looked at now."""
    if len(values) < LEAST:
        return None
    kept = sorted(values)[: max(LEAST, int(KEPT * len(values)))]
    middle = median(kept)
    often = None
    if before is not None and len(before) >= LEAST_FOR_OFTEN:
        often = sorted(before)[int((1 - OFTEN) * len(before))]
    spread = TO_DEVIATIONS * median(abs(value - middle) for value in kept)
    return Usual(middle, spread, often, len(values))


def lower(first: Usual | None, second: Usual | None) -> Usual | None:
    """The one that expects less."""
    if first is None or second is None:
        return first or second
    least = min(first, second, key=lambda each: each.middle)
    often = min((each.often for each in (first, second) if each.often is not None), default=None)
    return msgspec.structs.replace(least, often=often, count=max(first.count, second.count))


class Past:
    """What was usual in the last hour, in parts of ten minutes; nothing is forgotten while something is wrong."""

    def __init__(self) -> None:
        self._slots: dict[Track, dict[int, Usual]] = {}

    def add(self, track: Track, known: Usual, *, at: float) -> None:
        slots = self._slots.setdefault(track, {})
        number = int(at // SLOT_S)
        slots[number] = lower(slots.get(number), known) or known

    def lowest(self, track: Track) -> Usual | None:
        found: Usual | None = None
        for known in self._slots.get(track, {}).values():
            found = lower(found, known)
        return found

    def forget(self, *, at: float) -> None:
        """What is older than an hour, and what is gone."""
        first = int(at // SLOT_S) - SLOTS
        for track, slots in list(self._slots.items()):
            for number in [number for number in slots if number < first]:
                del slots[number]
            if not slots or not track.times:
                del self._slots[track]


class Baselines:
    """What was usual up to a moment, computed when it is first asked for."""

    def __init__(self, bundle: Bundle, *, at: float, past: Past | None = None) -> None:
        self._at, self._past = at, past
        self.settled = settled_at(bundle)
        self._known: dict[Track, Usual | None] = {}

    def of(self, track: Track) -> Usual | None:
        if track not in self._known:
            self._known[track] = self._look(track)
        return self._known[track]

    def _look(self, track: Track) -> Usual | None:
        before = track.between(self.settled, self._at - RECENT_S)
        known = usual(track.between(self.settled, self._at), before=before)
        if self._past is None:
            return known
        if known is not None:
            self._past.add(track, known, at=self._at)
        return self._past.lowest(track)

    def figure(self, tracks: Tracks, name: str) -> Usual | None:
        return self.of(tracks[name]) if name in tracks else None


def past_of(bundle: Bundle, earlier: Iterable[Bundle]) -> Past:
    """What was usual in parts of the same run that lie before, by figure."""
    past = Past()
    for part in earlier:
        known = {
            key: found
            for key, track in part.tracks()
            if (found := usual(track.values, before=track.values)) is not None
        }
        for key, track in bundle.tracks():
            if key in known:
                past.add(track, known[key], at=part.at)
    return past


def settled_at(bundle: Bundle) -> float:
    """Since when the run is warm."""
    if len(bundle.steps) > WARM_STEPS and bundle.steps[0].number <= 1:
        return bundle.steps[WARM_STEPS].time
    if bundle.steps and bundle.steps[0].number > 1:
        return bundle.began
    return bundle.began + COLD_S
