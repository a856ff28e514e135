"""Activity of each process over a window of time: spans and phases as lanes, measured load, stages of the steps."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kintsugi.diagnosis.evidence import awaited_processes
from kintsugi.page.line_files import last_lines, window
from kintsugi.page.metrics import MetricsTable
from kintsugi.page.schema import HeatMap, Lane, Readings, StepBar, TimelineSpan
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import ProcessBegan, ProcessEnded, Transition, records_in
from kintsugi.telemetry.readings import (
    ClockOffsetReading,
    HostReading,
    ProcessReading,
    samples_in,
    time_of,
)
from kintsugi.types import Role, Wait, process_id, role_of

DEFAULT_S = 60.0
"""Window without `from` and `to`: the end of the run."""
LONGEST_SPAN_S = 30.0
"""Spans are written when they end, so the window is read a while longer."""
MOST_BYTES, MOST_IN_ALL = 6 << 20, 96 << 20
"""Part of one file, and of all files of a kind, that one request reads."""
MOST_PROCESSES = 32
"""Above this many processes there is a heat map."""
HEAT_COLUMNS = 120
LEAST_WORK = 0.05
"""Part of a cell of the heat map below which it shows the wait."""
MOST_STEPS = 400
MASTER = process_id(Role.MASTER, 0)

KIND_OF_SPAN = {
    **dict.fromkeys(("generate", "actor_generate", "request", "episode"), "generate"),
    "reward": "reward",
    **dict.fromkeys(("actor_train", "critic_train", "commit_step", "prepare_step", "step"), "train"),
    **dict.fromkeys(("publish", "weights_fetch", "weights_swap", "weights_upload"), "weights"),
    **dict.fromkeys(("save", "hash_weights"), "save"),
    **dict.fromkeys(
        ("pre_lock", "device_stop", "device_clean", "rebuild_group", "rollback", "repair", "notify_normal"),
        "recover",
    ),
    "start_stage": "start",
    "slow_request": "wait",
    "evaluate_pairs": "evaluate",
}
"""Name of a span → kind; others are model calls (`train`) on ranks, or `other`."""
KIND_OF_PHASE = {
    "starting": "start",
    "preparing": "recover",
    "recovering": "recover",
    "collecting": "generate",
    "training": "train",
    "committing": "train",
    "publishing": "weights",
    "evaluating": "evaluate",
    "saving": "save",
    "ending": "save",
}
_INSIDE = frozenset({"actor_generate"})
"""Spans that lie inside others of the same process and kind."""


class _Piece(NamedTuple):
    since: float
    until: float
    kind: str
    name: str
    step: int | None
    version: int | None


class ProcessSpans(NamedTuple):
    spans: list[TimelineSpan]
    is_thinned: bool


def extent(run_dir: Path, metrics: MetricsTable) -> tuple[float, float]:
    """Return the times of the first and the last record of a run; zeros if there are none."""
    run = RunFolder(run_dir)
    first, last = math.inf, 0.0
    for path in run.events_folder.glob("*.jsonl"):
        try:
            with path.open("rb") as file:
                begin = time_of(file.readline(64 << 10))
        except OSError:
            continue
        if begin is not None and "." not in path.stem:
            first = min(first, begin)
        for line in reversed(last_lines(path, size=4 << 10)):
            if (time := time_of(line)) is not None:
                last = max(last, time)
                break
    if metrics.times:
        first, last = min(first, metrics.times[0]), max(last, metrics.times[-1])
    return (first, last) if last else (0.0, 0.0)


def sessions_s(run_dir: Path, metrics: MetricsTable, *, until: float | None) -> float | None:
    """Return the duration of all sessions of a run, without the time between them; None if nothing was recorded.

    A session is the life of the first agent; where it was killed, its successor continues it. `until`: now, for a run
    that goes on.
    """
    agent = process_id(Role.AGENT, 0)
    lines, _ = window(RunFolder(run_dir).events_file(agent), since=0.0, until=math.inf, most_bytes=MOST_BYTES)
    total, begin, end = 0.0, 0.0, 0.0
    for record in records_in(lines):
        match record.event:
            case ProcessBegan() if not begin:
                begin, end = record.stamp.time, 0.0
            case ProcessBegan() if end:
                total += end - begin
                begin, end = record.stamp.time, 0.0
            case ProcessEnded():
                end = record.stamp.time
            case _:
                pass
    if not begin:
        return None
    _, last = extent(run_dir, metrics)
    return total + max(0.0, (until or end or last) - begin)


def clock_offsets(run_dir: Path) -> dict[str, float]:
    """Return host → seconds that its clock is ahead of the master's; 0 where that is within the error."""
    found: dict[str, float] = {}
    for path in RunFolder(run_dir).readings_folder.glob(f"{Role.AGENT.value}-*.jsonl"):
        if "." in path.stem:
            continue
        lines = (line for line in reversed(last_lines(path, size=256 << 10)) if b'"ClockSample"' in line)
        record = next(samples_in(lines), None)
        if record is not None and isinstance(record.sample, ClockOffsetReading):
            sample = record.sample
            found[sample.host] = sample.offset_s if abs(sample.offset_s) > sample.error_s else 0.0
    return found


def processes_of(run_dir: Path) -> list[str]:
    """Return the processes of the run that recorded events, by role and number."""
    names = {path.name.partition(".")[0] for path in RunFolder(run_dir).events_folder.glob("*.jsonl")}
    return sorted((name for name in names if _role(name)), key=_place)


def _role(process: str) -> str:
    try:
        return role_of(process).value
    except ValueError:
        return ""


_ORDER = {
    role.value: number
    for number, role in enumerate(
        (
            Role.MASTER,
            Role.MODEL,
            Role.ROLLOUT,
            Role.MANAGER,
            Role.SERVER,
            Role.AGENT,
            Role.LAUNCHER,
            Role.SPARE,
        )
    )
}


def _place(process: str) -> tuple[int, int]:
    name, _, number = process.rpartition("-")
    return _ORDER.get(name, len(_ORDER)), int(number) if number.isdecimal() else 0


def lanes(
    run_dir: Path,
    *,
    since: float,
    until: float,
    points: int,
    hosts: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[Lane], list[str]]:
    """Return one lane per process, and problems."""
    found, thinned = [], []
    processes = processes_of(run_dir)
    most_bytes = min(MOST_BYTES, MOST_IN_ALL // max(1, len(processes)))
    for process in processes:
        host = hosts.get(process, "")
        spans = spans_of(
            run_dir,
            process,
            since=since,
            until=until,
            points=points,
            offset_s=offsets.get(host, 0.0),
            most_bytes=most_bytes,
        )
        if spans.is_thinned:
            thinned.append(process)
        found.append(Lane(process=process, host=host, role=_role(process), spans=tuple(spans.spans)))
    problems = (
        [f"too many spans to read all of them ({', '.join(thinned)}): choose a shorter time"]
        if thinned
        else []
    )
    return found, problems


def spans_of(
    run_dir: Path, process: str, *, since: float, until: float, points: int, offset_s: float, most_bytes: int
) -> ProcessSpans:
    """Return the merged spans of one process in a window, and whether some were not read."""
    run = RunFolder(run_dir)
    begin, end = since + offset_s, until + offset_s
    own, is_cut = window(
        run.spans_file(process), since=begin, until=end + LONGEST_SPAN_S, most_bytes=most_bytes
    )
    events, is_cut_too = window(
        run.events_file(process),
        since=begin - LONGEST_SPAN_S,
        until=end + LONGEST_SPAN_S,
        most_bytes=most_bytes,
    )
    beats, _ = window(run.readings_file(process), since=begin, until=end, most_bytes=most_bytes)
    pieces = [*_spans(own, process), *_waits(beats)]
    pieces += _phases(events, end=end) if process == MASTER else _spans(events, process)
    shifted = [
        piece._replace(since=max(piece.since - offset_s, since), until=min(piece.until - offset_s, until))
        for piece in pieces
        if piece.until - offset_s >= since and piece.since - offset_s <= until
    ]
    return ProcessSpans(merged(shifted, bin_s=(until - since) / max(1, points)), is_cut or is_cut_too)


class _SpanLine(msgspec.Struct, gc=False):
    """Fields of a line with a span: there are so many that stamp and event are decoded together."""

    time: float
    monotonic: float
    name: str
    start: float
    duration_s: float
    attributes: dict[str, str] = {}


class _BeatLine(msgspec.Struct, gc=False):
    """Fields of a heartbeat with waits."""

    time: float
    monotonic: float
    waits: tuple[Wait, ...] = ()


_span_decoder = msgspec.json.Decoder(_SpanLine)
_beat_decoder = msgspec.json.Decoder(_BeatLine)
_Line = TypeVar("_Line")


def _decoded(lines: Iterable[bytes], decoder: msgspec.json.Decoder[_Line], *, mark: bytes) -> Iterator[_Line]:
    """Yield the decoded lines that have a mark; damaged ones are skipped."""
    for line in lines:
        if mark in line:
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue


def _spans(lines: Iterable[bytes], process: str) -> Iterator[_Piece]:
    is_rank = process.startswith(Role.MODEL.value)
    for span in _decoded(lines, _span_decoder, mark=b'"kind":"Span"'):
        if span.name in _INSIDE:
            continue
        attributes = span.attributes
        # The stamp has both clocks, so the monotonic start becomes a time of day.
        start = span.time - (span.monotonic - span.start)
        kind = KIND_OF_SPAN.get(span.name, "train" if is_rank else "other")
        if attributes.get("split") == "eval" or attributes.get("ticket", "").startswith("eval:"):
            kind = "evaluate"
        step, version = _number(attributes, "step"), _number(attributes, "version")
        yield _Piece(start, start + span.duration_s, kind, span.name, step, version)


def _number(attributes: Mapping[str, str], name: str) -> int | None:
    text = attributes.get(name, "")
    return int(text) if text.isdecimal() else None


def _phases(lines: Iterable[bytes], *, end: float) -> Iterator[_Piece]:
    """Yield the phases of the master; a phase ends where the next one begins."""
    moves: list[tuple[float, str]] = []
    last = 0.0
    for record in records_in(line for line in lines if b'"kind":"Span"' not in line):
        last = max(last, record.stamp.time)
        event = record.event
        if isinstance(event, Transition) and (event.machine, event.key) == ("master", "run"):
            moves.append((record.stamp.time, event.after))
    if moves:
        moves.append((min(end, max(last, moves[-1][0])), ""))
    for (start, phase), (stop, _) in pairwise(moves):
        if phase in KIND_OF_PHASE:
            yield _Piece(start, stop, KIND_OF_PHASE[phase], phase, None, None)


def _waits(lines: Iterable[bytes]) -> Iterator[_Piece]:
    """Yield the waits for other processes that a process declared in its heartbeats."""
    for beat in _decoded(lines, _beat_decoder, mark=b'"waits"'):
        for wait in beat.waits:
            if awaited := ", ".join(awaited_processes(wait)):
                start = beat.time - (beat.monotonic - wait.since)
                yield _Piece(start, beat.time, "wait", f"{wait.what} of {awaited}", None, None)


class _Run:
    """Pieces that are drawn as one."""

    __slots__ = ("count", "first", "until")

    def __init__(self, first: _Piece) -> None:
        self.first, self.until, self.count = first, first.until, 1


def merged(pieces: Iterable[_Piece], *, bin_s: float) -> list[TimelineSpan]:
    """Merge pieces that touch or overlap: equal ones always, and those shorter than a bin with others of their kind."""
    rows: dict[tuple[object, ...], list[_Run]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.since):
        is_short = piece.until - piece.since < bin_s
        key = (piece.kind,) if is_short else (piece.kind, piece.name, piece.step, piece.version)
        row = rows.setdefault(key, [])
        if row and piece.since <= row[-1].until + bin_s:
            row[-1].until = max(row[-1].until, piece.until)
            row[-1].count += 1
        else:
            row.append(_Run(piece))
    found = [
        TimelineSpan(
            since=run.first.since,
            until=run.until,
            kind=run.first.kind,
            name=run.first.name,
            step=run.first.step,
            version=run.first.version,
            count=run.count,
        )
        for row in rows.values()
        for run in row
    ]
    return sorted(found, key=lambda span: (span.since, span.until))


_Row = tuple[float | None, float | None, float | None, float | None]
"""CPU, memory, busy share and memory of accelerators."""


class _Series:
    """Values of one process or host over time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rows: list[_Row] = []
        self.last: tuple[float, float] | None = None
        """Time and running total of CPU seconds."""

    def rate(self, time: float, total: float | None) -> float | None:
        before, self.last = self.last, None if total is None else (time, total)
        if before is None or total is None or time <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (time - before[0])


def readings(
    run_dir: Path, *, since: float, until: float, points: int, offsets: Mapping[str, float]
) -> dict[str, Readings]:
    """Return the measured values of processes and hosts, thinned to `points` times."""
    found: dict[str, _Series] = {}
    for path in sorted(RunFolder(run_dir).readings_folder.glob(f"{Role.AGENT.value}-*.jsonl")):
        if "." in path.stem:
            continue
        lines, _ = window(path, since=since - 2.0, until=until, most_bytes=MOST_BYTES)
        wanted = (line for line in lines if b'"ProcessSample"' in line or b'"HostSample"' in line)
        for record in samples_in(wanted):
            sample, time = record.sample, record.stamp.time
            match sample:
                case ProcessReading(of=name, values=values):
                    series = found.setdefault(name, _Series())
                    cpu = series.rate(time, values.get("cpu_s"))
                    row: _Row = (cpu, values.get("rss_bytes"), None, values.get("device_memory_bytes"))
                case HostReading(host=name, values=values):
                    series = found.setdefault(name, _Series())
                    busy = series.rate(time, values.get("cpu_busy_s"))
                    share = None if busy is None else min(1.0, busy / max(1.0, values.get("cpu_count", 1.0)))
                    row = (share, _used(values), *_device(values))
                case _:
                    continue
            if time >= since:
                series.times.append(time - offsets.get(name, 0.0))
                series.rows.append(row)
    return {name: _thinned(series, points=points) for name, series in found.items() if series.times}


def _used(values: Mapping[str, float]) -> float | None:
    total, available = values.get("memory_total_bytes"), values.get("memory_available_bytes")
    return None if total is None or available is None else total - available


def _device(values: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the mean busy share and the used memory of the accelerators of a host."""
    busy = [
        value
        for name, value in values.items()
        if name.startswith("device_") and name.endswith("_utilization")
    ]
    memory = [
        value
        for name, value in values.items()
        if name.startswith("device_") and name.endswith("_memory_bytes")
    ]
    return sum(busy) / len(busy) if busy else None, sum(memory) if memory else None


def _thinned(series: _Series, *, points: int) -> Readings:
    every = max(1, -(-len(series.times) // max(1, points)))
    starts = range(0, len(series.times), every)

    def column(number: int) -> tuple[float | None, ...]:
        means = []
        for start in starts:
            values = [
                value for row in series.rows[start : start + every] if (value := row[number]) is not None
            ]
            means.append(sum(values) / len(values) if values else None)
        return tuple(means)

    times = tuple(series.times[start] for start in starts)
    return Readings(times=times, cpu=column(0), memory=column(1), gpu=column(2), gpu_memory=column(3))


def steps(metrics: MetricsTable, *, since: float, until: float) -> list[StepBar]:
    """Return the stages of the steps of a window, from their recorded times."""
    first = bisect.bisect_left(metrics.times, since)
    last = bisect.bisect_right(metrics.times, until) + 1
    names = [name for name in metrics.keys if name.startswith("timing/") and name != "timing/step"]
    whole = metrics.column("timing/step")
    columns = {name.removeprefix("timing/"): metrics.column(name) for name in names}
    bars = []
    for row in range(first, min(last, len(metrics.steps)))[-MOST_STEPS:]:
        seconds = float(whole[row]) if math.isfinite(whole[row]) else 0.0
        stages = {name: float(column[row]) for name, column in columns.items() if math.isfinite(column[row])}
        end = metrics.times[row]
        bars.append(StepBar(step=metrics.steps[row], since=end - seconds, until=end, stages=stages))
    return bars


def _main_kind(seconds: Mapping[str, float], *, width: float) -> str:
    """Return the kind that took most of a cell; a wait only where there was hardly any work beside it.

    >>> _main_kind({"wait": 1.0, "train": 0.4}, width=1.0), _main_kind({"wait": 1.0, "train": 0.01}, width=1.0)
    ('train', 'wait')
    """
    work = {kind: each for kind, each in seconds.items() if kind != "wait"}
    chosen = work if sum(work.values()) >= LEAST_WORK * width else seconds
    return max(chosen, key=lambda kind: chosen[kind]) if chosen else ""


def heat(found: Iterable[Lane], *, since: float, until: float) -> HeatMap:
    """Return the busy share of each process over time, and the kind that took most of it."""
    width = max((until - since) / HEAT_COLUMNS, 1e-6)
    rows: list[tuple[float, ...]] = []
    kinds: list[tuple[str, ...]] = []
    names: list[str] = []
    for lane in found:
        seconds: list[dict[str, float]] = [{} for _ in range(HEAT_COLUMNS)]
        for span in lane.spans:
            first, last = int((span.since - since) / width), int((span.until - since) / width)
            for column in range(max(0, first), min(HEAT_COLUMNS, last + 1)):
                begin = since + column * width
                part = min(span.until, begin + width) - max(span.since, begin)
                seconds[column][span.kind] = seconds[column].get(span.kind, 0.0) + max(0.0, part)
        rows.append(
            tuple(
                round(min(1.0, sum(s for kind, s in each.items() if kind != "wait") / width), 3)
                for each in seconds
            )
        )
        kinds.append(tuple(_main_kind(each, width=width) for each in seconds))
        names.append(lane.process)
    times = tuple(since + column * width for column in range(HEAT_COLUMNS))
    return HeatMap(times=times, processes=tuple(names), busy=tuple(rows), kinds=tuple(kinds))
