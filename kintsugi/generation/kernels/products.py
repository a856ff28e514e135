"""Products of few rows with a weight, where the library leaves most of the device idle.

With few rows a product takes as long as its weight takes to read, which programs on all multiprocessors must share. A
weight of few columns is therefore cut into splits of its depth, whose sums in fp32 are added by whoever reads the
product next, in their order: no launch only adds. A row's bits depend neither on its place nor on how many there are.
"""

# What a kernel's arguments are, Triton finds out at each launch; it refuses annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kintsugi.generation.kernels.launching import await_predecessor, launch_options

MAX_WHOLE_ROWS = 64
"""Up to which products that are not split are ours."""
MAX_SPLIT_ROWS = 128
MAX_SPLITS = 8
_BLOCK_ROWS = 64
"""What tensor cores take at once; fewer rows are not faster."""
_NUM_PROGRAMS = 128
"""About the number of multiprocessors."""
_LINE = tl.constexpr(64)
"""16-bit values of a line of the cache."""


class ProductTiling(NamedTuple):
    """How a product is cut into programs; chosen by `benchmarks/gpu_kernels.py`."""

    block_columns: int = 32
    block_depth: int = 128
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def split_depth(self, depth: int) -> int:
        num_blocks = triton.cdiv(depth, self.block_depth)
        return int(triton.cdiv(num_blocks, self.num_splits) * self.block_depth)


WHOLE = ProductTiling()
GATED = ProductTiling(block_columns=16)


def is_whole_ours(rows: Tensor) -> bool:
    """Whether a product with these rows is better computed here, unsplit. Tensor cores do not take fp32."""
    return rows.shape[0] <= MAX_WHOLE_ROWS and rows.dtype != torch.float32


def split_tiling(num_rows: int, *, num_columns: int, depth: int, dtype: torch.dtype) -> ProductTiling | None:
    """How to split such a product, or None where the library's is as good. The same for all numbers of rows."""
    if num_rows > MAX_SPLIT_ROWS or dtype == torch.float32:
        return None
    tiling = ProductTiling()
    most = min(MAX_SPLITS, _NUM_PROGRAMS // triton.cdiv(num_columns, tiling.block_columns))
    if most < 2:
        return None
    tiling = tiling._replace(num_splits=most)
    return tiling._replace(num_splits=triton.cdiv(depth, tiling.split_depth(depth)))


@triton.jit
def _prefetch(pointers):
    """Into the cache that all multiprocessors share."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_weight(weight, column, begin, depth: tl.constexpr, split_depth: tl.constexpr):
    """What a program will read of its columns. The weight is there whatever the kernel before does."""
    num_lines: tl.constexpr = triton.next_power_of_2(split_depth // _LINE)
    inner = tl.minimum(tl.arange(0, num_lines) * _LINE, split_depth - 1)
    _prefetch(weight + column[:, None] * depth + tl.minimum(begin + inner, depth - 1)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    rows,
    weight,
    bias,
    output,
    num_rows,
    num_columns: tl.constexpr,
    depth: tl.constexpr,
    split_depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    stages: tl.constexpr,
    has_bias: tl.constexpr,
    starts_early: tl.constexpr,
):
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    split = tl.program_id(2)
    begin = split * split_depth
    is_row, is_column = (row < num_rows)[:, None], column < num_columns
    # Columns past the end repeat the last one and are not stored, so that loads need no mask for them.
    column = tl.minimum(column, num_columns - 1)
    if starts_early:
        _prefetch_weight(weight, column, begin, depth, split_depth)
    await_predecessor(starts_early)
    inner = begin + tl.arange(0, block_depth)
    row_pointers = rows + row[:, None] * depth + inner[None, :]
    column_pointers = weight + column[:, None] * depth + inner[None, :]
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for start in tl.range(0, split_depth, block_depth, num_stages=stages):
        if depth % split_depth == 0:
            some_rows = tl.load(row_pointers + start, is_row, 0.0)
            some_columns = tl.load(column_pointers + start)
        else:
            inside = (inner + start < depth)[None, :]
            some_rows = tl.load(row_pointers + start, is_row & inside, 0.0)
            some_columns = tl.load(column_pointers + start, inside, 0.0)
        total = tl.dot(some_rows, tl.trans(some_columns), total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    offsets = (split * num_rows + row[:, None]) * num_columns + column[None, :]
    tl.store(output + offsets, total.to(output.dtype.element_ty), is_row & is_column[None, :])


def multiply(
    rows: Tensor, weight: Tensor, *, bias: Tensor | None = None, output: Tensor, tiling: ProductTiling = WHOLE
) -> None:
    """`output = rows @ weight.t() + bias`; with splits, `output` is [splits, rows, columns], their sum the product."""
    (num_rows, depth), num_columns = rows.shape, weight.shape[0]
    assert output.shape[-2:] == (num_rows, num_columns) and output.is_contiguous() and rows.is_contiguous()
    assert bias is None or tiling.num_splits == 1
    num_tiles = triton.cdiv(num_rows, _BLOCK_ROWS)
    _product[(triton.cdiv(num_columns, tiling.block_columns), num_tiles, tiling.num_splits)](
        rows,
        weight,
        weight if bias is None else bias,
        output,
        num_rows,
        num_columns=num_columns,
        depth=depth,
        split_depth=tiling.split_depth(depth),
        block_rows=_BLOCK_ROWS,
        block_columns=tiling.block_columns,
        block_depth=tiling.block_depth,
        stages=tiling.num_stages,
        has_bias=bias is not None,
        num_warps=tiling.num_warps,
        **launch_options(rows.device),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_product(
    rows,
    weight,
    output,
    num_rows,
    num_columns: tl.constexpr,
    depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    stages: tl.constexpr,
    starts_early: tl.constexpr,
):
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_row, is_column = (row < num_rows)[:, None], column < num_columns
    column = tl.minimum(column, num_columns - 1)
    up_weight = weight + num_columns * depth
    if starts_early:
        _prefetch_weight(weight, column, 0, depth, depth)
        _prefetch_weight(up_weight, column, 0, depth, depth)
    await_predecessor(starts_early)
    inner = tl.arange(0, block_depth)
    row_pointers = rows + row[:, None] * depth + inner[None, :]
    gate_pointers = weight + column[:, None] * depth + inner[None, :]
    up_pointers = up_weight + column[:, None] * depth + inner[None, :]
    gate = tl.zeros([block_rows, block_columns], tl.float32)
    up = tl.zeros([block_rows, block_columns], tl.float32)
    for start in tl.range(0, depth, block_depth, num_stages=stages):
        if depth % block_depth == 0:
            some_rows = tl.load(row_pointers + start, is_row, 0.0)
            some_gates, some_ups = tl.load(gate_pointers + start), tl.load(up_pointers + start)
        else:
            inside = (inner + start < depth)[None, :]
            some_rows = tl.load(row_pointers + start, is_row & inside, 0.0)
            some_gates = tl.load(gate_pointers + start, inside, 0.0)
            some_ups = tl.load(up_pointers + start, inside, 0.0)
        gate = tl.dot(some_rows, tl.trans(some_gates), gate, input_precision="ieee")
        up = tl.dot(some_rows, tl.trans(some_ups), up, input_precision="ieee")
    dtype = output.dtype.element_ty
    wide = gate.to(dtype).to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    result = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(output + row[:, None] * num_columns + column[None, :], result, is_row & is_column[None, :])


def multiply_gated(rows: Tensor, weight: Tensor, *, output: Tensor, tiling: ProductTiling = GATED) -> None:
    """`output = silu(rows @ gate.t()) × (rows @ up.t())`, rounded where the model rounds; `weight` has `gate` first."""
    (num_rows, depth), num_columns = rows.shape, output.shape[1]
    assert weight.shape[0] == 2 * num_columns and output.is_contiguous() and rows.is_contiguous()
    grid = (triton.cdiv(num_columns, tiling.block_columns), triton.cdiv(num_rows, _BLOCK_ROWS))
    _gated_product[grid](
        rows,
        weight,
        output,
        num_rows,
        num_columns=num_columns,
        depth=depth,
        block_rows=_BLOCK_ROWS,
        block_columns=tiling.block_columns,
        block_depth=tiling.block_depth,
        stages=tiling.num_stages,
        num_warps=tiling.num_warps,
        **launch_options(rows.device),
    )
