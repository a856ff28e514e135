"""Recovery operations of a training rank on PyTorch: the implementation of `recovery.rank.Adapter`.

The process and its memory survive a recovery: the rank stops its running work, clears its leftovers, joins the next
process group, replaces its state if that is damaged or outdated, and returns to the agreed step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.protocol.recovery import RankReady, RebuildGroup
from kintsugi.recovery.rank import SNAPSHOT_PREFIX, Flow
from kintsugi.runtime.waits import wait
from kintsugi.training.process_group import Interruption, ProcessGroup, join_group
from kintsugi.training.snapshots import CopyCounters, StoredState
from kintsugi.training.state import TrainingState

LoadState = Callable[[int, str], tuple[StoredState, CopyCounters]]
"""Open the committed state of a step at a source: a replica, the agent with the peer copy, or a checkpoint."""

LEAST_PROBE_S = 1.0
DEVICE_STOP_TIMEOUT_S = 30.0
DEVICE_POLL_S = 0.001


class TorchAdapter:
    """Membership of one rank in the process group, and its return to an agreed state."""

    flow = Flow.ROLLBACK

    def __init__(
        self,
        state: TrainingState,
        *,
        process: str,
        keys: tuple[bytes, bytes],
        stages: Mapping[str, Stage],
        load_state: LoadState,
        forget: Callable[[], None],
        interruption: Interruption,
    ) -> None:
        """`keys` is the key pair of this process.

        `forget` drops what the rank keeps for the step it is in (samples, log-probabilities, results).
        """
        self._state = state
        self._process = process
        self._keys = keys
        self._stages = stages
        self._load_state = load_state
        self._forget = forget
        self._interruption = interruption
        self._group: ProcessGroup | None = None
        self._latest_group_id = 0
        """Highest group number that this rank has received, also where joining that group failed."""
        self._gathered_in = 0, False
        """Latest group in which the weights of a box were completed, and whether again before its first call."""

    @property
    def rank(self) -> int:
        """Rank in the group; 0 while in none."""
        return self._group.rank if self._group is not None else 0

    @property
    def ranks(self) -> tuple[str, ...]:
        """Processes of the group in rank order; empty while in none."""
        return self._group.ranks if self._group is not None else ()

    @property
    def group_id(self) -> int:
        """Number of the current group; 0 while in none."""
        return self._group.group_id if self._group is not None else 0

    def group(self, group_id: int) -> ProcessGroup:
        """Return the current group if it has this number; raise RefusedError otherwise."""
        if self._group is None or not self.is_in(group_id):
            mine = "none" if self._group is None else self._group.group_id
            raise RefusedError(f"expected a call of group generation {mine}, got one of {group_id}")
        return self._group

    def is_in(self, group_id: int) -> bool:
        """Whether this rank is in the group with this number."""
        return self._group is not None and self._group.group_id == group_id

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
        """Abort running collectives, then wait until all other work on the device has completed."""
        self._latest_group_id = max(self._latest_group_id, generation)
        if self._group is not None and self._group.group_id <= generation:
            self._group.end("this rank was told to stop")
            self.leave()
        if self._state.gradient.is_cuda:
            _wait_for_device(self._state.gradient.device)

    def clean(self) -> None:
        """Drop the data of the current step and the gradient; `rollback` restores the state itself."""
        self._forget()
        self._state.zero_gradient()

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
        group = join_group(
            group_id=request.generation,
            ranks=request.ranks,
            me=self._process,
            store_address=request.store,
            keys=self._keys,
            device=self._state.gradient.device,
            timeout_s=request.timeout_s,
            interruption=self._interruption,
        )
        try:
            remaining_s = request.timeout_s - (time.monotonic() - start)
            probe(group, device=self._state.gradient.device, timeout_s=max(remaining_s, LEAST_PROBE_S))
        except BaseException:
            group.close()
            raise
        self._group = group

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

    def rollback(self, step: int) -> None:
        if not (self._state.is_fresh and step == 0):  # A state that never changed is not verified.
            self._state.rollback(step)
        self._forget()
        if self._group is not None and self._gathered_in[0] < self._group.group_id:
            self._state.gather(self._group)
            self._gathered_in = self._group.group_id, False

    def complete(self) -> None:
        """Gather the weights again before the first call of a generation: if some of its ranks had begun a stage and
        others had not, the critic of the former was gathered before the latter filled theirs. A collective, once per
        generation on every rank."""
        group = self._group
        if (
            group is None
            or self._state.companions.critic is None
            or self._gathered_in == (group.group_id, True)
        ):
            return
        self._state.gather(group)
        self._gathered_in = group.group_id, True

    def leave(self) -> None:
        """Leave and close the current group, if any."""
        if self._group is not None:
            self._group.close()
            self._group = None


def probe(group: ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
    """Verify a new group by one all-reduce of known numbers: each rank contributes its rank and the group number."""
    if group.size == 1:
        return
    given = [float(group.rank + 1), float(group.group_id)]
    expected = [group.size * (group.size + 1) / 2, float(group.size * group.group_id)]
    numbers = torch.tensor(given, dtype=torch.float64, device=device)
    group.all_reduce(numbers, timeout_s=timeout_s)
    if numbers.tolist() != expected:
        raise IntegrityError(
            f"generation {group.group_id} of {', '.join(group.ranks)} does not add up: "
            f"expected {expected}, got {numbers.tolist()}"
        )


def _wait_for_device(device: torch.device) -> None:
    """Wait until all work started on the device has completed; raises DeadlineExceeded if the device hangs."""
    event = torch.cuda.current_stream(device).record_event()
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if event.query():
            return True
        idle.wait(min(DEVICE_POLL_S, remaining_s))
        return None

    wait(attempt, whom=str(device), what="the end of its work", timeout_s=DEVICE_STOP_TIMEOUT_S)
