"""What a model function call does on a rank: a table from interface to method.

A training call makes the stage's updates of one model on the whole batch, each from a gradient summed over all ranks;
the last one of a step leaves the rank prepared. An inference call looks at this rank's samples; what it finds stays
here for the step's later calls, and only scalars per sample travel. Metrics are sums over all shards of all ranks, so
every rank reports the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kintsugi.config import COMPARE_SAMPLES
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.messages import RunCall
from kintsugi.model.known_answer import KnownAnswer
from kintsugi.model.transformer import Transformer
from kintsugi.runtime import COUNTERS
from kintsugi.training import advantages, losses, objectives
from kintsugi.training.advantages import TokenAdvantages
from kintsugi.training.batch import Kept, MicroBatch, Sample, check_staleness, cut
from kintsugi.training.group import ProcessGroup
from kintsugi.training.kept import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    KeptForStep,
)
from kintsugi.training.layout import ACTOR
from kintsugi.training.objectives import Objective, Totals
from kintsugi.training.origins import load_reward_model
from kintsugi.training.passes import CallResult, whole_batch
from kintsugi.training.reduction import Contribution
from kintsugi.training.state import TrainingState, Update

Shards = Mapping[int, Sequence[Sample]]
"""This rank's, by index."""
Interface = Callable[[RunCall, Shards, ProcessGroup], CallResult]

COMMON_SUMS = ("loss", "tokens", "loss_tokens")


class ModelCalls:
    """Carries out calls on one rank's state; remembers within a step what later calls read."""

    def __init__(
        self,
        state: TrainingState,
        *,
        deterministic: bool,
        check: Callable[[], None] = lambda: None,
        store: Callable[[RunCall], None] = lambda call: None,
    ) -> None:
        """`check` is called between micro-batches and raises when the call is to be given up; `store` keeps the samples
        of a call in the run folder."""
        self._state = state
        self._deterministic = deterministic
        self._check = check
        self._store = store
        self._known_answer = KnownAnswer(state.gradient.device, dtype=state.model.dtype)
        self._kept = KeptForStep()
        self._reward_model: Transformer | None = None
        trained: dict[str, Callable[[TrainingState, KeptForStep], Objective]] = {
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
            self._interfaces[name] = partial(self._train, objective=objective(state, self._kept))

    def forget(self) -> None:
        """Drop what was kept for the current step."""
        self._kept.clear()

    def run(self, call: RunCall, shards: Shards, *, group: ProcessGroup) -> CallResult:
        """Carry out a call on this rank's shards. What a damaged device computed is not given out."""
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
            if index == 0:
                _check_whole(totals[0], call)
                state.begin_update()
            with result.timed("optimizer"):
                updates.append(NOT_UPDATED if waits else state.update(total.gradient, part=objective.part))
        if call.prepares:
            state.end_update(call.step)
            COUNTERS.add("steps")
        else:
            state.pause_update()
        result.metrics = objective.metrics(totals, updates)
        COUNTERS.add("tokens_trained", sum(len(s.tokens) for samples in shards.values() for s in samples))
        return result

    def _contribution(
        self, batches: Sequence[MicroBatch], *, call: RunCall, objective: Objective, learns: bool
    ) -> Contribution:
        """Gradient and statistics of some micro-batches, added up in their order."""
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
                state.collect_gradient(objective.part)
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
        return Contribution(gradient.clone(), sums, maxima)

    def _cut(self, shards: Shards, *, kept: Kept = "learned") -> dict[int, list[MicroBatch]]:
        """Micro-batches by shard; in the mode that does not care for order, all of them under the first shard."""
        max_tokens, device = self._state.stage.actor.micro_batch_tokens, self._state.gradient.device
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
        """Show every micro-batch to a function, without gradient."""
        result = CallResult()
        with result.timed("forward"):
            for batches in self._cut(shards, kept=kept).values():
                for batch in batches:
                    self._check()
                    look(batch)
                    COUNTERS.add("micro_batches")
        return result

    def _reference_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """The reference's log-probabilities stay here. Where the KL is taken off the reward of whole samples, the sum
        of each one's estimates travels."""
        stage = self._state.stage
        algorithm = stage.algorithm
        model, is_dpo = self._state.reference_model, algorithm.name == "dpo"
        temperature = 1.0 if is_dpo else call.arguments["temperature"]
        by_sample = stage.takes_kl_off_reward and algorithm.name in COMPARE_SAMPLES
        divergences = {sample.key: 0.0 for samples in shards.values() for sample in samples}

        def look(batch: MicroBatch) -> None:
            logprobs, _ = objectives.token_logprobs(model, batch, temperature=temperature)
            parts = logprobs.split(list(batch.loss_lengths))
            self._kept.put(REFERENCE_LOGPROBS, batch.keys, parts)
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
        """The log-probabilities of the weights with which the step begins, before any update of it."""
        model, temperature = self._state.model, call.arguments["temperature"]

        def look(batch: MicroBatch) -> None:
            logprobs, _ = objectives.token_logprobs(model, batch, temperature=temperature)
            self._kept.put(PROXIMAL_LOGPROBS, batch.keys, logprobs.split(list(batch.loss_lengths)))

        return self._infer(shards, look)

    def _critic_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """The critic's values of the states before each loss token, and of the one after the last."""
        critic = self._state.critic

        def look(batch: MicroBatch) -> None:
            hidden = critic.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
            values = critic.values(hidden.index_select(0, torch.cat((batch.sources, batch.lasts)))).cpu()
            before = values[: len(batch.sources)].split(list(batch.loss_lengths))
            after = values[len(batch.sources) :].split(1)
            self._kept.put(VALUES, batch.keys, map(torch.cat, zip(before, after, strict=True)))

        return self._infer(shards, look)

    def _reward_inference(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """The reward model's score of every sample."""
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
        """Keep the samples; the state is the same after the step."""
        result = CallResult()
        with result.timed("store"):
            self._store(call)
        self._state.begin_update()
        self._state.end_update(call.step)
        COUNTERS.add("steps")
        return result

    def _token_advantages(self, call: RunCall, shards: Shards, group: ProcessGroup) -> CallResult:
        """Advantages of every token, whitened over the whole batch's, and the critic's returns; they stay here. What
        people are told of a sample is the mean over its tokens."""
        result = CallResult()
        learned = {index: [s for s in samples if s.is_learned] for index, samples in shards.items()}
        found: dict[str, TokenAdvantages] = {}

        def contribution(samples: Sequence[Sample]) -> Contribution:
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
        self._kept.put(TOKEN_ADVANTAGES, list(found), whitened)
        means = (float(each.mean()) if len(each) else 0.0 for each in whitened)
        result.outputs = {"mean_advantage": dict(zip(found, means, strict=True))}
        if call.interface == "gae":
            self._kept.put(RETURNS, list(found), (each.returns for each in found.values()))
        count, total_sum, _ = moments.tolist()
        result.metrics = {"advantage_mean": total_sum / max(count, 1.0)}
        return result

    def _advantages_of(self, samples: Sequence[Sample], *, with_critic: bool) -> dict[str, TokenAdvantages]:
        """Before whitening, from the tokens' rewards and, with a critic, its values."""
        stage = self._state.stage
        algorithm = stage.algorithm
        lengths = [len(sample.loss_positions) for sample in samples]
        references: Sequence[Tensor | None] = [None] * len(samples)
        if samples and stage.takes_kl_off_reward:
            joined = self._kept.joined(REFERENCE_LOGPROBS, [sample.key for sample in samples])
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
                    self._kept.of(VALUES, sample.key),
                    truncated=sample.values.get("truncated", 0.0) > 0,
                    gamma=algorithm.gamma,
                    gae_lambda=algorithm.gae_lambda,
                )
            else:
                to_go = advantages.reward_to_go(rewards, gamma=algorithm.gamma)
                found[sample.key] = TokenAdvantages(to_go, to_go)
        return found


NOT_UPDATED = Update(grad_norm=0.0, learning_rate=0.0, applied=True)
"""Of a model that waits."""


def _named(total: Contribution, objective: Objective) -> Totals:
    names = (*COMMON_SUMS, *objective.sums, *(f"{name}/max" for name in objective.maxima))
    return dict(zip(names, (*total.sums.tolist(), *total.maxima.tolist()), strict=True))


def _check_whole(total: Totals, call: RunCall) -> None:
    """The denominators were taken over the batch that was actually summed."""
    found, expected = total["loss_tokens"], call.totals["tokens"]
    if found != expected:
        raise IntegrityError(
            f"step {call.step}: expected {expected:.0f} loss tokens over all ranks, got {found:.0f}"
        )
