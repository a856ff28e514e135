"""What people who are elsewhere are told of a run: the same by its watcher as by who looks on (`kintsugi watch`)."""

from __future__ import annotations

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind
from kintsugi.observe.alerts import Notification
from kintsugi.observe.events import Alert, Event, FaultSeen, ProcessGone
from kintsugi.observe.telling import told

CauseKey = tuple[str, str, float]
"""By what a cause is known again: process, kind, and of a kill when it was."""


def notification(run: str, time: float, process: str, event: Event) -> Notification | None:
    """None of what nobody has to look at; an end that the run ordered is no news."""
    match event:
        case ProcessGone(ordered=False) if event.status != 0:
            return _notification(run, time, event.of, "fault", told(event), msgspec.to_builtins(event))
        case FaultSeen(fault=fault):
            return _notification(run, time, fault.process, "fault", told(event), msgspec.to_builtins(fault))
        case Alert(message=message, values=values):
            return Notification(
                run=run, time=time, process=process, kind="alert", text=message, values=values
            )
        case _:
            return None


def notification_of(cause: Cause, *, run: str, time: float) -> Notification:
    return _notification(run, time, cause.process, "diagnosis", cause.summary, msgspec.to_builtins(cause))


def _notification(run: str, time: float, process: str, kind: str, text: str, details: object) -> Notification:
    return Notification(run=run, time=time, process=process, kind=kind, text=text, details=details)


def cause_key(cause: Cause) -> CauseKey:
    """What goes on is told once, though it shows again and again; a kill is over at once, and the next is another."""
    is_kill = cause.kind is FaultKind.KILLED
    killed_at = max((evidence.time for evidence in cause.evidence), default=cause.onset) if is_kill else 0.0
    return cause.process, cause.kind.value, killed_at
