"""The way of one prompt, station by station: from its row of the data set to the weights that learned from it.

    row ─► ticket issued ─► assigned ─► generated, scored ─► in a batch ─► trained ─► committed ─► published ─► current

What the master decided are facts of the journal, at the times of the inputs that they follow from; what took time at a
process are its spans. Both are found by the ticket and, from the batch on, by the step and the version of the weights.
A ticket that was returned, or whose step was undone, goes parts of its way more than once, and all of them are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kintsugi.errors import UserError
from kintsugi.facts import (
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
from kintsugi.observe.events import Alert, FaultSeen, Span, Transition
from kintsugi.observe.searching import Line, Query, search
from kintsugi.observe.store import RunStore
from kintsugi.observe.telling import told, told_fact
from kintsugi.types import Ticket

MASTER_PHASES = ("master", "run")
ISSUED = "issued"


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Something at a process: with a beginning and an end, or at one moment."""

    name: str
    process: str
    start: float
    """Wall clock of the master; 0 where nobody wrote a time down."""
    duration_s: float | None = None
    """None for a moment."""
    text: str = ""
    """For people."""
    source: str = ""
    """Where it stands: `events/server-0.jsonl`, `journal`."""
    exact: bool = True
    attributes: Mapping[str, str] = {}

    @property
    def end(self) -> float:
        return self.start + (self.duration_s or 0.0)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one ticket."""

    run: str
    ticket: str
    row: str = ""
    """Which row it is of: `row 212 of arithmetic`."""
    prompt: str = ""
    steps: tuple[int, ...] = ()
    """In whose batches it was; more than one only where some were undone."""
    version: int | None = None
    """The first one current that learned from it."""
    stations: tuple[Slice, ...] = ()
    """In the order of time."""
    clocks: Mapping[str, tuple[float, float]] = {}
    """Host → seconds by which its clock was ahead, and how wrong that may be; more than that is taken off."""


def issued_tickets(store: RunStore) -> Iterator[Ticket]:
    """Every ticket of the run, in the order of issue."""
    for line in search(store, Query(kind=TicketsIssued.__name__)):
        if isinstance(line.content, TicketsIssued):
            yield from line.content.tickets


def trace_ticket(store: RunStore, ticket: str, *, row: str = "", prompt: str = "") -> Trace:
    """The way of a ticket as far as it has come. UserError for one that was never issued."""
    own = list(search(store, Query(request=ticket)))
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


def _place_in_time(each: Slice) -> tuple[float, bool, float]:
    """Of one millisecond, what was decided comes before what was done about it."""
    return round(each.start, 3), each.duration_s is not None, each.start


def _once(lines: Iterable[Line]) -> Iterator[Line]:
    """What is about the ticket and its step is told once."""
    seen: set[tuple[Any, ...]] = set()
    for line in lines:
        key = (line.source, line.time, line.kind, line.text)
        if key not in seen:
            seen.add(key)
            yield line


def _of_steps(store: RunStore, steps: tuple[int, ...], *, since: float) -> Iterator[Line]:
    """What ranks and master did about the steps, and which of them were undone."""
    for step in dict.fromkeys(steps):
        for line in search(store, Query(request=f"step:{step}", since=since)):
            if isinstance(line.content, StepCommitted | CheckpointSaved) or _is_of_many(line):
                yield line
    if steps:
        for line in search(store, Query(kind=RolledBack.__name__, since=since)):
            if isinstance(line.content, RolledBack) and line.content.step < max(steps):
                yield line


def _of_version(store: RunStore, version: int) -> Iterator[Line]:
    for line in search(store, Query(request=f"version:{version}")):
        if isinstance(line.content, VersionCurrent) or _is_of_many(line):
            yield line


def _is_of_many(line: Line) -> bool:
    """A span of a step or a version as a whole: one that names a ticket belongs to that one."""
    return isinstance(line.content, Span) and "ticket" not in line.content.attributes


def _version_after(store: RunStore, step: int) -> int | None:
    """The first version that became current and has the step in it; others may have been left out."""
    versions = (
        line.content.version
        for line in search(store, Query(kind=VersionCurrent.__name__))
        if isinstance(line.content, VersionCurrent) and line.content.version >= step
    )
    return min(versions, default=None)


def _station(line: Line, ticket: str) -> Slice:
    text, attributes, duration_s, name = line.text, {}, None, line.kind
    content = line.content
    if isinstance(content, Span):
        name, attributes, duration_s = content.name, dict(content.attributes), content.duration_s
        text = _span_text(content)
    elif isinstance(content, msgspec.Struct) and line.source == "journal":
        name, text = _fact_station(content, ticket)  # type: ignore[arg-type]
    elif content is not None:
        text = told(content)
    return Slice(
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
    """Without the ticket, which is the same everywhere, and of a batch only how many there are."""
    shown = {name: value for name, value in span.attributes.items() if name != "ticket"}
    if "tickets" in shown:
        shown["tickets"] = str(shown["tickets"].count(",") + 1)
    words = ", ".join(f"{name} {value}" for name, value in shown.items())
    return f"{span.name}: {words}" if words else span.name


def _fact_station(fact: Fact, ticket: str) -> tuple[str, str]:
    """What a fact is called as a station of this ticket, and what it says there."""
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
            return type(fact).__name__, told_fact(fact)


def _clocks(store: RunStore, stations: Iterable[Slice]) -> dict[str, tuple[float, float]]:
    """Of the hosts that the way leads over."""
    hosts = {store.host_of(process) for process in {each.process for each in stations}}
    known = {host: store.clocks(host)[-1:] for host in sorted(filter(None, hosts))}
    return {host: (state.offset_s, state.error_s) for host, states in known.items() for state in states}


def whole_run(store: RunStore, *, since: float | None = None, until: float | None = None) -> Iterator[Slice]:
    """Everything of a run that has a place in time: spans, the master's phases, and what a person would look for."""
    yield from _phases(store, since=since, until=until)
    kinds = (Span, Transition, FaultSeen, Alert, StepCommitted, VersionCurrent, RolledBack)
    lines = (line for kind in kinds for line in _search(store, kind, since=since, until=until))
    for line in lines:
        is_phase = (
            isinstance(line.content, Transition) and (line.content.machine, line.content.key) == MASTER_PHASES
        )
        if line.time and not is_phase:
            yield _station(line, "")


def _search(store: RunStore, kind: type, *, since: float | None, until: float | None) -> Iterator[Line]:
    return search(store, Query(kind=kind.__name__, since=since, until=until))


def _phases(store: RunStore, *, since: float | None, until: float | None) -> Iterator[Slice]:
    moves = [
        (line.time, line.content, line)
        for line in _search(store, Transition, since=since, until=until)
        if isinstance(line.content, Transition) and (line.content.machine, line.content.key) == MASTER_PHASES
    ]
    for (start, move, line), (end, _, _) in itertools.pairwise(moves):
        yield Slice(
            name=move.after,
            process=line.process,
            start=start,
            duration_s=max(0.0, end - start),
            text=move.reason,
            source=line.source,
            attributes={"reason": move.reason},
        )
