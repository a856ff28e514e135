"""Which pairs of state and event, and of state and crash, can occur at all, and which of them a campaign has met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

import msgspec

from kintsugi.control.phases import Phase
from kintsugi.control.protocol import Event
from kintsugi.recovery.states import RecoveryState

RECOVERING = "recovering: "
NORMAL_STATES: tuple[str, ...] = tuple(
    phase.value for phase in Phase if phase not in (Phase.RECOVERING, Phase.ENDED)
)
RECOVERY_STATES: tuple[str, ...] = tuple(
    RECOVERING + state.value for state in RecoveryState if state is not RecoveryState.NORMAL
)
HOPELESS_STATES: tuple[str, ...] = tuple(
    RECOVERING + state.value for state in (RecoveryState.DUMPING, RecoveryState.GIVEN_UP)
)
"""Only a fault that nobody can survive leads here."""
STATES = NORMAL_STATES + RECOVERY_STATES
EVENTS: tuple[str, ...] = tuple(sorted(kind.__name__ for kind in get_args(Event)))
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

IMPOSSIBLE: dict[Pair, str] = {
    (state, "Began"): "a master begins once, and stands in its first state then"
    for state in STATES
    if state != Phase.STARTING.value
}
"""Pairs of state and event that can not occur, and why. ENDED is no state of a living master: the decision that enters
it makes its process exit."""


def possible_events() -> list[Pair]:
    return [(state, event) for state in STATES for event in EVENTS if (state, event) not in IMPOSSIBLE]


def possible_boundaries() -> list[Pair]:
    """Everything that is worth aiming at; which effects a state really has, the campaign finds out."""
    return [(state, what) for state in (*STATES, Phase.ENDED.value) for what in BOUNDARIES]


class Coverage(msgspec.Struct):
    """Pairs that were met, and how often."""

    events: Counter[Pair] = msgspec.field(default_factory=Counter)
    """(state, event)"""
    effects: Counter[Pair] = msgspec.field(default_factory=Counter)
    """(state, effect or write) that occurred, so that a master could die there."""
    crashes: Counter[Pair] = msgspec.field(default_factory=Counter)
    """(state, effect or write) at which a master did die."""

    def add(self, other: Coverage) -> None:
        self.events.update(other.events)
        self.effects.update(other.effects)
        self.crashes.update(other.crashes)

    def report(self) -> dict[str, object]:
        """For people: how much of what is possible was met, and what was not."""
        possible = possible_events()
        met = [pair for pair in possible if self.events[pair]]
        died = [pair for pair in self.effects if self.crashes[pair]]
        return {
            "state_event": {
                "possible": len(possible),
                "met": len(met),
                "share": len(met) / len(possible),
                "missing": _names(pair for pair in possible if not self.events[pair]),
                "undeclared": _names(
                    pair for pair in self.events if pair in IMPOSSIBLE or pair[0] not in STATES
                ),
                "impossible": {f"{state} × {event}": why for (state, event), why in IMPOSSIBLE.items()},
            },
            "state_effect_crash": {
                "possible": len(self.effects),
                "met": len(died),
                "share": len(died) / max(1, len(self.effects)),
                "missing": _names(pair for pair in self.effects if not self.crashes[pair]),
            },
        }


def _names(pairs: Iterable[Pair]) -> list[str]:
    return sorted(f"{state} × {what}" for state, what in pairs)
