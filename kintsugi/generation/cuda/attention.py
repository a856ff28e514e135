"""Attention over a paged KV cache: one new token per row (decoding), or chunks of prompts (prefill).

Pages are [pages, kv_heads, page_size, head_dim], so that one program's part of a page is contiguous. The query heads
that share a kv head are the rows of one small matrix product, padded to the 16 that tensor cores take.

Decoding cuts a long context into splits of a fixed length, processed by different programs; the last program to finish
joins the splits, in their order. So the order of every sum depends only on the row's own length, and a row's bits
depend neither on the other rows nor on the number of splits of the launch.
"""

# Triton infers the types of a kernel's arguments at each launch; it rejects annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kintsugi.model.architecture import ModelConfig

MIN_DOT_ROWS = 16
"""Fewest rows of a matrix product on tensor cores."""

SPLIT_LENGTH = 1024
"""Keys of one split, a multiple of every block size. Contexts up to this length are not split."""


@dataclass(frozen=True)
class DecodeTiling:
    """Tiling of decode attention into programs; chosen by `benchmarks/gpu_kernels.py`."""

    block_size: int = 32
    """Keys that are processed together."""
    num_warps: int = 4
    num_stages: int = 5

    @classmethod
    def of(cls, dtype: torch.dtype) -> DecodeTiling:
        """Tiling for a type: keys of twice the size leave room for fewer."""
        return cls(num_stages=2) if dtype == torch.float32 else cls()


@dataclass(frozen=True)
class PrefillTiling:
    block_rows: int = 64
    """Query tokens × grouped heads of one program, or more where one token has more heads."""
    block_size: int = 64
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def of(cls, dtype: torch.dtype) -> PrefillTiling:
        return cls(block_rows=32, block_size=32) if dtype == torch.float32 else cls()


@triton.jit
def _page_offsets(
    table,
    positions,
    inside,
    kv_head,
    num_kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Offsets of the keys (or values) at these positions, for a sequence with this page table."""
    page = tl.load(table + positions // page_size, mask=inside, other=0).to(tl.int64)
    return (page * num_kv_heads + kv_head) * (page_size * head_dim) + (positions % page_size) * head_dim


@triton.jit
def _absorb(query, keys, values, visible, scale, maximum, total, attended):
    """Add some keys to a running softmax with exponentials of base 2."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrinking = tl.exp2(maximum - new_maximum)
    total = total * shrinking + tl.sum(weights, 1)
    attended = tl.dot(weights.to(values.dtype), values, attended * shrinking[:, None], input_precision="ieee")
    return new_maximum, total, attended


@triton.jit
def _store_attended(output, attended, total, heads, dims, valid, head_dim: tl.constexpr):
    result = (attended / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + heads[:, None] * head_dim + dims[None, :], result, valid)


@triton.jit
def _join_splits(
    partials,
    partial_maxima,
    partial_totals,
    num_splits,
    heads,
    is_head,
    dims,
    valid,
    head_dim: tl.constexpr,
    padded_group: tl.constexpr,
    padded_dim: tl.constexpr,
    max_splits: tl.constexpr,
):
    """Sum the results of the splits, in their order. Bypass the L1 cache, which may hold stale data."""
    maximum = tl.full([padded_group], float("-inf"), tl.float32)
    for split in range(num_splits):
        partial = tl.load(partial_maxima + heads * max_splits + split, is_head, 0.0, cache_modifier=".cg")
        maximum = tl.maximum(maximum, partial)
    total = tl.zeros([padded_group], tl.float32)
    attended = tl.zeros([padded_group, padded_dim], tl.float32)
    for split in range(num_splits):
        at = heads * max_splits + split
        shrinking = tl.exp2(tl.load(partial_maxima + at, is_head, 0.0, cache_modifier=".cg") - maximum)
        total += tl.load(partial_totals + at, is_head, 1.0, cache_modifier=".cg") * shrinking
        offsets = at[:, None] * head_dim + dims[None, :]
        partial = tl.load(partials + offsets, valid, 0.0, cache_modifier=".cg")
        attended += partial * shrinking[:, None]
    return total, attended


@triton.jit
def _decode_attention(
    qkv,
    key_pages,
    value_pages,
    tables,
    slots,
    lengths,
    output,
    partials,
    partial_maxima,
    partial_totals,
    arrivals,
    scale,
    qkv_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_size: tl.constexpr,
    split_length: tl.constexpr,
    max_splits: tl.constexpr,
    stages: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split * split_length
    table = tables + tl.load(slots + row).to(tl.int64) * table_stride
    length = tl.load(lengths + row)
    if begin < length:
        end = tl.minimum(begin + split_length, length)
        in_group, dims = tl.arange(0, padded_group), tl.arange(0, padded_dim)
        is_head, is_dim = in_group < group, dims < head_dim
        heads = kv_head * group + in_group
        valid = is_head[:, None] & is_dim[None, :]
        query = tl.load(qkv + row * qkv_stride + heads[:, None] * head_dim + dims[None, :], valid, 0.0)
        maximum = tl.full([padded_group], float("-inf"), tl.float32)
        total = tl.zeros([padded_group], tl.float32)
        attended = tl.zeros([padded_group, padded_dim], tl.float32)
        for start in tl.range(begin, end, block_size, num_stages=stages):
            positions = start + tl.arange(0, block_size)
            inside = positions < end
            offsets = _page_offsets(table, positions, inside, kv_head, num_kv_heads, page_size, head_dim)
            offsets = offsets[:, None] + dims[None, :]
            mask = inside[:, None]
            if padded_dim != head_dim:
                mask = mask & is_dim[None, :]
            keys = tl.load(key_pages + offsets, mask, 0.0)
            values = tl.load(value_pages + offsets, mask, 0.0)
            maximum, total, attended = _absorb(
                query, keys, values, inside[None, :], scale, maximum, total, attended
            )
        num_splits = tl.cdiv(length, split_length)
        heads = row * (num_kv_heads * group) + heads
        if num_splits == 1:
            _store_attended(output, attended, total, heads, dims, valid, head_dim)
        else:
            at = heads * max_splits + split
            tl.store(partial_maxima + at, maximum, is_head)
            tl.store(partial_totals + at, total, is_head)
            tl.store(partials + at[:, None].to(tl.int64) * head_dim + dims[None, :], attended, valid)
            tl.debug_barrier()
            arrival = arrivals + row * num_kv_heads + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_splits - 1:
                total, attended = _join_splits(
                    partials,
                    partial_maxima,
                    partial_totals,
                    num_splits,
                    heads.to(tl.int64),
                    is_head,
                    dims,
                    valid,
                    head_dim,
                    padded_group,
                    padded_dim,
                    max_splits,
                )
                tl.store(output + heads[:, None] * head_dim + dims[None, :], attended / total[:, None], valid)
                tl.store(arrival, 0)


@triton.jit
def _prefill_attention(
    qkv,
    key_pages,
    value_pages,
    tables,
    chunks,
    output,
    scale,
    qkv_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_rows: tl.constexpr,
    block_size: tl.constexpr,
    stages: tl.constexpr,
):
    chunk, tile, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile_tokens: tl.constexpr = block_rows // padded_group
    first_row = tl.load(chunks + chunk * 3)
    num_tokens = tl.load(chunks + chunk * 3 + 1)
    start = tl.load(chunks + chunk * 3 + 2)
    first = tile * tile_tokens
    if first < num_tokens:
        rows, dims = tl.arange(0, block_rows), tl.arange(0, padded_dim)
        tokens, in_group = first + rows // padded_group, rows % padded_group
        is_dim = dims < head_dim
        valid = ((tokens < num_tokens) & (in_group < group))[:, None] & is_dim[None, :]
        heads = kv_head * group + in_group
        at = (first_row + tokens).to(tl.int64)
        query = tl.load(qkv + (at * qkv_stride + heads * head_dim)[:, None] + dims[None, :], valid, 0.0)
        table = tables + chunk.to(tl.int64) * table_stride
        end = start + tl.minimum(first + tile_tokens, num_tokens)
        maximum = tl.full([block_rows], float("-inf"), tl.float32)
        total = tl.zeros([block_rows], tl.float32)
        attended = tl.zeros([block_rows, padded_dim], tl.float32)
        for begin in tl.range(0, end, block_size, num_stages=stages):
            positions = begin + tl.arange(0, block_size)
            inside = positions < end
            offsets = _page_offsets(table, positions, inside, kv_head, num_kv_heads, page_size, head_dim)
            offsets = offsets[:, None] + dims[None, :]
            mask = inside[:, None]
            if padded_dim != head_dim:
                mask = mask & is_dim[None, :]
            keys = tl.load(key_pages + offsets, mask, 0.0)
            values = tl.load(value_pages + offsets, mask, 0.0)
            visible = positions[None, :] <= (start + tokens)[:, None]
            maximum, total, attended = _absorb(query, keys, values, visible, scale, maximum, total, attended)
        offsets = (at * (num_kv_heads * group * head_dim) + heads * head_dim)[:, None] + dims[None, :]
        tl.store(output + offsets, (attended / total[:, None]).to(output.dtype.element_ty), valid)


class PagedAttention:
    """Launches of both kernels for one model, and the memory in which splits are joined."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        page_size: int,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        decode: DecodeTiling | None = None,
        prefill: PrefillTiling | None = None,
    ) -> None:
        self._decode_tiling = DecodeTiling.of(dtype) if decode is None else decode
        self._prefill_tiling = PrefillTiling.of(dtype) if prefill is None else prefill
        self._page_size = page_size
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._group = config.num_heads // config.num_kv_heads
        self._padded_dim = max(MIN_DOT_ROWS, triton.next_power_of_2(config.head_dim))
        self._scale = config.head_dim**-0.5 * math.log2(math.e)
        self.max_splits: int = triton.cdiv(max_length, SPLIT_LENGTH)
        num_heads = max_rows * config.num_heads
        # Rows that fit into one split never touch these.
        places = self.max_splits if self.max_splits > 1 else 0
        options = {"dtype": torch.float32, "device": device}
        self._partials = torch.empty(max(1, num_heads * places * config.head_dim), **options)  # type: ignore[call-overload]
        self._partial_maxima, self._partial_totals = torch.empty(2, max(1, num_heads * places), **options)  # type: ignore[call-overload]
        self._arrivals = torch.zeros(max_rows * config.num_kv_heads, dtype=torch.int32, device=device)

    def decode(
        self,
        qkv: Tensor,
        *,
        key_pages: Tensor,
        value_pages: Tensor,
        tables: Tensor,
        slots: Tensor,
        lengths: Tensor,
        output: Tensor,
        num_splits: int,
    ) -> None:
        """Attend from row i's query in `qkv` to the first `lengths[i]` keys of slot `slots[i]`; length 0 leaves
        `output` unchanged. No length needs more than `num_splits` splits."""
        tiling = self._decode_tiling
        _decode_attention[(qkv.shape[0], self._num_kv_heads, num_splits)](
            qkv,
            key_pages,
            value_pages,
            tables,
            slots,
            lengths,
            output,
            self._partials,
            self._partial_maxima,
            self._partial_totals,
            self._arrivals,
            self._scale,
            qkv.stride(0),
            tables.stride(0),
            num_kv_heads=self._num_kv_heads,
            group=self._group,
            padded_group=max(MIN_DOT_ROWS, triton.next_power_of_2(self._group)),
            head_dim=self._head_dim,
            padded_dim=self._padded_dim,
            page_size=self._page_size,
            block_size=tiling.block_size,
            split_length=SPLIT_LENGTH,
            max_splits=self.max_splits,
            stages=tiling.num_stages,
            num_warps=tiling.num_warps,
        )

    def prefill(
        self,
        qkv: Tensor,
        *,
        key_pages: Tensor,
        value_pages: Tensor,
        tables: Tensor,
        chunks: Tensor,
        max_tokens: int,
        output: Tensor,
    ) -> None:
        """Attend from every token of each chunk to its sequence's keys up to its own position.

        `chunks` is [chunks, 3]: first row in `qkv`, number of tokens (at most `max_tokens`), position of the first.
        """
        tiling = self._prefill_tiling
        padded_group = triton.next_power_of_2(self._group)
        block_rows = max(tiling.block_rows, padded_group)
        num_tiles = triton.cdiv(max_tokens, block_rows // padded_group)
        _prefill_attention[(chunks.shape[0], num_tiles, self._num_kv_heads)](
            qkv,
            key_pages,
            value_pages,
            tables,
            chunks,
            output,
            self._scale,
            qkv.stride(0),
            tables.stride(0),
            num_kv_heads=self._num_kv_heads,
            group=self._group,
            padded_group=padded_group,
            head_dim=self._head_dim,
            padded_dim=self._padded_dim,
            page_size=self._page_size,
            block_rows=block_rows,
            block_size=tiling.block_size,
            stages=tiling.num_stages,
            num_warps=tiling.num_warps,
        )
