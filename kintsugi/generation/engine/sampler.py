"""Sampling on the CPU: from logits to tokens and their log-probabilities, each row independently.

A token is drawn by inverting the cumulative distribution at one uniform number per row, in two stages: blocks of the
vocabulary by their masses, then the tokens of one block. Gumbel-max would need a number and a logarithm per vocabulary
entry for the same distribution. Both stages add in float64, so that even the last of 150,000 entries keeps its
probability, and in a fixed order, so that equal logits give equal tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

BLOCK_SIZE = 128
LARGEST_SHARE = 1 - 2.0**-52
"""`share × total` rounds to less than `total` for every float64 `total`: a token of no mass is never drawn."""
_FEW_BLOCKS = 8
"""Up to this number of blocks, the first stage is skipped."""
_USUAL_NUCLEUS = 1024


class Sampled(NamedTuple):
    """One token per row (int64) and its log-probability (float32), and the most likely tokens, [rows, `num_top`]."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class LogitsEditing(NamedTuple):
    """Per-row parameters that change the distribution besides temperature; the names are those of
    `types.SamplingParams`."""

    penalties: Tensor
    """float32; 1 disables it."""
    seen: Tensor
    """bool [rows, vocabulary]: tokens of prompt and completion so far."""
    biases: Tensor
    """float32 [rows, vocabulary]."""
    top_ks: Tensor
    """int64; 0 disables it."""
    top_ps: Tensor
    """float32; 1 disables it."""
    min_ps: Tensor
    """float32; 0 disables it."""


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    uniforms: Tensor,
    logits_processors: LogitsEditing | None = None,
    num_top: int = 0,
) -> Sampled:
    """Draw one token per row of `logits` [rows, vocabulary], float32, which are overwritten.

    The log-probability of a row is the one at its temperature, computed as the trainer does, before any logits
    processor. A row of temperature 0 takes the most likely token and its log-probability at temperature 1. Non-finite
    logits give some token with a non-finite log-probability.
    """
    greedy = temperatures == 0
    divisors = temperatures.masked_fill(greedy, 1.0).unsqueeze(-1)
    processed = (
        None
        if logits_processors is None
        else processed_logits(logits, logits_processors=logits_processors, divisors=divisors)
    )
    scaled = logits.div_(divisors)
    peaks = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - peaks).exp_()
    masses = _blocks(weights).sum(dim=-1)
    normalizers = masses.sum(dim=-1, keepdim=True).log_().add_(peaks)
    if processed is not None:
        weights = processed.sub(processed.amax(dim=-1, keepdim=True)).exp_()
        masses = _blocks(weights).sum(dim=-1)
    tokens = _invert(weights, masses=masses, uniforms=uniforms)
    if greedy.any():
        likeliest = (scaled if processed is None else processed).argmax(dim=-1)
        tokens = torch.where(greedy, likeliest, tokens)
    logprobs = scaled.gather(-1, tokens.unsqueeze(-1)).sub_(normalizers).squeeze(-1)
    if num_top == 0:
        return Sampled(tokens, logprobs, tokens.new_empty(len(tokens), 0), logprobs.new_empty(len(tokens), 0))
    top_logprobs, top_tokens = scaled.topk(num_top, dim=-1)
    return Sampled(tokens, logprobs, top_tokens, top_logprobs.sub_(normalizers))


def _blocks(weights: Tensor) -> Tensor:
    """[rows, blocks, BLOCK_SIZE], padded with zeros after the vocabulary."""
    missing = -weights.shape[-1] % BLOCK_SIZE
    padded = functional.pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(-1, (-1, BLOCK_SIZE))


def _invert(weights: Tensor, *, masses: Tensor, uniforms: Tensor) -> Tensor:
    """Find the token at which the cumulative weight of each row passes `uniforms` of the total.

    The mass of a block is a float32 sum. The position inside the block is found in the block's own float64 sum, at the
    same fraction, so the rounding of the mass changes probabilities by 10⁻⁷ only.
    """
    last_token = weights.shape[-1] - 1
    if masses.shape[-1] <= _FEW_BLOCKS:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        targets = cumulative[:, -1:] * uniforms.unsqueeze(-1)
        return torch.searchsorted(cumulative, targets, right=True).clamp_max_(last_token).squeeze(-1)
    cumulative = masses.cumsum(dim=-1, dtype=torch.float64)
    targets = cumulative[:, -1:] * uniforms.unsqueeze(-1)
    block = torch.searchsorted(cumulative, targets, right=True).clamp_max_(masses.shape[-1] - 1)
    mass = masses.gather(-1, block).double()
    before = cumulative.gather(-1, block).sub_(mass)
    shares = targets.sub_(before).div_(mass).clamp_(0.0, LARGEST_SHARE)
    columns = torch.arange(BLOCK_SIZE, device=weights.device) + block * BLOCK_SIZE
    inside = weights.gather(-1, columns.clamp_max(last_token)).masked_fill_(columns > last_token, 0.0)
    cumulative = inside.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(cumulative, shares.mul_(cumulative[:, -1:]), right=True)
    return place.add_(block.mul_(BLOCK_SIZE)).clamp_max_(last_token).squeeze(-1)


def processed_logits(logits: Tensor, *, logits_processors: LogitsEditing, divisors: Tensor) -> Tensor:
    """Logits to draw from: penalised, biased, divided by the temperature, and -∞ where excluded.

    Each exclusion is a threshold on the logit; tokens as likely as the last one that is kept are kept too.
    """
    penalties = logits_processors.penalties.unsqueeze(-1)
    penalised = torch.where(logits > 0, logits / penalties, logits * penalties)
    processed = (
        torch.where(logits_processors.seen, penalised, logits).add_(logits_processors.biases).div_(divisors)
    )
    _leave_out_below(processed, _top_k_thresholds(processed, logits_processors.top_ks))
    _leave_out_below(processed, _top_p_thresholds(processed, logits_processors.top_ps))
    _leave_out_below(processed, processed.amax(dim=-1) + logits_processors.min_ps.log())
    return processed


def _leave_out_below(processed: Tensor, thresholds: Tensor) -> None:
    processed.masked_fill_(processed < thresholds.unsqueeze(-1), float("-inf"))


def _top_k_thresholds(processed: Tensor, top_ks: Tensor) -> Tensor:
    thresholds = processed.new_full(top_ks.shape, float("-inf"))
    (rows,) = torch.nonzero(top_ks, as_tuple=True)
    if len(rows):
        counts = top_ks[rows].clamp_max(processed.shape[-1])
        largest = processed[rows].topk(int(counts.max()), dim=-1).values
        thresholds[rows] = largest.gather(-1, counts.unsqueeze(-1) - 1).squeeze(-1)
    return thresholds


def _top_p_thresholds(processed: Tensor, top_ps: Tensor) -> Tensor:
    thresholds = processed.new_full(top_ps.shape, float("-inf"))
    (rows,) = torch.nonzero(top_ps < 1, as_tuple=True)
    if len(rows):
        # A nucleus is nearly always among the first thousand tokens, which avoids sorting the whole vocabulary.
        for size in (min(_USUAL_NUCLEUS, processed.shape[-1]), processed.shape[-1]):
            found, complete = _nucleus_thresholds(processed[rows], shares=top_ps[rows], size=size)
            if complete:
                break
        thresholds[rows] = found
    return thresholds


def _nucleus_thresholds(processed: Tensor, *, shares: Tensor, size: int) -> tuple[Tensor, bool]:
    """Smallest logit of the fewest tokens that have these shares, searched among the `size` most likely; and whether
    the search found all of them."""
    largest = processed.topk(size, dim=-1).values
    probabilities = (largest - processed.logsumexp(dim=-1, keepdim=True)).double().exp_()
    cumulative = probabilities.cumsum(dim=-1)
    wanted = shares.double().unsqueeze(-1)
    num_kept = (cumulative - probabilities < wanted).sum(dim=-1, keepdim=True).clamp_(1, size)
    complete = bool((cumulative[:, -1:] >= wanted).all())
    return largest.gather(-1, num_kept - 1).squeeze(-1), complete
