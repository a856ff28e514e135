"""The trace of one prompt: from its row of the data set to the weights that were trained on it.

    row ─► ticket issued ─► assigned ─► generated, scored ─► in a batch ─► trained ─► committed ─► published ─► current

Decisions of the master are facts of the journal, at the times of the inputs that led to them; work at a process is its
spans. Both are found by the ticket and, from the batch on, by the step and the version of the weights. A ticket that
was returned, or whose step was undone, passes some stages more than once; the trace contains all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import msgspec

from kintsugi.errors import UserError
from kintsugi.journal.facts import (
    BatchFormed,
    CheckpointSaved,
    Fact,
    RolledBack,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
    VersionCurrent,
)
from kintsugi.telemetry.events import Alert, FaultSeen, Span, Transition
from kintsugi.telemetry.format import clock_text, format_event, format_fact
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.search import FoundLine, SearchQuery, search
from kintsugi.types import Ticket, kind_of

MASTER_PHASES = ("master", "run")
ISSUED = "issued"


class TraceSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process did, over a time or at one moment."""

    name: str
    process: str
    start: float
    """Wall clock of the master; 0 where no time was recorded."""
    duration_s: float | None = None
    """None for a moment."""
    text: str = ""
    """Description for display."""
    source: str = ""
    """File that contains it: `events/server-0.jsonl`, `journal`."""
    exact: bool = True
    attributes: Mapping[str, str] = {}

    @property
    def end(self) -> float:
        return self.start + (self.duration_s or 0.0)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All records of one ticket."""

    run: str
    ticket: str
    row: str = ""
    """Row of the data set: `row 212 of arithmetic`."""
    prompt: str = ""
    steps: tuple[int, ...] = ()
    """Steps that had it in their batch; more than one only where steps were undone."""
    version: int | None = None
    """First current version of the weights that was trained on it."""
    stations: tuple[TraceSlice, ...] = ()
    """In the order of time."""
    clocks: Mapping[str, tuple[float, float]] = {}
    """Host → (offset of its clock, error), in seconds; an offset above its error is subtracted."""


def issued_tickets(store: RunStore) -> Iterator[Ticket]:
    """Yield every ticket of the run, in the order of issue."""
    for line in search(store, SearchQuery(kind=kind_of(TicketsIssued))):
        if isinstance(line.content, TicketsIssued):
            yield from line.content.tickets


def trace_ticket(store: RunStore, ticket: str, *, row: str = "", prompt: str = "") -> Trace:
    """Return the trace of a ticket so far. UserError for one that was never issued."""
    own = list(search(store, SearchQuery(request=ticket)))
    if not any(isinstance(line.content, TicketsIssued) for line in own):
        raise UserError(
            f"{store.run_dir}: no ticket {ticket} was given out so far; `kintsugi samples` shows some"
        )
    steps = tuple(line.content.step for line in own if isinstance(line.content, BatchFormed))
    lines = [*own, *_of_steps(store, steps, since=own[0].time)]
    version = _version_after(store, steps[-1]) if steps else None
    if version is not None:
        lines += _of_version(store, version)
    stations = sorted((_station(line, ticket) for line in _once(lines)), key=_place_in_time)
    return Trace(
        run=str(store.run_dir),
        ticket=ticket,
        row=row,
        prompt=prompt,
        steps=steps,
        version=version,
        stations=tuple(stations),
        clocks=_clocks(store, stations),
    )


def _place_in_time(each: TraceSlice) -> tuple[float, bool, float]:
    """Sort key: within one millisecond, decisions come before the work that they led to."""
    return round(each.start, 3), each.duration_s is not None, each.start


def _once(lines: Iterable[FoundLine]) -> Iterator[FoundLine]:
    """Yield each line once: some are found by the ticket and by its step."""
    seen: set[tuple[Any, ...]] = set()
    for line in lines:
        key = (line.source, line.time, line.kind, line.text)
        if key not in seen:
            seen.add(key)
            yield line


def _of_steps(store: RunStore, steps: tuple[int, ...], *, since: float) -> Iterator[FoundLine]:
    """Yield the work of ranks and master on these steps, and rollbacks that undid them."""
    for step in dict.fromkeys(steps):
        for line in search(store, SearchQuery(request=f"step:{step}", since=since)):
            if isinstance(line.content, StepCommitted | CheckpointSaved) or _is_of_many(line):
                yield line
    if steps:
        for line in search(store, SearchQuery(kind=kind_of(RolledBack), since=since)):
            if isinstance(line.content, RolledBack) and line.content.step < max(steps):
                yield line


def _of_version(store: RunStore, version: int) -> Iterator[FoundLine]:
    for line in search(store, SearchQuery(request=f"version:{version}")):
        if isinstance(line.content, VersionCurrent) or _is_of_many(line):
            yield line


def _is_of_many(line: FoundLine) -> bool:
    """Return whether a line is a span of a whole step or version; a span that names a ticket belongs to that ticket."""
    return isinstance(line.content, Span) and "ticket" not in line.content.attributes


def _version_after(store: RunStore, step: int) -> int | None:
    """Return the first current version that contains the step; versions may be skipped."""
    versions = (
        line.content.version
        for line in search(store, SearchQuery(kind=kind_of(VersionCurrent)))
        if isinstance(line.content, VersionCurrent) and line.content.version >= step
    )
    return min(versions, default=None)


def _station(line: FoundLine, ticket: str) -> TraceSlice:
    text, attributes, duration_s, name = line.text, {}, None, line.kind
    content = line.content
    if isinstance(content, Span):
        name, attributes, duration_s = content.name, dict(content.attributes), content.duration_s
        text = _span_text(content)
    elif isinstance(content, get_args(Fact)):
        name, text = _fact_station(content, ticket)
    elif content is not None:
        text = format_event(content)
    return TraceSlice(
        name=name,
        process=line.process,
        start=line.time if line.begun is None else line.begun,
        duration_s=duration_s,
        text=text,
        source=line.source,
        exact=line.exact,
        attributes=attributes,
    )


def _span_text(span: Span) -> str:
    """Return the attributes of a span as text, without the ticket; of a batch only the number of tickets."""
    shown = {name: value for name, value in span.attributes.items() if name != "ticket"}
    if "tickets" in shown:
        shown["tickets"] = str(shown["tickets"].count(",") + 1)
    words = ", ".join(f"{name} {value}" for name, value in shown.items())
    return f"{span.name}: {words}" if words else span.name


def _fact_station(fact: Fact, ticket: str) -> tuple[str, str]:
    """Return name and text of a fact in the trace of this ticket."""
    match fact:
        case TicketsIssued(tickets):
            count = next(each.num_samples for each in tickets if each.id == ticket)
            return ISSUED, f"issued: {count} samples are wanted"
        case TicketAssigned(worker=worker, version=version):
            weights = f", weights of version {version} or newer" if version >= 0 else ""
            return "assigned", f"assigned to {worker}{weights}"
        case TicketReturned(reason=reason):
            return "returned", f"returned, to be issued again: {reason}"
        case SamplesScored(samples=samples):
            rewards = ", ".join(f"{meta.reward:g}" for meta in samples)
            versions = ", ".join(map(str, sorted({meta.version for meta in samples} - {-1}))) or "none"
            tokens = sum(meta.num_loss_tokens for meta in samples)
            holders = ", ".join(sorted({meta.holder for meta in samples}))
            scored = f"{len(samples)} samples scored: rewards {rewards}; {tokens} tokens"
            return "scored", f"{scored}, oldest of weight version {versions}, kept by {holders}"
        case SampleQuarantined(key=key, reason=reason):
            return "quarantined", f"{key} quarantined: {reason}"
        case TicketFiltered(reason=reason) | TicketExpired(reason=reason):
            return "dropped", f"dropped: {reason}"
        case BatchFormed(step, tickets):
            return "batched", f"ready, and in the batch of step {step} with {len(tickets) - 1} other groups"
        case StepCommitted(step, digest):
            return "committed", f"step {step} is committed, state {digest[:12]}"
        case CheckpointSaved(step, path):
            return "saved", f"step {step} is saved in {path.rpartition('/')[2]}"
        case RolledBack(step, reason):
            return "rolled_back", f"back to step {step}: {reason}"
        case VersionCurrent(version, servers=servers):
            return "current", f"version {version} is current at {', '.join(servers)}"
        case _:
            return kind_of(fact), format_fact(fact)


def _clocks(store: RunStore, stations: Iterable[TraceSlice]) -> dict[str, tuple[float, float]]:
    """Return clock offset and error of the hosts in a trace."""
    hosts = {store.host_of(process) for process in {each.process for each in stations}}
    known = {host: store.clocks(host)[-1:] for host in sorted(filter(None, hosts))}
    return {host: (state.offset_s, state.error_s) for host, states in known.items() for state in states}


def whole_run(
    store: RunStore, *, since: float | None = None, until: float | None = None
) -> Iterator[TraceSlice]:
    """Yield spans, phases of the master, faults, alerts and committed steps of a whole run."""
    yield from _phases(store, since=since, until=until)
    kinds = (Span, Transition, FaultSeen, Alert, StepCommitted, VersionCurrent, RolledBack)
    lines = (line for kind in kinds for line in _search(store, kind, since=since, until=until))
    for line in lines:
        is_phase = (
            isinstance(line.content, Transition) and (line.content.machine, line.content.key) == MASTER_PHASES
        )
        if line.time and not is_phase:
            yield _station(line, "")


def _search(store: RunStore, kind: type, *, since: float | None, until: float | None) -> Iterator[FoundLine]:
    return search(store, SearchQuery(kind=kind_of(kind), since=since, until=until))


def _phases(store: RunStore, *, since: float | None, until: float | None) -> Iterator[TraceSlice]:
    moves = [
        (line.time, line.content, line)
        for line in _search(store, Transition, since=since, until=until)
        if isinstance(line.content, Transition) and (line.content.machine, line.content.key) == MASTER_PHASES
    ]
    for (start, move, line), (end, _, _) in itertools.pairwise(moves):
        yield TraceSlice(
            name=move.after,
            process=line.process,
            start=start,
            duration_s=max(0.0, end - start),
            text=move.reason,
            source=line.source,
            attributes={"reason": move.reason},
        )


MAX_PROMPT_LENGTH = 60


def timeline(trace: Trace, *, with_day: bool = False) -> str:
    """Format a trace as text: one line per slice, with time, duration, process, description and file."""
    return "\n".join([*_head(trace), "", *_table(trace, with_day=with_day)])


def _head(trace: Trace) -> Iterator[str]:
    prompt = (
        trace.prompt
        if len(trace.prompt) <= MAX_PROMPT_LENGTH
        else f"{trace.prompt[: MAX_PROMPT_LENGTH - 1]}…"
    )
    yield " · ".join(filter(None, [trace.ticket, trace.row, repr(prompt) if prompt else ""]))
    if not trace.steps:
        yield "in no batch yet"
    else:
        steps = ", ".join(map(str, trace.steps))
        current = (
            f"first current as version {trace.version}"
            if trace.version is not None
            else "not current at any server yet"
        )
        yield f"in the batch of step {steps}; {current}"
    for host, (offset_s, error_s) in trace.clocks.items():
        taken_off = ", taken off" if abs(offset_s) > error_s else ""
        ahead = f"{offset_s * 1e3:+.3f} ms ± {error_s * 1e3:.3f} ms"
        yield f"clock of {host}: {ahead} against the master's{taken_off}"


def _table(trace: Trace, *, with_day: bool) -> Iterator[str]:
    origin = next((each.start for each in trace.stations if each.name == ISSUED and each.start > 0), 0.0)
    width = max((len(each.process) for each in trace.stations), default=0)
    time = f"{'time':<{24 if with_day else 13}}"
    yield f"{time} {'after':>9} {'took':>9}  {'process':<{width}}  what  (where it is written)"
    for each in trace.stations:
        about = " " if each.exact else "~"
        after = f"{each.start - origin:+.3f} s" if origin and each.start > 0 else ""
        took = _seconds(each)
        where = f"({each.source})" if each.source else ""
        clock = clock_text(each.start, with_day=with_day)
        yield f"{clock}{about} {after:>9} {took:>9}  {each.process:<{width}}  {each.text}  {where}"


def _seconds(each: TraceSlice) -> str:
    return "" if each.duration_s is None else f"{each.duration_s:.3f} s"
