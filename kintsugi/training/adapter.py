"""What recovery asks of a training rank, as PyTorch does it: the callbacks of `recovery.processor.Adapter`.

The process and its memory outlive all of it: a rank stops what runs, drops what it left behind, joins the next
generation of the process group, takes over a good state if its own is not, and returns to the agreed step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.operations import RankReady, RebuildGroup
from kintsugi.recovery.processor import SNAPSHOT_PREFIX, Flow
from kintsugi.runtime import wait
from kintsugi.stages import Stage
from kintsugi.training.copies import Counters
from kintsugi.training.group import Interruption, ProcessGroup, join_group
from kintsugi.training.state import TrainingState

LoadState = Callable[[int, str], tuple[Mapping[str, Tensor], Counters]]
"""(step, source) to the committed state of that step, from a replica, a buddy or a checkpoint."""

LEAST_PROBE_S = 1.0
DEVICE_STOP_TIMEOUT_S = 30.0
DEVICE_POLL_S = 0.001


class TorchAdapter:
    """One rank's membership in the group, and its way back to an agreed state."""

    flow = Flow.ROLLBACK

    def __init__(
        self,
        state: TrainingState,
        *,
        process: str,
        stages: Mapping[str, Stage],
        load_state: LoadState,
        forget: Callable[[], None],
        interruption: Interruption,
    ) -> None:
        """`forget` drops what the rank keeps for the step it is in (samples, log-probabilities, results)."""
        self._state = state
        self._process = process
        self._stages = stages
        self._load_state = load_state
        self._forget = forget
        self._interruption = interruption
        self._group: ProcessGroup | None = None
        self._generation = 0

    @property
    def rank(self) -> int:
        """Place in the group; 0 while it is in none."""
        return self._group.rank if self._group is not None else 0

    @property
    def ranks(self) -> tuple[str, ...]:
        """Everybody in the group, in rank order; nobody while it is in none."""
        return self._group.ranks if self._group is not None else ()

    def group(self, generation: int) -> ProcessGroup:
        """The group, if it is the one that is meant."""
        if self._group is None or not self.is_in(generation):
            mine = "none" if self._group is None else self._group.generation
            raise RefusedError(f"expected a call of group generation {mine}, got one of {generation}")
        return self._group

    def is_in(self, generation: int) -> bool:
        """Whether this rank is in that generation of the group."""
        return self._group is not None and self._group.generation == generation

    def standing(self) -> RankReady:
        """The generation is the latest that was tried: its name in the store is used up, also where that failed."""
        state = self._state
        return RankReady(
            state.committed_step,
            state.committed_digest,
            state.half_updated,
            -1 if state.prepared_step is None else state.prepared_step,
            self._generation,
            state.committed_counters.stage,
        )

    def stop(self, generation: int) -> None:
        """The collective library is told to abort what hangs, and what else runs on the device is waited out."""
        self._generation = max(self._generation, generation)
        if self._group is not None and self._group.generation <= generation:
            self._group.end("this rank was told to stop")
            self.leave()
        if self._state.gradient.is_cuda:
            _wait_for_device(self._state.gradient.device)

    def clean(self) -> None:
        """The state itself is the rollback's business."""
        self._forget()
        self._state.zero_gradient()

    def rebuild(self, request: RebuildGroup) -> None:
        """Being told again to join the present generation does nothing."""
        if self._group is not None and self._group.generation == request.generation:
            return
        if request.generation <= self._generation:
            raise RefusedError(f"generation {request.generation} is over: this rank is in {self._generation}")
        if self._process not in request.ranks:
            raise RefusedError(f"{self._process} is not among the ranks {', '.join(request.ranks)}")
        self.leave()
        self._generation = request.generation
        start = time.monotonic()
        group = join_group(
            generation=request.generation,
            ranks=request.ranks,
            me=self._process,
            store_address=request.store,
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
            tensors, counters = self._load_state(step, source)
            if counters.step != step:
                raise IntegrityError(
                    f"expected the state of step {step} from {source}, got that of {counters.step}"
                )
            if counters.stage and counters.stage not in self._stages:
                raise IntegrityError(
                    f"the state from {source} belongs to stage {counters.stage!r}, which is not ours"
                )
            stage = self._stages.get(counters.stage)
            self._state.restore(tensors, counters=counters, stage=stage, digest=digest)
        self._forget()

    def rollback(self, step: int) -> None:
        self._state.rollback(step)
        self._forget()

    def leave(self) -> None:
        """Leave the group, if in one."""
        if self._group is not None:
            self._group.close()
            self._group = None


def probe(group: ProcessGroup, *, device: torch.device, timeout_s: float) -> None:
    """Try a new group out: a sum that everybody knows, of every rank's place and of the generation it believes in."""
    if group.size == 1:
        return
    given = [float(group.rank + 1), float(group.generation)]
    expected = [group.size * (group.size + 1) / 2, float(group.size * group.generation)]
    numbers = torch.tensor(given, dtype=torch.float64, device=device)
    group.all_reduce(numbers, timeout_s=timeout_s)
    if numbers.tolist() != expected:
        raise IntegrityError(
            f"generation {group.generation} of {', '.join(group.ranks)} does not add up: "
            f"expected {expected}, got {numbers.tolist()}"
        )


def _wait_for_device(device: torch.device) -> None:
    """Until everything that was started on the device has ended; a device that hangs ends in DeadlineExceeded."""
    event = torch.cuda.current_stream(device).record_event()
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if event.query():
            return True
        idle.wait(min(DEVICE_POLL_S, remaining_s))
        return None

    wait(attempt, whom=str(device), what="the end of its work", timeout_s=DEVICE_STOP_TIMEOUT_S)
