"""Notifications about a run, the same for the webhook of its watcher and for `kintsugi watch`."""

from __future__ import annotations

import msgspec

from kintsugi.diagnosis.verdict import Cause, FaultKind
from kintsugi.telemetry.events import Alert, Event, FaultSeen, ProcessGone
from kintsugi.telemetry.export.webhooks import Notification
from kintsugi.telemetry.format import format_event

INSTANTANEOUS = frozenset({FaultKind.KILLED, FaultKind.CRASHED})
"""Kinds without duration: their end is not reported."""
CauseKey = tuple[str, str, float]
"""Identity of a cause: process, kind, and the time of a kill."""


def notification(run: str, time: float, process: str, event: Event) -> Notification | None:
    """Return the notification of an event; None for events without one, as an end that the run ordered. An end of which
    the agent knows no status, because it was not the parent, is reported by the master if it was a loss."""
    match event:
        case ProcessGone(ordered=False) if event.status:
            return _notification(
                run, time, event.of, "fault", format_event(event), msgspec.to_builtins(event)
            )
        case FaultSeen(fault=fault):
            return _notification(
                run, time, fault.process, "fault", format_event(event), msgspec.to_builtins(fault)
            )
        case Alert(message=message, values=values):
            return Notification(
                run=run, time=time, process=process, kind="alert", text=message, values=values
            )
        case _:
            return None


def notification_of(cause: Cause, *, run: str, time: float) -> Notification:
    """`runs/demo-1: model-1 on host-1: cpu, 96 % sure: was kept from running for 2.1 of 3 s`."""
    what = cause.summary.removeprefix(f"{cause.process}: ")
    return Notification(
        run=run,
        time=time,
        process=cause.process,
        kind="diagnosis",
        text=f"{_subject(cause, run)}, {100 * cause.confidence:.0f} % sure: {what}",
        values={"confidence": cause.confidence, "onset": cause.onset},
        details=msgspec.to_builtins(cause),
    )


def notification_of_end(cause: Cause, *, run: str, time: float) -> Notification | None:
    """Return the notification of a cause that is over: `runs/demo-1: model-1 on host-1: cpu is over after 12 s`.

    None for a cause without duration. `cause` is its last version, `time` that of the first diagnosis without it.
    """
    if cause.kind in INSTANTANEOUS:
        return None
    lasted_s = max(0.0, time - cause.onset)
    return Notification(
        run=run,
        time=time,
        process=cause.process,
        kind="diagnosis",
        text=f"{_subject(cause, run)} is over after {lasted_s:.0f} s",
        values={"confidence": cause.confidence, "onset": cause.onset, "lasted_s": round(lasted_s, 3)},
        details=msgspec.to_builtins(cause),
    )


def _subject(cause: Cause, run: str) -> str:
    where = f" on {cause.host}" if cause.host else ""
    return f"{run}: {cause.process}{where}: {cause.kind.value}"


def _notification(run: str, time: float, process: str, kind: str, text: str, details: object) -> Notification:
    return Notification(run=run, time=time, process=process, kind=kind, text=text, details=details)


def cause_key(cause: Cause) -> CauseKey:
    """Return the identity of a cause: a lasting one is reported once; each kill is a cause of its own."""
    is_kill = cause.kind is FaultKind.KILLED
    killed_at = max((evidence.time for evidence in cause.evidence), default=cause.onset) if is_kill else 0.0
    return cause.process, cause.kind.value, killed_at
