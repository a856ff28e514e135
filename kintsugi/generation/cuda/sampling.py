"""Sampling on the device: from logits to tokens, and each row's state to the next.

Takes one pass over the logits, then one block of them again. The vocabulary is cut into blocks of fixed size.
`summarize` finds each block's largest scaled logit and the sum of exponentials relative to it; `draw` chooses a block
by the cumulative masses in float64 at the row's uniform number, then the token within it, as `sampler` does on the CPU.
The distribution that is drawn from may differ from the one of the reported log-probability: logits processors change
only the former.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kintsugi.generation.cuda import slot_state as fields
from kintsugi.generation.engine.rng import FIRST_FACTOR, GOLDEN_RATIO, SECOND_FACTOR, UNIFORM_BITS
from kintsugi.generation.engine.validation import MAX_STOP_TOKENS

BLOCK_SIZE = 2048
"""Tokens of one block of the vocabulary."""

_TOKEN, _POSITION, _ALIVE = (
    tl.constexpr(fields.TOKEN),
    tl.constexpr(fields.POSITION),
    tl.constexpr(fields.ALIVE),
)
_LIMIT, _NUM_KNOWN = tl.constexpr(fields.LIMIT), tl.constexpr(fields.NUM_KNOWN)
_RNG_KEY, _TEMPERATURE = tl.constexpr(fields.RNG_KEY), tl.constexpr(fields.TEMPERATURE)
_END_TOKENS, _MAX_END_TOKENS = tl.constexpr(fields.END_TOKENS), tl.constexpr(MAX_STOP_TOKENS)
_GOLDEN_RATIO, _FIRST_FACTOR = tl.constexpr(GOLDEN_RATIO), tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR)
_UNUSED_BITS, _UNIFORM_STEP = tl.constexpr(64 - UNIFORM_BITS), tl.constexpr(2.0**-UNIFORM_BITS)


class SamplingSummary(NamedTuple):
    """Summary of every block of every row, [rows, blocks]."""

    maxima: Tensor
    masses: Tensor
    """Sum of exponentials of scaled logits less the block's largest."""
    tokens: Tensor
    """First token with the block's largest logit."""

    @classmethod
    def empty(cls, num_rows: int, *, vocab_size: int, device: torch.device) -> SamplingSummary:
        num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
        maxima, masses = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=device)
        return cls(maxima, masses, torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device))

    def first(self, num_rows: int) -> SamplingSummary:
        return SamplingSummary(self.maxima[:num_rows], self.masses[:num_rows], self.tokens[:num_rows])


@triton.jit
def temperature_of(state):
    return tl.load(state + _TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _uniform(key, counter):
    """`rng.uniforms` for one pair: SplitMix64 with random access."""
    mixed = key.to(tl.uint64, bitcast=True) + (counter + 1).to(tl.uint64, bitcast=True) * _GOLDEN_RATIO
    mixed = (mixed ^ (mixed >> 30)) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> 27)) * _SECOND_FACTOR
    mixed = mixed ^ (mixed >> 31)
    return (mixed >> _UNUSED_BITS).to(tl.float64) * _UNIFORM_STEP


@triton.jit
def _summarize(
    logits,
    slots,
    state,
    maxima,
    masses,
    tokens,
    vocab_size,
    state_stride,
    num_blocks,
    is_scaled: tl.constexpr,
    block_size: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * block_size + tl.arange(0, block_size)
    scaled = tl.load(logits + row * vocab_size + columns, columns < vocab_size, float("-inf"))
    if not is_scaled:
        temperature = temperature_of(state + tl.load(slots + row).to(tl.int64) * state_stride)
        scaled = scaled / tl.where(temperature == 0.0, 1.0, temperature)
    maximum, best = tl.max(scaled, 0, return_indices=True)
    # A block of -inf only has no mass; -inf minus -inf would be NaN.
    mass = tl.sum(tl.exp(scaled - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    at = row * num_blocks + block
    tl.store(maxima + at, maximum)
    tl.store(masses + at, mass)
    tl.store(tokens + at, block * block_size + best)


@triton.jit
def _total_mass(maxima, masses, at, is_block):
    """Each block's mass relative to the row's largest logit, and that logit."""
    largest = tl.load(maxima + at, is_block, float("-inf"))
    maximum = tl.max(largest, 0)
    # -inf minus -inf would be NaN if a whole row is excluded, which only overflow can cause.
    mass = tl.load(masses + at, is_block, 0.0) * tl.exp(largest - maximum)
    return tl.where(is_block, mass, 0.0).to(tl.float64), maximum


@triton.jit
def row_normalizer(maxima, masses, row, num_blocks, padded_blocks: tl.constexpr):
    """Largest scaled logit of a row, and the logarithm of the sum of exponentials relative to it."""
    blocks = tl.arange(0, padded_blocks)
    block_masses, maximum = _total_mass(maxima, masses, row * num_blocks + blocks, blocks < num_blocks)
    return maximum, tl.log(tl.sum(block_masses, 0))


@triton.jit
def _index_at(masses, indices, target):
    """First index up to which the masses sum to more than `target`, and the sum before it.

    Rounding may leave `target` at the very end: then the last index with a mass is returned, never one without.
    """
    cumulative = tl.cumsum(masses, 0)
    last = tl.max(tl.where(masses > 0.0, indices, 0), 0)
    index = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(indices == index, cumulative - masses, 0.0), 0)
    return index, before


@triton.jit
def _draw(
    logits,
    maxima,
    masses,
    drawn_logits,
    drawn_maxima,
    drawn_masses,
    drawn_tokens,
    slots,
    state,
    known,
    cursors,
    result_tokens,
    result_logprobs,
    vocab_size,
    num_blocks,
    state_stride,
    known_stride,
    result_stride,
    is_scaled: tl.constexpr,
    padded_blocks: tl.constexpr,
    block_size: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    own = state + slot * state_stride
    position = tl.load(own + _POSITION)
    next_position = position + 1
    temperature = temperature_of(own)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    drawn_divisor = divisor
    if is_scaled:
        drawn_divisor = 1.0

    blocks = tl.arange(0, padded_blocks)
    is_block = blocks < num_blocks
    at = row * num_blocks + blocks
    block_masses, maximum = _total_mass(drawn_maxima, drawn_masses, at, is_block)
    target = _uniform(tl.load(own + _RNG_KEY), next_position) * tl.sum(block_masses, 0)
    block, before = _index_at(block_masses, blocks, target)

    in_block = tl.arange(0, block_size)
    columns = block * block_size + in_block
    mask = columns < vocab_size
    base = row.to(tl.int64) * vocab_size
    scaled = tl.load(drawn_logits + base + columns, mask, float("-inf")) / drawn_divisor
    token_masses = tl.where(mask, tl.exp(scaled - maximum), 0.0).to(tl.float64)
    # A block's mass is a float32 sum and not exactly that of its tokens. The same fraction of the way is taken through
    # both sums; otherwise the difference would be added to the probability of the block's last token.
    share = (target - before) / tl.sum(tl.where(blocks == block, block_masses, 0.0), 0)
    index, _ = _index_at(token_masses, in_block, tl.maximum(share, 0.0) * tl.sum(token_masses, 0))
    drawn = block * block_size + index

    largest = tl.load(drawn_maxima + at, is_block, float("-inf"))
    best_block = tl.argmax(largest, 0)
    best = tl.load(drawn_tokens + row * num_blocks + tl.minimum(best_block, num_blocks - 1))
    token = tl.minimum(tl.where(is_greedy, best, drawn), vocab_size - 1)

    raw_maximum, log_mass = row_normalizer(maxima, masses, row, num_blocks, padded_blocks)
    above = tl.load(logits + base + token) / divisor - raw_maximum
    logprob = above.to(tl.float64) - log_mass

    cursor = tl.load(cursors + row)
    tl.store(cursors + row, cursor + 1)
    tl.store(result_tokens + cursor * result_stride + row, token)
    tl.store(result_logprobs + cursor * result_stride + row, logprob.to(tl.float32))

    alive = tl.load(own + _ALIVE) != 0
    is_known = next_position < tl.load(own + _NUM_KNOWN)
    forced = tl.load(known + slot * known_stride + next_position, alive & is_known, 0)
    ends = tl.load(own + _END_TOKENS + tl.arange(0, _MAX_END_TOKENS))
    is_end = (tl.sum((ends == token).to(tl.int32), 0) > 0) & (is_known == 0)
    ended = is_end | (next_position + 1 >= tl.load(own + _LIMIT))
    tl.store(own + _TOKEN, tl.where(is_known, forced, token).to(tl.int64), alive)
    tl.store(own + _POSITION, next_position, alive)
    tl.store(own + _ALIVE, (ended == 0).to(tl.int64), alive)


def summarize(
    logits: Tensor, *, slots: Tensor, state: Tensor, is_scaled: bool, summary: SamplingSummary
) -> None:
    """Fill `summary` for `logits` [rows, vocabulary] in fp32, divided by the slots' temperatures unless `is_scaled`."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    _summarize[(num_rows, num_blocks)](
        logits,
        slots,
        state,
        *summary,
        vocab_size,
        state.stride(0),
        num_blocks,
        is_scaled=is_scaled,
        block_size=BLOCK_SIZE,
        num_warps=4,
    )


def draw(
    logits: Tensor,
    summary: SamplingSummary,
    *,
    processed: tuple[Tensor, SamplingSummary] | None,
    slots: Tensor,
    state: Tensor,
    known: Tensor,
    cursors: Tensor,
    result_tokens: Tensor,
    result_logprobs: Tensor,
) -> None:
    """Draw a token for every row and store it as the next token of its slot, if that is alive.

    With `processed`, tokens are drawn from these scaled logits, and `logits` only give the log-probability. Row i's
    result goes to [cursors[i], i]; `cursors` are advanced.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    drawn_logits, drawn_summary = (logits, summary) if processed is None else processed
    _draw[(num_rows,)](
        logits,
        summary.maxima,
        summary.masses,
        drawn_logits,
        *drawn_summary,
        slots,
        state,
        known,
        cursors,
        result_tokens,
        result_logprobs,
        vocab_size,
        num_blocks,
        state.stride(0),
        known.stride(0),
        result_tokens.stride(0),
        is_scaled=processed is not None,
        padded_blocks=triton.next_power_of_2(num_blocks),
        block_size=BLOCK_SIZE,
        num_warps=4,
    )
