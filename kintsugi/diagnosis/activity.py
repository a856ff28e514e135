"""Activity of servers, rewards and environments over time, by process.

It is read from the spans that servers and rollout workers record for every prompt (`events/<process>.spans.jsonl`):

    episode         ├───────────────────────────────────────┤   rollout worker
    actor_generate    ├──────────────┤                          rollout worker: request until reply
    generate              ├──────┤                              server
    reward                            ├────────────────────┤    rollout worker: queued and scored

An episode without reward functions is run by an environment whenever no request to the model is open. One without any
request is a row of the data as it is. A span is written when it ends. Unfinished work is taken from heartbeats: servers
count their steps, and a rollout worker declares that it waits for its user-code process.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kintsugi.diagnosis.evidence import EvidenceBundle, Observation, known_role
from kintsugi.diagnosis.timeseries import Interval, Intervals, seconds, union, without
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Span, records_in
from kintsugi.telemetry.jsonl_log import NUM_OLD, lines_in, old_path, paths_of
from kintsugi.types import Role

FIRST_SIZE = 1 << 20
"""Bytes to read from the end of a file at first; doubled until they reach back far enough."""
USER_CODE_ACTIVITY = {"reward process": "judging", "environment process": "playing"}
"""Name of the user-code process in the waits of a rollout worker → its activity."""

_ROLES = (Role.SERVER, Role.ROLLOUT)


class FinishedWork(msgspec.Struct, frozen=True):
    """A finished span, in times of the master's clock."""

    process: str
    name: str
    ticket: str
    begin: float
    end: float


@dataclass(slots=True)
class ActivityTable:
    """Process → intervals, by activity."""

    generating: dict[str, Intervals] = field(default_factory=dict)
    asking: dict[str, Intervals] = field(default_factory=dict)
    judging: dict[str, Intervals] = field(default_factory=dict)
    playing: dict[str, Intervals] = field(default_factory=dict)
    handing_out: dict[str, Intervals] = field(default_factory=dict)
    """Rows of the data as they are: demonstrations."""
    reward_s: float | None = None
    """Time of a worker per scored group; shorter than the wait of a group if several are scored at the same time."""
    since: float = float("-inf")
    """Begin of the known time: span files are bounded."""

    @property
    def is_known(self) -> bool:
        return any((self.generating, self.asking, self.judging, self.playing, self.handing_out))


def any_active(at_work: dict[str, Intervals]) -> Intervals:
    """Return when at least one process was active."""
    return union(interval for intervals in at_work.values() for interval in intervals)


def activity_of(spans: Iterable[FinishedWork]) -> ActivityTable:
    """Return the activity of finished work. Pure."""
    by_name: dict[str, list[FinishedWork]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    asked = _by_group(by_name["actor_generate"])
    judged = _by_group(by_name["reward"])
    playing: dict[str, list[Interval]] = defaultdict(list)
    handing_out: dict[str, list[Interval]] = defaultdict(list)
    for span in by_name["episode"]:
        group = (span.process, span.ticket)
        if group in judged:
            continue
        if group in asked:
            playing[span.process] += without([(span.begin, span.end)], union(asked[group]))
        else:
            handing_out[span.process].append((span.begin, span.end))
    judging = _by_process(by_name["reward"])
    return ActivityTable(
        generating=_by_process(by_name["generate"]),
        asking=_by_process(by_name["actor_generate"]),
        judging=judging,
        playing={process: union(intervals) for process, intervals in playing.items()},
        handing_out={process: union(intervals) for process, intervals in handing_out.items()},
        reward_s=sum(map(seconds, judging.values())) / len(by_name["reward"]) if judging else None,
    )


def _by_group(spans: list[FinishedWork]) -> dict[tuple[str, str], list[Interval]]:
    groups: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for span in spans:
        groups[span.process, span.ticket].append((span.begin, span.end))
    return groups


def _by_process(spans: list[FinishedWork]) -> dict[str, Intervals]:
    processes: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        processes[span.process].append((span.begin, span.end))
    return {process: union(intervals) for process, intervals in processes.items()}


def add_open(activity: ActivityTable, bundle: EvidenceBundle, *, since: float) -> None:
    """Add unfinished work since a moment, from heartbeats. They are up to half a second late, so this is used for the
    current phase only."""
    added: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for process, beats in bundle.beats.items():
        recent = [beat for beat in beats if beat.time >= since]
        match known_role(process):
            case Role.SERVER:
                added["generating"][process] = _counted(recent)
            case Role.ROLLOUT:
                for beat in recent:
                    for wait in beat.waits:
                        if wait.whom in USER_CODE_ACTIVITY:
                            added[USER_CODE_ACTIVITY[wait.whom]][process].append((wait.since, beat.time))
            case _:
                pass
    for what in ("generating", "judging", "playing"):
        known: dict[str, Intervals] = getattr(activity, what)
        for process, intervals in added[what].items():
            if both := union([*known.get(process, ()), *intervals]):
                known[process] = both


def _counted(beats: list[Observation]) -> list[Interval]:
    """Return the intervals between heartbeats in which a server took steps."""
    return [
        (before.time, after.time)
        for before, after in itertools.pairwise(beats)
        if after.counters.get("steps", 0) > before.counters.get("steps", 0)
    ]


def read_activity(run_dir: Path, bundle: EvidenceBundle, *, since: float, until: float) -> ActivityTable:
    """Read the activity of servers and rollout workers; the bundle has the offsets of their clocks."""
    spans: list[FinishedWork] = []
    known_since = float("-inf")
    for path in sorted(RunFolder(run_dir).events_folder.glob("*.spans.jsonl")):
        process = path.name.partition(".")[0]
        if known_role(process) not in _ROLES:
            continue
        found = list(_spans_in(path, process, bundle, since=since))
        spans += [span for span in found if span.begin <= until and span.end >= since]
        if old_path(path, NUM_OLD).exists() and found:
            # Older spans have been dropped.
            known_since = max(known_since, min(span.end for span in found))
    activity = activity_of(spans)
    activity.since = known_since
    return activity


def _spans_in(path: Path, process: str, bundle: EvidenceBundle, *, since: float) -> Iterator[FinishedWork]:
    for file in reversed(paths_of(path)):
        earliest = float("inf")
        for record in records_in(_last_lines(file, since=since)):
            if isinstance(record.event, Span):
                end = bundle.corrected(process, record.stamp.time)
                earliest = min(earliest, end)
                ticket = record.event.attributes.get("ticket", "")
                yield FinishedWork(process, record.event.name, ticket, end - record.event.duration_s, end)
        if earliest < since:
            return


def _last_lines(path: Path, *, since: float) -> list[bytes]:
    """Return the lines of a moment and later, and some before it: lines are in the order of time."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            size = FIRST_SIZE
            while True:
                file.seek(max(0, end - size))
                lines = lines_in(file.read(min(size, end)))
                first = next(records_in(lines), None)
                if size >= end or (first is not None and first.stamp.time < since):
                    return lines
                size *= 2
    except FileNotFoundError:
        return []
