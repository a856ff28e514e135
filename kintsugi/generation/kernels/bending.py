"""What changes a row's distribution besides its temperature, and its most likely tokens; only for steps that need it.

`bend` edits a row's logits (repetition penalty, bias) and leaves out what top-k, top-p and min-p leave out. Each of
these is a threshold on the scaled logit, found by halving the range of all float32 numbers: exact, without sorting, and
by passes over a row that fits into the cache. What is as likely as the last token that stays, stays too.
"""

# What a kernel's arguments are, Triton finds out at each launch; it refuses annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.generation.kernels.sampling import Summary, row_normalizer, temperature_of
from kintsugi.generation.kernels.state import TOKEN
from kintsugi.types import Sampling

_TOKEN = tl.constexpr(TOKEN)
_NUM_CUTS = tl.constexpr(4)
_BLOCK_SIZE = 4096


class Edits(NamedTuple):
    """What is added to or taken from single logits, [slots, vocabulary]."""

    seen: Tensor
    """uint8: 1 for tokens of prompt and completion so far."""
    biases: Tensor
    """float32."""

    @classmethod
    def none(cls, num_slots: int, *, vocab_size: int, device: torch.device) -> Edits:
        return cls(
            torch.zeros(num_slots, vocab_size, dtype=torch.uint8, device=device),
            torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device),
        )


def is_edited(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or bool(sampling.logit_bias)


def is_bent(sampling: Sampling) -> bool:
    is_cut = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return is_cut or is_edited(sampling)


def packed_cuts(samplings: Sequence[Sampling]) -> NDArray[np.float32]:
    """[rows, 4]: repetition penalty, top-k, top-p, min-p."""
    cuts = [(each.repetition_penalty, each.top_k, each.top_p, each.min_p) for each in samplings]
    return np.array(cuts, np.float32).reshape(-1, 4)


@triton.jit
def _order_of(values):
    """int32 that are ordered as these float32 are."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sum_from(bent, vocab_size, least, maximum, by_mass: tl.constexpr, block: tl.constexpr):
    """Of the logits not below `least` (an order): their mass, or their number."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, block):
        columns = start + tl.arange(0, block)
        values = tl.load(bent + columns, columns < vocab_size, float("-inf"))
        is_kept = (_order_of(values) >= least) & (columns < vocab_size)
        if by_mass:
            total += tl.sum(tl.where(is_kept, tl.exp(values - maximum), 0.0), 0).to(tl.float64)
        else:
            total += tl.sum(is_kept.to(tl.int32), 0).to(tl.float64)
    return total


@triton.jit
def _threshold(bent, vocab_size, wanted, least, maximum, by_mass: tl.constexpr, block: tl.constexpr):
    """The largest order from which on there is as much as `wanted`, but `least` where there is not."""
    low = least.to(tl.int64)
    high = _order_of(maximum).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = _sum_from(bent, vocab_size, middle, maximum, by_mass, block) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _bend(
    logits,
    bent,
    slots,
    state,
    cuts,
    seen,
    biases,
    vocab_size,
    state_stride,
    has_edits: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    own = state + slot * state_stride
    logits += row * vocab_size
    bent += row * vocab_size
    seen += slot * vocab_size
    biases += slot * vocab_size
    temperature = temperature_of(own)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    penalty = tl.load(cuts + slot * _NUM_CUTS)
    fed = tl.load(own + _TOKEN)
    maximum = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, block):
        columns = start + tl.arange(0, block)
        mask = columns < vocab_size
        values = tl.load(logits + columns, mask, float("-inf"))
        if has_edits:
            is_seen = (tl.load(seen + columns, mask, 0) != 0) | (columns == fed)
            penalised = tl.where(values > 0.0, values / penalty, values * penalty)
            values = tl.where(is_seen, penalised, values) + tl.load(biases + columns, mask, 0.0)
        values = values / divisor
        tl.store(bent + columns, values, mask)
        maximum = tl.maximum(maximum, tl.max(values, 0))
    if has_edits:
        tl.store(seen + fed, 1)
    tl.debug_barrier()
    least = _order_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    top_k = tl.load(cuts + slot * _NUM_CUTS + 1)
    if top_k > 0.0:
        least = _threshold(bent, vocab_size, top_k, least, maximum, False, block)
    top_p = tl.load(cuts + slot * _NUM_CUTS + 2)
    if top_p < 1.0:
        wanted = top_p * _sum_from(bent, vocab_size, least, maximum, True, block)
        least = _threshold(bent, vocab_size, wanted, least, maximum, True, block)
    floor = maximum + tl.log(tl.load(cuts + slot * _NUM_CUTS + 3))
    for start in range(0, vocab_size, block):
        columns = start + tl.arange(0, block)
        mask = columns < vocab_size
        values = tl.load(bent + columns, mask, float("-inf"))
        is_kept = (_order_of(values) >= least) & (values >= floor)
        tl.store(bent + columns, tl.where(is_kept, values, float("-inf")), mask)


def bend(
    logits: Tensor, *, slots: Tensor, state: Tensor, cuts: Tensor, edits: Edits | None, output: Tensor
) -> None:
    """The logits that are drawn from: edited, divided by the temperature, and -∞ where left out.

    The token that was fed in this step counts as seen from now on.
    """
    num_rows, vocab_size = logits.shape
    _bend[(num_rows,)](
        logits,
        output,
        slots,
        state,
        cuts,
        *((logits, logits) if edits is None else edits),
        vocab_size,
        state.stride(0),
        has_edits=edits is not None,
        block=min(_BLOCK_SIZE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


@triton.jit
def _report_top(
    top_logits,
    top_tokens,
    maxima,
    masses,
    slots,
    state,
    cursors,
    result_tokens,
    result_logprobs,
    num_blocks,
    state_stride,
    result_stride,
    num_top: tl.constexpr,
    padded_top: tl.constexpr,
    padded_blocks: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = temperature_of(state + tl.load(slots + row).to(tl.int64) * state_stride)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    maximum, log_mass = row_normalizer(maxima, masses, row, num_blocks, padded_blocks)
    places = tl.arange(0, padded_top)
    mask = places < num_top
    at = row * num_top + places
    above = tl.load(top_logits + at, mask, 0.0) / divisor - maximum
    target = tl.load(cursors + row) * result_stride + at
    tl.store(result_tokens + target, tl.load(top_tokens + at, mask, 0).to(tl.int32), mask)
    tl.store(result_logprobs + target, (above.to(tl.float64) - log_mass).to(tl.float32), mask)


def report_top(
    logits: Tensor,
    summary: Summary,
    *,
    slots: Tensor,
    state: Tensor,
    cursors: Tensor,
    result_tokens: Tensor,
    result_logprobs: Tensor,
) -> None:
    """The most likely tokens of each row and their log-probabilities, to [cursors[i], i] of the results, whose last
    dimension says how many. To be called before `draw` advances the cursors."""
    num_rows, num_top = logits.shape[0], result_tokens.shape[2]
    num_blocks = summary.maxima.shape[1]
    top = logits.topk(num_top, dim=-1)
    _report_top[(num_rows,)](
        top.values,
        top.indices,
        summary.maxima,
        summary.masses,
        slots,
        state,
        cursors,
        result_tokens,
        result_logprobs,
        num_blocks,
        state.stride(0),
        result_tokens.stride(0),
        num_top=num_top,
        padded_top=triton.next_power_of_2(num_top),
        padded_blocks=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
