"""What each training call minimises, micro-batch by micro-batch, and what its sums over the batch mean.

An objective gives a micro-batch's share of the batch's mean loss, ready for the backward pass, and statistics as sums
and maxima that are added up exactly over shards and ranks. `metrics` turns the batch's totals into the names that
people read; names of different calls never meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kintsugi.errors import IntegrityError
from kintsugi.messages import RunCall
from kintsugi.model.transformer import Transformer
from kintsugi.training import losses
from kintsugi.training.batch import Kept, MicroBatch
from kintsugi.training.kept import (
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    KeptForStep,
)
from kintsugi.training.layout import ACTOR, CRITIC
from kintsugi.training.losses import TokenLosses
from kintsugi.training.state import TrainingState, Update

Totals = Mapping[str, float]
"""Of one update: sums and maxima by name."""


class BatchLoss(NamedTuple):
    """A micro-batch's share of the batch's mean loss, and its statistics."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class Objective(Protocol):
    """One training interface."""

    @property
    def part(self) -> str:
        """The model that learns."""
        ...

    @property
    def kept(self) -> Kept:
        """Which samples it needs."""
        ...

    @property
    def sums(self) -> tuple[str, ...]: ...

    @property
    def maxima(self) -> tuple[str, ...]: ...

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss: ...

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """From every update's totals; `loss`, `tokens` and `loss_tokens` are always among the sums."""
        ...


class _Shared:
    """What the objectives share; the actor learns unless one says otherwise."""

    part = ACTOR
    kept: Kept = "learned"
    maxima: tuple[str, ...] = ()

    def __init__(self, state: TrainingState, kept_for_step: KeptForStep) -> None:
        self._state = state
        self._kept_for_step = kept_for_step

    def _mean(self, token_losses: TokenLosses, batch: MicroBatch, call: RunCall) -> Tensor:
        """Over the batch's loss tokens, by the algorithm's denominator. What is stale may weigh less; the rest does not
        weigh more for it."""
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

    def _common_metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        return {
            "loss": _mean_of(totals, "loss"),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "learning_rate": updates[-1].learning_rate,
            "skipped": float(sum(not update.applied for update in updates)),
            "tokens": totals[0]["tokens"],
            "loss_tokens": totals[0]["loss_tokens"],
        }


class Supervised(_Shared):
    """`sft_train`: the completion's tokens are to become likely."""

    sums = ("entropy",)

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        logprobs, entropy = token_logprobs(self._state.model, batch, temperature=1.0)
        token_losses = losses.sft_loss(logprobs, torch.ones_like(logprobs))
        return BatchLoss(self._mean(token_losses, batch, call), {"entropy": _exact_sum(entropy)}, {})

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        first = totals[0]
        return {
            **self._common_metrics(totals, updates),
            "entropy": first["entropy"] / max(first["loss_tokens"], 1.0),
        }


class PolicyGradient(_Shared):
    """`policy_train`: all algorithms in which tokens are sampled and have an advantage."""

    sums = (
        *("entropy", "clip_ratio", "kl", "behaviour_kl", "ratio", "logprob_abs_diff"),
        *("importance_weight", "importance_capped", "staleness"),
    )
    maxima = ("logprob_abs_diff", "importance_weight")

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        stage = self._state.stage
        algorithm = stage.algorithm
        logprobs, entropy = token_logprobs(
            self._state.model, batch, temperature=call.arguments["temperature"]
        )
        advantages, reference = batch.advantages, None
        if advantages is None:
            advantages = self._kept_for_step.joined(TOKEN_ADVANTAGES, batch.keys).to(logprobs.device)
        if stage.has_reference:
            reference = self._kept_for_step.joined(REFERENCE_LOGPROBS, batch.keys)
        staleness = batch.token_staleness(step=call.step)
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
            proximal_logprobs=self._proximal(logprobs, batch, staleness=staleness),
            importance="mask" if algorithm.importance == "mask" else "cap",
            importance_cap=algorithm.importance_cap,
            reference_logprobs=reference,
            beta=algorithm.beta if algorithm.kl_in == "loss" else 0.0,
            kl=algorithm.kl,
            entropy=entropy,
            entropy_weight=algorithm.entropy_weight,
        )
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
            return self._kept_for_step.joined(PROXIMAL_LOGPROBS, batch.keys)
        if stage.algorithm.proximal == "recompute" or stage.algorithm.importance == "truncate":
            return logprobs.detach()
        return None

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """Means over the loss tokens and, where an update changes them, over the step's updates.

        How far sampler and trainer agree is taken before the first update; afterwards they differ by intent. The ratio
        is that to the sampler, whatever the updates stay close to.
        """
        first = totals[0]
        num_tokens = max(first["loss_tokens"], 1.0)
        return {
            **self._common_metrics(totals, updates),
            **(self._importance(totals) if self._state.stage.weighs_samples else {}),
            "entropy": first["entropy"] / num_tokens,
            "kl": _mean_of(totals, "kl") / num_tokens,
            "behaviour_kl": first["behaviour_kl"] / num_tokens,
            "clip_ratio": _mean_of(totals, "clip_ratio") / num_tokens,
            "ratio_mean": first["ratio"] / num_tokens,
            "token_staleness_mean": first["staleness"] / num_tokens,
            "logprob_abs_diff_mean": first["logprob_abs_diff"] / num_tokens,
            "logprob_abs_diff_max": first["logprob_abs_diff/max"],
        }

    def _importance(self, totals: Sequence[Totals]) -> dict[str, float]:
        """How much is made up for another policy having sampled."""
        num_tokens = max(totals[0]["loss_tokens"], 1.0)
        return {
            "importance_weight_mean": _mean_of(totals, "importance_weight") / num_tokens,
            "importance_weight_max": max(each["importance_weight/max"] for each in totals),
            "importance_capped_share": _mean_of(totals, "importance_capped") / num_tokens,
        }


class _OfPairs(_Shared):
    """Sample 0 of a ticket is the chosen completion, sample 1 the rejected one; the mean is over pairs."""

    kept: Kept = "groups"
    sums = ("pairs", "accuracy", "margin")
    prefix = ""

    def _pair_loss(self, pair_losses: TokenLosses, call: RunCall) -> BatchLoss:
        num_pairs = len(pair_losses.losses)
        pairs = torch.tensor(float(num_pairs), dtype=torch.float64, device=pair_losses.losses.device)
        loss = (pair_losses.losses / max(call.totals["groups"], 1.0)).sum()
        return BatchLoss(loss, {"pairs": pairs, **pair_losses.sums}, {})

    def metrics(self, totals: Sequence[Totals], updates: Sequence[Update]) -> dict[str, float]:
        """Accuracy and margin are those of the weights that the step began with."""
        first = totals[0]
        num_pairs = max(first["pairs"], 1.0)
        return {
            **self._common_metrics(totals, updates),
            f"{self.prefix}_accuracy": first["accuracy"] / num_pairs,
            f"{self.prefix}_margin": first["margin"] / num_pairs,
        }


class DirectPreference(_OfPairs):
    """`dpo_train`."""

    prefix = "dpo"

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        logprobs, _ = token_logprobs(self._state.model, batch, temperature=1.0)
        reference = self._kept_for_step.joined(REFERENCE_LOGPROBS, batch.keys)
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
    """`critic_train`: the critic learns what the states were worth."""

    part = CRITIC
    sums = ("value_clip_ratio", "value", "return", "return_squared", "residual", "residual_squared")

    def loss(self, batch: MicroBatch, call: RunCall) -> BatchLoss:
        values = values_before(self._state.critic, batch)
        old = torch.cat([self._kept_for_step.of(VALUES, key)[:-1] for key in batch.keys])
        returns = self._kept_for_step.joined(RETURNS, batch.keys)
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
            "value_loss": _mean_of(totals, "loss"),
            "critic_grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "critic_learning_rate": updates[-1].learning_rate,
            "critic_skipped": float(sum(not update.applied for update in updates)),
            "value_clip_ratio": _mean_of(totals, "value_clip_ratio") / num_tokens,
            "values_mean": first["value"] / num_tokens,
            "returns_mean": first["return"] / num_tokens,
            "explained_variance": losses.explained_variance(first, count=num_tokens),
        }


def token_logprobs(model: Transformer, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every loss token of a micro-batch, and nowhere else."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.token_logprobs(hidden.index_select(0, batch.sources), batch.targets, temperature=temperature)


def values_before(model: Transformer, batch: MicroBatch) -> Tensor:
    """The critic's value of the state in which each loss token was chosen."""
    hidden = model.forward_packed(batch.tokens, batch.layout.positions, batch.layout)
    return model.values(hidden.index_select(0, batch.sources))


def scores(model: Transformer, batch: MicroBatch) -> Tensor:
    """A reward model's score of each sequence: the value of its last token's state."""
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


def _mean_of(totals: Sequence[Totals], name: str) -> float:
    return sum(each[name] for each in totals) / len(totals)
