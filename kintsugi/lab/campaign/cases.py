"""Cases of a blind campaign, drawn from a seed or each once: fault type × target × phase × strength, or none. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from kintsugi.config.schema import Config
from kintsugi.control.phases.table import Phase
from kintsugi.errors import UserError
from kintsugi.lab.injector.injection import Ability, Injection, Trigger
from kintsugi.lab.scenarios.experiments import processes_of
from kintsugi.runtime.clock import random_stream
from kintsugi.types import Role, process_id, role_of

T = TypeVar("T")

WINDOW_S = 10.0
"""A case without a verdict ends after this time."""
LEAST_FAULT_S = 6.0
"""Shortest duration of a fault, even when it is diagnosed earlier: its effect has to show, also in the logs."""
MOMENT_TIMEOUT_S = 12.0
PAIR_LEASE_S = WINDOW_S + MOMENT_TIMEOUT_S + 2.0
"""Longest duration of a fault of a pair: the first one lasts while the second awaits its moment."""


class CaseClass(StrEnum):
    FAULT = "fault"
    TWO = "two"
    """Two concurrent faults in two processes."""
    BENIGN = "benign"
    """Slower than usual without a fault."""
    HEALTHY = "healthy"


class Benign(StrEnum):
    """Reason why a healthy run is slower."""

    BUSY_HOST = "busy_host"
    """Other programs compete for the CPUs: all processes are slowed down alike."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    SCALED = "scaled"
    """A generation server was removed and added again."""


SHARES: tuple[tuple[CaseClass, float], ...] = (
    (CaseClass.FAULT, 0.70),
    (CaseClass.TWO, 0.08),
    (CaseClass.BENIGN, 0.11),
    (CaseClass.HEALTHY, 0.11),
)
ROLES: dict[Ability, tuple[Role, ...]] = {
    Ability.CPU: (Role.MODEL, Role.ROLLOUT, Role.SERVER),
    Ability.MEMORY: (Role.MODEL, Role.ROLLOUT, Role.SERVER),
    Ability.DISK_FILL: (Role.MODEL,),
    Ability.DISK_LOAD: (Role.MODEL,),
    Ability.DISK_ERROR: (Role.MODEL,),
    Ability.NETWORK_DELAY: (Role.MODEL, Role.ROLLOUT, Role.SERVER),
    Ability.NETWORK_LOSS: (Role.MODEL, Role.ROLLOUT, Role.SERVER),
    Ability.NETWORK_CUT: (Role.MODEL, Role.ROLLOUT, Role.SERVER),
    Ability.DNS: (Role.MODEL,),
    Ability.DEVICE_MEMORY: (Role.MODEL, Role.SERVER),
    Ability.DEVICE_SLOW: (Role.MODEL, Role.SERVER),
    Ability.KILL: (Role.MODEL, Role.ROLLOUT, Role.SERVER, Role.MANAGER),
    Ability.STOP: (Role.MODEL, Role.ROLLOUT, Role.SERVER, Role.MANAGER),
    Ability.CORRUPT: (Role.MODEL, Role.SERVER),
    Ability.NUMERIC: (Role.MODEL,),
    Ability.GROW: (Role.SERVER, Role.ROLLOUT),
    Ability.USER_CODE: (Role.ROLLOUT,),
    Ability.HOST_LOSS: (),
}
"""Roles that each fault type is injected into. A campaign loses no host: its hosts are on this machine."""
AMOUNTS: dict[Ability, dict[str, tuple[float, float]]] = {
    Ability.CPU: {"share": (0.9, 0.98)},
    Ability.MEMORY: {"rate": (2e8, 8e8)},
    Ability.DISK_FILL: {"share": (0.995, 1.0)},
    Ability.DISK_LOAD: {"rate": (1e8, 4e8), "block_size": (1 << 20, 4 << 20)},
    Ability.NETWORK_DELAY: {"delay_s": (0.15, 1.0), "jitter_s": (0.0, 0.1)},
    Ability.NETWORK_LOSS: {"share": (0.15, 0.5)},
    Ability.DEVICE_SLOW: {"factor": (3.0, 10.0)},
    Ability.DEVICE_MEMORY: {"share": (0.95, 1.0)},
    Ability.DISK_ERROR: {"share": (0.5, 1.0)},
    Ability.GROW: {"rate": (1e8, 3e8)},
}
"""Range of each parameter, from the weakest to the strongest."""
PHASES = (None, None, Phase.COLLECTING, Phase.TRAINING, Phase.PUBLISHING)
ONLY_THEN: dict[Ability, Phase] = {Ability.DISK_ERROR: Phase.SAVING}
"""Fault types that have an effect in one phase only."""


class CampaignCase(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    what: CaseClass
    injections: tuple[Injection, ...] = ()
    benign: Benign | None = None


def plan(
    count: int,
    *,
    seed: int,
    config: Config,
    abilities: Collection[Ability],
    only: CaseClass | None = None,
) -> list[CampaignCase]:
    """Draw the cases: classes by their shares or one class only, in random order; fault types and roles evenly
    distributed."""
    if not abilities:
        raise UserError(
            "no fault can be injected on this machine (see `kintsugi lab abilities`): nothing to diagnose"
        )
    stream = random_stream(seed, "campaign")
    shares = SHARES if only is None else ((only, 1.0),)
    classes = [what for what, share in shares for _ in range(round(share * count))]
    classes = (classes + [CaseClass.FAULT] * count)[:count]
    stream.shuffle(classes)
    faults = _faults(stream, config=config, abilities=sorted(abilities))
    benign = _repeated(stream, list(Benign))
    cases = []
    for number, what in enumerate(classes, start=1):
        match what:
            case CaseClass.FAULT:
                cases.append(CampaignCase(number=number, what=what, injections=(next(faults),)))
            case CaseClass.TWO:
                cases.append(CampaignCase(number=number, what=what, injections=_two(faults)))
            case CaseClass.BENIGN:
                cases.append(CampaignCase(number=number, what=what, benign=next(benign)))
            case CaseClass.HEALTHY:
                cases.append(CampaignCase(number=number, what=what))
    return cases


def _repeated(stream: random.Random, items: Sequence[T]) -> Iterator[T]:
    """Yield all items in random order, then again: no item occurs more often than the others."""
    while True:
        yield from stream.sample(items, len(items))


def _two(faults: Iterator[Injection]) -> tuple[Injection, Injection]:
    """Draw two faults of different processes and types; the first does not end its process."""
    first = next(each for each in faults if each.ability not in (Ability.KILL, Ability.NUMERIC))
    second = next(
        each for each in faults if each.target != first.target and each.ability is not first.ability
    )
    return (
        msgspec.structs.replace(first, duration_s=PAIR_LEASE_S),
        msgspec.structs.replace(second, duration_s=PAIR_LEASE_S),
    )


def _faults(stream: random.Random, *, config: Config, abilities: Sequence[Ability]) -> Iterator[Injection]:
    processes = sorted(processes_of(config))
    pairs = [(ability, role) for ability in abilities for role in ROLES[ability]]
    for ability, role in _repeated(stream, pairs):
        target = stream.choice([process for process in processes if role_of(process) is role])
        amount = {name: stream.uniform(*bounds) for name, bounds in AMOUNTS.get(ability, {}).items()}
        phase = ONLY_THEN.get(ability, stream.choice(PHASES))
        after_s = 0.0 if ability in ONLY_THEN else round(stream.uniform(0.0, 0.4), 2)
        yield Injection(
            ability=ability,
            target=target,
            amount=amount,
            trigger=Trigger(phase=phase, after_s=after_s, timeout_s=MOMENT_TIMEOUT_S),
            duration_s=WINDOW_S + 2.0,
        )


SAVE_TIMEOUT_S = 300.0
"""Longest wait for the next checkpoint."""
LONGEST_FAULT_S = 90.0
HOST_GROWTH = {"rate": 2e8, "limit": 2e9}
DEVICE_GROWTH = {"rate": 2e9, "limit": 16e9}
EACH: tuple[tuple[Ability, Role, dict[str, float]], ...] = (
    (Ability.KILL, Role.ROLLOUT, {}),
    (Ability.STOP, Role.ROLLOUT, {}),
    (Ability.USER_CODE, Role.ROLLOUT, {}),
    (Ability.MEMORY, Role.ROLLOUT, {}),
    (Ability.KILL, Role.MANAGER, {}),
    (Ability.STOP, Role.MANAGER, {}),
    (Ability.GROW, Role.SERVER, {}),
    (Ability.KILL, Role.SERVER, {}),
    (Ability.STOP, Role.SERVER, {}),
    (Ability.DEVICE_SLOW, Role.MODEL, {"factor": 5.0}),
    (Ability.DEVICE_MEMORY, Role.MODEL, {"share": 1.0}),
    (Ability.DISK_FILL, Role.MODEL, {"share": 1.0}),
    (Ability.STOP, Role.MODEL, {}),
    (Ability.KILL, Role.MODEL, {}),
    (Ability.STOP, Role.AGENT, {}),
    (Ability.KILL, Role.AGENT, {}),
    (Ability.STOP, Role.MASTER, {}),
    (Ability.KILL, Role.MASTER, {}),
)
"""Faults that are tried once each, those with the least effect on the run first."""


def each_once(*, config: Config, abilities: Collection[Ability], has_accelerator: bool) -> list[CampaignCase]:
    """Return a case for each fault of `EACH` that can be injected, at the first process of its role; a full disk is for
    the next save."""
    growth = DEVICE_GROWTH if has_accelerator else HOST_GROWTH
    cases: list[CampaignCase] = []
    for ability, role, amount in EACH:
        if ability not in abilities or (ability is Ability.DISK_FILL and not config.checkpoint.every):
            continue
        at_save = Trigger(phase=Phase.SAVING, timeout_s=SAVE_TIMEOUT_S)
        injection = Injection(
            ability=ability,
            target=process_id(role, 0),
            amount=growth if ability is Ability.GROW else amount,
            trigger=at_save if ability is Ability.DISK_FILL else Trigger(),
            duration_s=LONGEST_FAULT_S,
        )
        cases.append(CampaignCase(number=1 + len(cases), what=CaseClass.FAULT, injections=(injection,)))
    return cases
