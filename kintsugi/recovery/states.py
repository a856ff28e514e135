"""States and transitions of a recovery, and the part of a page that shows them (`flows.page`).

Every (state, event) pair is defined: one that is not in `TRANSITIONS` leaves the state as it is. A fault restarts a
recovery from any state, with everything that was lost until then; so does an operation that fails. After a bounded
number of attempts a last checkpoint is dumped, and the run is given up with its cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RecoveryState(StrEnum):
    """State of the ranks between a fault and normal operation, in the words of the protocol."""

    NORMAL = "normal"
    PRE_LOCKING = "pre-lock"
    DEVICE_STOPPING = "device stop"
    DEVICE_CLEANING = "device clean"
    WAITING = "wait for replacements"
    REBUILDING = "rebuild communication"
    REPAIRING = "repair"
    ROLLING_BACK = "rollback"
    STAGING = "start stage"
    NOTIFYING = "notify normal"
    DUMPING = "dump"
    GIVEN_UP = "given up"


class RecoveryEvent(StrEnum):
    """Event that moves a recovery to its next state."""

    FAULT = "a fault, or ranks that are not one group"
    LOCKED = "stop complete: every living rank is locked"
    STOPPED = "every living rank has stopped"
    CLEANED = "every living rank is clean"
    REPLACED = "every rank is live, or the group continues smaller"
    REBUILT = "the new group has passed its probe"
    REPAIRED = "every rank that lacked the state has it"
    ROLLED_BACK = "all ranks stand at the agreed step"
    STAGED = "all ranks carry the same stage, their hashes agree"
    NOTIFIED = "every rank is notified"
    FAILED = "an operation failed, or its deadline passed"
    HOPELESS = "no strategy is left"
    DUMPED = "the last checkpoint is written, or cannot be"


_S, _E = RecoveryState, RecoveryEvent

STEPS: tuple[tuple[RecoveryState, RecoveryEvent], ...] = (
    (_S.PRE_LOCKING, _E.LOCKED),
    (_S.DEVICE_STOPPING, _E.STOPPED),
    (_S.DEVICE_CLEANING, _E.CLEANED),
    (_S.WAITING, _E.REPLACED),
    (_S.REBUILDING, _E.REBUILT),
    (_S.REPAIRING, _E.REPAIRED),
    (_S.ROLLING_BACK, _E.ROLLED_BACK),
    (_S.STAGING, _E.STAGED),
    (_S.NOTIFYING, _E.NOTIFIED),
)
"""States of a recovery without further faults, each with the event that ends it."""


def _table() -> dict[tuple[RecoveryState, RecoveryEvent], RecoveryState]:
    table = {(_S.NORMAL, _E.FAULT): _S.PRE_LOCKING, (_S.NORMAL, _E.HOPELESS): _S.DUMPING}
    table[_S.NORMAL, _E.FAILED] = _S.PRE_LOCKING
    after = [state for state, _ in STEPS[1:]] + [_S.NORMAL]
    for (state, event), following in zip(STEPS, after, strict=True):
        table[state, event] = following
        table[state, _E.FAULT] = table[state, _E.FAILED] = _S.PRE_LOCKING
        table[state, _E.HOPELESS] = _S.DUMPING
    table[_S.DUMPING, _E.DUMPED] = table[_S.DUMPING, _E.FAILED] = _S.GIVEN_UP
    table[_S.DUMPING, _E.FAULT] = _S.GIVEN_UP
    return table


TRANSITIONS: Mapping[tuple[RecoveryState, RecoveryEvent], RecoveryState] = _table()


def following(state: RecoveryState, event: RecoveryEvent) -> RecoveryState:
    """Return the state after an event; an event without meaning in this state changes nothing."""
    return TRANSITIONS.get((state, event), state)


def markdown() -> str:
    """Return the table and the diagram, with which `docs/recovery.md` begins."""
    rows = [f"| {state} | {event} | {TRANSITIONS[state, event]} |" for state, event in TRANSITIONS]
    names = {state: state.name.lower() for state in RecoveryState}
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in TRANSITIONS.items():
        arrows.setdefault((names[state], names[after]), []).append(event.name.lower())
    diagram = [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join(
        [
            "# Recovery: states and transitions",
            "",
            "Generated from the code by `python -m kintsugi.recovery.flows`; a test keeps it in step.",
            "",
            "| state | event | next state |",
            "|---|---|---|",
            *rows,
            "",
            "Every other pair leaves the state as it is.",
            "",
            "```mermaid",
            "stateDiagram-v2",
            "    [*] --> normal",
            *diagram,
            "    given_up --> [*]",
            "```",
            "",
        ]
    )
