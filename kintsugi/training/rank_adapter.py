"""Recovery operations of a training rank, independent of the training framework: the base of every
`recovery.rank.Adapter`.

The process and its memory survive a recovery: the rank stops its running work, clears its leftovers, joins the next
group, replaces its state if that is damaged or outdated, and, if its flow has this step, returns to the agreed step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kintsugi.config.stages import Stage
from kintsugi.errors import GroupBroken, IntegrityError, RefusedError, WorldError, no_source
from kintsugi.model.arrays import Array
from kintsugi.protocol.recovery import BoxCopies, MeshShape, RankReady, RebuildGroup
from kintsugi.recovery.rank import SNAPSHOT_PREFIX, Flow
from kintsugi.training.group import Groups, Interruption, check_sum, known_numbers
from kintsugi.training.held_boxes import BoxReader
from kintsugi.training.rank_state import RankState
from kintsugi.training.snapshots import CopyCounters, StoredState

LoadState = Callable[[int, str], tuple[StoredState, CopyCounters]]
"""Open the committed state of a step at a source: a replica, the agent with the peer copy, or a checkpoint."""

LEAST_PROBE_S = 1.0


class Seating(Protocol):
    """Means of a process to give its rank another box of the state."""

    def take_seat(self, shape: MeshShape | None, ranks: tuple[str, ...], *, step: int) -> RankState:
        """Return the state of the rank for its seat among these ranks: the one that it has, or a fresh one. The
        snapshots of the one before, which has committed `step`, stay for the others."""
        ...

    @property
    def boxes(self) -> BoxReader: ...


class RankAdapter(ABC):
    """Membership of one rank in the group, and its return to an agreed state."""

    flow: Flow

    def __init__(
        self,
        state: RankState,
        *,
        process: str,
        keys: tuple[bytes, bytes],
        stages: Mapping[str, Stage],
        load_state: LoadState,
        forget: Callable[[], None],
        interruption: Interruption,
        seating: Seating | None = None,
    ) -> None:
        """`keys` is the key pair of this process. `seating`: None where the state is never cut otherwise.

        `forget` drops what the rank keeps for the step it is in (samples, log-probabilities, results).
        """
        self._state = state
        self._process = process
        self._keys = keys
        self._stages = stages
        self._load_state = load_state
        self._forget = forget
        self._interruption = interruption
        self._seating = seating
        self._groups: Groups | None = None
        self._latest_group_id = 0
        """Highest group number that this rank has received, also where joining that group failed."""
        self._gathered_in = 0, False
        """Latest group in which the weights of a box were completed, and whether again before its first call."""

    @property
    def rank(self) -> int:
        """Rank in the group; 0 while in none."""
        return self._groups.world.rank if self._groups is not None else 0

    @property
    def ranks(self) -> tuple[str, ...]:
        """Processes of the group in rank order; empty while in none."""
        return self._groups.world.ranks if self._groups is not None else ()

    @property
    def group_id(self) -> int:
        """Number of the current group; 0 while in none."""
        return self._groups.world.group_id if self._groups is not None else 0

    def groups(self, group_id: int) -> Groups:
        """Return the current groups if they have this number; raise RefusedError otherwise."""
        if self._groups is None or not self.is_in(group_id):
            mine = "none" if self._groups is None else self.group_id
            raise RefusedError(f"expected a call of group generation {mine}, got one of {group_id}")
        return self._groups

    def is_in(self, group_id: int) -> bool:
        """Whether this rank is in the group with this number."""
        return self._groups is not None and self._groups.world.group_id == group_id

    def standing(self) -> RankReady:
        """Report step, digest and group number. The number is the latest one tried: its store keys are used up, even
        where joining failed. A rank that has begun no stage has no digest: its state may not be there yet."""
        state = self._state
        return RankReady(
            state.committed_step,
            "" if state.is_fresh else state.committed_digest,
            state.half_updated,
            -1 if state.prepared_step is None else state.prepared_step,
            self._latest_group_id,
            state.committed_counters.stage,
        )

    def stop(self, generation: int) -> None:
        """Abort running collectives, then abort or await all other work on the device."""
        self._latest_group_id = max(self._latest_group_id, generation)
        if self._groups is not None and self.group_id <= generation:
            self._groups.end("this rank was told to stop")
            self.leave()
        self._stop_device()

    @abstractmethod
    def clean(self) -> None:
        """Drop the remains of an aborted step."""

    def rebuild(self, request: RebuildGroup) -> None:
        """Leave the current group and join the requested one; does nothing if this rank is in it already."""
        if self.is_in(request.generation):
            return
        if request.generation <= self._latest_group_id:
            raise RefusedError(
                f"generation {request.generation} is over: this rank is in {self._latest_group_id}"
            )
        if self._process not in request.ranks:
            raise RefusedError(f"{self._process} is not among the ranks {', '.join(request.ranks)}")
        self.leave()
        self._latest_group_id = request.generation
        start = time.monotonic()
        if self._seating is not None:
            self._state = self._seating.take_seat(request.mesh, request.ranks, step=request.step)
        groups = self._join(request)
        try:
            for group in groups:
                remaining_s = request.timeout_s - (time.monotonic() - start)
                if group.size > 1:
                    numbers = self._known_numbers(known_numbers(group))
                    check_sum(group, numbers, timeout_s=max(remaining_s, LEAST_PROBE_S))
        except BaseException:
            groups.close()
            raise
        self._groups = groups

    def repair(self, step: int, *, source: str, digest: str) -> None:
        if source.startswith(SNAPSHOT_PREFIX):
            process = source.removeprefix(SNAPSHOT_PREFIX)
            self._state.restore_snapshot(step, process=process, stages=self._stages, digest=digest)
        else:
            stored, counters = self._load_state(step, source)
            if counters.step != step:
                raise IntegrityError(
                    f"expected the state of step {step} from {source}, got that of {counters.step}"
                )
            if counters.stage and counters.stage not in self._stages:
                raise IntegrityError(
                    f"the state from {source} belongs to stage {counters.stage!r}, which is not ours"
                )
            stage = self._stages.get(counters.stage)
            self._state.restore(stored, counters=counters, stage=stage, digest=digest)
        self._forget()

    def assemble(self, step: int, *, boxes: Sequence[BoxCopies], digest: str, begun: str) -> None:
        assert self._seating is not None, "a rank that has one box only is not asked for others"
        reader = self._seating.boxes
        try:
            self._state.assemble(step, boxes=boxes, reader=reader, stages=self._stages, digest=digest)
        except GroupBroken:
            raise
        except WorldError as first:
            if not begun:
                raise
            try:
                self._state.assemble(step, boxes=boxes, reader=reader, stages=self._stages, begun=begun)
            except RefusedError as second:
                raise no_source(f"{second}; as it was committed: {first}", [first, second]) from second
        self._forget()

    @abstractmethod
    def rollback(self, step: int) -> None:
        """Return to the committed state of `step`; a prepared one is adopted."""

    def gather(self) -> None:
        """Complete the weights of this rank from the other ranks, once per generation. A collective."""
        if self._groups is not None and self._gathered_in[0] < self.group_id:
            self._state.gather(self._groups)
            self._gathered_in = self.group_id, False

    def complete(self) -> None:
        """Gather the weights again before the first call of a generation: if some of its ranks had begun a stage and
        others had not, the critic of the former was gathered before the latter filled theirs. A collective, once per
        generation on every rank."""
        groups = self._groups
        if (
            groups is None
            or self._state.companions.critic is None
            or self._gathered_in == (self.group_id, True)
        ):
            return
        self._state.gather(groups)
        self._gathered_in = self.group_id, True

    def leave(self) -> None:
        """Leave and close the current groups, if any."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    @abstractmethod
    def _join(self, request: RebuildGroup) -> Groups:
        """Form the requested groups with the other ranks."""

    @abstractmethod
    def _known_numbers(self, numbers: list[float]) -> Array:
        """Numbers in float64, in memory that the group's collectives can use."""

    @abstractmethod
    def _stop_device(self) -> None:
        """Abort or await all work of this process on its device."""
