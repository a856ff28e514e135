"""Choice of the faults of a soak: drawn from a seed so that every role is hit in every phase. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import product

import msgspec

from kintsugi.control.phases.table import Phase
from kintsugi.lab.injector.injection import INJECTABLE_PHASES, Ability, Injection, Trigger

SIGNAL_ABILITIES = (Ability.KILL, Ability.STOP)
"""Fault types of a soak: they need no preparation, and the run itself has to replace the process."""


class FaultRole(StrEnum):
    """Target of a fault: one process of a role, or all processes of one host in the same instant."""

    ROLLOUT = "rollout"
    SERVER = "server"
    MANAGER = "manager"
    MODEL = "model"
    AGENT = "agent"
    MASTER = "master"
    HOST = "host"
    NODE = "node"
    """A machine of the run: the supervisor of the host too. Only where the run is on other machines."""


WHOLE_HOSTS = frozenset({FaultRole.HOST, FaultRole.NODE})
"""Targets that are many processes."""
HERE_ROLES = tuple(role for role in FaultRole if role is not FaultRole.NODE)
"""Targets of a run on this machine."""


class PlannedFault(msgspec.Struct, frozen=True):
    """Fault before its process is chosen: `PlannedFault(FaultRole.SERVER, Ability.KILL, Phase.PUBLISHING)`."""

    role: FaultRole
    ability: Ability
    phase: Phase

    def injection(self, process: str) -> Injection:
        """Return the injection of this fault into `process`; for a host, `process` is its agent."""
        return Injection(ability=self.ability, target=process, trigger=Trigger(phase=self.phase.value))


class FaultPlan:
    """Draws faults so that coverage stays even, and counts the faults that were injected.

    The next pair of (role, phase) is one of those with the fewest injected faults. A miss counts as a third of a fault,
    so a pair that can not be reached delays the others without stopping them.
    """

    def __init__(
        self,
        seed: random.Random,
        *,
        roles: Collection[FaultRole] = HERE_ROLES,
        phases: Collection[Phase] = INJECTABLE_PHASES,
        abilities: Sequence[Ability] = SIGNAL_ABILITIES,
    ) -> None:
        self._random = seed
        self._pairs = list(product(roles, phases))
        self._abilities = abilities
        self._injected: Counter[tuple[str, str]] = Counter()
        self._missed: Counter[tuple[str, str]] = Counter()

    def draw(self) -> PlannedFault:
        def weight(pair: tuple[FaultRole, Phase]) -> float:
            return self._injected[pair] + self._missed[pair] / 3

        least = min(map(weight, self._pairs))
        role, phase = self._random.choice([pair for pair in self._pairs if weight(pair) <= least])
        # A machine that is lost does not stop; it is gone.
        ability = Ability.KILL if role is FaultRole.NODE else self._random.choice(self._abilities)
        return PlannedFault(role, ability, phase)

    def record_injected(self, role: str, phase: str) -> None:
        """Count a fault in the phase that it was injected in, which may not be the planned one."""
        self._injected[role, phase] += 1

    def record_missed(self, planned: PlannedFault) -> None:
        self._missed[planned.role, planned.phase] += 1

    @property
    def coverage(self) -> dict[str, dict[str, int]]:
        """Role → phase → number of injected faults, over the planned pairs."""
        table: dict[str, dict[str, int]] = {}
        for role, phase in self._pairs:
            table.setdefault(role.value, {})[phase.value] = self._injected[role, phase]
        return table

    def uncovered(self, *, at_least: int) -> list[tuple[str, str]]:
        """Return the pairs with fewer than `at_least` injected faults."""
        return [
            (role.value, phase.value) for role, phase in self._pairs if self._injected[role, phase] < at_least
        ]

    def choose(self, processes: Sequence[str]) -> str:
        """Draw one of several processes of a role."""
        return self._random.choice(processes)

    def fraction(self) -> float:
        """Draw the position in a phase at which the fault begins: 0 is the start of the phase."""
        return self._random.random()
