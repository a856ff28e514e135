"""Activities of each process over time, as far as they explain unusual readings. Pure.

    starting    from its first record until its first progress: it imports, connects and loads its weights
    repairing   ranks, while they form a process group and return to the committed step
    saving      ranks, while a checkpoint is written
    evaluating  servers, rollout workers and ranks, while held-out problems are answered
    publishing  ranks and servers, while new weights are copied and loaded

In a *transient* activity (the first three) a process may grow by tens of gigabytes, be silent in one long call, keep
CPUs and disk busy and let others wait: none of that is a symptom. A process is *settled* otherwise.

The activities are read from records that exist anyway: starts, progress counters, the phases of the master, and the
open requests of the master, which its heartbeats declare. So an activity is known when it begins, not only when it
ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from enum import StrEnum
from itertools import pairwise, zip_longest
from statistics import median
from typing import NamedTuple

from kintsugi.diagnosis.evidence import MASTER, PROGRESS_COUNTERS, EvidenceBundle, known_role
from kintsugi.diagnosis.timeseries import Interval, Intervals, TimeSeries, union
from kintsugi.types import Role

WARM_S = 4.0
"""Time in which a new process connects, even if it makes progress earlier."""
LONGEST_START_S = 180.0
"""A process without progress for this long does not count as starting any more."""
MARGIN_S = 1.6
"""Time after a transient activity that still shows it, at most as long as the activity: rates of a sample cover the
second before, and samples may be late."""
LONG_SAVE = 3.0
"""Factor of the usual duration of a save above which its disk is slow."""
OPEN_S = 1.2
"""The master declares its open requests twice a second; one that was open in its last heartbeat may still be."""


class Activity(StrEnum):
    STARTING = "starting"
    REPAIRING = "repairing"
    SAVING = "saving"
    EVALUATING = "evaluating"
    PUBLISHING = "publishing"


_A = Activity
TRANSIENT = (_A.STARTING, _A.REPAIRING, _A.SAVING)
"""Activities whose readings are not compared with others."""

_RANKS = frozenset({Role.MODEL})
OF_PHASE: dict[str, tuple[Activity, frozenset[Role]]] = {
    "starting": (_A.STARTING, frozenset({Role.MODEL, Role.SERVER})),
    "preparing": (_A.REPAIRING, _RANKS),
    "recovering": (_A.REPAIRING, _RANKS),
    "saving": (_A.SAVING, _RANKS),
    "ending": (_A.SAVING, _RANKS),
    "evaluating": (_A.EVALUATING, frozenset({Role.MODEL, Role.SERVER, Role.ROLLOUT, Role.MANAGER})),
    "publishing": (_A.PUBLISHING, frozenset({Role.MODEL, Role.SERVER})),
}
"""Phase of the master → activity, and the roles that have it."""
OF_REQUEST: dict[str, Activity] = {
    **dict.fromkeys(
        ("PreLock", "DeviceStop", "DeviceClean", "RebuildGroup", "Repair", "Rollback", "StartStage"),
        _A.REPAIRING,
    ),
    "Save": _A.SAVING,
    "HashWeights": _A.SAVING,
    "EvaluatePairs": _A.EVALUATING,
    "Publish": _A.PUBLISHING,
}
"""Open request of the master → activity of the process that it is sent to."""


class ActivitySpan(NamedTuple):
    begin: float
    end: float
    activity: Activity


class ProcessActivities:
    """Activities of all processes up to a moment; those of a process are computed on first use."""

    def __init__(self, bundle: EvidenceBundle, *, at: float) -> None:
        self._bundle, self._at = bundle, at
        self._phases = _of_phases(bundle, at=at)
        self._requested = _of_requests(bundle)
        self._spans: dict[str, list[ActivitySpan]] = {}
        self._intervals: dict[tuple[str, tuple[Activity, ...]], Intervals] = {}

    def of(self, process: str) -> list[ActivitySpan]:
        """Return its activities, in the order of their begin; those of different kinds may overlap."""
        if process not in self._spans:
            role = known_role(process)
            spans = [ActivitySpan(*span, _A.STARTING) for span in starts(self._bundle, process, at=self._at)]
            spans += [
                ActivitySpan(begin, end, activity)
                for begin, end, activity, roles in self._phases
                if role in roles
            ]
            spans += self._requested.get(process, [])
            self._spans[process] = sorted(spans)
        return self._spans[process]

    def intervals(self, process: str, *activities: Activity) -> Intervals:
        """Return the times of these activities."""
        key = (process, activities)
        if key not in self._intervals:
            chosen = [(span.begin, span.end) for span in self.of(process) if span.activity in activities]
            self._intervals[key] = union(chosen)
        return self._intervals[key]

    def is_in(self, process: str, time: float, *activities: Activity) -> bool:
        """Return whether a process had one of these activities at a time."""
        return _contain(self.intervals(process, *activities), time)

    def is_settled(self, process: str, time: float) -> bool:
        """Return whether its readings of this time can be compared with those of other times."""
        return not _contain(self._transients(process), time)

    def is_usual_save(self, process: str, time: float) -> bool:
        """Return whether a process was saving at a time, or shortly before, for no longer than its saves usually
        take; a slow disk makes them longer."""
        saves = self.intervals(process, _A.SAVING)
        index = bisect_right(saves, (time, math.inf)) - 1
        if index < 0:
            return False
        begin, end = saves[index]
        earlier = [until - since for since, until in saves[:index]]
        longest = LONG_SAVE * median(earlier) if earlier else math.inf
        return time <= end + min(MARGIN_S, end - begin) and time - begin <= longest + MARGIN_S

    def has_transient(self, process: str, begin: float, end: float) -> bool:
        """Return whether a part of [begin, end] is transient."""
        known = self._transients(process)
        index = bisect_left(known, (begin, begin))
        return _contain(known, begin) or (index < len(known) and known[index][0] <= end)

    def settled_parts(
        self, process: str, track: TimeSeries, since: float, until: float
    ) -> list[list[Interval]]:
        """Return the (time, value) pairs of [since, until], without transient times, which separate the parts."""
        parts: list[list[Interval]] = [[]]
        for point in track.points(since, until):
            if self.is_settled(process, point[0]):
                parts[-1].append(point)
            elif parts[-1]:
                parts.append([])
        return [part for part in parts if part]

    def _transients(self, process: str) -> Intervals:
        """Return the transient times, with the moment after each that still shows it."""
        key = (process, ())
        if key not in self._intervals:
            self._intervals[key] = union(
                (span.begin, span.end + min(MARGIN_S, span.end - span.begin))
                for span in self.of(process)
                if span.activity in TRANSIENT
            )
        return self._intervals[key]


def _contain(known: Intervals, time: float) -> bool:
    index = bisect_right(known, (time, math.inf)) - 1
    return index >= 0 and time <= known[index][1]


def starts(bundle: EvidenceBundle, process: str, *, at: float) -> list[Interval]:
    """Return when a process was starting: from each first record until its first progress, or until its successor
    began."""
    births = [born for born, _ in bundle.births.get(process, ()) if born <= at]
    counter = PROGRESS_COUNTERS.get(known_role(process))
    beats = bundle.beats.get(process, [])
    found: list[Interval] = []
    for born, following in zip_longest(births, births[1:]):
        last = min(at, born + LONGEST_START_S, following if following is not None else math.inf)
        first = bisect_left(beats, born, key=lambda beat: beat.time)
        own = [beat for beat in beats[first:] if beat.time <= last]
        if counter is None:
            ready = own[0].time if own else last
        else:
            ready = next(
                (
                    after.time
                    for before, after in pairwise(own)
                    if _has_grown(before.counters, after.counters, counter)
                ),
                last,
            )
        found.append((born, min(last, max(ready, born + WARM_S))))
    return found


def _has_grown(before: dict[str, int], after: dict[str, int], counter: str) -> bool:
    return after.get(counter, 0) > before.get(counter, 0)


def _of_phases(bundle: EvidenceBundle, *, at: float) -> list[tuple[float, float, Activity, frozenset[Role]]]:
    """Return the activities that the phases of the master imply, with the roles that have them."""
    found = []
    for phase, following in zip_longest(bundle.phases, bundle.phases[1:]):
        implied = OF_PHASE.get(phase.name)
        end = following.time if following is not None else at
        if implied is not None and phase.time <= at:
            found.append((phase.time, min(end, at), *implied))
    return found


def _of_requests(bundle: EvidenceBundle) -> dict[str, list[ActivitySpan]]:
    """Return the activities that the open requests of the master imply, by process."""
    found: dict[str, dict[tuple[float, Activity], float]] = defaultdict(dict)
    for beat in bundle.beats.get(MASTER, ()):
        for wait in beat.waits:
            activity = OF_REQUEST.get(wait.what)
            if activity is not None:
                key = (round(wait.since, 1), activity)
                found[wait.whom][key] = max(beat.time + OPEN_S, found[wait.whom].get(key, 0.0))
    return {
        process: [ActivitySpan(begin, end, activity) for (begin, activity), end in spans.items()]
        for process, spans in found.items()
    }
