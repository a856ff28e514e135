"""From logits to tokens and their log-probabilities, each row by itself.

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
"""So few are not worth a stage of their own."""
_USUAL_NUCLEUS = 1024


class Sampled(NamedTuple):
    """One token per row (int64) and its log-probability (float32), and the most likely tokens, [rows, `num_top`]."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class Bending(NamedTuple):
    """What changes the distribution besides temperature, per row, in the words of `types.Sampling`."""

    penalties: Tensor
    """float32, 1 for none."""
    seen: Tensor
    """bool [rows, vocabulary]: tokens of prompt and completion so far."""
    biases: Tensor
    """float32 [rows, vocabulary]."""
    top_ks: Tensor
    """int64, 0 for all."""
    top_ps: Tensor
    """float32, 1 for all."""
    min_ps: Tensor
    """float32, 0 for all."""


def sample(
    logits: Tensor,
    *,
    temperatures: Tensor,
    uniforms: Tensor,
    bending: Bending | None = None,
    num_top: int = 0,
) -> Sampled:
    """Draw one token per row of `logits` [rows, vocabulary], float32, which are overwritten.

    A row's log-probability is the one at its temperature, formed as the trainer forms it, before any bending; a row of
    temperature 0 takes the most likely token and its log-probability at temperature 1. Logits that are not finite give
    some token with a log-probability that is not finite.
    """
    greedy = temperatures == 0
    divisors = temperatures.masked_fill(greedy, 1.0).unsqueeze(-1)
    bent = None if bending is None else bent_logits(logits, bending=bending, divisors=divisors)
    scaled = logits.div_(divisors)
    peaks = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - peaks).exp_()
    masses = _blocks(weights).sum(dim=-1)
    normalizers = masses.sum(dim=-1, keepdim=True).log_().add_(peaks)
    if bent is not None:
        weights = bent.sub(bent.amax(dim=-1, keepdim=True)).exp_()
        masses = _blocks(weights).sum(dim=-1)
    tokens = _invert(weights, masses=masses, uniforms=uniforms)
    if greedy.any():
        likeliest = (scaled if bent is None else bent).argmax(dim=-1)
        tokens = torch.where(greedy, likeliest, tokens)
    logprobs = scaled.gather(-1, tokens.unsqueeze(-1)).sub_(normalizers).squeeze(-1)
    if num_top == 0:
        return Sampled(tokens, logprobs, tokens.new_empty(len(tokens), 0), logprobs.new_empty(len(tokens), 0))
    top_logprobs, top_tokens = scaled.topk(num_top, dim=-1)
    return Sampled(tokens, logprobs, top_tokens, top_logprobs.sub_(normalizers))


def _blocks(weights: Tensor) -> Tensor:
    """[rows, blocks, BLOCK_SIZE], zeros behind the vocabulary."""
    missing = -weights.shape[-1] % BLOCK_SIZE
    padded = functional.pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(-1, (-1, BLOCK_SIZE))


def _invert(weights: Tensor, *, masses: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative weight of each row passes `uniforms` of the total.

    A block's mass is a float32 sum; the place inside the block is where the rest of the way through that mass leads in
    the block's own float64 sum, so the mass's rounding changes probabilities by its own 10⁻⁷ only.
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


def bent_logits(logits: Tensor, *, bending: Bending, divisors: Tensor) -> Tensor:
    """The logits that are drawn from: penalised, biased, divided by the temperature, and -∞ where left out.

    Each way of leaving out is a threshold on the logit; what is as likely as the last token that stays, stays too.
    """
    penalties = bending.penalties.unsqueeze(-1)
    penalised = torch.where(logits > 0, logits / penalties, logits * penalties)
    bent = torch.where(bending.seen, penalised, logits).add_(bending.biases).div_(divisors)
    _leave_out_below(bent, _top_k_thresholds(bent, bending.top_ks))
    _leave_out_below(bent, _top_p_thresholds(bent, bending.top_ps))
    _leave_out_below(bent, bent.amax(dim=-1) + bending.min_ps.log())
    return bent


def _leave_out_below(bent: Tensor, thresholds: Tensor) -> None:
    bent.masked_fill_(bent < thresholds.unsqueeze(-1), float("-inf"))


def _top_k_thresholds(bent: Tensor, top_ks: Tensor) -> Tensor:
    thresholds = bent.new_full(top_ks.shape, float("-inf"))
    (rows,) = torch.nonzero(top_ks, as_tuple=True)
    if len(rows):
        counts = top_ks[rows].clamp_max(bent.shape[-1])
        largest = bent[rows].topk(int(counts.max()), dim=-1).values
        thresholds[rows] = largest.gather(-1, counts.unsqueeze(-1) - 1).squeeze(-1)
    return thresholds


def _top_p_thresholds(bent: Tensor, top_ps: Tensor) -> Tensor:
    thresholds = bent.new_full(top_ps.shape, float("-inf"))
    (rows,) = torch.nonzero(top_ps < 1, as_tuple=True)
    if len(rows):
        # A nucleus is nearly always among the first thousand, which spares sorting the whole vocabulary.
        for size in (min(_USUAL_NUCLEUS, bent.shape[-1]), bent.shape[-1]):
            found, complete = _nucleus_thresholds(bent[rows], shares=top_ps[rows], size=size)
            if complete:
                break
        thresholds[rows] = found
    return thresholds


def _nucleus_thresholds(bent: Tensor, *, shares: Tensor, size: int) -> tuple[Tensor, bool]:
    """The least likely logit of the fewest tokens that have these shares, sought among the `size` most likely; and
    whether all of them were there."""
    largest = bent.topk(size, dim=-1).values
    probabilities = (largest - bent.logsumexp(dim=-1, keepdim=True)).double().exp_()
    cumulative = probabilities.cumsum(dim=-1)
    wanted = shares.double().unsqueeze(-1)
    num_kept = (cumulative - probabilities < wanted).sum(dim=-1, keepdim=True).clamp_(1, size)
    complete = bool((cumulative[:, -1:] >= wanted).all())
    return largest.gather(-1, num_kept - 1).squeeze(-1), complete
