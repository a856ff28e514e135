"""Who was at work on the samples of a run at which moment: servers, rewards, environments.

It is read from the spans that servers and rollout workers leave of every prompt (`events/<process>.spans.jsonl`):

    episode         ├───────────────────────────────────────┤   rollout worker
    actor_generate    ├──────────────┤                          rollout worker: asked, until the answer is there
    generate              ├──────┤                              server
    reward                            ├────────────────────┤    rollout worker: waits for its turn, and is judged

An episode that is not judged by reward functions is played by an environment whenever nothing is asked of the model.
One that asks nothing at all hands out a row as it is. A span is written when it ends. Of what is still going on,
heartbeats tell: servers count their steps, and a rollout worker says that it waits for the process beside it.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kintsugi.diagnosis.evidence import Bundle, Looked, known_role
from kintsugi.diagnosis.intervals import Interval, Intervals, seconds, union, without
from kintsugi.observe.events import Span, records_in
from kintsugi.observe.lines import NUM_OLD, lines_in, old_path, paths_of
from kintsugi.types import Role

FIRST_SIZE = 1 << 20
"""So much of a file's end is read first, then twice as much, until it reaches back far enough."""
BESIDE = {"reward process": "judging", "environment process": "playing"}
"""How a rollout worker speaks of the process beside it, and what that does."""

_ROLES = (Role.SERVER, Role.ROLLOUT)


class Done(msgspec.Struct, frozen=True):
    """A span, on the master's clock."""

    process: str
    name: str
    ticket: str
    begin: float
    end: float


@dataclass(slots=True)
class Stations:
    """By process, when it was at what."""

    generating: dict[str, Intervals] = field(default_factory=dict)
    asking: dict[str, Intervals] = field(default_factory=dict)
    judging: dict[str, Intervals] = field(default_factory=dict)
    playing: dict[str, Intervals] = field(default_factory=dict)
    handing_out: dict[str, Intervals] = field(default_factory=dict)
    """Rows as they are: demonstrations."""
    reward_s: float | None = None
    """Of a worker, for each group that it has judged; less than a group waits, where several are judged at once."""
    since: float = float("-inf")
    """What was before is not known any more: files of spans are bounded."""

    @property
    def is_known(self) -> bool:
        return any((self.generating, self.asking, self.judging, self.playing, self.handing_out))


def anyone(at_work: dict[str, Intervals]) -> Intervals:
    """When at least one of them was at it."""
    return union(interval for intervals in at_work.values() for interval in intervals)


def stations_of(spans: Iterable[Done]) -> Stations:
    """Who was where, as far as it has ended. Pure."""
    by_name: dict[str, list[Done]] = defaultdict(list)
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
    return Stations(
        generating=_by_process(by_name["generate"]),
        asking=_by_process(by_name["actor_generate"]),
        judging=judging,
        playing={process: union(intervals) for process, intervals in playing.items()},
        handing_out={process: union(intervals) for process, intervals in handing_out.items()},
        reward_s=sum(map(seconds, judging.values())) / len(by_name["reward"]) if judging else None,
    )


def _by_group(spans: list[Done]) -> dict[tuple[str, str], list[Interval]]:
    groups: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for span in spans:
        groups[span.process, span.ticket].append((span.begin, span.end))
    return groups


def _by_process(spans: list[Done]) -> dict[str, Intervals]:
    processes: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        processes[span.process].append((span.begin, span.end))
    return {process: union(intervals) for process, intervals in processes.items()}


def add_open(stations: Stations, bundle: Bundle, *, since: float) -> None:
    """What has begun since a moment and not ended, as heartbeats tell. They tell it half a second late, so it is asked
    of the phase that is under way only."""
    added: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for process, beats in bundle.beats.items():
        recent = [beat for beat in beats if beat.time >= since]
        match known_role(process):
            case Role.SERVER:
                added["generating"][process] = _counted(recent)
            case Role.ROLLOUT:
                for beat in recent:
                    for wait in beat.waits:
                        if wait.whom in BESIDE:
                            added[BESIDE[wait.whom]][process].append((wait.since, beat.time))
            case _:
                pass
    for what in ("generating", "judging", "playing"):
        known: dict[str, Intervals] = getattr(stations, what)
        for process, intervals in added[what].items():
            if both := union([*known.get(process, ()), *intervals]):
                known[process] = both


def _counted(beats: list[Looked]) -> list[Interval]:
    """Between which heartbeats a server has taken steps."""
    return [
        (before.time, after.time)
        for before, after in itertools.pairwise(beats)
        if after.counters.get("steps", 0) > before.counters.get("steps", 0)
    ]


def read_stations(run_dir: Path, bundle: Bundle, *, since: float, until: float) -> Stations:
    """What servers and rollout workers were at in a stretch of time; the bundle knows how their clocks were."""
    spans: list[Done] = []
    known_since = float("-inf")
    for path in sorted((run_dir / "events").glob("*.spans.jsonl")):
        process = path.name.partition(".")[0]
        if known_role(process) not in _ROLES:
            continue
        found = list(_spans_in(path, process, bundle, since=since))
        spans += [span for span in found if span.begin <= until and span.end >= since]
        if old_path(path, NUM_OLD).exists() and found:
            # There were older ones, which are gone.
            known_since = max(known_since, min(span.end for span in found))
    stations = stations_of(spans)
    stations.since = known_since
    return stations


def _spans_in(path: Path, process: str, bundle: Bundle, *, since: float) -> Iterator[Done]:
    for file in reversed(paths_of(path)):
        earliest = float("inf")
        for record in records_in(_last_lines(file, since=since)):
            if isinstance(record.event, Span):
                end = bundle.corrected(process, record.stamp.time)
                earliest = min(earliest, end)
                ticket = record.event.attributes.get("ticket", "")
                yield Done(process, record.event.name, ticket, end - record.event.duration_s, end)
        if earliest < since:
            return


def _last_lines(path: Path, *, since: float) -> list[bytes]:
    """Those of a moment and later, and some before it: lines are in the order of their times."""
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
