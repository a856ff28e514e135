"""Model function calls on a rank: a table from interface to method.

A training call makes the stage's updates of one model on the whole batch, each from a gradient summed over all ranks;
the last training call of a step leaves the rank prepared. An inference call runs a model on this rank's samples; its
tensors stay on the rank for later calls of the step (`step_cache.py`), and only scalars per sample are sent to the
master. Metrics are sums over all shards of all ranks (`whole_batch`), so every rank reports the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kintsugi.config.schema import COMPARE_SAMPLES
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.known_answer import KnownAnswer
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.training import RunCall
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.peak_memory import PEAK_UPDATE
from kintsugi.training import advantages, losses, objectives
from kintsugi.training.advantages import TokenAdvantages
from kintsugi.training.batch import BatchSample, Kept, MicroBatch, check_staleness, cut
from kintsugi.training.initial_weights import load_reward_model
from kintsugi.training.layout import ACTOR
from kintsugi.training.objectives import Objective, Totals
from kintsugi.training.process_group import ProcessGroup
from kintsugi.training.reduction import Contribution, finish_tree, sum_any_order, sum_owned
from kintsugi.training.state import TrainingState, Update
from kintsugi.training.step_cache import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    StepCache,
)

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
    group: ProcessGroup,
    deterministic: bool,
    result: CallResult,
    work: str,
) -> Contribution:
    """Sum the contributions of all shards of all ranks; the result is equal on all ranks.

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
            return finish_tree(
                group, num_shards=call.num_shards, owned=owned, timeout_s=timeout_s, blocks=call.blocks
            )
        return sum_any_order(group, owned=everything, timeout_s=timeout_s)


Shards = Mapping[int, Sequence[BatchSample]]
"""Samples of this rank's shards, by shard index."""
Interface = Callable[[RunCall, Shards, ProcessGroup], CallResult]

COMMON_SUMS = ("loss", "tokens", "loss_tokens")


class ModelCalls:
    """Runs calls on one rank's state and caches, within a step, the tensors that later calls read."""

    def __init__(
        self,
        state: TrainingState,
        *,
        deterministic: bool,
        check: Callable[[], None] = lambda: None,
        store: Callable[[RunCall], None] = lambda call: None,
    ) -> None:
        """`check` is called between micro-batches and raises if the call has to be given up; `store` writes the samples
        of a call to the run folder."""
        self._state = state
        self._deterministic = deterministic
        self._check = check
        self._store = store
        self._known_answer = KnownAnswer(state.gradient.device, dtype=state.model.dtype)
        self._step_cache = StepCache()
        self._reward_model: Transformer | None = None
        trained: dict[str, Callable[[TrainingState, StepCache], Objective]] = {
            "sft_train": objectives.Supervised,
            "policy_train": objectives.PolicyGradient,
            "dpo_train": objectives.DirectPreference,
            "reward_train": objectives.PairwiseReward,
            "critic_train": objectives.ValueRegression,
        }
        self._interfaces: dict[str, Interface] = {
            "reference_inference": self._reference_inference,
            "proximal_inference": self._proximal_inference,
            "critic_inference": self._critic_inference,
            "reward_inference": self._reward_inference,
            "gae": self._token_advantages,
            "reward_to_go": self._token_advantages,
            "store_rollouts": self._store_rollouts,
        }
        for name, objective in trained.items():
            self._interfaces[name] = partial(self._train, objective=objective(state, self._step_cache))

    def forget(self) -> None:
        """Drop the cached tensors of the current step."""
        self._step_cache.clear()

    def run(self, call: RunCall, shards: Shards, *, group: ProcessGroup) -> CallResult:
        """Run a call on this rank's shards. A device that fails its known-answer test raises instead of a result."""
        if call.interface not in self._interfaces:
            raise RefusedError(f"{call.call}: this worker has no interface {call.interface!r}")
        result = self._interfaces[call.interface](call, shards, group)
        self._known_answer.check()
        return result

    def _train(
        self, call: RunCall, shards: Shards, group: ProcessGroup, *, objective: Objective
    ) -> CallResult:
        """Make the step's updates of one model; the gradient buffer is free again afterwards."""
        result = CallResult()
        state = self._state
        waits = objective.part == ACTOR and state.actor_waits(call.step)
        for samples in shards.values():
            check_staleness(samples, step=call.step)
        with result.timed("forward_backward"):
            batches = self._cut(shards, kept=objective.kept)
        totals: list[Totals] = []
        updates: list[Update] = []
        for index in range(1 if waits else state.stage.algorithm.updates_per_step):
            total = whole_batch(
                call,
                batches,
                contribution=partial(self._contribution, call=call, objective=objective, learns=not waits),
                group=group,
                deterministic=self._deterministic,
                result=result,
                work="forward_backward",
            )
            totals.append(_named(total, objective))
            state.note_peak()
            if index == 0:
                _check_whole(totals[0], call)
                state.begin_update(check=self._check)
            with result.timed("optimizer"):
                update = (
                    NOT_UPDATED if waits else state.update(total.gradient, part=objective.part, group=group)
                )
                updates.append(update)
        if call.prepares:
            state.end_update(call.step)
            COUNTERS.add("steps")
        else:
            state.pause_update()
        state.note_peak(PEAK_UPDATE)
        result.metrics = objective.metrics(totals, updates)
        COUNTERS.add("tokens_trained", sum(len(s.tokens) for samples in shards.values() for s in samples))
        return result

    def _contribution(
        self, batches: Sequence[MicroBatch], *, call: RunCall, objective: Objective, learns: bool
    ) -> Contribution:
        """Gradient and statistics of some micro-batches, added up in their order. The gradient is the state's buffer,
        which the next contribution overwrites."""
        state = self._state
        device = state.gradient.device
        state.zero_gradient(objective.part)
        gradient = state.gradient_of(objective.part) if learns else state.gradient[:0]
        names = (*COMMON_SUMS, *objective.sums)
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(objective.maxima), dtype=torch.float64, device=device)
        zero = sums.new_zeros(())
        for batch in batches:
            self._check()
            with torch.set_grad_enabled(learns):
                found = objective.loss(batch, call)
            if learns:
                found.loss.backward()
            named = {
                "loss": found.loss.detach().double(),
                "tokens": zero + batch.tokens.numel(),
                "loss_tokens": zero + batch.targets.numel(),
                **found.sums,
            }
            sums += torch.stack([named[name] for name in names])
            if objective.maxima:
                maxima = torch.maximum(maxima, torch.stack([found.maxima[name] for name in objective.maxima]))
            COUNTERS.add("micro_batches")
        return Contribution(gradient, sums, maxima)

    def _cut(self, shards: Shards, *, kept: Kept = "learned") -> dict[int, list[MicroBatch]]:
        """Cut the samples into micro-batches by shard; in nondeterministic mode all are under the first shard."""
        device = self._state.gradient.device
        max_tokens = self._state.stage.actor.block_tokens(
            deterministic=self._deterministic, is_cpu=device.type == "cpu"
        )
        if not self._deterministic:
            together = [sample for index in sorted(shards) for sample in shards[index]]
            shards = {min(shards, default=0): together}
        return {
            index: cut(
                samples, deterministic=self._deterministic, max_tokens=max_tokens, device=device, kept=kept
            )
            for index, samples in shards.items()
        }

    @torch.no_grad()
    def _infer(
        self, shards: Shards, look: Callable[[MicroBatch], None], *, kept: Kept = "learned"
    ) -> CallResult:
        """Call a function with every micro-batch, without gradient."""
        result = CallResult()
        with result.timed("forward"):
            for batches in self._cut(shards, kept=kept).values():
                for batch in batches:
                    self._check()
                    look(batch)
                    COUNTERS.add("micro_batches")
        return result

    def _reference_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Compute and cache the reference's log-probabilities. If the KL is subtracted from the reward of whole
        samples, return the sum of each sample's KL estimates."""
        stage = self._state.stage
        algorithm = stage.algorithm
        model, is_dpo = self._state.reference_model, algorithm.name == "dpo"
        temperature = 1.0 if is_dpo else call.arguments["temperature"]
        by_sample = stage.takes_kl_off_reward and algorithm.name in COMPARE_SAMPLES
        divergences = {sample.key: 0.0 for samples in shards.values() for sample in samples}

        def look(batch: MicroBatch) -> None:
            logprobs, _ = objectives.token_logprobs(model, batch, temperature=temperature)
            parts = logprobs.split(list(batch.loss_lengths))
            self._step_cache.put(REFERENCE_LOGPROBS, batch.keys, parts)
            if by_sample:
                estimates = losses.kl_estimate(batch.sampler_logprobs, logprobs, estimator=algorithm.kl)
                summed = losses.sequence_sums(
                    estimates.double(), sequence_index=batch.sequence_index, num_sequences=batch.num_sequences
                )
                divergences.update(zip(batch.keys, summed.tolist(), strict=True))

        result = self._infer(shards, look, kept="groups" if is_dpo else "learned")
        if by_sample:
            result.outputs = {"reference_kl": divergences}
        return result

    def _proximal_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Compute and cache the log-probabilities under the weights before the first update of the step."""
        model, temperature = self._state.model, call.arguments["temperature"]

        def look(batch: MicroBatch) -> None:
            logprobs, _ = objectives.token_logprobs(model, batch, temperature=temperature)
            self._step_cache.put(PROXIMAL_LOGPROBS, batch.keys, logprobs.split(list(batch.loss_lengths)))

        return self._infer(shards, look)

    def _critic_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Compute and cache the critic's values of the states before each loss token, and of the one after the last."""
        critic = self._state.critic

        def look(batch: MicroBatch) -> None:
            hidden = critic.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
            values = critic.values(hidden.index_select(0, torch.cat((batch.sources, batch.lasts)))).cpu()
            before = values[: len(batch.sources)].split(list(batch.loss_lengths))
            after = values[len(batch.sources) :].split(1)
            self._step_cache.put(VALUES, batch.keys, map(torch.cat, zip(before, after, strict=True)))

        return self._infer(shards, look)

    def _reward_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Score every sample by the reward model."""
        state = self._state
        if state.stage.reward_model is None:
            raise RefusedError(f"stage {state.stage.name!r} has no reward model")
        if self._reward_model is None:
            self._reward_model = load_reward_model(
                state.stage,
                companions=state.companions,
                dtype=state.model.dtype,
                device=state.gradient.device,
            )
        model, found = self._reward_model, dict[str, float]()

        def look(batch: MicroBatch) -> None:
            found.update(zip(batch.keys, objectives.scores(model, batch).tolist(), strict=True))

        result = self._infer(shards, look, kept="all")
        result.outputs = {"score": found}
        return result

    def _store_rollouts(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Write the samples to the run folder; the step does not change the state."""
        result = CallResult()
        with result.timed("store"):
            self._store(call)
        self._state.begin_update(check=self._check)
        self._state.end_update(call.step)
        COUNTERS.add("steps")
        return result

    def _token_advantages(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Compute and cache every token's advantage, whitened over the whole batch, and the critic's returns. The
        result of the call has each sample's mean advantage."""
        result = CallResult()
        learned = {index: [s for s in samples if s.is_learned] for index, samples in shards.items()}
        found: dict[str, TokenAdvantages] = {}

        def contribution(samples: Sequence[BatchSample]) -> Contribution:
            self._check()
            found.update(self._advantages_of(samples, with_critic=call.interface == "gae"))
            sums = advantages.moments(found[sample.key].advantages for sample in samples)
            device = self._state.gradient.device
            return Contribution(self._state.gradient[:0], sums.to(device), sums.new_zeros(0, device=device))

        total = whole_batch(
            call,
            learned,
            contribution=contribution,
            group=group,
            deterministic=self._deterministic,
            result=result,
            work="forward",
        )
        moments = total.sums.cpu()
        whitened = [advantages.whiten(each.advantages, moments) for each in found.values()]
        self._step_cache.put(TOKEN_ADVANTAGES, list(found), whitened)
        means = (float(each.mean()) if len(each) else 0.0 for each in whitened)
        result.outputs = {"mean_advantage": dict(zip(found, means, strict=True))}
        if call.interface == "gae":
            self._step_cache.put(RETURNS, list(found), (each.returns for each in found.values()))
        count, total_sum, _ = moments.tolist()
        result.metrics = {"advantage_mean": total_sum / max(count, 1.0)}
        return result

    def _advantages_of(
        self, samples: Sequence[BatchSample], *, with_critic: bool
    ) -> dict[str, TokenAdvantages]:
        """Advantages before whitening, from the tokens' rewards and, with a critic, its values."""
        stage = self._state.stage
        algorithm = stage.algorithm
        lengths = [len(sample.loss_positions) for sample in samples]
        references: Sequence[Tensor | None] = [None] * len(samples)
        if samples and stage.takes_kl_off_reward:
            joined = self._step_cache.joined(REFERENCE_LOGPROBS, [sample.key for sample in samples])
            references = joined.cpu().split(lengths)
        found = {}
        for sample, reference in zip(samples, references, strict=True):
            rewards = advantages.token_rewards(
                stage.total_reward(sample.values),
                torch.from_numpy(sample.logprobs),
                reference,
                beta=algorithm.beta,
                kl=algorithm.kl,
            )
            if with_critic:
                found[sample.key] = advantages.gae(
                    rewards,
                    self._step_cache.of(VALUES, sample.key),
                    truncated=sample.values.get("truncated", 0.0) > 0,
                    gamma=algorithm.gamma,
                    gae_lambda=algorithm.gae_lambda,
                )
            else:
                to_go = advantages.reward_to_go(rewards, gamma=algorithm.gamma)
                found[sample.key] = TokenAdvantages(to_go, to_go)
        return found


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
