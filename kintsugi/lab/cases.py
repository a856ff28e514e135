"""What a blind campaign does, drawn from a seed: kind × target × moment × intensity, also nothing at all. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from kintsugi.config import Config
from kintsugi.errors import UserError
from kintsugi.lab.experiments import Phase, processes_of
from kintsugi.lab.injection import Ability, Injection, Trigger
from kintsugi.runtime import random_stream
from kintsugi.types import Role, role_of

T = TypeVar("T")

WINDOW_S = 10.0
"""A case without a verdict is over then."""
LEAST_FAULT_S = 6.0
"""A fault lasts at least so long, whenever it is named: its effect has to show, and those who read logs have to have
something to read."""
MOMENT_TIMEOUT_S = 12.0


class CaseClass(StrEnum):
    FAULT = "fault"
    TWO = "two"
    """Two faults at once, of two processes."""
    BENIGN = "benign"
    """Slower than usual, and nothing is wrong."""
    HEALTHY = "healthy"


class Benign(StrEnum):
    """What makes a healthy run slower."""

    BUSY_HOST = "busy_host"
    """Other programs want the processors: everybody suffers alike."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    SCALED = "scaled"
    """Somebody took a generation server away, and gave it back."""


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
}
"""Whom an ability is aimed at."""
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
}
"""From the weakest to the strongest."""
MOMENTS = (None, None, Phase.COLLECTING, Phase.TRAINING, Phase.PUBLISHING)
ONLY_THEN: dict[Ability, Phase] = {Ability.DISK_ERROR: Phase.SAVING}
"""Where nobody does at other times what the fault is about."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    what: CaseClass
    injections: tuple[Injection, ...] = ()
    benign: Benign | None = None


def plan(count: int, *, seed: int, config: Config, abilities: Collection[Ability]) -> list[Case]:
    """As many cases of each class as its share says, in an order that the seed decides; kinds and roles evenly."""
    if not abilities:
        raise UserError(
            "no fault can be injected on this machine (see `kintsugi lab abilities`): nothing to diagnose"
        )
    stream = random_stream(seed, "campaign")
    classes = [what for what, share in SHARES for _ in range(round(share * count))]
    classes = (classes + [CaseClass.FAULT] * count)[:count]
    stream.shuffle(classes)
    aims = _aims(stream, config=config, abilities=sorted(abilities))
    benign = _endlessly(stream, list(Benign))
    cases = []
    for number, what in enumerate(classes, start=1):
        match what:
            case CaseClass.FAULT:
                cases.append(Case(number=number, what=what, injections=(next(aims),)))
            case CaseClass.TWO:
                cases.append(Case(number=number, what=what, injections=_two(aims)))
            case CaseClass.BENIGN:
                cases.append(Case(number=number, what=what, benign=next(benign)))
            case CaseClass.HEALTHY:
                cases.append(Case(number=number, what=what))
    return cases


def _endlessly(stream: random.Random, deck: Sequence[T]) -> Iterator[T]:
    """Each once in random order, then again: nothing comes up more often than the rest."""
    while True:
        yield from stream.sample(deck, len(deck))


def _two(aims: Iterator[Injection]) -> tuple[Injection, Injection]:
    """Of two processes, or nobody could tell them apart; a dead one has no other fault."""
    first = next(each for each in aims if each.ability not in (Ability.KILL, Ability.NUMERIC))
    second = next(each for each in aims if each.target != first.target and each.ability is not first.ability)
    return first, second


def _aims(stream: random.Random, *, config: Config, abilities: Sequence[Ability]) -> Iterator[Injection]:
    processes = sorted(processes_of(config))
    pairs = [(ability, role) for ability in abilities for role in ROLES[ability]]
    for ability, role in _endlessly(stream, pairs):
        target = stream.choice([process for process in processes if role_of(process) is role])
        amount = {name: stream.uniform(*bounds) for name, bounds in AMOUNTS.get(ability, {}).items()}
        moment = ONLY_THEN.get(ability, stream.choice(MOMENTS))
        after_s = 0.0 if ability in ONLY_THEN else round(stream.uniform(0.0, 0.4), 2)
        yield Injection(
            ability=ability,
            target=target,
            amount=amount,
            trigger=Trigger(phase=moment, after_s=after_s, timeout_s=MOMENT_TIMEOUT_S),
            duration_s=WINDOW_S + 2.0,
        )
