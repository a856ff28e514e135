"""From logits to tokens and their log-probabilities, each row by itself.

A token is drawn by inverting the cumulative distribution at one uniform number per row. Gumbel-max would need a number
and a logarithm per vocabulary entry for the same distribution; here the sum runs in float64, so that even the last
of 150,000 entries keeps its probability, and its order is fixed, so that equal logits give equal tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sampled(NamedTuple):
    """One token per row (int64) and its log-probability (float32)."""

    tokens: Tensor
    logprobs: Tensor


def sample(logits: Tensor, *, temperatures: Tensor, uniforms: Tensor) -> Sampled:
    """Draw one token per row of `logits` [rows, vocabulary], float32.

    A row's log-probability is the one at its temperature, formed as the trainer forms it; a row of temperature 0 takes
    the most likely token and its log-probability at temperature 1. Logits that are not finite give some token with a
    log-probability that is not finite.
    """
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0).unsqueeze(-1)
    normalizer = scaled.logsumexp(dim=-1, keepdim=True)
    cumulative = (scaled - normalizer).exp_().cumsum(dim=-1, dtype=torch.float64)
    targets = cumulative[:, -1:] * uniforms.unsqueeze(-1)
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp_max_(logits.shape[-1] - 1)
    tokens = torch.where(greedy.unsqueeze(-1), scaled.argmax(dim=-1, keepdim=True), drawn)
    logprobs = scaled.gather(-1, tokens).sub_(normalizer)
    return Sampled(tokens.squeeze(-1), logprobs.squeeze(-1))
