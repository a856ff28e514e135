"""Validation of an injection without a run: parameters, target and trigger. Pure."""

from __future__ import annotations

import math
import re

from kintsugi.errors import UserError
from kintsugi.lab.faults.catalogue import MECHANISMS
from kintsugi.lab.faults.memory import SMALLEST_LIMIT
from kintsugi.lab.injector.injection import INJECTABLE_PHASES, Ability, Injection, Trigger

NETWORK = frozenset({Ability.NETWORK_DELAY, Ability.NETWORK_LOSS, Ability.NETWORK_CUT})
"""Fault types that can be restricted to one link of a process."""
LAST_PORT = 65535
LONGEST_FAULT_S = 3600.0
LONGEST_AFTER_S = 60.0
"""Longest delay of a trigger; the run may be in a different step and phase by then."""
LONGEST_DELAY_S = 600.0

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "share": (0.0, 1.0, "a number from 0 to 1"),
    "delay_s": (0.0, LONGEST_DELAY_S, f"seconds from 0 to {LONGEST_DELAY_S:g}"),
    "jitter_s": (0.0, LONGEST_DELAY_S, f"seconds from 0 to {LONGEST_DELAY_S:g}"),
    "factor": (1.0, 1000.0, "a number from 1 to 1000"),
    "rate": (1.0, math.inf, "at least 1 byte a second"),
    "limit": (1.0, math.inf, "at least 1 byte"),
    "block_size": (1.0, 1 << 30, "bytes from 1 to 2^30"),
    "bytes": (1.0, 1 << 30, "bytes from 1 to 2^30"),
    "room": (0.0, math.inf, "a number not below 0"),
    "device": (0.0, 255.0, "N of /dev/nvidiaN"),
}


def check_injection(injection: Injection, *, where: str = "") -> None:
    """Raise UserError that names the field, its value and what was expected; `where` is the prefix of the field's
    name."""
    _check_times(injection, where=where)
    _check_target(injection, where=where)
    _check_parameters(injection, where=where)
    check_trigger(injection.trigger, where=f"{where}trigger")


def supported_parameters_of(ability: Ability) -> frozenset[str]:
    """Return the parameters that at least one mechanism of this fault type supports."""
    return frozenset[str]().union(*(mechanism.supported_parameters for mechanism in MECHANISMS[ability]))


def _check_times(injection: Injection, *, where: str) -> None:
    if not 0 < injection.duration_s <= LONGEST_FAULT_S:
        raise UserError(
            f"{where}duration_s: expected seconds above 0, at most {LONGEST_FAULT_S:g}, got {injection.duration_s:g}"
        )
    if not 0 <= injection.ramp_s <= LONGEST_FAULT_S:
        raise UserError(
            f"{where}ramp_s: expected seconds not below 0, at most {LONGEST_FAULT_S:g}, got {injection.ramp_s:g}"
        )


def _check_target(injection: Injection, *, where: str) -> None:
    for field in ("peer", "port", "interface"):
        value = getattr(injection, field)
        if value is not None and injection.ability not in NETWORK:
            raise UserError(
                f"{where}{field}: {injection.ability.value} is done to a process, not to a link of it; expected none, "
                f"got {value!r}"
            )
    if injection.port is not None and not 1 <= injection.port <= LAST_PORT:
        raise UserError(f"{where}port: expected 1 to {LAST_PORT}, got {injection.port}")
    if injection.peer == injection.target:
        raise UserError(f"{where}peer: expected another process than the target, got {injection.peer!r}")


def _check_parameters(injection: Injection, *, where: str) -> None:
    supported = supported_parameters_of(injection.ability)
    if unknown := sorted(set(injection.amount) - supported):
        expected = ", ".join(sorted(supported)) or "none"
        raise UserError(
            f"{where}amount: {injection.ability.value} knows {expected}, got {', '.join(unknown)}"
        )
    for name, value in injection.amount.items():
        least, most, expected = _BOUNDS[name]
        if name == "limit" and injection.ability is Ability.MEMORY:
            least, expected = SMALLEST_LIMIT, f"at least {SMALLEST_LIMIT} bytes"
        if not (math.isfinite(value) and least <= value <= most):
            raise UserError(f"{where}amount.{name}: expected {expected}, got {value:g}")
    delay_s, jitter_s = injection.amount.get("delay_s"), injection.amount.get("jitter_s")
    if delay_s is not None and jitter_s is not None and jitter_s > delay_s:
        raise UserError(
            f"{where}amount.jitter_s: expected at most delay_s, which is {delay_s:g}, got {jitter_s:g}"
        )


def check_trigger(trigger: Trigger, *, where: str = "trigger") -> None:
    """Raise UserError for a trigger that no run can fulfil."""
    phases = [phase.value for phase in INJECTABLE_PHASES]
    if trigger.phase is not None and trigger.phase not in phases:
        raise UserError(f"{where}.phase: expected one of {', '.join(phases)}, got {trigger.phase!r}")
    if trigger.step is not None and trigger.step < 1:
        raise UserError(f"{where}.step: steps are counted from 1, got {trigger.step}")
    if not 0 <= trigger.after_s <= LONGEST_AFTER_S:
        raise UserError(
            f"{where}.after_s: expected seconds not below 0, at most {LONGEST_AFTER_S:g}, got {trigger.after_s:g}"
        )
    if not 0 < trigger.timeout_s <= LONGEST_FAULT_S:
        raise UserError(
            f"{where}.timeout_s: expected seconds above 0, at most {LONGEST_FAULT_S:g}, got {trigger.timeout_s:g}"
        )
    if trigger.event is not None:
        check_pattern(trigger.event, where=f"{where}.event")


def check_pattern(pattern: str, *, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where}: expected a regular expression, got {pattern!r}: {error}") from error
