"""Usual ranges of readings, from their own past. Pure.

Faults make readings high. So the usual range is computed from the lower part of the values, and a follower of a run
takes the lowest range of the last hour (`PastReadings`): a lasting fault does not become usual while it is observed. A
level that is reached regularly for a short time is usual too (`UsualRange.often`), as the load of links while weights
are sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.timeseries import TimeSeries, TimeSeriesSet

KEPT = 0.7
"""Share of the values, from the lowest, that define the usual range."""
OFTEN = 0.08
"""Share of the values, from the highest, that a regular level has …"""
RECENT_S = 40.0
"""… among those before this time, which are not judged now."""
LEAST = 5
"""Least number of values."""
LEAST_FOR_OFTEN = 100
RECENT_STEPS = 50
MANY = 30
"""Number of values from which on a high median is accepted."""
TO_DEVIATIONS = 1.4826
WARM_STEPS = 2
"""First steps of a run, which fill caches and compile."""
COLD_S = 180.0
"""Time of work after which a run without steps counts as warm."""
COMPARED_STEPS = 2
"""Steps after which every phase has contributed to the usual ranges."""
LONGEST_STEP_S = 60.0
"""Bound of the step that is used as a measure of time."""
SLOT_S, SLOTS = 600.0, 6
"""Length and number of the parts in which the past is kept."""


class UsualRange(msgspec.Struct, frozen=True):
    """`UsualRange(0.12, 0.03)`: a median and a robust standard deviation."""

    middle: float
    spread: float
    often: float | None = None
    """Level that is reached regularly; None where too few values are known."""
    count: int = 0
    """Number of values."""

    def is_as_often(self, value: float, *, factor: float) -> bool:
        """Return whether a value is below `factor` times the regular level."""
        return self.often is not None and value < factor * self.often

    def is_far(self, value: float, *, factor: float, least: float) -> bool:
        """Return whether a value is far above the median: by a factor, an absolute step and the usual deviation."""
        return value >= factor * self.middle and value - self.middle >= max(least, 4 * self.spread)


def usual(values: list[float], *, before: list[float] | None = None) -> UsualRange | None:
    """Return the usual range; None for too few values. `before` are those values that are not judged now."""
    if len(values) < LEAST:
        return None
    kept = sorted(values)[: max(LEAST, int(KEPT * len(values)))]
    middle = median(kept)
    often = None
    if before is not None and len(before) >= LEAST_FOR_OFTEN:
        often = sorted(before)[int((1 - OFTEN) * len(before))]
    spread = TO_DEVIATIONS * median(abs(value - middle) for value in kept)
    return UsualRange(middle, spread, often, len(values))


def lower(first: UsualRange | None, second: UsualRange | None) -> UsualRange | None:
    """Return the lower one of two ranges."""
    if first is None or second is None:
        return first or second
    least = min(first, second, key=lambda each: each.middle)
    often = min((each.often for each in (first, second) if each.often is not None), default=None)
    return msgspec.structs.replace(least, often=often, count=max(first.count, second.count))


class PastReadings:
    """Usual ranges of the last hour, in parts of ten minutes; nothing is dropped while a fault lasts."""

    def __init__(self) -> None:
        self._slots: dict[TimeSeries, dict[int, UsualRange]] = {}

    def add(self, track: TimeSeries, known: UsualRange, *, at: float) -> None:
        slots = self._slots.setdefault(track, {})
        number = int(at // SLOT_S)
        slots[number] = lower(slots.get(number), known) or known

    def lowest(self, track: TimeSeries) -> UsualRange | None:
        found: UsualRange | None = None
        for known in self._slots.get(track, {}).values():
            found = lower(found, known)
        return found

    def forget(self, *, at: float) -> None:
        """Drop parts older than an hour, and series without values."""
        first = int(at // SLOT_S) - SLOTS
        for track, slots in list(self._slots.items()):
            for number in [number for number in slots if number < first]:
                del slots[number]
            if not slots or not track.times:
                del self._slots[track]


class Baselines:
    """Usual ranges up to a moment, computed on first use."""

    def __init__(self, bundle: EvidenceBundle, *, at: float, past: PastReadings | None = None) -> None:
        self._at, self._past = at, past
        self.settled = settled_at(bundle)
        self.step_s = min(LONGEST_STEP_S, usual_step_s(bundle, since=self.settled))
        """Usual duration of a step; 0 while it is not known."""
        self._known: dict[TimeSeries, UsualRange | None] = {}

    @property
    def compared_from(self) -> float:
        """Time from which on readings are compared: the usual ranges then contain whole steps."""
        return self.settled + COMPARED_STEPS * self.step_s

    def of(self, track: TimeSeries) -> UsualRange | None:
        if track not in self._known:
            self._known[track] = self._compute(track)
        return self._known[track]

    def _compute(self, track: TimeSeries) -> UsualRange | None:
        before = track.between(self.settled, self._at - RECENT_S)
        known = usual(track.between(self.settled, self._at), before=before)
        if self._past is None:
            return known
        if known is not None:
            self._past.add(track, known, at=self._at)
        return self._past.lowest(track)

    def named(self, tracks: TimeSeriesSet, name: str) -> UsualRange | None:
        return self.of(tracks[name]) if name in tracks else None


def past_of(bundle: EvidenceBundle, earlier: Iterable[EvidenceBundle]) -> PastReadings:
    """Return the usual ranges of earlier parts of the same run."""
    past = PastReadings()
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


def settled_at(bundle: EvidenceBundle) -> float:
    """Return the time since which the run is warm."""
    if not bundle.steps:
        return max(bundle.began, _first_work(bundle)) + COLD_S
    if bundle.steps[0].number > 1:
        return bundle.began
    if len(bundle.steps) > WARM_STEPS:
        return bundle.steps[WARM_STEPS].time
    last = bundle.steps[-1]
    return last.time + (1 + WARM_STEPS - len(bundle.steps)) * last.duration_s


def _first_work(bundle: EvidenceBundle) -> float:
    """Return when the first phase after the start began."""
    return next((each.time for each in bundle.phases if each.name not in ("starting", "preparing")), 0.0)


def usual_step_s(bundle: EvidenceBundle, *, since: float) -> float:
    """Return the median duration of the last steps since a time, or of all where there is none since; 0 without
    steps."""
    durations = [step.duration_s for step in bundle.steps if step.time > since] or [
        step.duration_s for step in bundle.steps
    ]
    return median(durations[-RECENT_STEPS:]) if durations else 0.0
