"""What is broken, in whom, and when: drawn from a seed so that every role is hit in every phase. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import product

import msgspec


class Target(StrEnum):
    """Whom a fault hits: one process of a role, or all processes of one host at once."""

    ROLLOUT = "rollout"
    SERVER = "server"
    MANAGER = "manager"
    MODEL = "model"
    AGENT = "agent"
    MASTER = "master"
    HOST = "host"


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL: it is gone, and the kernel says so."""
    STOP = "stop"
    """SIGSTOP: it is there and does nothing; somebody has to notice."""


class Moment(StrEnum):
    """The phases of the master in which a fault may strike; the words are those of its transitions."""

    COLLECTING = "collecting"
    TRAINING = "training"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    RECOVERING = "recovering"
    """While another fault is being mended."""


class Aim(msgspec.Struct, frozen=True):
    """A fault before it has struck: `Aim(Target.SERVER, Kind.KILL, Moment.PUBLISHING)`."""

    target: Target
    kind: Kind
    moment: Moment


class Deck:
    """Draws aims so that coverage stays even, and keeps count of what was really hit.

    The next pair of (target, moment) is one of those with the fewest hits. A missed aim counts as a third of a hit, so
    a pair that can not be reached delays the others without stopping them.
    """

    def __init__(
        self,
        seed: random.Random,
        *,
        targets: Collection[Target] = tuple(Target),
        moments: Collection[Moment] = tuple(Moment),
        kinds: Sequence[Kind] = tuple(Kind),
    ) -> None:
        self._random = seed
        self._pairs = list(product(targets, moments))
        self._kinds = kinds
        self._hits: Counter[tuple[str, str]] = Counter()
        self._misses: Counter[tuple[str, str]] = Counter()

    def draw(self) -> Aim:
        def weight(pair: tuple[Target, Moment]) -> float:
            return self._hits[pair] + self._misses[pair] / 3

        least = min(map(weight, self._pairs))
        target, moment = self._random.choice([pair for pair in self._pairs if weight(pair) <= least])
        return Aim(target, self._random.choice(self._kinds), moment)

    def hit(self, target: str, phase: str) -> None:
        """A fault struck in this phase, whether or not it was meant to."""
        self._hits[target, phase] += 1

    def missed(self, aim: Aim) -> None:
        self._misses[aim.target, aim.moment] += 1

    @property
    def coverage(self) -> dict[str, dict[str, int]]:
        """Target → phase → hits, over the pairs that were to be covered."""
        table: dict[str, dict[str, int]] = {}
        for target, moment in self._pairs:
            table.setdefault(target.value, {})[moment.value] = self._hits[target, moment]
        return table

    def uncovered(self, *, at_least: int) -> list[tuple[str, str]]:
        """Pairs with fewer hits."""
        return [
            (target.value, moment.value)
            for target, moment in self._pairs
            if self._hits[target, moment] < at_least
        ]

    def choose(self, names: Sequence[str]) -> str:
        """One of several processes of a role."""
        return self._random.choice(names)

    def fraction(self) -> float:
        """Where in a phase to strike: 0 is its beginning."""
        return self._random.random()
