"""What this machine and this user can do: every mechanism of every ability, and what keeps one from working."""

from __future__ import annotations

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.abilities.catalogue import MECHANISMS
from kintsugi.lab.abilities.fault import Fault
from kintsugi.lab.injection import Ability, Injection


class Availability(msgspec.Struct, frozen=True):
    """One mechanism, here."""

    ability: Ability
    mechanism: str
    missing: str | None
    """What it lacks; None: it works."""
    stands_for: str = ""
    """What it only acts like."""


_found: dict[str, str | None] = {}


def _missing(mechanism: type[Fault]) -> str | None:
    """Looked for once."""
    if mechanism.name not in _found:
        _found[mechanism.name] = mechanism.missing()
    return _found[mechanism.name]


def abilities() -> tuple[Availability, ...]:
    """All of them, the best mechanism of each ability first; takes a moment the first time."""
    return tuple(
        Availability(ability, mechanism.name, _missing(mechanism), mechanism.stands_for)
        for ability in Ability
        for mechanism in MECHANISMS[ability]
    )


def choose(injection: Injection, *, pid: int | None = None) -> type[Fault]:
    """The mechanism that will be used, on a process if one is given: the first that works here and does all that is
    asked.

    UserError when there is none, with what each of them lacks.
    """
    candidates = MECHANISMS[injection.ability]
    if injection.mechanism is not None:
        names = ", ".join(repr(mechanism.name) for mechanism in candidates)
        candidates = tuple(each for each in candidates if each.name == injection.mechanism)
        if not candidates:
            raise UserError(
                f"mechanism: {injection.ability.value} has none named {injection.mechanism!r}; expected {names}"
            )
    lacking: dict[str, str] = {}
    for mechanism in candidates:
        lack = _missing(mechanism) or _ignored(mechanism, injection)
        lack = lack or (mechanism.unsuited(pid) if pid is not None else None)
        if lack is None:
            return mechanism
        lacking[mechanism.name] = lack
    lacks = "; ".join(f"{name}: {lack}" for name, lack in lacking.items())
    raise UserError(f"{injection.ability.value} can not be done on this machine: {lacks}")


def _ignored(mechanism: type[Fault], injection: Injection) -> str | None:
    """A fault that is weaker, or other, than it was asked for would be reported as what was asked."""
    ignored = mechanism.ignored(injection)
    if not ignored:
        return None
    known = ", ".join(sorted(mechanism.words)) or "none"
    return f"does not know {', '.join(ignored)}; expected of amount: {known}{', and ramp_s' if mechanism.ramps else ''}"
