"""Events, faults and facts as one line of text each, and the ids by which they are found.

Ids are those of tickets (`grpo:0:17:0`) and faults, and `step:7` or `version:7` for the step or the weights that an
entry belongs to.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import msgspec

from kintsugi.errors import Fault, chain
from kintsugi.journal.facts import BatchFormed, Fact, SampleQuarantined, TicketsIssued
from kintsugi.telemetry.events import (
    Alert,
    Event,
    FaultSeen,
    Note,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    Span,
    Transition,
)
from kintsugi.types import ticket_of

MAX_LENGTH = 400
_TICKET = re.compile(r"(?<![\w:.])[A-Za-z_]\w*:\d+:\d+:\d+(?![\w:])")
_NUMBERED = ("step", "version")


def format_event(event: Event) -> str:
    """Format an event: `step 7 took 0.412 s (stage=grpo)`."""
    match event:
        case ProcessBegan(role, incarnation, pid):
            return f"began as {role}, incarnation {incarnation}, pid {pid}"
        case ProcessEnded(code, reason):
            return f"ended with code {code}" + (f": {reason}" if reason else "")
        case ProcessGone(process, incarnation, pid, _, how):
            oom = ", out of memory" if event.oom else ""
            return f"{process} {incarnation} (pid {pid}) is gone: {how}{oom}"
        case FaultSeen(fault):
            return format_fault(fault)
        case Transition(machine, key, before, after, reason):
            return f"{machine} {key}: {before} → {after}" + (f": {reason}" if reason else "")
        case Span(name, _, duration_s, attributes):
            return f"{name} took {duration_s:.3f} s{_pairs(attributes)}"
        case Alert(message, values):
            return message + _pairs({name: f"{value:g}" for name, value in values.items()})
        case Note(message):
            return message


def format_fault(fault: Fault) -> str:
    """Format a fault and the faults that led to it: `StorageError of model-0: disk full [f3a…] ← …`."""
    text = f"{fault.kind} of {fault.process}: {fault.message} [{fault.id}]"
    return text if fault.cause is None else f"{text} ← {format_fault(fault.cause)}"


def format_fact(fact: Fact) -> str:
    """Format the fields of a fact; long lists are cut in the middle."""
    fields = {name: getattr(fact, name) for name in fact.__struct_fields__}
    text = ", ".join(f"{name} {_brief(value)}" for name, value in fields.items() if _is_shown(value))
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1]}…"


def _is_shown(value: Any) -> bool:
    return not isinstance(value, bytes) and value not in ("", (), {}, None)


def _brief(value: Any) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case Fault():
            return format_fault(value)
        case msgspec.Struct():
            name = next(
                (getattr(value, each) for each in ("id", "key", "process") if hasattr(value, each)), None
            )
            return str(name if name is not None else type(value).__name__)
        case tuple() | list():
            shown = [_brief(each) for each in value]
            if len(shown) > 4:
                shown = [*shown[:2], f"… {len(shown) - 3} more …", shown[-1]]
            return ", ".join(shown)
        case dict():
            return _pairs({str(key): _brief(each) for key, each in value.items()}).strip()
        case _:
            return str(value)


def _pairs(values: dict[str, str]) -> str:
    return f" ({', '.join(f'{key}={value}' for key, value in values.items())})" if values else ""


def clock_text(time: float, *, with_day: bool = False) -> str:
    """Return a time of day, to the millisecond; question marks where the time is not known."""
    form = "%Y-%m-%d %H:%M:%S.%f" if with_day else "%H:%M:%S.%f"
    if time > 0:
        return datetime.fromtimestamp(time).strftime(form)[:-3]
    return "????-??-?? ??:??:??.???" if with_day else "??:??:??.???"


def ids_in(text: str) -> set[str]:
    """Return the tickets that a text names; of a sample its ticket."""
    return set(_TICKET.findall(text)) if ":" in text else set()


def ids_of(event: Event) -> set[str]:
    """Return the ids that an event is about."""
    match event:
        case Span(attributes=attributes):
            numbered = {f"{name}:{attributes[name]}" for name in _NUMBERED if name in attributes}
            return numbered.union(*map(ids_in, attributes.values()))
        case FaultSeen(fault):
            return {each.id for each in chain(fault)}.union(*(ids_in(each.message) for each in chain(fault)))
        case Alert(message) | Note(message):
            return ids_in(message)
        case Transition(key=key, reason=reason):
            return ids_in(key) | ids_in(reason)
        case _:
            return set()


def ids_of_fact(fact: Fact) -> set[str]:
    """Return the ids that a fact is about."""
    fault = getattr(fact, "fault", None)
    ids = {each.id for each in chain(fault)} if isinstance(fault, Fault) else set()
    match fact:
        case TicketsIssued(tickets):
            return ids | {ticket.id for ticket in tickets}
        case BatchFormed(step, members):
            return {f"step:{step}", *members}
        case SampleQuarantined(key=key):
            return {ticket_of(key)}
        case _ if hasattr(fact, "ticket"):
            return {fact.ticket}
        case _:
            return ids | {f"{name}:{getattr(fact, name)}" for name in _NUMBERED if hasattr(fact, name)}
