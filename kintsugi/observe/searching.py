"""Finding what a run recorded: by id, time window, process, kind and words; as it was, or as it comes."""

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
from kintsugi.facts import Fact, SamplesScored, TicketAssigned
from kintsugi.observe.events import Event
from kintsugi.observe.figures import (
    Beat,
    ClockSample,
    FigureRecord,
    HostSample,
    LinkSample,
    ProcessSample,
    Sample,
    figures_path,
    samples_in,
)
from kintsugi.observe.lines import lines_in, paths_of
from kintsugi.observe.sources import JOURNAL, LOG, whole_lines
from kintsugi.observe.store import RunStore
from kintsugi.observe.telling import told, told_fact

SAMPLE_KINDS = tuple(kind.__name__ for kind in get_args(Sample))
KINDS = (*(kind.__name__ for kind in (*get_args(Event), *get_args(Fact))), LOG, *SAMPLE_KINDS)
_OF_PROMPTS = (TicketAssigned.__name__, SamplesScored.__name__)
"""Facts of single prompts; their spans are in files of their own."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEEWAY_S = 60.0
"""Who writes minutes means any second of them; and a run that goes on has recorded its last a while ago."""
LAST_SIZE = 64 << 10
"""At the end of a file of figures: some of its last lines are in it."""
_RELATIVE = re.compile(r"([+-]?)(\d+(?:\.\d+)?)([smhd])")
_COLUMNS = (
    "records.id, records.time, records.exact, who.name, what.name, sources.path, records.offset, records.length, "
    "records.part, records.begun"
)


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for; everything that is given must hold."""

    keyword: str | None = None
    """Words in this order; the last one may be the beginning of one."""
    request: str | None = None
    """A ticket, a sample of one, a fault's id, `step:7`, `version:7`, or any other id that is written down."""
    process: str | None = None
    """A process, or all of a role: `model-1`, `model`."""
    kind: str | None = None
    """Of the entry, or how it begins: `Alert`, `fault`, `log`. Figures are meant where nothing else begins so."""
    since: float | None = None
    until: float | None = None
    """Wall clock of the master."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found."""

    time: float
    """Wall clock of the master."""
    exact: bool
    """False where it was written down without a time, at this one at the latest."""
    process: str
    kind: str
    source: str
    """The file of the run folder in which it stands."""
    text: str
    begun: float | None = None
    """Of something that took time: `time` is when it was over, and written down."""
    content: Any = None
    """As it was recorded: the fields of an event, a fact or a sample."""


def search(store: RunStore, query: Query) -> Iterator[Line]:
    """Everything of the store that the query asks for, in the order of time. UserError names what can not be found.

    Of many there are, only what is asked for is told: figures where the query names their kind; what concerns single
    prompts where it names a kind, a request or words.
    """
    processes, kinds = _processes(store, query.process), _kinds(query.kind)
    if kinds is not None and kinds <= set(SAMPLE_KINDS):
        if query.keyword is not None or query.request is not None:
            raise UserError(f"--kind {query.kind}: figures have no words and belong to no request")
        return _figures(store, query, kinds=kinds, processes=processes)
    return _entries(store, query, kinds=kinds, processes=processes)


def follow(store: RunStore, query: Query, *, pause: Callable[[], bool]) -> Iterator[Line]:
    """What is there, then what comes; `pause` waits a moment between two looks and says whether there will be more."""
    last, goes_on, kinds = 0, True, _kinds(query.kind)
    if kinds is not None and kinds <= set(SAMPLE_KINDS):
        raise UserError(f"--follow: expected events, facts or logs, got --kind {query.kind}: figures")
    while True:
        store.refresh()
        (newest,) = store.database.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()
        # A role's processes, and what a request is mentioned in, may be known only now.
        processes = _processes(store, query.process, may_come=True)
        yield from _entries(store, query, kinds=kinds, processes=processes, after=last, up_to=newest)
        last = newest
        if not goes_on:
            return
        goes_on = pause()


def _entries(
    store: RunStore,
    query: Query,
    *,
    kinds: frozenset[str] | None,
    processes: frozenset[str] | None,
    after: int = 0,
    up_to: int | None = None,
) -> Iterator[Line]:
    conditions = ["records.id > ?"]
    values: list[Any] = [after]
    where: list[tuple[str, Any]] = [
        ("records.id <= ?", up_to),
        ("records.time >= ?", query.since),
        ("records.time <= ?", query.until),
    ]
    for names, column in ((processes, "who.name"), (kinds, "what.name")):
        if names is not None:
            conditions.append(f"{column} IN ({', '.join('?' * len(names))})")
            values += sorted(names)
    if kinds is None and query.keyword is None and query.request is None:
        conditions.append(f"what.name NOT IN ({', '.join('?' * len(_OF_PROMPTS))})")
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
        "JOIN names AS who ON who.id = records.process JOIN names AS what ON what.id = records.kind "
        f"WHERE {' AND '.join(conditions)} ORDER BY records.time, records.id"
    )
    for row in store.database.execute(sql, values):
        yield line_of(store, row)


def line_of(store: RunStore, row: tuple[Any, ...]) -> Line:
    """What stands where a row of `records` says."""
    _, time, exact, process, kind, path, offset, length, part, begun = row
    text = ""  # Where the file is gone, or was damaged since.
    content: Fact | Event | None = None
    if path == JOURNAL:
        fact = store.reader.fact(offset=offset, part=part)
        if fact is not None:
            text, content = told_fact(fact), fact
    elif kind == LOG:
        text = store.reader.line(path, offset=offset, length=length).decode(errors="replace")
    else:
        event = store.reader.event(path, offset=offset, length=length)
        if event is not None:
            text, content = told(event), event
    return Line(
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
    """Who is about it by what it says of itself; an id that nobody says so of is looked for among the words."""
    subject = request.partition("/")[0] if ":" in request else request
    query = "SELECT 1 FROM mentions WHERE subject = ? LIMIT 1"
    if store.database.execute(query, (subject,)).fetchone():
        return "records.id IN (SELECT record FROM mentions WHERE subject = ?)", subject
    return "records.id IN (SELECT rowid FROM words WHERE words MATCH ?)", phrase(request)


def phrase(text: str) -> str:
    """As the index asks for it."""
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
    if not chosen:
        raise UserError(f"--kind: expected one of {', '.join(KINDS)}, or how one begins, got {name!r}")
    return frozenset(chosen - set(SAMPLE_KINDS) or chosen)


def _figures(
    store: RunStore, query: Query, *, kinds: frozenset[str], processes: frozenset[str] | None
) -> Iterator[Line]:
    """Samples straight from their files, which are each in the order of time but where a clock was set back."""
    folder = store.run_dir / "figures"
    recorders = sorted({path.name.partition(".")[0] for path in folder.glob("*.jsonl")})
    since = -math.inf if query.since is None else query.since
    until = math.inf if query.until is None else query.until
    files = [_samples(store, recorder, since=since) for recorder in recorders]
    for time, path, record in heapq.merge(*files, key=lambda found: found[0]):
        sample, about = record.sample, _about(record)
        is_wanted = type(sample).__name__ in kinds and since <= time <= until
        if is_wanted and (processes is None or about in processes):
            yield Line(
                time=time,
                exact=True,
                process=about,
                kind=type(sample).__name__,
                source=path,
                text=told_sample(sample),
                content=sample,
            )


def _samples(store: RunStore, recorder: str, *, since: float) -> Iterator[tuple[float, str, FigureRecord]]:
    """Each with its time by the master's clock, and the file in which it stands."""
    corrected = store.correction(recorder)
    for path in paths_of(figures_path(store.run_dir, recorder)):
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


def _about(record: FigureRecord) -> str:
    match record.sample:
        case ProcessSample(of=process) | LinkSample(of=process):
            return process
        case _:
            return record.stamp.process


def told_sample(sample: Sample) -> str:
    """`state S cpu_s=1.25 rss_bytes=2.1e+08`."""
    match sample:
        case Beat():
            waits = "; ".join(f"waits for {wait.whom}: {wait.what}" for wait in sample.waits)
            return " ".join(filter(None, [f"load {sample.load:g}", _values(sample.gauges), waits]))
        case ProcessSample():
            return f"pid {sample.pid} state {sample.state} {_values(sample.values)}"
        case HostSample():
            return f"{sample.host} {_values(sample.values)}"
        case LinkSample():
            return f"to {sample.peer} port {sample.port} {sample.state} {_values(sample.values)}"
        case ClockSample():
            return f"{sample.host} is {sample.offset_s * 1e3:+.3f} ms ahead, ± {sample.error_s * 1e3:.3f} ms"


def _values(values: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in values.items())


class Extent(msgspec.Struct, frozen=True):
    """From when to when a run has recorded something."""

    first: float
    last: float

    @property
    def has_midnight(self) -> bool:
        """Whether a time of the day does not say which day."""
        return datetime.fromtimestamp(self.first).date() != datetime.fromtimestamp(self.last).date()

    def including(self, time: float) -> Extent:
        """Of one that goes on."""
        return Extent(self.first, max(self.last, time))


def extent_of(store: RunStore) -> Extent | None:
    """None while there is nothing. What was printed without a time says nothing, unless there is nothing else."""
    for condition in ("time > 0 AND exact", "time > 0"):
        query = f"SELECT time FROM records WHERE {condition} ORDER BY time"
        first = store.database.execute(f"{query} LIMIT 1").fetchone()
        last = store.database.execute(f"{query} DESC LIMIT 1").fetchone()
        if first is not None:
            # One that hangs says nothing any more; it is still looked at.
            return Extent(first[0], max(last[0], _last_figure(store)))
    return None


def _last_figure(store: RunStore) -> float:
    """When somebody was last measured; figures are not in the index."""
    latest = 0.0
    for path in (store.run_dir / "figures").glob("*.jsonl"):
        if "." in path.stem:
            continue
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_SIZE))
            newest = next(samples_in(reversed(lines_in(file.read(LAST_SIZE)))), None)
            if newest is not None:
                latest = max(latest, store.correction(path.stem)(newest.stamp.time))
    return latest


def moment(text: str, *, extent: Extent | None, option: str, is_inside: bool = False) -> float:
    """A time as people write it; with `is_inside` one at which the run was there.

    `1794818377.5` seconds, `2026-11-16T08:39:37`, `08:39:37.5` of a day of the run, the one at which the run was there
    then; `+90s` after its first record, `90s` before its last one (s, m, h, d).
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


def _distance_s(time: float, extent: Extent) -> float:
    return max(0.0, extent.first - time, time - extent.last)


def _moment(text: str, *, extent: Extent | None, option: str) -> float:
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


def _days(extent: Extent | None) -> list[date]:
    """On which the run went; today, of one that has recorded nothing."""
    if extent is None:
        return [datetime.now().date()]
    first, last = (datetime.fromtimestamp(time).date() for time in (extent.first, extent.last))
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def _absolute(text: str, extent: Extent | None) -> float:
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d(\.\d+)?)?", text):
        clock = datetime.strptime(text.partition(".")[0], "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
        fraction_s = float(f"0.{text.partition('.')[2] or 0}")
        times = [datetime.combine(day, clock.time()).timestamp() + fraction_s for day in _days(extent)]
        return min(times, key=lambda time: _distance_s(time, extent)) if extent is not None else times[0]
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    return datetime.fromisoformat(text).timestamp()
