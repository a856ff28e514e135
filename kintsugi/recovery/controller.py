"""Brings the training ranks of a run to one agreed step, whatever they were doing. Pure; the master carries it out.

The same way is gone at the start of a run, after a fault, when a new master finds ranks at work, and when a group that
went on smaller grows again: lock, stop, clean, wait until everybody is there, form the next generation of the group,
give the state to whoever lacks it, return to the agreed step, compare, go on. Every operation can be repeated, so a
fault in the middle simply begins it again; `sequence` lets a rank refuse what is left over from an earlier attempt.

No rank is special: the store of a generation is served by its first rank, and the next generation may have another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from kintsugi.messages import Body, StartStage
from kintsugi.operations import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.recovery.processor import Flow
from kintsugi.recovery.states import STEPS, RecoveryEvent, RecoveryState, following

SEQUENCES_PER_EPOCH = 1 << 24
"""Operations are numbered through all epochs, so that a new master's are always younger than its predecessor's."""

_S, _E = RecoveryState, RecoveryEvent
_ENDS = dict(STEPS)


class Ranks(msgspec.Struct, frozen=True):
    """The ranks as the master knows them now, and where they have to get to."""

    living: tuple[str, ...]
    """In rank order."""
    missing: tuple[str, ...]
    """Planned, but not there."""
    stores: Mapping[str, str]
    """Process → address of the store it can serve for a generation."""
    sources: Mapping[str, tuple[str, ...]]
    """Process → where it may find the state of `step`, best first; living replicas are added here."""
    step: int
    """The agreed step: the last one in the journal."""
    digest: str
    """Of the state at that step, where `stage` is the one it was committed in; empty when not known."""
    stage: str
    """That the step was trained in."""
    next_stage: str
    """That the next step belongs to."""
    flow: str = Flow.ROLLBACK
    """A framework that can not roll back has every rank repaired from its snapshot instead."""


class Orders(msgspec.Struct, frozen=True):
    """What to do next: ask these processes, or, when recovery has ended, nothing more."""

    bodies: dict[str, Body]
    reason: str
    problem: str = ""
    """The ranks do not agree: nothing is asked, the fault centre has to choose again."""
    culprits: tuple[str, ...] = ()
    """Ranks whose state is not the committed one."""


class Controller:
    """One recovery at a time. `begin` (again) at every fault, `answered` for every reply, `check` when ranks come."""

    def __init__(self) -> None:
        self.state = _S.NORMAL
        self.generation = 0
        self.ranks: tuple[str, ...] = ()
        """Of the current group, in rank order."""
        self.smaller = False
        """Go on with the ranks that live."""
        self.since: dict[RecoveryState, float] = {}
        """When each state of this recovery was entered (the latest time)."""
        self.repaired_from: dict[str, str] = {}
        self._sequence = 0
        self._ready: dict[str, RankReady] = {}
        self._open: set[str] = set()
        self._repaired: set[str] = set()
        self._without: set[str] = set()
        """Ranks whose repair failed in this round."""
        self._last_repaired: set[str] = set()
        """Whom this round of repairs asks."""

    @property
    def active(self) -> bool:
        return self.state not in (_S.NORMAL, _S.GIVEN_UP)

    @property
    def waits_for(self) -> frozenset[str]:
        """Ranks that have not answered the current operation."""
        return frozenset(self._open)

    @property
    def begun(self) -> tuple[str, ...]:
        """Ranks that have begun a stage, so that they are not at the beginning of the run any more."""
        return tuple(name for name, answer in self._ready.items() if answer.stage)

    def begin(self, ranks: Ranks, now: float, *, epoch: int) -> Orders:
        """A fault, a start, or a new master: lock whoever lives. What was under way is forgotten."""
        self._sequence = max(self._sequence, epoch * SEQUENCES_PER_EPOCH)
        self._ready, self.repaired_from, self.smaller = {}, {}, False
        self._repaired, self._without = set(), set()
        self.since = {}
        self._enter(_E.FAULT, now)
        return self._order(ranks, now)

    def answered(self, process: str, body: Body, ranks: Ranks, now: float) -> Orders | None:
        """Take a rank's answer; orders when it was the last of its round, None while others are awaited."""
        if process not in self._open:
            return None
        self._open.remove(process)
        if isinstance(body, RankReady):
            self._ready[process] = body
            if body.source:
                self.repaired_from[process] = body.source
        return None if self._open else self._finish_round(ranks, now)

    def check(self, ranks: Ranks, now: float) -> Orders | None:
        """A rank joined, or the group is to go on smaller: go on if that was what it waited for."""
        if self.state is not _S.WAITING or not self._is_staffed(ranks):
            return None
        return self._finish_round(ranks, now)

    def fail(self, now: float) -> None:
        """The recovery can not go on as it is; what follows is the fault centre's choice."""
        self._open = set()
        self._enter(_E.FAILED, now)

    def give_up(self, now: float) -> None:
        """No strategy is left but to dump."""
        self._open = set()
        self._enter(_E.HOPELESS, now)

    def dumped(self, now: float) -> None:
        self._enter(_E.DUMPED, now)

    # One round after the other.

    def repair_failed(self, process: str, ranks: Ranks, now: float) -> Orders | None:
        """A rank found the state nowhere; another one of the same round may, and can give it to this one."""
        self._open.discard(process)
        self._without.add(process)
        return None if self._open else self._finish_round(ranks, now)

    def _finish_round(self, ranks: Ranks, now: float) -> Orders:
        if self.state is not _S.REPAIRING:  # Which may take several rounds.
            self._enter(_ENDS[self.state], now)
            return self._order(ranks, now)
        without, self._without = self._without, set()
        found = any(self.holds(name, ranks.step) for name in self._last_repaired - without)
        if without and not found:
            problem = f"no source has the state of step {ranks.step} for {', '.join(sorted(without))}"
            return Orders({}, problem, problem)
        self._repaired -= without
        return self._order(ranks, now)

    def _order(self, ranks: Ranks, now: float) -> Orders:
        """What the present state asks of whom; a state that asks nothing of anybody is passed at once."""
        while self.active:
            if self.state is _S.WAITING:
                if not self._is_staffed(ranks):
                    return Orders({}, f"waiting for {', '.join(ranks.missing)}")
            else:
                if self.state is _S.NOTIFYING and (problem := self._disagreement(ranks)) is not None:
                    return problem
                self._sequence += 1
                bodies = self._bodies[self.state](self, ranks)
                if bodies:
                    self._open = set(bodies)
                    return Orders(bodies, f"{self.state}: {', '.join(bodies)}")
            self._enter(_ENDS[self.state], now)
        return Orders({}, f"normal: {len(self.ranks)} ranks at step {ranks.step}")

    def _disagreement(self, ranks: Ranks) -> Orders | None:
        """Verification before training goes on: every rank at the agreed step, all with the hash of its commit."""
        ready = {name: self._ready[name] for name in self.ranks}
        wrong = [name for name, answer in ready.items() if answer.step != ranks.step or answer.half_updated]
        expected = ranks.digest if {answer.stage for answer in ready.values()} == {ranks.stage} else ""
        digests = [answer.state_digest for answer in ready.values()]
        expected = expected or max(digests, key=digests.count)
        wrong += [name for name, answer in ready.items() if answer.state_digest != expected]
        if not wrong:
            return None
        held = ", ".join(
            f"{name} {answer.state_digest} of step {answer.step}" for name, answer in ready.items()
        )
        problem = f"expected every rank at state {expected} of step {ranks.step}, got {held}"
        return Orders({}, problem, problem, tuple(dict.fromkeys(wrong)))

    def _is_staffed(self, ranks: Ranks) -> bool:
        return bool(ranks.living) and (self.smaller or not ranks.missing)

    def _pre_lock(self, ranks: Ranks) -> dict[str, Body]:
        return dict.fromkeys(ranks.living, PreLock(ranks.step, self._sequence))

    def _device_stop(self, ranks: Ranks) -> dict[str, Body]:
        self.generation = max([self.generation, *(answer.generation for answer in self._ready.values())])
        return dict.fromkeys(self._locked(ranks), DeviceStop(self.generation, self._sequence, ranks.missing))

    def _device_clean(self, ranks: Ranks) -> dict[str, Body]:
        return dict.fromkeys(self._locked(ranks), DeviceClean(self._sequence))

    def _rebuild(self, ranks: Ranks) -> dict[str, Body]:
        self.ranks = ranks.living
        self.generation += 1
        store = ranks.stores.get(self.ranks[0], "")
        return dict.fromkeys(
            self.ranks, RebuildGroup(self.generation, self.ranks, store, sequence=self._sequence)
        )

    def _repair(self, ranks: Ranks) -> dict[str, Body]:
        """Whoever does not stand at the agreed step; where there is no rollback, everybody, and those first who hold
        it and can then give it to the others.

        At step 0 a fresh rank already has the state: it is what the configuration says.
        """
        holders = tuple(name for name in self.ranks if self.holds(name, ranks.step))
        lacking = [name for name in self.ranks if name not in self._repaired]
        if ranks.flow != Flow.RESTORE:
            lacking = [name for name in lacking if name not in holders]
        if ranks.step == 0:
            lacking = [name for name in lacking if name in self._ready and self._ready[name].stage != ""]
        chosen = [name for name in lacking if name in holders] or lacking
        self._repaired.update(chosen)
        self._last_repaired = set(chosen)
        bodies: dict[str, Body] = {}
        for name in chosen:
            own = [source for source in ranks.sources.get(name, ()) if source.startswith("snapshot:")]
            rest = [source for source in ranks.sources.get(name, ()) if source not in own]
            replicas = [other for other in holders if other != name]
            sources = (*own, *replicas, *rest)
            bodies[name] = Repair(ranks.step, sources, self._sequence, self._expected(ranks))
        return bodies

    def _rollback(self, ranks: Ranks) -> dict[str, Body]:
        if ranks.flow == Flow.RESTORE:
            return {}
        return dict.fromkeys(self.ranks, Rollback(ranks.step, self._sequence))

    def _start_stage(self, ranks: Ranks) -> dict[str, Body]:
        """A rank may have begun the next stage before the fault, another not: then all begin it."""
        stages = {name: self._ready[name].stage for name in self.ranks if name in self._ready}
        begun = ranks.next_stage in stages.values()
        stage = ranks.next_stage if begun else ranks.stage
        behind = [name for name in self.ranks if stages.get(name) != stage]
        return dict.fromkeys(behind, StartStage(stage, ranks.step))

    def _notify(self, ranks: Ranks) -> dict[str, Body]:
        return dict.fromkeys(self.ranks, NotifyNormal(ranks.step, self._sequence))

    _bodies: ClassVar[dict[RecoveryState, Callable[[Controller, Ranks], dict[str, Body]]]] = {
        _S.PRE_LOCKING: _pre_lock,
        _S.DEVICE_STOPPING: _device_stop,
        _S.DEVICE_CLEANING: _device_clean,
        _S.REBUILDING: _rebuild,
        _S.REPAIRING: _repair,
        _S.ROLLING_BACK: _rollback,
        _S.STAGING: _start_stage,
        _S.NOTIFYING: _notify,
    }

    def _locked(self, ranks: Ranks) -> list[str]:
        return [name for name in ranks.living if name in self._ready]

    def holds(self, name: str, step: int) -> bool:
        """Whether a rank can return to a step by itself: it committed it, or prepared it and missed the commit."""
        ready = self._ready.get(name)
        return ready is not None and ready.stage != "" and step in (ready.step, ready.prepared_step)

    def _expected(self, ranks: Ranks) -> str:
        """The hash that a repaired state must have; at the end of a stage the only copy may have begun the next."""
        return "" if ranks.next_stage != ranks.stage else ranks.digest

    def _enter(self, event: RecoveryEvent, now: float) -> None:
        self.state = following(self.state, event)
        self.since[self.state] = now
