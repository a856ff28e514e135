"""Protocol that brings all ranks to one agreed step from any state. Pure; the master carries it out.

The sequence is the same at the start of a run, after a fault, after a takeover, and when a smaller group grows again:
lock, stop, clean, wait for replacements, form the next generation of the group, repair ranks that lack the state,
return to the agreed step, compare, continue. Every operation can be repeated, so a fault in the middle restarts the
sequence; `sequence` lets a rank refuse messages of an earlier attempt.

No rank is special: the first rank of a generation serves its store, and the next generation may have another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import msgspec

from kintsugi.errors import StatesDiverged
from kintsugi.model.seats import Mesh, digest_of_box, joined, seat_of
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    BoxCopies,
    DeviceClean,
    DeviceStop,
    MeshShape,
    NotifyNormal,
    PreLock,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.protocol.training import StartStage
from kintsugi.recovery.rank import Flow
from kintsugi.recovery.states import STEPS, RecoveryEvent, RecoveryState, following

SEQUENCES_PER_TERM = 1 << 24
"""Operations are numbered through all terms, so that those of a new master always follow its predecessor's."""

_S, _E = RecoveryState, RecoveryEvent
_ENDS = dict(STEPS)


class RankSet(msgspec.Struct, frozen=True):
    """The ranks as the master knows them now, and their target."""

    living: tuple[str, ...]
    """Live ranks, in rank order."""
    missing: tuple[str, ...]
    """Planned ranks that are not live."""
    stores: Mapping[str, str]
    """Process → address of the store that it can serve for a generation."""
    sources: Mapping[str, tuple[str, ...]]
    """Process → places where it may find the state of `step`, best first; live replicas are added here."""
    step: int
    """Agreed step: the last one in the journal."""
    digest: str
    """Digest of the state at that step, in the stage in which it was committed; empty when not known."""
    stage: str
    """Stage that the step was trained in."""
    next_stage: str
    """Stage that the next step belongs to."""
    flow: str = Flow.ROLLBACK
    """Flow of the framework. One that cannot roll back has every rank repaired from its snapshot instead."""
    mesh: Mesh = Mesh()
    """Parts into which the state is cut; each rank of the group that is formed now holds one of them."""
    boxes: Mapping[str, tuple[BoxCopies, ...]] = MappingProxyType({})
    """Process → places of the boxes of `step`, where it was cut otherwise."""

    @property
    def seated(self) -> tuple[str, ...]:
        """Live ranks that have a seat, in the order of the seats."""
        return self.mesh.seated(self.living)

    def box_of(self, name: str) -> str:
        return seat_of(name, self.mesh).box

    def digest_of(self, name: str) -> str:
        """Digest that a rank's part of the state has at that step; empty when not known."""
        return digest_of_box(self.digest, seat_of(name, self.mesh))


class RankOrders(msgspec.Struct, frozen=True):
    """Next requests to the ranks; none when the recovery has ended."""

    bodies: dict[str, Body]
    reason: str
    problem: str = ""
    """Disagreement of the ranks: nothing is requested, and a strategy has to be chosen again."""
    culprits: tuple[str, ...] = ()
    """Ranks with another state than the committed one."""
    divergence: StatesDiverged | None = None
    """States of the ranks, if they differ."""


class RankProtocol:
    """One recovery at a time. `begin` (again) at every fault, `answered` for every reply, `check` when a rank joins."""

    def __init__(self) -> None:
        self.state = _S.NORMAL
        self.generation = 0
        self.ranks: tuple[str, ...] = ()
        """Ranks of the current group, in rank order."""
        self.mesh = Mesh()
        """Parts into which the current group cuts the state."""
        self.smaller = False
        """Continue with the live ranks only."""
        self.since: dict[RecoveryState, float] = {}
        """Latest time at which each state of this recovery was entered."""
        self.repaired_from: dict[str, str] = {}
        self._sequence = 0
        self._ready: dict[str, RankReady] = {}
        self._open: set[str] = set()
        self._repaired: set[str] = set()
        self._without: set[str] = set()
        """Ranks that could not be repaired in this round."""
        self._last_repaired: set[str] = set()
        """Ranks that this round of repairs asks."""

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

    def begin(self, ranks: RankSet, now: float, *, term: int) -> RankOrders:
        """Lock all live ranks: after a fault, at the start, after a takeover. Earlier progress is forgotten."""
        self._sequence = max(self._sequence, term * SEQUENCES_PER_TERM)
        self._ready, self.repaired_from, self.smaller = {}, {}, False
        self._repaired, self._without = set(), set()
        self.since = {}
        self._enter(_E.FAULT, now)
        return self._order(ranks, now)

    def adopt(self, ranks: tuple[str, ...], *, generation: int, mesh: Mesh) -> None:
        """Take over the group of the last master, whose ranks go on undisturbed."""
        assert self.state is _S.NORMAL, "a new master has begun no recovery"
        self.ranks, self.generation, self.mesh = ranks, generation, mesh

    def answered(self, process: str, body: Body, ranks: RankSet, now: float) -> RankOrders | None:
        """Take the answer of a rank; return orders if it was the last of its round, else None."""
        if process not in self._open:
            return None
        self._open.remove(process)
        if isinstance(body, RankReady):
            self._ready[process] = body
            if body.source:
                self.repaired_from[process] = body.source
        return None if self._open else self._finish_round(ranks, now)

    def check(self, ranks: RankSet, now: float) -> RankOrders | None:
        """Continue if a rank that joined, or the decision to continue smaller, ends the wait for replacements."""
        if self.state is not _S.WAITING or not self._is_complete(ranks):
            return None
        return self._finish_round(ranks, now)

    def fail(self, now: float) -> None:
        """End an attempt that cannot continue; the choice of a strategy follows."""
        self._open = set()
        self._enter(_E.FAILED, now)

    def give_up(self, now: float) -> None:
        """Begin the dump: no other strategy is left."""
        self._open = set()
        self._enter(_E.HOPELESS, now)

    def dumped(self, now: float) -> None:
        self._enter(_E.DUMPED, now)

    # Rounds.

    def repair_failed(self, process: str, ranks: RankSet, now: float) -> RankOrders | None:
        """Take a failed repair; another rank of the same round may find the state and pass it on."""
        self._open.discard(process)
        self._without.add(process)
        return None if self._open else self._finish_round(ranks, now)

    def _finish_round(self, ranks: RankSet, now: float) -> RankOrders:
        if self.state is not _S.REPAIRING:  # A repair may take several rounds.
            self._enter(_ENDS[self.state], now)
            return self._order(ranks, now)
        without, self._without = self._without, set()
        found = {ranks.box_of(name) for name in self._last_repaired - without if self.holds(name, ranks.step)}
        hopeless = sorted(name for name in without if ranks.box_of(name) not in found)
        if hopeless:
            problem = f"no source has the state of step {ranks.step} for {', '.join(hopeless)}"
            return RankOrders({}, problem, problem)
        self._repaired -= without
        return self._order(ranks, now)

    def _order(self, ranks: RankSet, now: float) -> RankOrders:
        """Return the requests of the current state; a state without requests is passed immediately."""
        while self.active:
            if self.state is _S.WAITING:
                if not self._is_complete(ranks):
                    return RankOrders({}, f"waiting for {', '.join(ranks.missing)}")
            else:
                if self.state is _S.NOTIFYING and (problem := self._disagreement(ranks)) is not None:
                    return problem
                self._sequence += 1
                bodies = self._bodies[self.state](self, ranks)
                if bodies:
                    self._open = set(bodies)
                    return RankOrders(bodies, f"{self.state}: {', '.join(bodies)}")
            self._enter(_ENDS[self.state], now)
        return RankOrders({}, f"normal: {len(self.ranks)} ranks at step {ranks.step}")

    def _disagreement(self, ranks: RankSet) -> RankOrders | None:
        """Verify before training continues that every rank is at the agreed step with the digest of its commit."""
        ready = {name: self._ready[name] for name in self.ranks}
        wrong = [name for name, answer in ready.items() if answer.step != ranks.step or answer.half_updated]
        is_known = {answer.stage for answer in ready.values()} == {ranks.stage}
        states = {name: answer.state_digest for name, answer in ready.items()}
        likely = joined(states, ranks.mesh)
        right = {
            name: (ranks.digest_of(name) if is_known else "")
            or digest_of_box(likely, seat_of(name, ranks.mesh))
            for name in ready
        }
        wrong += [name for name, state in states.items() if state != right[name]]
        if not wrong:
            return None
        expected = joined(right, ranks.mesh)
        held = ", ".join(
            f"{name} {answer.state_digest} of step {answer.step}" for name, answer in ready.items()
        )
        problem = f"expected every rank at state {expected} of step {ranks.step}, got {held}"
        differ = len(set(states.values())) > ranks.mesh.boxes
        divergence = StatesDiverged("recovery", states, expected) if differ else None
        return RankOrders({}, problem, problem, tuple(dict.fromkeys(wrong)), divergence)

    def _is_complete(self, ranks: RankSet) -> bool:
        return bool(ranks.living) and (self.smaller or not ranks.missing)

    def _pre_lock(self, ranks: RankSet) -> dict[str, Body]:
        return dict.fromkeys(ranks.living, PreLock(ranks.step, self._sequence))

    def _device_stop(self, ranks: RankSet) -> dict[str, Body]:
        self.generation = max([self.generation, *(answer.generation for answer in self._ready.values())])
        return dict.fromkeys(self._locked(ranks), DeviceStop(self.generation, self._sequence, ranks.missing))

    def _device_clean(self, ranks: RankSet) -> dict[str, Body]:
        return dict.fromkeys(self._locked(ranks), DeviceClean(self._sequence))

    def _rebuild(self, ranks: RankSet) -> dict[str, Body]:
        self.ranks, self.mesh = ranks.seated, ranks.mesh
        self.generation += 1
        store = ranks.stores.get(self.ranks[0], "")
        mesh = self.mesh
        shape = MeshShape(mesh.shards, mesh.stages, mesh.tensors) if mesh.ranks else None
        body = RebuildGroup(
            self.generation, self.ranks, store, sequence=self._sequence, mesh=shape, step=ranks.step
        )
        return dict.fromkeys(self.ranks, body)

    def _repair(self, ranks: RankSet) -> dict[str, Body]:
        """Repair the ranks that are not at the agreed step; without rollback all ranks, and first those that hold the
        state and can then pass it on.

        At step 0 a fresh rank already has the state, which the configuration defines.
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
            box = ranks.box_of(name)
            replicas = [other for other in holders if other != name and ranks.box_of(other) == box]
            boxes = ranks.boxes.get(name, ())
            # The digest of a box that was not committed as such is not known: snapshots of it may be of other weights.
            sources = (*replicas, *rest) if boxes else (*own, *replicas, *rest)
            begun = ranks.next_stage if ranks.next_stage != ranks.stage else ""
            digest = self._expected(ranks, name)
            bodies[name] = Repair(ranks.step, sources, self._sequence, digest, boxes, begun if boxes else "")
        return bodies

    def _rollback(self, ranks: RankSet) -> dict[str, Body]:
        if ranks.flow == Flow.RESTORE:
            return {}
        return dict.fromkeys(self.ranks, Rollback(ranks.step, self._sequence))

    def _start_stage(self, ranks: RankSet) -> dict[str, Body]:
        """Start the next stage on all ranks if any of them had begun it before the fault."""
        stages = {name: self._ready[name].stage for name in self.ranks if name in self._ready}
        begun = ranks.next_stage in stages.values()
        stage = ranks.next_stage if begun else ranks.stage
        behind = [name for name in self.ranks if stages.get(name) != stage]
        return dict.fromkeys(behind, StartStage(stage, ranks.step))

    def _notify(self, ranks: RankSet) -> dict[str, Body]:
        return dict.fromkeys(self.ranks, NotifyNormal(ranks.step, self._sequence))

    _bodies: ClassVar[dict[RecoveryState, Callable[[RankProtocol, RankSet], dict[str, Body]]]] = {
        _S.PRE_LOCKING: _pre_lock,
        _S.DEVICE_STOPPING: _device_stop,
        _S.DEVICE_CLEANING: _device_clean,
        _S.REBUILDING: _rebuild,
        _S.REPAIRING: _repair,
        _S.ROLLING_BACK: _rollback,
        _S.STAGING: _start_stage,
        _S.NOTIFYING: _notify,
    }

    def _locked(self, ranks: RankSet) -> list[str]:
        return [name for name in ranks.living if name in self._ready]

    def holds(self, name: str, step: int) -> bool:
        """Return whether a rank can return to a step alone: it committed it, or prepared it and missed the commit."""
        ready = self._ready.get(name)
        return ready is not None and ready.stage != "" and step in (ready.step, ready.prepared_step)

    def _expected(self, ranks: RankSet, name: str) -> str:
        """Return the digest that a repaired state must have; at the end of a stage the only copy may have begun the
        next."""
        return "" if ranks.next_stage != ranks.stage else ranks.digest_of(name)

    def _enter(self, event: RecoveryEvent, now: float) -> None:
        self.state = following(self.state, event)
        self.since[self.state] = now
