"""Coverage: the possible pairs of state and event, and of state and crash, and those that a campaign has reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

import msgspec

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Event
from kintsugi.recovery.states import RecoveryState
from kintsugi.types import kind_of

RECOVERING = "recovering: "
NORMAL_STATES: tuple[str, ...] = tuple(
    phase.value for phase in Phase if phase not in (Phase.RECOVERING, Phase.ENDED)
)
RECOVERY_STATES: tuple[str, ...] = tuple(
    RECOVERING + state.value for state in RecoveryState if state is not RecoveryState.NORMAL
)
PRE_LOCKING = RECOVERING + RecoveryState.PRE_LOCKING
WAITING = RECOVERING + RecoveryState.WAITING
STAGING = RECOVERING + RecoveryState.STAGING
NOTIFYING = RECOVERING + RecoveryState.NOTIFYING
DUMPING = RECOVERING + RecoveryState.DUMPING
GIVEN_UP = RECOVERING + RecoveryState.GIVEN_UP
HOPELESS_STATES = (DUMPING, GIVEN_UP)
"""States that only an unrecoverable fault leads to."""
STATES = NORMAL_STATES + RECOVERY_STATES
EVENTS: tuple[str, ...] = tuple(sorted(kind_of(kind) for kind in get_args(Event)))
BOUNDARIES: tuple[str, ...] = (
    "append",
    "sync",
    "Request",
    "Tell",
    "Admit",
    "Forget",
    "ShareBook",
    "RecordStep",
    "RecordEvaluation",
    "Raise",
    "Finish",
)

Pair = tuple[str, str]

IMPOSSIBLE_EVENTS: dict[Pair, str] = {
    (state, "Began"): "a master begins once, and is in its first state then"
    for state in STATES
    if state != Phase.STARTING
}
"""Pairs of state and event that cannot occur, and why. ENDED is no state of a running master: the decision that enters
it ends its process."""

_ONLY_IN: dict[str, tuple[tuple[str, ...], str]] = {
    "sync": (
        (*(state for state in STATES if state != STAGING), Phase.ENDED),
        "before the first step no step, no checkpoint and no end are journaled, which must be durable",
    ),
    "Request": (STATES, "after the end of the run no requests are sent"),
    "Forget": (STATES, "the run ends by a reply, a tick or a stop, none of which reports a loss"),
    "Tell": (
        (
            *(Phase.ADOPTING, Phase.COLLECTING, Phase.TRAINING, Phase.COMMITTING, Phase.PUBLISHING),
            *(Phase.EVALUATING, Phase.SAVING, *RECOVERY_STATES),
        ),
        "workers are sent trained groups after a commit or a takeover, and moved groups while they run",
    ),
    "RecordStep": ((Phase.COMMITTING,), "a step is recorded by the decision that commits it"),
    "RecordEvaluation": (
        (Phase.PREPARING, Phase.COLLECTING, Phase.TRAINING, Phase.SAVING, PRE_LOCKING),
        "after an evaluation the step is saved, the group grows back, a stage begins, or the next step does",
    ),
    "Finish": ((Phase.ENDED,), "only the decision that ends the run lets it finish"),
}
"""Effect or write → the only states in which it occurs, and why."""

IMPOSSIBLE_BOUNDARIES: dict[Pair, str] = {
    (state, what): why
    for what, (states, why) in _ONLY_IN.items()
    for state in (*STATES, Phase.ENDED.value)
    if state not in states
}
"""Pairs of state and effect or write that cannot occur, and why. A run in which one occurs is in violation."""


def possible_events() -> list[Pair]:
    return [(state, event) for state in STATES for event in EVENTS if (state, event) not in IMPOSSIBLE_EVENTS]


def possible_boundaries() -> list[Pair]:
    """Return every boundary at which a master can crash while it carries out a decision."""
    states = (*STATES, Phase.ENDED.value)
    pairs = ((state, what) for state in states for what in BOUNDARIES)
    return [pair for pair in pairs if pair not in IMPOSSIBLE_BOUNDARIES]


class Coverage(msgspec.Struct):
    """Number of times that each pair was reached."""

    events: Counter[Pair] = msgspec.field(default_factory=Counter)
    """(state, event)"""
    crashes: Counter[Pair] = msgspec.field(default_factory=Counter)
    """(state, effect or write) at which a master crashed."""

    def add(self, other: Coverage) -> None:
        self.events.update(other.events)
        self.crashes.update(other.crashes)

    def report(self) -> dict[str, object]:
        """Return which share of the possible pairs was reached, and the missing ones."""
        return {
            "state_event": _share(self.events, possible_events(), IMPOSSIBLE_EVENTS),
            "state_effect_crash": _share(self.crashes, possible_boundaries(), IMPOSSIBLE_BOUNDARIES),
        }


def _share(counted: Counter[Pair], possible: list[Pair], impossible: dict[Pair, str]) -> dict[str, object]:
    missing = [pair for pair in possible if not counted[pair]]
    num_met = len(possible) - len(missing)
    return {
        "possible": len(possible),
        "met": num_met,
        "share": num_met / len(possible),
        "missing": _names(missing),
        "impossible": {f"{state} × {what}": why for (state, what), why in impossible.items()},
    }


def _names(pairs: Iterable[Pair]) -> list[str]:
    return sorted(f"{state} × {what}" for state, what in pairs)
