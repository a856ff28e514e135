"""Search of everything that a run recorded: by id, time window, process, kind and words, once or continuously."""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any, get_args

import msgspec

from kintsugi.errors import UserError
from kintsugi.journal.facts import Fact, SamplesScored, TicketAssigned
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, AlertEvent, Event, Note, NoteEvent
from kintsugi.telemetry.format import format_event, format_fact
from kintsugi.telemetry.jsonl_log import lines_in, paths_of
from kintsugi.telemetry.readings import (
    ClockOffsetReading,
    HeartbeatReading,
    HostReading,
    LinkReading,
    ProcessReading,
    ReadingRecord,
    Sample,
    samples_in,
)
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.sources import LOG, SourceKind, whole_lines
from kintsugi.types import kind_of

SAMPLE_KINDS = tuple(kind_of(kind) for kind in get_args(Sample))
KINDS = (*(kind_of(kind) for kind in (*get_args(Event), *get_args(Fact))), LOG, *SAMPLE_KINDS)
_SUBKINDS = {
    kind_of(Alert): frozenset(map(kind_of, get_args(AlertEvent))),
    kind_of(Note): frozenset(map(kind_of, get_args(NoteEvent))),
}
"""Kinds that are found under the name of another one as well."""
_OF_PROMPTS = (kind_of(TicketAssigned), kind_of(SamplesScored))
"""Facts of single prompts; their spans are in files of their own."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEEWAY_S = 60.0
"""Tolerance of a given time: minutes stand for any of their seconds, and the last record of a running job is a while
ago."""
LAST_SIZE = 64 << 10
"""Part of a readings file, from its end, that contains at least one whole line."""
_RELATIVE = re.compile(r"([+-]?)(\d+(?:\.\d+)?)([smhd])")
_COLUMNS = (
    "records.id, records.time, records.exact, process_names.name, kind_names.name, sources.path, "
    "records.offset, records.length, records.part, records.begun, sources.family"
)


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A search; all given conditions must hold."""

    keyword: str | None = None
    """Words in this order; the last one may be the beginning of one."""
    request: str | None = None
    """A ticket, a sample of one, a fault's id, `step:7`, `version:7`, or any other id that is written down."""
    process: str | None = None
    """A process, or all of a role: `model-1`, `model`."""
    kind: str | None = None
    """Kind of the entry, or its first letters: `Alert` (with all alerts of classes of their own), `fault`, `log`.
    Readings are searched only where no other kind begins so."""
    since: float | None = None
    until: float | None = None
    """Wall clock of the master."""


class FoundLine(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a search."""

    time: float
    """Wall clock of the master."""
    exact: bool
    """False where the line has no time of its own: it was written at this time at the latest."""
    process: str
    kind: str
    source: str
    """File of the run folder that contains it."""
    text: str
    begun: float | None = None
    """Start of something that took time; `time` is its end, when it was written."""
    content: Any = None
    """The recorded event, fact or reading."""


def search(store: RunStore, query: SearchQuery) -> Iterator[FoundLine]:
    """Yield the matching entries in the order of time. UserError names a condition that can not be met.

    Readings are yielded only if the query names their kind, entries of single prompts only if it names a kind, a
    request or words.
    """
    processes, kinds = _processes(store, query.process), _kinds(query.kind)
    if kinds is not None and kinds <= set(SAMPLE_KINDS):
        if query.keyword is not None or query.request is not None:
            raise UserError(f"--kind {query.kind}: readings have no words and belong to no request")
        return _readings(store, query, kinds=kinds, processes=processes)
    return _entries(store, query, kinds=kinds, processes=processes)


def follow(store: RunStore, query: SearchQuery, *, pause: Callable[[], bool]) -> Iterator[FoundLine]:
    """Yield existing entries, then new ones. `pause` waits between two refreshes and returns whether to continue."""
    last, goes_on, kinds = 0, True, _kinds(query.kind)
    if kinds is not None and kinds <= set(SAMPLE_KINDS):
        raise UserError(f"--follow: expected events, facts or logs, got --kind {query.kind}: readings")
    while True:
        store.refresh()
        (newest,) = store.database.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()
        # Processes of a role, and entries that mention a request, may have appeared since.
        processes = _processes(store, query.process, may_come=True)
        yield from _entries(store, query, kinds=kinds, processes=processes, after=last, up_to=newest)
        last = newest
        if not goes_on:
            return
        goes_on = pause()


def _entries(
    store: RunStore,
    query: SearchQuery,
    *,
    kinds: frozenset[str] | None,
    processes: frozenset[str] | None,
    after: int = 0,
    up_to: int | None = None,
) -> Iterator[FoundLine]:
    conditions = ["records.id > ?"]
    values: list[Any] = [after]
    where: list[tuple[str, Any]] = [
        ("records.id <= ?", up_to),
        ("records.time >= ?", query.since),
        ("records.time <= ?", query.until),
    ]
    for names, column in ((processes, "process_names.name"), (kinds, "kind_names.name")):
        if names is not None:
            conditions.append(f"{column} IN ({', '.join('?' * len(names))})")
            values += sorted(names)
    if kinds is None and query.keyword is None and query.request is None:
        conditions.append(f"kind_names.name NOT IN ({', '.join('?' * len(_OF_PROMPTS))})")
        values += _OF_PROMPTS
        conditions.append("sources.path NOT LIKE '%.spans.%'")
    if query.keyword is not None:
        where.append(("records.id IN (SELECT rowid FROM words WHERE words MATCH ?)", phrase(query.keyword)))
    if query.request is not None:
        where.append(_of_request(store, query.request))
    for condition, value in where:
        if value is not None:
            conditions.append(condition)
            values.append(value)
    sql = (
        f"SELECT {_COLUMNS} FROM records JOIN sources ON sources.id = records.source "
        "JOIN names AS process_names ON process_names.id = records.process "
        "JOIN names AS kind_names ON kind_names.id = records.kind "
        f"WHERE {' AND '.join(conditions)} ORDER BY records.time, records.id"
    )
    for row in store.database.execute(sql, values):
        yield line_of(store, row)


def line_of(store: RunStore, row: tuple[Any, ...]) -> FoundLine:
    """Read the entry that a row of `records` points to."""
    _, time, exact, process, kind, path, offset, length, part, begun, family = row
    text = ""  # The file may be gone or damaged.
    content: Fact | Event | None = None
    if family == SourceKind.JOURNAL:
        fact = store.reader.fact(path, offset=offset, part=part)
        if fact is not None:
            text, content = format_fact(fact), fact
    elif kind == LOG:
        text = store.reader.line(path, offset=offset, length=length).decode(errors="replace")
    else:
        event = store.reader.event(path, offset=offset, length=length)
        if event is not None:
            text, content = format_event(event), event
    return FoundLine(
        time=time,
        exact=bool(exact),
        process=process,
        kind=kind,
        source=path,
        text=text,
        begun=begun,
        content=content,
    )


def _of_request(store: RunStore, request: str) -> tuple[str, str]:
    """Match records by indexed id; fall back to full-text search for ids that are not indexed."""
    subject = request.partition("/")[0] if ":" in request else request
    query = "SELECT 1 FROM mentions WHERE subject = ? LIMIT 1"
    if store.database.execute(query, (subject,)).fetchone():
        return "records.id IN (SELECT record FROM mentions WHERE subject = ?)", subject
    return "records.id IN (SELECT rowid FROM words WHERE words MATCH ?)", phrase(request)


def phrase(text: str) -> str:
    """Quote words as a phrase of the full-text index."""
    if not any(character.isalnum() for character in text):
        raise UserError(f"expected words to look for, got {text!r}")
    return '"{}"*'.format(text.replace('"', '""'))


def _processes(store: RunStore, name: str | None, *, may_come: bool = False) -> frozenset[str] | None:
    if name is None:
        return None
    query = "SELECT process FROM sources UNION SELECT process FROM places ORDER BY 1"
    known = [process for (process,) in store.database.execute(query)]
    chosen = frozenset(each for each in known if name in (each, each.rpartition("-")[0]))
    if not chosen and not may_come:
        raise UserError(
            f"--process: expected a process of the run or a role ({', '.join(known) or 'none yet'}), got {name}"
        )
    return chosen or frozenset({name})


def _kinds(name: str | None) -> frozenset[str] | None:
    if name is None:
        return None
    lower = name.lower()
    chosen = {kind for kind in KINDS if kind.lower() == lower} or {
        kind for kind in KINDS if lower and kind.lower().startswith(lower)
    }
    for parent, children in _SUBKINDS.items():
        if parent in chosen:
            chosen |= children
    if not chosen:
        raise UserError(f"--kind: expected one of {', '.join(KINDS)}, or how one begins, got {name!r}")
    return frozenset(chosen - set(SAMPLE_KINDS) or chosen)


def _readings(
    store: RunStore, query: SearchQuery, *, kinds: frozenset[str], processes: frozenset[str] | None
) -> Iterator[FoundLine]:
    """Yield readings from their files, each of which is in the order of time except where a clock was set back."""
    folder = RunFolder(store.run_dir).readings_folder
    recorders = sorted({path.name.partition(".")[0] for path in folder.glob("*.jsonl")})
    since = -math.inf if query.since is None else query.since
    until = math.inf if query.until is None else query.until
    files = [_samples(store, recorder, since=since) for recorder in recorders]
    for time, path, record in heapq.merge(*files, key=lambda found: found[0]):
        sample, about = record.sample, _about(record)
        is_wanted = kind_of(sample) in kinds and since <= time <= until
        if is_wanted and (processes is None or about in processes):
            yield FoundLine(
                time=time,
                exact=True,
                process=about,
                kind=kind_of(sample),
                source=path,
                text=format_reading(sample),
                content=sample,
            )


def _samples(store: RunStore, recorder: str, *, since: float) -> Iterator[tuple[float, str, ReadingRecord]]:
    """Yield readings with their times on the master's clock and the file that contains them."""
    corrected = store.correction(recorder)
    for path in paths_of(RunFolder(store.run_dir).readings_file(recorder)):
        name, offset = str(path.relative_to(store.run_dir)), 0
        while True:
            lines, end = whole_lines(path, offset=offset)
            if not lines:
                break
            offset = end
            newest = next(samples_in(line for _, line in reversed(lines)), None)
            if newest is None or corrected(newest.stamp.time) < since:
                continue
            for record in samples_in(line for _, line in lines):
                yield corrected(record.stamp.time), name, record


def _about(record: ReadingRecord) -> str:
    match record.sample:
        case ProcessReading(of=process) | LinkReading(of=process):
            return process
        case _:
            return record.stamp.process


def format_reading(sample: Sample) -> str:
    """`state S cpu_s=1.25 rss_bytes=2.1e+08`."""
    match sample:
        case HeartbeatReading():
            awaited = ((wait.whom, wait.what) for wait in sample.waits)
            waits = "; ".join(f"waits for {process}: {what}" for process, what in awaited)
            return " ".join(filter(None, [f"load {sample.load:g}", _values(sample.gauges), waits]))
        case ProcessReading():
            return f"pid {sample.pid} state {sample.state} {_values(sample.values)}"
        case HostReading():
            return f"{sample.host} {_values(sample.values)}"
        case LinkReading():
            return f"to {sample.peer} port {sample.port} {sample.state} {_values(sample.values)}"
        case ClockOffsetReading():
            return f"{sample.host} is {sample.offset_s * 1e3:+.3f} ms ahead, ± {sample.error_s * 1e3:.3f} ms"


def _values(values: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in values.items())


class TimeExtent(msgspec.Struct, frozen=True):
    """Times of the first and the last record of a run."""

    first: float
    last: float

    @property
    def has_midnight(self) -> bool:
        """Return whether a time of day is ambiguous."""
        return datetime.fromtimestamp(self.first).date() != datetime.fromtimestamp(self.last).date()

    def including(self, time: float) -> TimeExtent:
        """Extend the times of a running job to this one."""
        return TimeExtent(self.first, max(self.last, time))


def extent_of(store: RunStore) -> TimeExtent | None:
    """Return None while there are no records. Lines without a time of their own count only if there are no others."""
    for condition in ("time > 0 AND exact", "time > 0"):
        query = f"SELECT time FROM records WHERE {condition} ORDER BY time"
        first = store.database.execute(f"{query} LIMIT 1").fetchone()
        last = store.database.execute(f"{query} DESC LIMIT 1").fetchone()
        if first is not None:
            # A process that hangs records nothing any more, but its agent still samples it.
            return TimeExtent(first[0], max(last[0], _last_reading(store)))
    return None


def _last_reading(store: RunStore) -> float:
    """Return the time of the last reading; readings are not in the index."""
    latest = 0.0
    for path in RunFolder(store.run_dir).readings_folder.glob("*.jsonl"):
        if "." in path.stem:
            continue
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_SIZE))
            newest = next(samples_in(reversed(lines_in(file.read(LAST_SIZE)))), None)
            if newest is not None:
                latest = max(latest, store.correction(path.stem)(newest.stamp.time))
    return latest


def moment(text: str, *, extent: TimeExtent | None, option: str, is_inside: bool = False) -> float:
    """Parse a time as people write it; with `is_inside` it must lie within the run.

    `1794818377.5` seconds, `2026-11-16T08:39:37`, `08:39:37.5` of the day on which the run existed
    at that time; `+90s` after its first record, `90s` before its last one (s, m, h, d).
    """
    found = _moment(text, extent=extent, option=option)
    if is_inside and extent is not None and _distance_s(found, extent) > LEEWAY_S:
        first, last = (_day_text(time) for time in (extent.first, extent.last))
        raise UserError(
            f"{option} {text}: expected a moment of the run, which goes from {first} to {last}, got {_day_text(found)}"
        )
    return found


def _day_text(time: float) -> str:
    return datetime.fromtimestamp(time).isoformat(sep=" ", timespec="seconds")


def _distance_s(time: float, extent: TimeExtent) -> float:
    return max(0.0, extent.first - time, time - extent.last)


def _moment(text: str, *, extent: TimeExtent | None, option: str) -> float:
    match = _RELATIVE.fullmatch(text.strip())
    if match is not None and extent is None:
        raise UserError(f"{option} {text}: the run has recorded nothing yet that this could be counted from")
    try:
        if match is None or extent is None:
            found = _absolute(text.strip(), extent)
        else:
            seconds = float(match[2]) * _UNITS[match[3]]
            found = extent.first + seconds if match[1] == "+" else extent.last - seconds
        datetime.fromtimestamp(found).astimezone()  # Raises where there is no such day.
        return found
    except (ValueError, OverflowError, OSError):
        raise UserError(
            f"{option}: expected a time (2026-11-16T08:39:37, 08:39:37, seconds since 1970, +90s after the run's "
            f"beginning, 90s before its end), got {text!r}"
        ) from None


def _days(extent: TimeExtent | None) -> list[date]:
    """Return the days of the run; today if it has recorded nothing."""
    if extent is None:
        return [datetime.now().date()]
    first, last = (datetime.fromtimestamp(time).date() for time in (extent.first, extent.last))
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def _absolute(text: str, extent: TimeExtent | None) -> float:
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?", text):
        clock = datetime.strptime(text.partition(".")[0], "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
        fraction_s = float(f"0.{text.partition('.')[2] or 0}")
        times = [datetime.combine(day, clock.time()).timestamp() + fraction_s for day in _days(extent)]
        return min(times, key=lambda time: _distance_s(time, extent)) if extent is not None else times[0]
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    return datetime.fromisoformat(text).timestamp()
