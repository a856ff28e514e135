"""What is minimised, as pure functions over packed tokens.

Every tensor holds one entry per token that is predicted; a mask of 0 takes a token out. A loss function gives losses
per token and statistics as *sums*: nothing is divided here, because a mean over the optimizer batch needs a
denominator that no micro-batch, shard or rank knows. `token_weights` carries that denominator, which the master took
over the whole batch before the first micro-batch; the summed product of losses and weights is the batch's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Denominator = Literal["tokens", "sequences", "constant"]


class TokenLosses(NamedTuple):
    """Losses per token (0 where masked), sums over tokens, and maxima over tokens, by name."""

    losses: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def sft_loss(logprobs: Tensor, mask: Tensor) -> TokenLosses:
    """Negative log-likelihood of the tokens to learn."""
    return TokenLosses(-logprobs * mask, {}, {})


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
) -> TokenLosses:
    """The clipped policy-gradient loss, with an optional penalty for leaving the reference model.

    `old_logprobs` are those of the policy that sampled, so the ratio also corrects for whatever differs between
    sampler and trainer. The penalty is the k3 estimate of the KL divergence: unbiased, and never negative.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    anchor_logprobs = old_logprobs if ref_logprobs is None else ref_logprobs
    kl = k3_divergence(logprobs, anchor_logprobs)
    if ref_logprobs is not None:
        losses = losses + beta * kl
    losses = torch.where(mask > 0, losses, 0.0)
    with torch.no_grad():
        cut = ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))
        difference = log_ratio.abs()
        sums = {"clip_ratio": cut, "kl": kl, "ratio": ratio, "logprob_abs_diff": difference}
        return TokenLosses(
            losses,
            {name: masked_sum(values, mask) for name, values in sums.items()},
            {"logprob_abs_diff": torch.where(mask > 0, difference, 0.0).max().double()},
        )


def k3_divergence(logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate, per token, of the KL divergence from the policy to an anchor: r - 1 - log r."""
    log_ratio = anchor_logprobs - logprobs
    return log_ratio.expm1() - log_ratio


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The float64 sum of what the mask keeps; a value that is masked may even be NaN."""
    return torch.where(mask > 0, values.double(), 0.0).sum()


def token_weights(
    mask: Tensor,
    *,
    sequence_index: Tensor,
    num_sequences: int,
    totals: Mapping[str, float],
    denominator: Denominator,
) -> Tensor:
    """Each token's share of the batch's mean loss; 0 where masked, also when nothing in the whole batch is learned.

    tokens: every loss token of the batch weighs the same. sequences: every sequence with a loss token weighs the
    same. constant: every loss token weighs 1 / (sequences × longest completion), however long its own is.
    """
    total = totals[denominator]
    if total == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    weights = mask.float() / total
    if denominator == "sequences":
        loss_tokens = torch.zeros(num_sequences, device=mask.device).index_add_(
            0, sequence_index, mask.float()
        )
        weights = weights / loss_tokens.clamp(min=1)[sequence_index]
    return weights
