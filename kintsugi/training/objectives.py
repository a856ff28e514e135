"""Objectives of the training calls: the loss of each micro-batch, and metrics from the totals of the batch.

An objective returns a micro-batch's part of the mean loss of the batch, ready for the backward pass, and statistics as
sums and maxima, which are combined exactly over shards and ranks. `metrics` turns the totals of the batch into reported
metrics; different calls use different names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kintsugi.config.custom_algorithm import FIELD, CustomAlgorithm, custom_algorithm
from kintsugi.config.schema import Algorithm
from kintsugi.errors import IntegrityError, UserError
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.training import RunCall
from kintsugi.training import losses
from kintsugi.training.batch import MicroBatch
from kintsugi.training.layout import CRITIC
from kintsugi.training.losses import BatchLoss, TokenLosses
from kintsugi.training.objective_metrics import (
    ObjectiveMetrics,
    PolicyMetrics,
    SupervisedMetrics,
    Totals,
    mean_of,
)
from kintsugi.training.packing import Kept
from kintsugi.training.rank_state import Update
from kintsugi.training.state import TrainingState
from kintsugi.training.step_cache import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    StepCache,
)


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """Argument of `CustomAlgorithm.token_loss`: one entry for every loss token of a micro-batch, sequence by sequence.

    Masked samples are left out. Only `logprobs` and `entropy` carry a gradient.
    """

    logprobs: Tensor
    """Log-probabilities under the policy that is updated."""
    sampler_logprobs: Tensor
    """Log-probabilities under the policy that sampled, as the generation servers reported them."""
    proximal_logprobs: Tensor
    """Log-probabilities under the policy that updates must stay close to (`algorithm.proximal`)."""
    reference_logprobs: Tensor | None
    """Log-probabilities under the reference model; None while `algorithm.beta` is 0."""
    advantages: Tensor
    entropy: Tensor
    """Entropy of the policy's distribution at the token."""
    staleness: Tensor
    """Steps between the weights that sampled the token and those with which the step begins."""
    sequence_index: Tensor
    """Sequence of each token, from 0 to `num_sequences` − 1."""
    num_sequences: int


class _Shared(ObjectiveMetrics):
    """Common part of the objectives: the weighted mean of token losses."""

    def __init__(self, state: TrainingState, step_cache: StepCache) -> None:
        super().__init__(state)
        self._state = state
        self._step_cache = step_cache

    def _mean(self, token_losses: TokenLosses, batch: MicroBatch, call: RunCall) -> Tensor:
        """Weighted sum of losses, by the algorithm's denominator. Stale samples may have a lower weight; the weights of
        the others do not change."""
        weights = losses.token_weights(
            torch.ones_like(token_losses.losses),
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            totals=call.totals,
            denominator=self._state.stage.algorithm.denominator,
        )
        decay = self._state.stage.asynchrony.decay
        if decay < 1:
            weights = weights * (decay**batch.staleness)[batch.sequence_index]
        return (token_losses.losses * weights).sum()


class Supervised(_Shared, SupervisedMetrics):
    """`sft_train`: maximise the likelihood of the completions."""

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        logprobs, entropy = token_logprobs(self._state.model, batch, temperature=1.0)
        token_losses = losses.sft_loss(logprobs, torch.ones_like(logprobs))
        return BatchLoss(self._mean(token_losses, batch, call), {"entropy": _exact_sum(entropy)}, {})


class PolicyGradient(_Shared, PolicyMetrics):
    """`policy_train`: policy gradient of all algorithms with sampled tokens and advantages."""

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        stage = self._state.stage
        algorithm = stage.algorithm
        logprobs, entropy = token_logprobs(
            self._state.model, batch, temperature=call.arguments["temperature"]
        )
        advantages, reference = batch.advantages, None
        if advantages is None:
            advantages = self._step_cache.joined(TOKEN_ADVANTAGES, batch.keys).to(logprobs.device)
        if stage.has_reference:
            reference = self._step_cache.joined(REFERENCE_LOGPROBS, batch.keys)
        staleness = batch.token_staleness(step=call.step)
        proximal = self._proximal(logprobs, batch, staleness=staleness)
        token_losses = losses.policy_loss(
            logprobs,
            batch.sampler_logprobs,
            advantages,
            torch.ones_like(logprobs),
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ratio=algorithm.ratio,
            proximal_logprobs=proximal,
            importance="mask" if algorithm.importance == "mask" else "cap",
            importance_cap=algorithm.importance_cap,
            reference_logprobs=reference,
            beta=algorithm.beta if algorithm.kl_in == "loss" else 0.0,
            kl=algorithm.kl,
            entropy=entropy,
            entropy_weight=algorithm.entropy_weight,
        )
        custom = custom_algorithm(algorithm)
        if custom is not None and custom.token_loss is not None:
            tokens = PolicyTokens(
                logprobs,
                batch.sampler_logprobs,
                batch.sampler_logprobs if proximal is None else proximal,
                reference,
                advantages,
                entropy,
                staleness,
                batch.sequence_index,
                batch.num_sequences,
            )
            token_losses = token_losses._replace(losses=_custom_losses(custom, tokens, settings=algorithm))
        sums = {"entropy": _exact_sum(entropy), "staleness": _exact_sum(staleness), **token_losses.sums}
        return BatchLoss(self._mean(token_losses, batch, call), sums, token_losses.maxima)

    def _proximal(self, logprobs: Tensor, batch: MicroBatch, *, staleness: Tensor) -> Tensor | None:
        """The log-probabilities that the updates must stay close to; None for the sampler's.

        Before the first update the policy is the one with which the step begins. Truncated importance sampling stays
        close to nothing: every update starts from where it is, and all of π/μ is weight.
        """
        stage = self._state.stage
        if stage.algorithm.proximal == "approximate":
            return losses.proximal_estimate(logprobs, batch.sampler_logprobs, staleness=staleness)
        if stage.asks_proximal:
            return self._step_cache.joined(PROXIMAL_LOGPROBS, batch.keys)
        if stage.algorithm.proximal == "recompute" or stage.algorithm.importance == "truncate":
            return logprobs.detach()
        return None


def _custom_losses(custom: CustomAlgorithm, tokens: PolicyTokens, *, settings: Algorithm) -> Tensor:
    """Call the user's loss function and check its result. The statistics remain those of the built-in loss."""
    assert custom.token_loss is not None
    found: object = custom.token_loss(tokens, settings)
    expected = tuple(tokens.logprobs.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != expected:
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"`{FIELD}`: expected one loss per token from `token_loss` of {settings.custom}, a tensor of shape "
            f"{expected}, got {got}"
        )
    if tokens.logprobs.requires_grad and not found.requires_grad:
        raise UserError(
            f"`{FIELD}`: expected a loss with a gradient from `token_loss` of {settings.custom}, got one that does not "
            "depend on `tokens.logprobs` or `tokens.entropy`"
        )
    return found


class _OfPairs(_Shared):
    """Common part of pairwise objectives: sample 0 of a ticket is chosen, sample 1 rejected; means are over pairs."""

    kept: Kept = "groups"
    sums = ("pairs", "accuracy", "margin")
    prefix = ""

    def _pair_loss(self, pair_losses: TokenLosses, call: RunCall) -> BatchLoss:
        num_pairs = len(pair_losses.losses)
        pairs = torch.tensor(float(num_pairs), dtype=torch.float64, device=pair_losses.losses.device)
        loss = (pair_losses.losses / max(call.totals["groups"], 1.0)).sum()
        return BatchLoss(loss, {"pairs": pairs, **pair_losses.sums}, {})

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """Accuracy and margin are those of the weights at the beginning of the step."""
        first = totals[0]
        num_pairs = max(first["pairs"], 1.0)
        return {
            **self.common_metrics(totals, updates),
            f"{self.prefix}_accuracy": first["accuracy"] / num_pairs,
            f"{self.prefix}_margin": first["margin"] / num_pairs,
        }


class DirectPreference(_OfPairs):
    """`dpo_train`."""

    prefix = "dpo"

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        logprobs, _ = token_logprobs(self._state.model, batch, temperature=1.0)
        reference = self._step_cache.joined(REFERENCE_LOGPROBS, batch.keys)
        chosen, rejected = in_pairs(batch, _sums_of_sequences(logprobs, batch))
        reference_chosen, reference_rejected = in_pairs(batch, _sums_of_sequences(reference, batch))
        pair_losses = losses.dpo_loss(
            chosen,
            rejected,
            reference_chosen=reference_chosen,
            reference_rejected=reference_rejected,
            beta=self._state.stage.algorithm.beta,
        )
        return self._pair_loss(pair_losses, call)


class PairwiseReward(_OfPairs):
    """`reward_train`."""

    prefix = "rm"

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        chosen, rejected = in_pairs(batch, scores(self._state.model, batch))
        return self._pair_loss(losses.reward_model_loss(chosen, rejected), call)


class ValueRegression(_Shared):
    """`critic_train`: regression of the critic's values on the returns."""

    part = CRITIC
    sums = ("value_clip_ratio", "value", "return", "return_squared", "residual", "residual_squared")

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        values = values_before(self._state.critic, batch)
        old = torch.cat([self._step_cache.of(VALUES, key)[:-1] for key in batch.keys])
        returns = self._step_cache.joined(RETURNS, batch.keys)
        token_losses = losses.value_loss(
            values,
            old.to(values.device),
            returns.to(values.device),
            torch.ones_like(values),
            value_clip=self._state.stage.critic.value_clip,
        )
        return BatchLoss(self._mean(token_losses, batch, call), token_losses.sums, {})

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        first = totals[0]
        num_tokens = max(first["loss_tokens"], 1.0)
        return {
            "value_loss": mean_of(totals, "loss"),
            "critic_grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "critic_learning_rate": updates[-1].learning_rate,
            "critic_skipped": float(sum(not update.applied for update in updates)),
            "value_clip_ratio": mean_of(totals, "value_clip_ratio") / num_tokens,
            "values_mean": first["value"] / num_tokens,
            "returns_mean": first["return"] / num_tokens,
            "explained_variance": losses.explained_variance(first, count=num_tokens),
        }


def token_logprobs(model: Transformer, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every loss token of a micro-batch, and nowhere else."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.token_logprobs(hidden.index_select(0, batch.sources), batch.targets, temperature=temperature)


def values_before(model: Transformer, batch: MicroBatch) -> Tensor:
    """Values of the critic for the states in which the loss tokens were chosen."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.values(hidden.index_select(0, batch.sources))


def scores(model: Transformer, batch: MicroBatch) -> Tensor:
    """Scores of a reward model for each sequence: the value at its last token."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.values(hidden.index_select(0, batch.lasts))


def in_pairs(batch: MicroBatch, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Entries of the chosen and of the rejected sequences of a micro-batch."""
    tickets = [key.rpartition("/") for key in batch.keys]
    for first, second in zip(tickets[0::2], tickets[1::2], strict=False):
        if (first[0], first[2], second[2]) != (second[0], "0", "1"):
            raise IntegrityError(f"expected samples 0 and 1 of one ticket, got {first} and {second}")
    if len(tickets) % 2:
        raise IntegrityError(f"expected pairs, got {len(tickets)} samples, {batch.keys[-1]} among them")
    return entries[0::2], entries[1::2]


def _sums_of_sequences(entries: Tensor, batch: MicroBatch) -> Tensor:
    return losses.sequence_sums(
        entries, sequence_index=batch.sequence_index, num_sequences=batch.num_sequences
    )


def _exact_sum(entries: Tensor) -> Tensor:
    return entries.detach().double().sum()
