"""Model function calls of a rank on PyTorch: a table from interface to method.

Training calls are those of `calls.py`, with torch's passes. An inference call runs a model on this rank's samples; its
tensors stay on the rank for later calls of the step (`step_cache.py`), and only scalars per sample are sent to the
master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from kintsugi.config.schema import COMPARE_SAMPLES
from kintsugi.errors import RefusedError
from kintsugi.model.known_answer import KnownAnswer
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.training import RunCall
from kintsugi.runtime.counters import COUNTERS
from kintsugi.training import advantages, losses, objectives
from kintsugi.training.advantages import TokenAdvantages
from kintsugi.training.batch import MicroBatch, cut
from kintsugi.training.calls import COMMON_SUMS, CallResult, Shards, TrainingCalls, whole_batch
from kintsugi.training.group import Column, Groups
from kintsugi.training.initial_weights import load_reward_model
from kintsugi.training.losses import BatchLoss
from kintsugi.training.objective_metrics import Objective
from kintsugi.training.packing import BatchSample, Kept
from kintsugi.training.pipeline import forward_pass, learning_pass, losses_alone
from kintsugi.training.reduction import Contribution
from kintsugi.training.state import TrainingState
from kintsugi.training.step_cache import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    StepCache,
)
from kintsugi.training.unit_gradients import Leaves
from kintsugi.training.unit_pass import UnitPass


class ModelCalls(TrainingCalls):
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
        super().__init__(state, deterministic=deterministic, check=check, store=store)
        self._state = state
        self._known_answer = KnownAnswer(state.gradient.device, dtype=state.model.dtype)
        self._reward_model: Transformer | None = None
        trained: dict[str, Callable[[TrainingState, StepCache], Objective]] = {
            "sft_train": objectives.Supervised,
            "policy_train": objectives.PolicyGradient,
            "dpo_train": objectives.DirectPreference,
            "reward_train": objectives.PairwiseReward,
            "critic_train": objectives.ValueRegression,
        }
        self._interfaces |= {
            "reference_inference": self._reference_inference,
            "proximal_inference": self._proximal_inference,
            "critic_inference": self._critic_inference,
            "reward_inference": self._reward_inference,
            "gae": self._token_advantages,
            "reward_to_go": self._token_advantages,
        }
        for name, objective in trained.items():
            self._interfaces[name] = self.trained_by(objective(state, self._step_cache))

    def run(self, call: RunCall, shards: Shards, *, groups: Groups) -> CallResult:
        self._state.enter(groups)
        return super().run(call, shards, groups=groups)

    def _contributions(
        self,
        batches: Mapping[int, Sequence[MicroBatch]],
        *,
        call: RunCall,
        objective: Objective,
        groups: Groups,
        learns: bool,
    ) -> Callable[[Sequence[MicroBatch]], Contribution]:
        in_order = [batch for index in sorted(batches) for batch in batches[index]]
        model = self._state.trained(objective.part)
        losses = partial(objective.loss, call=call)
        if learns:
            counts = accumulate(len(batches[index]) for index in sorted(batches))
            steps = learning_pass(
                model,
                in_order,
                groups=groups,
                loss=losses,
                check=self._check,
                tied=self._state.tied_gradient(objective.part),
                ends={count - 1 for count in counts},
            )
        else:
            steps = losses_alone(model, in_order, groups=groups, loss=losses, check=self._check)
        return partial(self._contribution, steps=steps, objective=objective, learns=learns)

    def _total(
        self,
        call: RunCall,
        batches: Mapping[int, Sequence[MicroBatch]],
        *,
        objective: Objective,
        groups: Groups,
        learns: bool,
        result: CallResult,
    ) -> Contribution:
        """A model whose weights are gathered by units is computed for all shards together; its gradient is then summed
        already, and only the statistics are left."""
        model = self._state.trained(objective.part)
        unit_pass = self._state.unit_pass(model)
        if unit_pass is None:
            return super()._total(
                call, batches, objective=objective, groups=groups, learns=learns, result=result
            )
        with result.timed("forward_backward"):
            found = self._unit_losses(
                call, batches, unit_pass=unit_pass, objective=objective, groups=groups, learns=learns
            )
        waited_s = unit_pass.take_waited_s()
        result.timing["forward_backward"] -= waited_s
        result.timing["reduce"] = result.timing.get("reduce", 0.0) + waited_s
        steps = iter(found)
        total = whole_batch(
            call,
            batches,
            contribution=lambda own: self._statistics(own, steps=steps, objective=objective),
            groups=groups,
            deterministic=self._deterministic,
            result=result,
            work="forward_backward",
        )
        total.gradient = self._state.gradient_of(objective.part)
        return total

    def _unit_losses(
        self,
        call: RunCall,
        batches: Mapping[int, Sequence[MicroBatch]],
        *,
        unit_pass: UnitPass,
        objective: Objective,
        groups: Groups,
        learns: bool,
    ) -> list[BatchLoss]:
        """Losses of all micro-batches of this rank, in their order; if the model learns, its gradient is complete."""
        in_order = [batch for index in sorted(batches) for batch in batches[index]]
        losses, group = partial(objective.loss, call=call), cast(Column, groups.data)
        if not learns:
            found: list[BatchLoss] = []
            unit_pass.look(
                in_order, look=lambda batch: found.append(losses(batch)), group=group, check=self._check
            )
            return found
        places, first = dict[int, range](), 0
        for index in sorted(batches):
            places[index] = range(first, first + len(batches[index]))
            first += len(batches[index])
        if self._deterministic:
            leaves = Leaves(call.num_shards, places, call.blocks)
        else:
            leaves = Leaves(group.size, {group.rank: range(first)}, ())
        return unit_pass.learn(in_order, leaves=leaves, loss=losses, group=group, check=self._check)

    def _contribution(
        self,
        batches: Sequence[MicroBatch],
        *,
        steps: Iterator[BatchLoss | None],
        objective: Objective,
        learns: bool,
    ) -> Contribution:
        """Gradient and statistics of the next micro-batches, which `steps` finishes one after the other."""
        state = self._state
        state.zero_gradient(objective.part)
        found = self._statistics(batches, steps=_counted(steps), objective=objective)
        found.gradient = state.gradient_of(objective.part) if learns else state.gradient[:0]
        return found

    def _statistics(
        self,
        batches: Sequence[MicroBatch],
        *,
        steps: Iterator[BatchLoss | None],
        objective: Objective,
    ) -> Contribution:
        """Statistics of the next micro-batches, without a gradient."""
        device = self._state.gradient.device
        names = (*COMMON_SUMS, *objective.sums)
        sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        maxima = torch.zeros(len(objective.maxima), dtype=torch.float64, device=device)
        zero = sums.new_zeros(())
        for batch in batches:
            found = next(steps)
            if found is None:
                continue
            named = {
                "loss": found.loss.detach().double(),
                "tokens": zero + batch.tokens.numel(),
                "loss_tokens": zero + batch.targets.numel(),
                **found.sums,
            }
            sums += torch.stack([named[name] for name in names])
            if objective.maxima:
                maxima = torch.maximum(maxima, torch.stack([found.maxima[name] for name in objective.maxima]))
        return Contribution(self._state.gradient[:0], sums, maxima)

    def _micro_batches(self, samples: Sequence[BatchSample], *, kept: Kept) -> list[MicroBatch]:
        device = self._state.gradient.device
        max_tokens = self._state.stage.actor.block_tokens(
            deterministic=self._deterministic, is_cpu=device.type == "cpu"
        )
        return cut(
            samples, deterministic=self._deterministic, max_tokens=max_tokens, device=device, kept=kept
        )

    def _check_device(self) -> None:
        self._known_answer.check()

    def _look(
        self,
        shards: Shards,
        look: Callable[[MicroBatch], None],
        *,
        model: Transformer,
        groups: Groups,
        kept: Kept = "learned",
    ) -> CallResult:
        """Call a function, which runs the model, with every micro-batch, without gradient."""
        result = CallResult()
        with result.timed("forward"):
            batches = [batch for every in self._cut(shards, kept=kept).values() for batch in every]
            unit_pass = self._state.unit_pass(model)
            if unit_pass is not None:
                group = cast(Column, groups.data)
                unit_pass.look(batches, look=look, group=group, check=self._check)
                return result
            for _ in forward_pass(model, batches, groups=groups, look=look, check=self._check):
                COUNTERS.add("micro_batches")
        return result

    def _reference_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
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

        result = self._look(shards, look, model=model, groups=groups, kept="groups" if is_dpo else "learned")
        if by_sample:
            result.outputs = {"reference_kl": divergences}
        return result

    def _proximal_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Compute and cache the log-probabilities under the weights before the first update of the step."""
        model, temperature = self._state.model, call.arguments["temperature"]

        def look(batch: MicroBatch) -> None:
            logprobs, _ = objectives.token_logprobs(model, batch, temperature=temperature)
            self._step_cache.put(PROXIMAL_LOGPROBS, batch.keys, logprobs.split(list(batch.loss_lengths)))

        return self._look(shards, look, model=model, groups=groups)

    def _critic_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Compute and cache the critic's values of the states before each loss token, and of the one after the last."""
        critic = self._state.critic

        def look(batch: MicroBatch) -> None:
            hidden = critic.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
            values = critic.values(hidden.index_select(0, torch.cat((batch.sources, batch.lasts)))).cpu()
            before = values[: len(batch.sources)].split(list(batch.loss_lengths))
            after = values[len(batch.sources) :].split(1)
            self._step_cache.put(VALUES, batch.keys, map(torch.cat, zip(before, after, strict=True)))

        return self._look(shards, look, model=critic, groups=groups)

    def _reward_inference(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
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
                seat=state.seat,
                tensors=state.tensor_group,
            )
        model, found = self._reward_model, dict[str, float]()

        def look(batch: MicroBatch) -> None:
            found.update(zip(batch.keys, objectives.scores(model, batch).tolist(), strict=True))

        result = self._look(shards, look, model=model, groups=groups, kept="all")
        result.outputs = {"score": found}
        return result

    def _token_advantages(self, call: RunCall, shards: Shards, groups: Groups) -> CallResult:
        """Compute and cache every token's advantage, whitened over the whole batch, and the critic's returns. The
        result of the call has each sample's mean advantage."""
        result = CallResult()
        learned = {index: [s for s in samples if s.is_learned] for index, samples in shards.items()}
        found: dict[str, TokenAdvantages] = {}

        def contribution(samples: Sequence[BatchSample]) -> Contribution:
            self._check()
            if self._state.seat.is_last:  # The others have no values of samples.
                found.update(self._advantages_of(samples, with_critic=call.interface == "gae"))
            sums = advantages.moments(found[s.key].advantages for s in samples if s.key in found)
            device = self._state.gradient.device
            return Contribution(self._state.gradient[:0], sums.to(device), sums.new_zeros(0, device=device))

        total = whole_batch(
            call,
            learned,
            contribution=contribution,
            groups=groups,
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


def _counted(steps: Iterator[BatchLoss | None]) -> Iterator[BatchLoss | None]:
    """The same micro-batches, each counted when it is finished."""
    for found in steps:
        COUNTERS.add("micro_batches")
        yield found
