"""Products of few rows with a weight of few columns, for which the library leaves most of the device idle.

With few rows a product takes as long as reading its weight, which programs on all multiprocessors must share. Therefore
the depth is cut into splits. Their fp32 sums are added, in their order, by the kernel that reads the product next: no
extra launch is needed. A row's bits depend neither on its index nor on the number of rows.
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

MAX_SPLIT_ROWS = 128
MAX_SPLITS = 8
_NUM_PROGRAMS = 128
"""About the number of multiprocessors."""


class ProductTiling(NamedTuple):
    """Tiling of a product into programs; chosen by `benchmarks/gpu_kernels.py`."""

    num_splits: int
    block_columns: int = 32
    block_depth: int = 128
    block_rows: int = 64
    """Rows that tensor cores process together; fewer rows are not faster."""
    num_warps: int = 4
    num_stages: int = 4

    def split_depth(self, depth: int) -> int:
        num_blocks = triton.cdiv(depth, self.block_depth)
        return int(triton.cdiv(num_blocks, self.num_splits) * self.block_depth)


def split_tiling(num_rows: int, *, num_columns: int, depth: int, dtype: torch.dtype) -> ProductTiling | None:
    """Tiling of such a product, or None where the library is as fast. Tensor cores do not take fp32."""
    if num_rows > MAX_SPLIT_ROWS or dtype == torch.float32:
        return None
    tiling = ProductTiling(num_splits=1)
    most = min(MAX_SPLITS, _NUM_PROGRAMS // triton.cdiv(num_columns, tiling.block_columns))
    if most < 2:
        return None
    tiling = tiling._replace(num_splits=most)
    return tiling._replace(num_splits=triton.cdiv(depth, tiling.split_depth(depth)))


@triton.jit(do_not_specialize=["num_rows"])
def _product_in_parts(
    rows,
    weight,
    parts,
    num_rows,
    num_columns: tl.constexpr,
    depth: tl.constexpr,
    split_depth: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    split = tl.program_id(2)
    is_row, is_column = (row < num_rows)[:, None], (column < num_columns)[None, :]
    inner = split * split_depth + tl.arange(0, block_depth)
    row_pointers = rows + row[:, None] * depth + inner[None, :]
    # Columns past the end read the last one, so that loads need no mask. Sums are stored by the unclamped columns,
    # because the compiler knows that these are contiguous; otherwise it would give each thread of a warp a row.
    column_pointers = weight + tl.minimum(column, num_columns - 1)[:, None] * depth + inner[None, :]
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
    offsets = (split * num_rows + row[:, None]) * num_columns + column[None, :]
    tl.store(parts + offsets, total, is_row & is_column)


def multiply_in_parts(rows: Tensor, weight: Tensor, *, parts: Tensor, tiling: ProductTiling) -> None:
    """Fill `parts` [splits, rows, columns] in fp32; their sum is `rows @ weight.t()`."""
    (num_rows, depth), num_columns = rows.shape, weight.shape[0]
    assert parts.shape == (tiling.num_splits, num_rows, num_columns) and parts.dtype == torch.float32
    assert parts.is_contiguous() and rows.is_contiguous() and weight.is_contiguous()
    num_tiles = triton.cdiv(num_rows, tiling.block_rows)
    _product_in_parts[(triton.cdiv(num_columns, tiling.block_columns), num_tiles, tiling.num_splits)](
        rows,
        weight,
        parts,
        num_rows,
        num_columns=num_columns,
        depth=depth,
        split_depth=tiling.split_depth(depth),
        block_rows=tiling.block_rows,
        block_columns=tiling.block_columns,
        block_depth=tiling.block_depth,
        stages=tiling.num_stages,
        num_warps=tiling.num_warps,
    )
