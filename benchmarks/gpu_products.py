"""A candidate for products of few rows, timed beside the library's by `gpu_kernels.py`.

The depth is cut into splits, which write partial sums in float32; whoever reads the product next would add them up, in
their order. So every multiprocessor reads a part of the weight, without a launch that only adds.
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


class Tiling(NamedTuple):
    block_rows: int
    block_columns: int
    block_depth: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 4


TILINGS = (
    Tiling(64, 64, 64, 2),
    Tiling(64, 64, 64, 4),
    Tiling(64, 64, 128, 4, num_stages=3),
    Tiling(64, 64, 64, 8),
    Tiling(64, 32, 128, 1),
    Tiling(64, 32, 128, 4),
    Tiling(64, 128, 64, 4),
    Tiling(64, 128, 64, 8),
    Tiling(16, 64, 128, 4),
    Tiling(16, 32, 256, 2),
)


@triton.jit
def _product(
    rows,
    weight,
    partials,
    num_rows,
    num_columns,
    depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    num_splits: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    split = tl.program_id(2)
    split_depth: tl.constexpr = depth // num_splits
    inner = tl.arange(0, block_depth)
    row_pointers = rows + row[:, None] * depth + split * split_depth + inner[None, :]
    column_pointers = weight + column[:, None] * depth + split * split_depth + inner[None, :]
    is_row = (row < num_rows)[:, None]
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for start in tl.range(0, split_depth, block_depth, num_stages=stages):
        some_rows = tl.load(row_pointers + start, is_row, 0.0)
        some_columns = tl.load(column_pointers + start)
        total = tl.dot(some_rows, tl.trans(some_columns), total)
    offsets = (split * num_rows + row[:, None]) * num_columns + column[None, :]
    tl.store(partials + offsets, total.to(partials.dtype.element_ty), is_row)


def product(rows: Tensor, weight: Tensor, *, partials: Tensor, tiling: Tiling) -> None:
    """`partials` [splits, rows, columns] sum to `rows @ weight.t()`."""
    num_rows, depth = rows.shape
    num_columns = weight.shape[0]
    assert depth % (tiling.block_depth * tiling.num_splits) == 0 and num_columns % tiling.block_columns == 0
    grid = (num_columns // tiling.block_columns, triton.cdiv(num_rows, tiling.block_rows), tiling.num_splits)
    _product[grid](
        rows,
        weight,
        partials,
        num_rows,
        num_columns,
        depth=depth,
        block_rows=tiling.block_rows,
        block_columns=tiling.block_columns,
        block_depth=tiling.block_depth,
        num_splits=tiling.num_splits,
        stages=tiling.num_stages,
        num_warps=tiling.num_warps,
    )


def new_partials(rows: Tensor, weight: Tensor, *, tiling: Tiling) -> Tensor:
    dtype = rows.dtype if tiling.num_splits == 1 else torch.float32
    return torch.full(
        (tiling.num_splits, rows.shape[0], weight.shape[0]), 777.0, dtype=dtype, device=rows.device
    )
