"""Availability of every fault mechanism on this machine, for this user."""

from __future__ import annotations

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.faults.catalogue import MECHANISMS
from kintsugi.lab.faults.mechanism import FaultMechanism
from kintsugi.lab.injector.injection import Ability, Injection


class Availability(msgspec.Struct, frozen=True):
    """One mechanism and whether it works here."""

    ability: Ability
    mechanism: str
    missing: str | None
    """Reason why it does not work; None when it works."""
    stands_for: str = ""
    """Fault that the mechanism only imitates."""


_found: dict[str, str | None] = {}


def _missing(mechanism: type[FaultMechanism]) -> str | None:
    """Return the reason, determined once per process."""
    if mechanism.name not in _found:
        _found[mechanism.name] = mechanism.missing()
    return _found[mechanism.name]


def abilities() -> tuple[Availability, ...]:
    """Return all mechanisms, the best of each fault type first; the first call takes a moment."""
    return tuple(
        Availability(ability, mechanism.name, _missing(mechanism), mechanism.stands_for)
        for ability in Ability
        for mechanism in MECHANISMS[ability]
    )


def choose(
    injection: Injection, *, pid: int | None = None, may_share_network: bool = False
) -> type[FaultMechanism]:
    """Return the first mechanism that works here (on process `pid`, if given) and supports all of the injection. With
    `may_share_network` it may change the network of this machine itself.

    Raises UserError with the reason of each mechanism when there is none.
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
        if lack is None and pid is not None:
            lack = mechanism.unsupported_for(pid, may_share_network=may_share_network)
        if lack is None:
            return mechanism
        lacking[mechanism.name] = lack
    lacks = "; ".join(f"{name}: {lack}" for name, lack in lacking.items())
    raise UserError(f"{injection.ability.value} can not be done on this machine: {lacks}")


def _ignored(mechanism: type[FaultMechanism], injection: Injection) -> str | None:
    """Return the unsupported parameters, if any: a weaker or different fault would be reported as the requested one."""
    ignored = mechanism.ignored(injection)
    if not ignored:
        return None
    known = ", ".join(sorted(mechanism.supported_parameters)) or "none"
    return f"does not know {', '.join(ignored)}; expected of amount: {known}{', and ramp_s' if mechanism.ramps else ''}"
