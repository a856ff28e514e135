"""Triton kernels between the matrix products of training: each is one pass over its inputs.

The forward kernels round to the model's type where those of generation do (`generation/cuda/layers.py`, which shares
rotation and gate), so that trainer and sampler differ only by the order of sums. Gradients are computed in fp32 and
rounded once.

The gradient of a norm's weight is a sum over all rows. Each program adds up its own rows and writes one row of partial
sums; a second kernel adds those in a fixed order. Nothing is added atomically, so equal inputs give equal bits.

Numbers of rows differ between micro-batches. They are not specialised, so that none of them compiles a kernel again.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 1024
"""Programs among which the rows of a sum are divided: enough to fill a GPU, and independent of its kind."""


class HeadShape(NamedTuple):
    """Heads in a row of queries, keys and values, which follow each other in this order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def width(self) -> int:
        return self.query_size + 2 * self.kv_size


def _warps_for(size: int) -> int:
    """Number of warps with which a thread holds about eight values."""
    return int(min(8, max(1, triton.next_power_of_2(size) // 256)))


def _divided(num_rows: int) -> tuple[int, int]:
    """Number of programs, and rows of each."""
    rows_per_program = -(-num_rows // MAX_PROGRAMS)
    return -(-num_rows // rows_per_program), rows_per_program


@triton.jit
def _add_and_normalize(
    residual,
    update,
    weight,
    hidden,
    normalized,
    inverses,
    epsilon,
    has_update: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    mask = columns < size
    at = row * size + columns
    values = tl.load(residual + at, mask, 0.0)
    if has_update:
        added = tl.load(update + at, mask, 0.0).to(tl.float32)
        values = (values.to(tl.float32) + added).to(values.dtype)
        tl.store(hidden + at, values, mask)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    scale = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    tl.store(normalized + at, (wide * inverse * scale).to(values.dtype), mask)
    tl.store(inverses + row, inverse)


def add_and_normalize(
    residual: Tensor, update: Tensor | None, *, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`residual + update`, its RMS norm, and 1 / RMS of each row in fp32; without an update the first is `residual`."""
    num_rows, size = residual.shape
    hidden = residual if update is None else torch.empty_like(residual)
    normalized = torch.empty_like(residual)
    inverses = torch.empty(num_rows, dtype=torch.float32, device=residual.device)
    with torch.cuda.device_of(residual):
        _add_and_normalize[(num_rows,)](
            residual,
            residual if update is None else update,
            weight,
            hidden,
            normalized,
            inverses,
            epsilon,
            has_update=update is not None,
            size=size,
            padded_size=triton.next_power_of_2(size),
            num_warps=_warps_for(size),
        )
    return hidden, normalized, inverses


@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def _gradient_of_norm(
    hidden,
    inverses,
    weight,
    normalized_gradient,
    hidden_gradient,
    gradient,
    partials,
    num_rows,
    rows_per_program,
    has_hidden_gradient: tl.constexpr,
    size: tl.constexpr,
    padded_size: tl.constexpr,
):
    """With x the row, r = 1 / RMS(x), y = x r and d the gradient of y × weight: the gradient of x is
    r (w d - y mean(w d y)), that of the weight is the sum of d y over the rows."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_size)
    scale = tl.load(weight + columns, columns < size, 0.0).to(tl.float32)
    total = tl.zeros([padded_size], tl.float32)
    for index in range(rows_per_program):
        row = program * rows_per_program + index
        is_row = row < num_rows
        mask = (columns < size) & is_row
        at = row * size + columns
        inverse = tl.load(inverses + row, is_row, 0.0)
        unscaled = tl.load(hidden + at, mask, 0.0).to(tl.float32) * inverse
        upstream = tl.load(normalized_gradient + at, mask, 0.0).to(tl.float32)
        total += upstream * unscaled
        scaled = upstream * scale
        found = inverse * (scaled - unscaled * (tl.sum(scaled * unscaled, 0) / size))
        if has_hidden_gradient:
            found += tl.load(hidden_gradient + at, mask, 0.0).to(tl.float32)
        tl.store(gradient + at, found.to(gradient.dtype.element_ty), mask)
    tl.store(partials + program * size + columns, total, columns < size)


def gradient_of_norm(
    hidden: Tensor,
    *,
    inverses: Tensor,
    weight: Tensor,
    normalized_gradient: Tensor,
    hidden_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `hidden`, to which the one that it has otherwise is added, and of the weight."""
    num_rows, size = hidden.shape
    num_programs, rows_per_program = _divided(num_rows)
    gradient = torch.empty_like(hidden)
    partials = torch.empty(num_programs, size, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        _gradient_of_norm[(num_programs,)](
            hidden,
            inverses,
            weight,
            normalized_gradient,
            normalized_gradient if hidden_gradient is None else hidden_gradient,
            gradient,
            partials,
            num_rows,
            rows_per_program,
            has_hidden_gradient=hidden_gradient is not None,
            size=size,
            padded_size=triton.next_power_of_2(size),
            num_warps=_warps_for(size),
        )
    return gradient, _column_sums(partials, dtype=weight.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows(partials, sums, num_rows, num_columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for first in range(0, num_rows, block_rows):
        rows = first + tl.arange(0, block_rows)
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        total += tl.load(partials + rows[:, None] * num_columns + columns[None, :], mask, 0.0)
    tl.store(sums + columns, tl.sum(total, 0).to(sums.dtype.element_ty), columns < num_columns)


def _column_sums(partials: Tensor, *, dtype: torch.dtype) -> Tensor:
    num_rows, num_columns = partials.shape
    sums = torch.empty(num_columns, dtype=dtype, device=partials.device)
    with torch.cuda.device_of(partials):
        _add_rows[(triton.cdiv(num_columns, 16),)](
            partials, sums, num_rows, num_columns, block_rows=128, block_columns=16, num_warps=4
        )
    return sums


@triton.jit
def rotated_heads(
    heads,
    weight,
    mask,
    columns,
    cosine,
    sine,
    epsilon,
    has_norm: tl.constexpr,
    half: tl.constexpr,
):
    """Both halves of the heads whose first halves are at these pointers, normalised and rotated. Training and
    generation share it, so that both round alike."""
    first, second = tl.load(heads, mask, 0.0), tl.load(heads + half, mask, 0.0)
    dtype = first.dtype
    if has_norm:
        inside = columns < half
        low, high = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        inverse = tl.rsqrt(squares / (2 * half) + epsilon)[:, None]
        low *= inverse * tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
        high *= inverse * tl.load(weight + half + columns, inside, 0.0).to(tl.float32)[None, :]
        first, second = low.to(dtype), high.to(dtype)
    low = (first.to(tl.float32) * cosine).to(dtype).to(tl.float32) - second.to(tl.float32) * sine
    high = (second.to(tl.float32) * cosine).to(dtype).to(tl.float32) + first.to(tl.float32) * sine
    return low.to(dtype), high.to(dtype)


@triton.jit
def _rotate(
    qkv,
    rotated,
    cosines,
    sines,
    query_weight,
    key_weight,
    epsilon,
    qkv_stride,
    rotated_stride,
    rotation_stride,
    num_heads: tl.constexpr,
    padded_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    has_norm: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_half)
    inside = columns < half
    cosine = tl.load(cosines + row * rotation_stride + columns, inside, 0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + row * rotation_stride + columns, inside, 0.0).to(tl.float32)[None, :]
    source, target = qkv + row * qkv_stride, rotated + row * rotated_stride

    heads = tl.arange(0, padded_heads)
    at = heads[:, None] * (2 * half) + columns[None, :]
    mask = (heads < num_heads)[:, None] & inside[None, :]
    low, high = rotated_heads(source + at, query_weight, mask, columns, cosine, sine, epsilon, has_norm, half)
    tl.store(target + at, low, mask)
    tl.store(target + at + half, high, mask)
    heads = tl.arange(0, padded_kv_heads)
    at = (num_heads + heads)[:, None] * (2 * half) + columns[None, :]
    mask = (heads < num_kv_heads)[:, None] & inside[None, :]
    low, high = rotated_heads(source + at, key_weight, mask, columns, cosine, sine, epsilon, has_norm, half)
    tl.store(target + at, low, mask)
    tl.store(target + at + half, high, mask)


def rotate(
    qkv: Tensor,
    *,
    shape: HeadShape,
    cosine: Tensor,
    sine: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Rotated queries and keys of [tokens, `shape.width`]: in place, or, normalised before, in a new tensor.

    `cosine` and `sine` are [tokens, head_dim / 2], any stride between tokens.
    """
    has_norm = query_weight is not None
    num_tokens, half = qkv.shape[0], shape.head_dim // 2
    rotated = qkv.new_empty(num_tokens, shape.query_size + shape.kv_size) if has_norm else qkv
    assert cosine.stride() == sine.stride() and cosine.stride(1) == 1
    with torch.cuda.device_of(qkv):
        _rotate[(num_tokens,)](
            qkv,
            rotated,
            cosine,
            sine,
            qkv if query_weight is None else query_weight,
            qkv if key_weight is None else key_weight,
            epsilon,
            qkv.stride(0),
            rotated.stride(0),
            cosine.stride(0),
            **_tile_of(shape),
            half=half,
            padded_half=triton.next_power_of_2(half),
            has_norm=has_norm,
            num_warps=_warps_for(shape.query_size // 2),
        )
    return rotated


def _tile_of(shape: HeadShape) -> dict[str, int]:
    return {
        "num_heads": shape.num_heads,
        "padded_heads": triton.next_power_of_2(shape.num_heads),
        "num_kv_heads": shape.num_kv_heads,
        "padded_kv_heads": triton.next_power_of_2(shape.num_kv_heads),
    }


@triton.jit
def _rotate_back(
    upstream,
    source,
    target,
    weight,
    mask,
    columns,
    cosine,
    sine,
    epsilon,
    has_norm: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
):
    """Store the gradient of heads; return this row's part of the gradient of the norm's weight, in two halves."""
    first = tl.load(upstream, mask, 0.0).to(tl.float32)
    second = tl.load(upstream + half, mask, 0.0).to(tl.float32)
    low = first * cosine + second * sine
    high = second * cosine - first * sine
    low_part, high_part = tl.zeros([padded_half], tl.float32), tl.zeros([padded_half], tl.float32)
    if has_norm:
        inside = columns < half
        first = tl.load(source, mask, 0.0).to(tl.float32)
        second = tl.load(source + half, mask, 0.0).to(tl.float32)
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse = tl.rsqrt(squares / (2 * half) + epsilon)[:, None]
        first *= inverse
        second *= inverse
        low_part, high_part = tl.sum(low * first, 0), tl.sum(high * second, 0)
        low *= tl.load(weight + columns, inside, 0.0).to(tl.float32)[None, :]
        high *= tl.load(weight + half + columns, inside, 0.0).to(tl.float32)[None, :]
        mean = ((tl.sum(low * first, 1) + tl.sum(high * second, 1)) / (2 * half))[:, None]
        low = inverse * (low - first * mean)
        high = inverse * (high - second * mean)
    tl.store(target, low.to(target.dtype.element_ty), mask)
    tl.store(target + half, high.to(target.dtype.element_ty), mask)
    return low_part, high_part


@triton.jit(do_not_specialize=["num_tokens", "rows_per_program"])
def _gradient_of_rotation(
    query_gradient,
    key_gradient,
    value_gradient,
    qkv,
    gradient,
    cosines,
    sines,
    query_weight,
    key_weight,
    partials,
    epsilon,
    num_tokens,
    rows_per_program,
    qkv_stride,
    rotation_stride,
    num_heads: tl.constexpr,
    padded_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    has_norm: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_half)
    inside = columns < half
    heads, kv_heads = tl.arange(0, padded_heads), tl.arange(0, padded_kv_heads)
    at = heads[:, None] * (2 * half) + columns[None, :]
    kv_at = kv_heads[:, None] * (2 * half) + columns[None, :]
    width: tl.constexpr = (num_heads + 2 * num_kv_heads) * 2 * half
    query_width: tl.constexpr = num_heads * 2 * half
    kv_width: tl.constexpr = num_kv_heads * 2 * half
    query_low, query_high = tl.zeros([padded_half], tl.float32), tl.zeros([padded_half], tl.float32)
    key_low, key_high = tl.zeros([padded_half], tl.float32), tl.zeros([padded_half], tl.float32)
    for index in range(rows_per_program):
        row = program * rows_per_program + index
        is_row = row < num_tokens
        seen = inside & is_row
        cosine = tl.load(cosines + row * rotation_stride + columns, seen, 0.0).to(tl.float32)[None, :]
        sine = tl.load(sines + row * rotation_stride + columns, seen, 0.0).to(tl.float32)[None, :]
        source, target = qkv + row * qkv_stride, gradient + row * width
        mask = (heads < num_heads)[:, None] & seen[None, :]
        low, high = _rotate_back(
            query_gradient + row * query_width + at,
            source + at,
            target + at,
            query_weight,
            mask,
            columns,
            cosine,
            sine,
            epsilon,
            has_norm,
            half,
            padded_half,
        )
        query_low += low
        query_high += high
        mask = (kv_heads < num_kv_heads)[:, None] & seen[None, :]
        low, high = _rotate_back(
            key_gradient + row * kv_width + kv_at,
            source + query_width + kv_at,
            target + query_width + kv_at,
            key_weight,
            mask,
            columns,
            cosine,
            sine,
            epsilon,
            has_norm,
            half,
            padded_half,
        )
        key_low += low
        key_high += high
        values, target = value_gradient + row * kv_width + kv_at, target + query_width + kv_width + kv_at
        tl.store(target, tl.load(values, mask, 0.0), mask)
        tl.store(target + half, tl.load(values + half, mask, 0.0), mask)
    if has_norm:
        own = partials + program * (4 * half) + columns
        tl.store(own, query_low, inside)
        tl.store(own + half, query_high, inside)
        tl.store(own + 2 * half, key_low, inside)
        tl.store(own + 3 * half, key_high, inside)


def gradient_of_rotation(
    query_gradient: Tensor,
    *,
    key_gradient: Tensor,
    value_gradient: Tensor,
    qkv: Tensor | None,
    shape: HeadShape,
    cosine: Tensor,
    sine: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of [tokens, `shape.width`], and of both norms' weights [2, head_dim] where there are norms.

    `qkv` is the input of the norms; without norms it is not needed.
    """
    has_norm = query_weight is not None
    assert (qkv is not None) == has_norm
    num_tokens, half = query_gradient.shape[0], shape.head_dim // 2
    num_programs, rows_per_program = _divided(num_tokens) if has_norm else (num_tokens, 1)
    gradient = query_gradient.new_empty(num_tokens, shape.width)
    partials = torch.empty(
        num_programs if has_norm else 0, 4 * half, dtype=torch.float32, device=gradient.device
    )
    unread = gradient if qkv is None else qkv
    with torch.cuda.device_of(gradient):
        _gradient_of_rotation[(num_programs,)](
            query_gradient.contiguous(),
            key_gradient.contiguous(),
            value_gradient.contiguous(),
            unread,
            gradient,
            cosine,
            sine,
            unread if query_weight is None else query_weight,
            unread if key_weight is None else key_weight,
            partials if has_norm else gradient,
            epsilon,
            num_tokens,
            rows_per_program,
            unread.stride(0),
            cosine.stride(0),
            **_tile_of(shape),
            half=half,
            padded_half=triton.next_power_of_2(half),
            has_norm=has_norm,
            num_warps=_warps_for(shape.query_size // 2),
        )
    if query_weight is None:
        return gradient, None
    return gradient, _column_sums(partials, dtype=query_weight.dtype).view(2, -1)


@triton.jit
def activate_rows(gate_up, output, size: tl.constexpr, block_size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block_size + tl.arange(0, block_size)
    mask = columns < size
    gate = tl.load(gate_up + row * (2 * size) + columns, mask, 0.0)
    up = tl.load(gate_up + row * (2 * size) + size + columns, mask, 0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * size + columns, (activated * up).to(gate.dtype), mask)


def activate(gate_up: Tensor) -> Tensor:
    """`silu(gate) × up` of [rows, 2 × size], gate first."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    block_size = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate_up):
        activate_rows[(num_rows, triton.cdiv(size, block_size))](
            gate_up, output, size=size, block_size=block_size, num_warps=_warps_for(block_size)
        )
    return output


@triton.jit
def _gradient_of_activation(gate_up, upstream, gradient, size: tl.constexpr, block_size: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block_size + tl.arange(0, block_size)
    mask = columns < size
    own = row * (2 * size) + columns
    gate = tl.load(gate_up + own, mask, 0.0)
    up = tl.load(gate_up + own + size, mask, 0.0).to(tl.float32)
    given = tl.load(upstream + row * size + columns, mask, 0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    slope = share * (1.0 + wide * (1.0 - share))
    tl.store(gradient + own, (given * up * slope).to(gate.dtype), mask)
    tl.store(gradient + own + size, (given * activated).to(gate.dtype), mask)
    tl.store(upstream + row * size + columns, (activated * up).to(gate.dtype), mask)


def gradient_of_activation(gate_up: Tensor, upstream: Tensor) -> Tensor:
    """Gradient of `gate_up`. `upstream`, the gradient of the activation, is overwritten with the activation itself:
    the product after it needs it for the gradient of its weight, and training does not keep it."""
    num_rows, size = upstream.shape
    assert upstream.is_contiguous()
    gradient = torch.empty_like(gate_up)
    block_size = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate_up):
        _gradient_of_activation[(num_rows, triton.cdiv(size, block_size))](
            gate_up, upstream, gradient, size=size, block_size=block_size, num_warps=_warps_for(block_size)
        )
    return gradient
