"""What recovery asks of a training rank, under the protocol's names.

The process and its memory outlive all of it: a rank stops what runs, drops what it left behind, joins the next
generation of the process group, takes over a good state if its own is not, and returns to the agreed step. Each
operation may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kintsugi.config import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.messages import RankReady, RebuildGroup
from kintsugi.training.group import Interruption, ProcessGroup, join_group
from kintsugi.training.state import Counters, TrainingState

LoadState = Callable[[int, str], tuple[Mapping[str, Tensor], Counters]]
"""(step, source) to the committed state of that step, from a replica or a checkpoint."""


class RankProcessor:
    """One rank's membership in the group, and its way back to an agreed state."""

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
        self._locked_after: int | None = None

    @property
    def generation(self) -> int:
        """Of the group that this rank is a member of; 0 while it is in none."""
        return self._group.generation if self._group is not None else 0

    @property
    def rank(self) -> int:
        """Place in the group; 0 while it is in none."""
        return self._group.rank if self._group is not None else 0

    def group(self, generation: int) -> ProcessGroup:
        """The group, if it is the one that is meant."""
        if self._group is None or generation != self._group.generation:
            raise RefusedError(
                f"expected a call of group generation {self.generation}, got one of {generation}"
            )
        return self._group

    def admit(self, step: int) -> None:
        """Refuse to run a step that is not the next one, or that must not run now."""
        if self._locked_after is not None and step > self._locked_after:
            raise RefusedError(
                f"step {step} must not run: this rank is locked after step {self._locked_after}"
            )
        if self._state.half_updated:
            raise RefusedError(f"step {step} must not run: this rank is half updated and needs a rollback")
        if self._state.prepared_step is not None:
            raise RefusedError(
                f"step {step} must not run: step {self._state.prepared_step} is prepared and not committed"
            )
        if step != self._state.committed_step + 1:
            raise RefusedError(
                f"step {step} is not the next one: this rank has committed step {self._state.committed_step}"
            )

    def ready(self) -> RankReady:
        """Where this rank stands."""
        return RankReady(self._state.committed_step, self._state.digest(), self._state.half_updated)

    def pre_lock(self, step: int) -> None:
        """Run no call after `step` until a rollback unlocks."""
        self._locked_after = step

    def stop(self, generation: int) -> None:
        """The generation is over: collectives of it raise, and what runs on the device is waited out."""
        if self._group is not None and self._group.generation <= generation:
            self._group.end("this rank was told to stop")
        if self._state.gradient.is_cuda:
            torch.cuda.synchronize(self._state.gradient.device)

    def clean(self) -> None:
        """Drop what an aborted step left behind. The state itself is the rollback's business."""
        self._forget()
        self._state.zero_gradient()

    def rebuild(self, request: RebuildGroup) -> None:
        """Leave the group and join the next generation; being told again to join the present one does nothing."""
        if self._group is not None and self._group.generation == request.generation:
            return
        if request.generation <= self.generation:
            raise RefusedError(f"generation {request.generation} is over: this rank is in {self.generation}")
        if self._process not in request.ranks:
            raise RefusedError(f"{self._process} is not among the ranks {', '.join(request.ranks)}")
        self.leave()
        self._group = join_group(
            generation=request.generation,
            ranks=request.ranks,
            me=self._process,
            store_address=request.store,
            device=self._state.gradient.device,
            timeout_s=request.timeout_s,
            interruption=self._interruption,
        )

    def repair(self, step: int, source: str) -> None:
        """Take over the committed state of `step` from a replica or a checkpoint."""
        tensors, counters = self._load_state(step, source)
        if counters.step != step:
            raise IntegrityError(
                f"expected the state of step {step} from {source}, got that of {counters.step}"
            )
        if counters.stage and counters.stage not in self._stages:
            raise IntegrityError(
                f"the state from {source} belongs to stage {counters.stage!r}, which is not ours"
            )
        self._state.restore(tensors, counters=counters, stage=self._stages.get(counters.stage))
        self._forget()

    def rollback(self, step: int) -> None:
        """Return to the committed state of `step` and be ready to run the next one."""
        self._state.rollback(step)
        self._forget()
        self._locked_after = None

    def leave(self) -> None:
        """Leave the group, if in one."""
        if self._group is not None:
            self._group.close()
            self._group = None
