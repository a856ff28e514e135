"""Loss functions, as pure functions over packed tokens.

Every tensor has one entry per predicted token (per pair where a function says so); a mask of 0 excludes a token,
whatever its value. A loss function returns losses per entry and statistics as *sums*. Nothing is divided here, because
a mean over the optimizer batch needs a denominator that no micro-batch, shard or rank knows. `token_weights` contains
that denominator, which the master computed over the whole batch; the sum of losses × weights over all ranks is the mean
of the batch.

Notation: π the policy (`logprobs`), μ the policy that sampled (`old_logprobs`), prox the policy that updates must stay
close to (`proximal_logprobs`), ref the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

Denominator = Literal["tokens", "sequences", "constant"]
Ratio = Literal["token", "sequence", "sequence_mean"]
Importance = Literal["cap", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Ratios are limited to e^20, in value and gradient. A ratio that overflows, multiplied by the factor 0 of clipping or
a mask, is NaN and would spoil the gradient of the whole batch."""


class BatchLoss(NamedTuple):
    """A micro-batch's part of the mean loss of the batch, and its statistics."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class TokenLosses(NamedTuple):
    """Losses per token or pair (0 where masked), and sums and maxima of statistics by name."""

    losses: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def sft_loss(logprobs: Tensor, mask: Tensor) -> TokenLosses:
    """Negative log-likelihood of the tokens to learn."""
    return TokenLosses(-_keep(logprobs, mask), {}, {})


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sequence_index: Tensor,
    num_sequences: int,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
    proximal_logprobs: Tensor | None = None,
    importance: Importance = "cap",
    importance_cap: float = inf,
    reference_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl: KlEstimator = "k3",
    entropy: Tensor | None = None,
    entropy_weight: float = 0.0,
) -> TokenLosses:
    """PPO's clipped policy gradient, −w min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)A), with optional KL and entropy.

    ρ = π/prox, by `ratio`: of each token (PPO, GRPO, …); of the whole sequence, the product of its tokens' (RLOO); or
    the geometric mean of its tokens' (GSPO). A sequence's ρ stands at each of its tokens, so `token_weights` with the
    denominator "sequences" turns it into a mean over sequences. w = prox/μ, a constant taken in the same way, makes up
    for μ having sampled: kept at most at `importance_cap`, or what exceeds it leaves the loss (`importance` "mask").
    Without `proximal_logprobs` prox is μ, w is 1, and ρ = π/μ also corrects for whatever differs between sampler and
    trainer. Where samples are fresh (prox is μ but for rounding) both are the same; with π as its own prox, bit by bit.

    `beta` × `kl_loss` is added (0 where the KL is part of the reward), `entropy_weight` × entropy taken off.
    """
    logprobs, old_logprobs, advantages = (
        _keep(values, mask) for values in (logprobs, old_logprobs, advantages)
    )
    proximal = old_logprobs if proximal_logprobs is None else _keep(proximal_logprobs, mask)
    compare = partial(
        _compared, mask=mask, ratio=ratio, sequence_index=sequence_index, num_sequences=num_sequences
    )
    compared, weight = compare(logprobs - proximal), compare(proximal - old_logprobs)
    capped, clipped = weight.clamp(max=importance_cap), compared.clamp(1 - clip_low, 1 + clip_high)
    # The weight comes before the advantage, where a ratio to the sampler stands: in this order equal means equal bits.
    losses = -torch.minimum(capped * compared * advantages, capped * clipped * advantages)
    reference = None if reference_logprobs is None else _keep(reference_logprobs, mask)
    if beta > 0:
        assert reference is not None, "a KL in the loss needs a reference"
        of_token = _exp(proximal - old_logprobs).clamp(max=importance_cap) * _exp(logprobs - proximal)
        losses = losses + beta * kl_loss(logprobs, reference, weight=of_token, estimator=kl)
    if entropy_weight > 0:
        assert entropy is not None, "an entropy bonus needs the entropy"
        losses = losses - entropy_weight * _keep(entropy, mask)
    learned = mask * (weight <= importance_cap) if importance == "mask" else mask
    cut = ((compared < 1 - clip_low) & (advantages < 0)) | ((compared > 1 + clip_high) & (advantages > 0))
    statistics = {
        **_distances(logprobs.detach(), old_logprobs, reference, estimator=kl),
        "clip_ratio": _keep(cut, learned),
        "ratio": compare(logprobs.detach() - old_logprobs),
        "importance_weight": _keep(capped, learned),
        "importance_capped": weight > importance_cap,
    }
    maxima = {"logprob_abs_diff": statistics["logprob_abs_diff"], "importance_weight": weight}
    return TokenLosses(
        _keep(losses, learned),
        {name: masked_sum(values, mask) for name, values in statistics.items()},
        {name: _keep(values, mask).max().double() for name, values in maxima.items()},
    )


def _distances(
    logprobs: Tensor, old_logprobs: Tensor, reference: Tensor | None, *, estimator: KlEstimator
) -> dict[str, Tensor]:
    """`kl` estimates KL(π‖ref); without a reference KL(μ‖π), how far the updates went from what sampled."""
    from_sampler = kl_estimate(old_logprobs, logprobs, estimator="k3")
    return {
        "kl": from_sampler if reference is None else kl_estimate(logprobs, reference, estimator=estimator),
        "behaviour_kl": from_sampler,
        "logprob_abs_diff": (logprobs - old_logprobs).abs(),
    }


def proximal_estimate(logprobs: Tensor, old_logprobs: Tensor, *, staleness: Tensor) -> Tensor:
    """log prox between log μ and log π, as if every step had moved a token's log-probability by the same amount.

    μ is k = `staleness` steps before prox, and π becomes the step after prox: log μ + k/(k + 1) (log π − log μ). Of a
    token that is not stale it is μ itself. A constant: the gradient belongs to π (arXiv 2512.06547).
    """
    with torch.no_grad():
        return old_logprobs + (logprobs - old_logprobs) * (staleness / (staleness + 1))


def kl_estimate(logprobs: Tensor, anchor_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Estimates, per sampled token, of KL(π‖anchor); with l = log π/anchor at that token (Schulman 2020):

    k1 = l: unbiased, of either sign. k2 = l²/2: biased, never negative. k3 = e^−l − 1 + l: unbiased, never negative.
    """
    log_ratio = logprobs - anchor_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return (-log_ratio).clamp(max=MAX_LOG_RATIO).expm1() + log_ratio


def kl_loss(
    logprobs: Tensor, reference_logprobs: Tensor, *, weight: Tensor, estimator: KlEstimator
) -> Tensor:
    """KL to the reference as a loss per token: its value is the named estimate, its gradient that of the KL itself.

    Differentiating an estimate does not give an estimate of the gradient: in expectation over π, k1's derivative is 0
    and k3's is that of the *reverse* divergence KL(ref‖π); only k2's, l ∇log π, is the gradient of KL(π‖ref). So all
    three have that gradient here, and the name says which value is reported. With `weight` π/μ both stay right when
    another policy sampled the tokens (for k3 this is TRL's `use_bias_correction_kl`). As in every loss per
    token, what a token does to the KL of later ones is not in it; with the KL taken off the reward it is.
    """
    with torch.no_grad():
        value = weight * kl_estimate(logprobs, reference_logprobs, estimator=estimator)
        slope = weight * (logprobs - reference_logprobs)
    return value + slope * (logprobs - logprobs.detach())


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> TokenLosses:
    """Loss of the critic: ½ (V − return)², or that of V clipped to within `value_clip` of the value at sampling if it
    is larger.

    A `value_clip` of 0 does not clip. The sums are the input of `explained_variance`, for the values at sampling.
    """
    values, old_values, returns = (_keep(entries, mask) for entries in (values, old_values, returns))
    losses = (values - returns).square()
    cut = torch.zeros_like(mask, dtype=torch.bool)
    if value_clip > 0:
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_losses = (clipped - returns).square()
        cut = clipped_losses > losses
        losses = torch.maximum(losses, clipped_losses)
    losses = _keep(losses / 2, mask)
    with torch.no_grad():
        residuals = returns.double() - old_values.double()
        statistics = {
            "value_clip_ratio": cut,
            "value": old_values,
            "return": returns,
            "return_squared": returns.double().square(),
            "residual": residuals,
            "residual_squared": residuals.square(),
        }
        return TokenLosses(
            losses, {name: masked_sum(entries, mask) for name, entries in statistics.items()}, {}
        )


def explained_variance(sums: Mapping[str, float], *, count: float) -> float:
    """1 − var(return − value) / var(return): 1 for a perfect critic, 0 for a constant; 0 where returns do not vary."""
    variance = sums["return_squared"] / count - (sums["return"] / count) ** 2
    unexplained = sums["residual_squared"] / count - (sums["residual"] / count) ** 2
    return 1.0 - unexplained / variance if variance > 0 else 0.0


def reward_model_loss(chosen: Tensor, rejected: Tensor) -> TokenLosses:
    """Bradley–Terry per pair, from the scores: −log σ(chosen − rejected)."""
    return _preference_loss(chosen - rejected)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, *, reference_chosen: Tensor, reference_rejected: Tensor, beta: float
) -> TokenLosses:
    """DPO per pair: −log σ(implicit reward of the chosen − of the rejected), which is β log π/ref.

    All four are log-probabilities summed over a completion's tokens (`sequence_sums`).
    """
    return _preference_loss(beta * ((chosen - reference_chosen) - (rejected - reference_rejected)))


def _preference_loss(margins: Tensor) -> TokenLosses:
    everything = torch.ones_like(margins)
    with torch.no_grad():
        statistics = {"accuracy": margins > 0, "margin": margins}
        sums = {name: masked_sum(values, everything) for name, values in statistics.items()}
    return TokenLosses(-functional.logsigmoid(margins), sums, {})


def sequence_sums(values: Tensor, *, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum over the tokens of each sequence; 0 for a sequence without any."""
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def _compared(
    log_ratio: Tensor, *, mask: Tensor, ratio: Ratio, sequence_index: Tensor, num_sequences: int
) -> Tensor:
    """Ratio at each token: its own, or that of its sequence without masked tokens."""
    if ratio == "token":
        return _exp(log_ratio)
    of_sequence = sequence_sums(log_ratio, sequence_index=sequence_index, num_sequences=num_sequences)
    if ratio == "sequence_mean":
        kept = (mask > 0).to(log_ratio.dtype)
        counts = sequence_sums(kept, sequence_index=sequence_index, num_sequences=num_sequences)
        of_sequence = of_sequence / counts.clamp(min=1)
    return _exp(of_sequence[sequence_index])


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _keep(values: Tensor, mask: Tensor) -> Tensor:
    """0 where masked, in value and gradient, also where the value is NaN."""
    return torch.where(mask > 0, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Float64 sum of the unmasked values; masked values may be NaN."""
    return _keep(values.double(), mask).sum()


def token_weights(
    mask: Tensor,
    *,
    sequence_index: Tensor,
    num_sequences: int,
    totals: Mapping[str, float],
    denominator: Denominator,
) -> Tensor:
    """Weight of each token in the mean loss of the batch; 0 where masked, and if the batch has no loss token at all.

    tokens: every loss token of the batch weighs the same. sequences: every sequence with a loss token weighs the
    same. constant: every loss token weighs 1 / (sequences × longest completion), however long its own is.
    """
    total = totals[denominator]
    if total == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    weights = mask.float() / total
    if denominator == "sequences":
        loss_tokens = sequence_sums(mask.float(), sequence_index=sequence_index, num_sequences=num_sequences)
        weights = weights / loss_tokens.clamp(min=1)[sequence_index]
    return weights
