"""Training calls on a rank, independent of the training framework: micro-batches, the sum over all ranks, updates.

A training call makes the stage's updates of one model on the whole batch, each from a gradient summed over all ranks;
the last training call of a step leaves the rank prepared. Metrics are sums over all shards of all ranks
(`whole_batch`), so every rank reports the same numbers. A framework adds the passes (`model_calls.py`,
`mindspore/calls.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.arrays import namespace
from kintsugi.protocol.training import RunCall
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.peak_memory import PEAK_UPDATE
from kintsugi.training.group import Group, Groups
from kintsugi.training.layout import ACTOR
from kintsugi.training.objective_metrics import Objective, Totals
from kintsugi.training.packing import BatchSample, Kept, check_staleness
from kintsugi.training.rank_state import RankState, Update
from kintsugi.training.reduction import Contribution, Cut, finish_tree, sum_any_order, sum_owned
from kintsugi.training.step_cache import StepCache

T = TypeVar("T")

APART_S = 75.0
"""Allowance for the ranks not starting a pass simultaneously: a library may keep one of them for a minute."""
SLOWER_RANK_FACTOR = 10.0
"""A rank that takes this many times longer than this one counts as stuck: shards are balanced by tokens."""


@dataclass
class CallResult:
    """Result of a call: metrics, seconds per part of the work, and scalars per sample by output key."""

    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to `timing[part]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timing[part] = self.timing.get(part, 0.0) + time.perf_counter() - start


def whole_batch(
    call: RunCall,
    parts: Mapping[int, Sequence[T]],
    *,
    contribution: Callable[[Sequence[T]], Contribution],
    groups: Groups,
    deterministic: bool,
    result: CallResult,
    work: str,
    cut: Cut | None = None,
) -> Contribution:
    """Sum the contributions of all shards of all ranks; the result is equal on all ranks, of the gradient in those
    elements that `cut` gives to this rank.

    `parts` are this rank's by shard; `work` is the name under which their computation is timed. In deterministic mode
    the sum is a tree over shards; otherwise each rank computes one contribution from all of its parts.
    """
    start = time.perf_counter()
    with result.timed(work):
        if deterministic:
            owned = sum_owned(
                call.num_shards,
                owned=range(min(parts), max(parts) + 1),
                of_shard=lambda index: contribution(parts[index]),
            )
        else:
            everything = contribution([part for index in sorted(parts) for part in parts[index]])
    timeout_s = APART_S + SLOWER_RANK_FACTOR * (time.perf_counter() - start)
    with result.timed("reduce"):
        if deterministic:
            total = finish_tree(
                groups.data,
                num_shards=call.num_shards,
                owned=owned,
                timeout_s=timeout_s,
                blocks=call.blocks,
                cut=cut,
            )
        else:
            total = sum_any_order(groups.data, owned=everything, timeout_s=timeout_s)
        return total if groups.stages is None else _of_last_stage(total, groups.stages, timeout_s=timeout_s)


def _of_last_stage(total: Contribution, stages: Group, *, timeout_s: float) -> Contribution:
    """The same gradient with the statistics of the last stage, which computes the losses."""
    xp, num_sums = namespace(total.sums), len(total.sums)
    last = stages.all_gather(xp.concatenate((total.sums, total.maxima)), timeout_s=timeout_s)[-1]
    return Contribution(total.gradient, last[:num_sums], last[num_sums:])


Shards = Mapping[int, Sequence[BatchSample]]
"""Samples of this rank's shards, by shard index."""
Interface = Callable[[RunCall, Shards, Groups], CallResult]

COMMON_SUMS = ("loss", "tokens", "loss_tokens")


class TrainingCalls(ABC):
    """Runs calls on one rank's state and caches, within a step, the tensors that later calls read."""

    def __init__(
        self,
        state: RankState,
        *,
        deterministic: bool,
        check: Callable[[], None],
        store: Callable[[RunCall], None],
    ) -> None:
        """`check` is called between micro-batches and raises if the call has to be given up; `store` writes the samples
        of a call to the run folder."""
        self._rank_state = state
        self._deterministic = deterministic
        self._check = check
        self._store = store
        self._step_cache = StepCache()
        self._interfaces: dict[str, Interface] = {"store_rollouts": self._store_rollouts}

    @abstractmethod
    def _contributions(
        self,
        batches: Mapping[int, Sequence[Any]],
        *,
        call: RunCall,
        objective: Objective,
        groups: Groups,
        learns: bool,
    ) -> Callable[[Sequence[Any]], Contribution]:
        """Function of the micro-batches of one shard, which is called with those of one after the other: their gradient
        and statistics, added up in their order. The gradient is the state's buffer, which the next contribution
        overwrites. `batches` are those of all shards."""

    @abstractmethod
    def _micro_batches(self, samples: Sequence[BatchSample], *, kept: Kept) -> list[Any]:
        """Cut samples into the micro-batches of one pass each."""

    @abstractmethod
    def _check_device(self) -> None:
        """Raise DeviceError if the device fails its known-answer test."""

    def trained_by(self, objective: Objective) -> Interface:
        """Interface that makes the updates of an objective."""
        return partial(self._train, objective=objective)

    def forget(self) -> None:
        """Drop the cached tensors of the current step."""
        self._step_cache.clear()

    def run(self, call: RunCall, shards: Shards, *, groups: Groups) -> CallResult:
        """Run a call on this rank's shards. A device that fails its known-answer test raises instead of a result."""
        if call.interface not in self._interfaces:
            raise RefusedError(f"{call.call}: this worker has no interface {call.interface!r}")
        result = self._interfaces[call.interface](call, shards, groups)
        if not self._rank_state.seat.is_last:
            result.outputs = {}  # Values of samples are computed by the last stage.
        self._check_device()
        return result

    def _train(self, call: RunCall, shards: Shards, groups: Groups, *, objective: Objective) -> CallResult:
        """Make the step's updates of one model; the gradient buffer is free again afterwards."""
        result = CallResult()
        state = self._rank_state
        waits = objective.part == ACTOR and state.actor_waits(call.step)
        for samples in shards.values():
            check_staleness(samples, step=call.step)
        with result.timed("pack"):
            batches = self._cut(shards, kept=objective.kept)
        totals: list[Totals] = []
        updates: list[Update] = []
        for index in range(1 if waits else state.stage.algorithm.updates_per_step):
            total = self._total(
                call, batches, objective=objective, groups=groups, learns=not waits, result=result
            )
            with result.timed("device"):  # An accelerator has only been given its work so far.
                totals.append(_named(total, objective))
            state.note_peak()
            if index == 0:
                _check_whole(totals[0], call)
                with result.timed("snapshot_wait"):
                    state.begin_update(check=self._check)
            with result.timed("optimizer"):
                update = (
                    NOT_UPDATED if waits else state.update(total.gradient, part=objective.part, groups=groups)
                )
                updates.append(update)
        if call.prepares:
            with result.timed("prepare"):
                state.end_update(call.step)
            COUNTERS.add("steps")
        else:
            state.pause_update()
        state.note_peak(PEAK_UPDATE)
        result.metrics = objective.metrics(totals, updates)
        if (
            state.seat.number % state.seat.mesh.model_ranks == 0
        ):  # One of the ranks that compute these samples.
            COUNTERS.add("tokens_trained", sum(len(s.tokens) for samples in shards.values() for s in samples))
        return result

    def _total(
        self,
        call: RunCall,
        batches: Mapping[int, Sequence[Any]],
        *,
        objective: Objective,
        groups: Groups,
        learns: bool,
        result: CallResult,
    ) -> Contribution:
        """Gradient and statistics of the whole batch; of the gradient what this rank updates. A collective."""
        return whole_batch(
            call,
            batches,
            contribution=self._contributions(
                batches, call=call, objective=objective, groups=groups, learns=learns
            ),
            groups=groups,
            deterministic=self._deterministic,
            result=result,
            work="forward_backward",
            cut=self._rank_state.cut(objective.part, groups.data),
        )

    def _cut(self, shards: Shards, *, kept: Kept = "learned") -> dict[int, list[Any]]:
        """Cut the samples into micro-batches by shard; in nondeterministic mode all are under the first shard."""
        if not self._deterministic:
            together = [sample for index in sorted(shards) for sample in shards[index]]
            shards = {min(shards, default=0): together}
        return {index: self._micro_batches(samples, kept=kept) for index, samples in shards.items()}

    def _infer(self, shards: Shards, look: Callable[[Any], None], *, kept: Kept = "learned") -> CallResult:
        """Call a function with every micro-batch."""
        result = CallResult()
        with result.timed("forward"):
            for batches in self._cut(shards, kept=kept).values():
                for batch in batches:
                    self._check()
                    look(batch)
                    COUNTERS.add("micro_batches")
        return result

    def _store_rollouts(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Write the samples to the run folder; the step does not change the state."""
        result = CallResult()
        with result.timed("store"):
            self._store(call)
        self._rank_state.begin_update(check=self._check)
        self._rank_state.end_update(call.step)
        COUNTERS.add("steps")
        return result


NOT_UPDATED = Update(grad_norm=0.0, learning_rate=0.0, applied=True)
"""Placeholder for a model that is not updated in this step."""


def _named(total: Contribution, objective: Objective) -> Totals:
    names = (*COMMON_SUMS, *objective.sums, *(f"{name}/max" for name in objective.maxima))
    return dict(zip(names, (*total.sums.tolist(), *total.maxima.tolist()), strict=True))


def _check_whole(total: Totals, call: RunCall) -> None:
    """Raise IntegrityError if the master's denominator was computed over another batch than the one summed."""
    found, expected = total["loss_tokens"], call.totals["tokens"]
    if found != expected:
        raise IntegrityError(
            f"step {call.step}: expected {expected:.0f} loss tokens over all ranks, got {found:.0f}"
        )
