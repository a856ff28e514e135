"""Fused kernels between the matrix products of a layer: each is one pass over its inputs.

Values are rounded to the model's type exactly where `model.transformer` rounds them, so that generation and training
differ only by the order of sums.
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

from kintsugi.generation.cuda.slot_state import ALIVE, POSITION, TOKEN
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.layer_kernels import activate_rows, rotated_heads
from kintsugi.model.rotary import inverse_frequencies, rotation_at

_TOKEN, _POSITION, _ALIVE = tl.constexpr(TOKEN), tl.constexpr(POSITION), tl.constexpr(ALIVE)


class CachePositions(NamedTuple):
    """Position and KV cache location of each row of a step, all int32 and one entry per row."""

    positions: Tensor
    lengths: Tensor
    """Number of keys that the row attends to, including its own; 0 for an inactive row."""
    destinations: Tensor
    """Page × page_size + offset in the page, for its key and value; -1 if they are not written."""


class RotaryTables(NamedTuple):
    """Cosine and sine of every position, [positions, head_dim / 2], rounded as the model rounds them."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(
        cls, config: ModelConfig, *, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> RotaryTables:
        rotation = rotation_at(
            torch.arange(max_length, device=device),
            frequencies=inverse_frequencies(config, device=device),
            config=config,
            dtype=dtype,
        )
        return cls(rotation.cosine[:, 0, 0].contiguous(), rotation.signed_sine[:, 0, 1].contiguous())


def _warps_for(size: int) -> int:
    """Number of warps with which a thread holds about eight values."""
    return int(min(8, max(1, triton.next_power_of_2(size) // 256)))


@triton.jit
def _normalized(values, weight, size: tl.constexpr, epsilon):
    """Normalised values of one row, in fp32."""
    return values * tl.rsqrt(tl.sum(values * values, 0) / size + epsilon) * weight


@triton.jit
def _begin_rows(
    slots,
    state,
    tables,
    embedding,
    weight,
    positions,
    lengths,
    destinations,
    residual,
    output,
    epsilon,
    state_stride,
    table_stride,
    page_size: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    own = state + slot * state_stride
    alive = tl.load(own + _ALIVE) != 0
    position = tl.where(alive, tl.load(own + _POSITION), 0)
    page = tl.load(tables + slot * table_stride + position // page_size)
    tl.store(positions + row, position)
    tl.store(lengths + row, tl.where(alive, position + 1, 0))
    tl.store(destinations + row, tl.where(alive, page * page_size + position % page_size, -1))
    columns = tl.arange(0, padded_size)
    mask = columns < size
    hidden = tl.load(embedding + tl.load(own + _TOKEN) * size + columns, mask, 0.0)
    tl.store(residual + row * size + columns, hidden, mask)
    scale = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    normalized = _normalized(hidden.to(tl.float32), scale, size, epsilon)
    tl.store(output + row * size + columns, normalized.to(hidden.dtype), mask)


def begin_rows(
    slots: Tensor,
    *,
    state: Tensor,
    tables: Tensor,
    embedding: Tensor,
    weight: Tensor,
    epsilon: float,
    page_size: int,
    cache_positions: CachePositions,
    residual: Tensor,
    output: Tensor,
) -> None:
    """Look up each slot's token: its position, its embedding, and the normalised embedding for the first layer."""
    size = embedding.shape[1]
    _begin_rows[(slots.shape[0],)](
        slots,
        state,
        tables,
        embedding,
        weight,
        *cache_positions,
        residual,
        output,
        epsilon,
        state.stride(0),
        tables.stride(0),
        page_size=page_size,
        size=size,
        padded_size=triton.next_power_of_2(size),
        num_warps=_warps_for(size),
    )


@triton.jit
def _add_and_normalize(
    residual,
    update,
    weight,
    output,
    epsilon,
    num_parts: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    mask = columns < size
    scale = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    hidden = tl.load(residual + row * size + columns, mask, 0.0)
    if num_parts > 0:
        added = tl.zeros([padded_size], tl.float32)
        for part in tl.static_range(num_parts):
            at = (part * tl.num_programs(0) + row) * size
            added += tl.load(update + at + columns, mask, 0.0).to(tl.float32)
        added = added.to(hidden.dtype).to(tl.float32)
        hidden = (hidden.to(tl.float32) + added).to(hidden.dtype)
        tl.store(residual + row * size + columns, hidden, mask)
    normalized = _normalized(hidden.to(tl.float32), scale, size, epsilon)
    tl.store(output + row * size + columns, normalized.to(hidden.dtype), mask)


def add_and_normalize(
    residual: Tensor, update: Tensor | None, *, weight: Tensor, epsilon: float, output: Tensor
) -> None:
    """`residual += update`, then `output = rms_norm(residual)`; without an update only the latter.

    `update` may be in parts, [parts, rows, size]: they are added in their order, and their sum is rounded.
    """
    num_rows, size = residual.shape
    _add_and_normalize[(num_rows,)](
        residual,
        residual if update is None else update,
        weight,
        output,
        epsilon,
        num_parts=0 if update is None else 1 if update.dim() == 2 else update.shape[0],
        size=size,
        padded_size=triton.next_power_of_2(size),
        num_warps=_warps_for(size),
    )


@triton.jit
def _rotate_and_store(
    qkv,
    positions,
    destinations,
    cosines,
    sines,
    query_weight,
    key_weight,
    key_pages,
    value_pages,
    epsilon,
    qkv_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    page_size: tl.constexpr,
    has_norm: tl.constexpr,
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    head_dim: tl.constexpr = 2 * half
    columns, in_group = tl.arange(0, padded_half), tl.arange(0, padded_group)
    is_column = (columns < half)[None, :]
    position = tl.load(positions + row)
    destination = tl.load(destinations + row)
    cosine = tl.load(cosines + position * half + columns, columns < half, 0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + position * half + columns, columns < half, 0.0).to(tl.float32)[None, :]

    own = qkv + row.to(tl.int64) * qkv_stride
    valid = (in_group < group)[:, None] & is_column
    heads = own + (kv_head * group + in_group)[:, None] * head_dim + columns[None, :]
    low, high = rotated_heads(heads, query_weight, valid, columns, cosine, sine, epsilon, has_norm, half)
    tl.store(heads, low, valid)
    tl.store(heads + half, high, valid)

    # One head as a matrix of one row, so that a key is computed by the same function as a query.
    one = tl.arange(0, 1)[:, None]
    is_written = is_column & (destination >= 0)
    heads = own + (num_kv_heads * group + kv_head + one) * head_dim + columns[None, :]
    low, high = rotated_heads(heads, key_weight, is_written, columns, cosine, sine, epsilon, has_norm, half)
    page = (destination // page_size).to(tl.int64)
    place = (page * num_kv_heads + kv_head) * (page_size * head_dim) + (destination % page_size) * head_dim
    target = place + one * head_dim + columns[None, :]
    tl.store(key_pages + target, low, is_written)
    tl.store(key_pages + target + half, high, is_written)
    heads += num_kv_heads * head_dim
    tl.store(value_pages + target, tl.load(heads, is_written, 0.0), is_written)
    tl.store(value_pages + target + half, tl.load(heads + half, is_written, 0.0), is_written)


def rotate_and_store(
    qkv: Tensor,
    *,
    cache_positions: CachePositions,
    rotary: RotaryTables,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    key_pages: Tensor,
    value_pages: Tensor,
) -> None:
    """Normalise (where the model does) and rotate the queries in place; the same for the keys, and store keys and
    values in their pages. `qkv` is [rows, (heads + 2 × kv_heads) × head_dim]."""
    _, num_kv_heads, page_size, head_dim = key_pages.shape
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    _rotate_and_store[(qkv.shape[0], num_kv_heads)](
        qkv,
        cache_positions.positions,
        cache_positions.destinations,
        rotary.cosine,
        rotary.sine,
        qkv if query_weight is None else query_weight,
        qkv if key_weight is None else key_weight,
        key_pages,
        value_pages,
        epsilon,
        qkv.stride(0),
        num_kv_heads=num_kv_heads,
        group=group,
        padded_group=triton.next_power_of_2(group),
        half=head_dim // 2,
        padded_half=triton.next_power_of_2(head_dim // 2),
        page_size=page_size,
        has_norm=query_weight is not None,
        num_warps=1 if group <= 4 else 4,
    )


def silu_and_multiply(gate_up: Tensor, *, output: Tensor) -> None:
    """`output = silu(gate) × up` of [rows, 2 × size], gate first."""
    num_rows, size = output.shape
    block_size = min(1024, triton.next_power_of_2(size))
    activate_rows[(num_rows, triton.cdiv(size, block_size))](
        gate_up,
        output,
        size=size,
        block_size=block_size,
        num_warps=_warps_for(block_size),
    )
