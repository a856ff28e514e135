"""Logits processors and top log-probabilities, used only by steps that need them.

`process_logits` edits a row's logits (repetition penalty, bias) and excludes tokens by top-k, top-p and min-p. Each
exclusion is a threshold on the scaled logit, found by bisection over all float32 numbers: exact, without sorting, and
by passes over a row that fits into the cache. Tokens as likely as the last one that is kept are kept too.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
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

from kintsugi.generation.cuda.sampling import SamplingSummary, row_normalizer, temperature_of
from kintsugi.generation.cuda.slot_state import TOKEN
from kintsugi.types import SamplingParams

_TOKEN = tl.constexpr(TOKEN)
_NUM_CUTS = tl.constexpr(4)
_BLOCK_SIZE = 4096


class LogitsEdits(NamedTuple):
    """Edits of single logits, [slots, vocabulary]."""

    seen: Tensor
    """uint8: 1 for tokens of prompt and completion so far."""
    biases: Tensor
    """float32."""

    @classmethod
    def none(cls, num_slots: int, *, vocab_size: int, device: torch.device) -> LogitsEdits:
        return cls(
            torch.zeros(num_slots, vocab_size, dtype=torch.uint8, device=device),
            torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device),
        )


def is_edited(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or bool(sampling.logit_bias)


def is_processed(sampling: SamplingParams) -> bool:
    is_cut = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return is_cut or is_edited(sampling)


def packed_cuts(samplings: Sequence[SamplingParams]) -> NDArray[np.float32]:
    """[rows, 4]: repetition penalty, top-k, top-p, min-p."""
    cuts = [(each.repetition_penalty, each.top_k, each.top_p, each.min_p) for each in samplings]
    return np.array(cuts, np.float32).reshape(-1, 4)


@triton.jit
def _order_of(values):
    """Map float32 to int32 of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sum_from(processed, vocab_size, least, maximum, by_mass: tl.constexpr, block: tl.constexpr):
    """Mass, or number, of the logits not below `least` (an order)."""
    total = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, block):
        columns = start + tl.arange(0, block)
        values = tl.load(processed + columns, columns < vocab_size, float("-inf"))
        is_kept = (_order_of(values) >= least) & (columns < vocab_size)
        if by_mass:
            total += tl.sum(tl.where(is_kept, tl.exp(values - maximum), 0.0), 0).to(tl.float64)
        else:
            total += tl.sum(is_kept.to(tl.int32), 0).to(tl.float64)
    return total


@triton.jit
def _threshold(processed, vocab_size, wanted, least, maximum, by_mass: tl.constexpr, block: tl.constexpr):
    """Largest order from which on the mass (or number) reaches `wanted`; `least` if it is not reached."""
    low = least.to(tl.int64)
    high = _order_of(maximum).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = _sum_from(processed, vocab_size, middle, maximum, by_mass, block) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _process_logits(
    logits,
    processed,
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
    processed += row * vocab_size
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
        tl.store(processed + columns, values, mask)
        maximum = tl.maximum(maximum, tl.max(values, 0))
    if has_edits:
        tl.store(seen + fed, 1)
    tl.debug_barrier()
    least = _order_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    top_k = tl.load(cuts + slot * _NUM_CUTS + 1)
    if top_k > 0.0:
        least = _threshold(processed, vocab_size, top_k, least, maximum, False, block)
    top_p = tl.load(cuts + slot * _NUM_CUTS + 2)
    if top_p < 1.0:
        wanted = top_p * _sum_from(processed, vocab_size, least, maximum, True, block)
        least = _threshold(processed, vocab_size, wanted, least, maximum, True, block)
    floor = maximum + tl.log(tl.load(cuts + slot * _NUM_CUTS + 3))
    for start in range(0, vocab_size, block):
        columns = start + tl.arange(0, block)
        mask = columns < vocab_size
        values = tl.load(processed + columns, mask, float("-inf"))
        is_kept = (_order_of(values) >= least) & (values >= floor)
        tl.store(processed + columns, tl.where(is_kept, values, float("-inf")), mask)


def process_logits(
    logits: Tensor, *, slots: Tensor, state: Tensor, cuts: Tensor, edits: LogitsEdits | None, output: Tensor
) -> None:
    """Compute the logits to draw from: edited, divided by the temperature, and -∞ where excluded.

    The token that was fed in this step counts as seen from now on.
    """
    num_rows, vocab_size = logits.shape
    _process_logits[(num_rows,)](
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
    summary: SamplingSummary,
    *,
    slots: Tensor,
    state: Tensor,
    cursors: Tensor,
    result_tokens: Tensor,
    result_logprobs: Tensor,
) -> None:
    """Write the most likely tokens of each row and their log-probabilities to [cursors[i], i] of the results; the last
    dimension of the results is their number. Call this before `draw` advances the cursors."""
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
