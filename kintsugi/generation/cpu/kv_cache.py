"""Contiguous KV cache of the decoding rows of the CPU runner: one region per row, adjacent to each other.

Reading pages through a table costs as much as the attention itself, and so do gaps between regions. Therefore all
regions have the length that the longest row needs, and are resized when it outgrows them. Untouched memory costs
nothing.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_REGIONS_AT_ONCE = 64
"""Regions that are moved together: few enough to stay in the CPU cache."""


def untouched_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Page-aligned zeros that take no memory before they are written.

    Uses huge pages where available: attention reads all of the cache at every step, and translating small pages takes a
    tenth of its time.
    """
    memory = mmap.mmap(-1, dtype.itemsize * prod(shape))
    if sys.platform == "linux":
        # Some kernels are built without huge pages.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class KvCacheSlots:
    """KV cache [layers, 2, rows, kv_heads, length, head_dim], of up to `max_length` each."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        max_length: int,
        dtype: torch.dtype,
    ) -> None:
        self._num_rows = num_rows
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        num_values = 2 * num_rows * num_kv_heads * max_length * head_dim
        self._memory = untouched_zeros(num_layers, num_values, dtype=dtype)
        self._length = 0
        self.masks = torch.empty(0)
        """[pairs of row and kv head, 1, length]: 0 where a row has a key, else -∞."""
        self._starts = torch.empty(0, dtype=torch.int64)
        """Offset of key and value of position 0 in a layer's memory, in heads, [rows, 2, kv_heads]."""

    @property
    def length(self) -> int:
        return self._length

    def resize(self, length: int, *, held: Tensor) -> None:
        """Change the length of all regions; row i keeps its first `held[i]` tokens."""
        if self._length > 0:
            for memory in self._memory:
                self._move_all(memory, length)
        self._length = length
        pairs = torch.arange(self._num_rows * self._num_kv_heads).view(self._num_rows, 1, -1)
        self._starts = (torch.arange(2).view(1, 2, 1) * pairs.numel() + pairs) * length
        is_held = torch.arange(length) < held.repeat_interleave(self._num_kv_heads).view(-1, 1, 1)
        self.masks = torch.where(is_held, 0.0, float("-inf")).to(self._memory.dtype)

    def _move_all(self, memory: Tensor, length: int) -> None:
        num_places, num_kept = 2 * self._num_rows * self._num_kv_heads, min(length, self._length)
        old, new = (
            memory[: num_places * each * self._head_dim].view(num_places, each, self._head_dim)
            for each in (self._length, length)
        )
        groups = range(0, num_places, _REGIONS_AT_ONCE)
        # In the order in which no region is overwritten before it has been moved.
        for first in groups if length < self._length else reversed(groups):
            some = slice(first, first + _REGIONS_AT_ONCE)
            kept = old[some, :num_kept].clone()
            # Memory after a row's last token must be finite, because 0 × NaN is not 0.
            new[some, num_kept:].zero_()
            new[some, :num_kept] = kept

    def _layer(self, memory: Tensor) -> Tensor:
        """[2, pairs, length, head_dim]"""
        sizes = (2, self._num_rows * self._num_kv_heads, self._length, self._head_dim)
        return memory[: prod(sizes)].view(sizes)

    def of_row(self, row: int) -> Tensor:
        """[layers, 2, kv_heads, length, head_dim]"""
        sizes = (2, self._num_rows, self._num_kv_heads, self._length, self._head_dim)
        return self._memory[:, : prod(sizes)].unflatten(1, sizes)[:, :, row]

    def unmask(self, row: int, length: int) -> None:
        """Unmask the first keys of a row, and no others."""
        masks = self.masks[row * self._num_kv_heads : (row + 1) * self._num_kv_heads]
        masks.fill_(float("-inf"))[..., :length].zero_()

    def open(self, positions: Tensor) -> Tensor:
        """Unmask one more position of each of the first rows; return the targets for `write`."""
        targets = self._starts[: len(positions)] + positions.view(-1, 1, 1)
        self.masks.view(-1).index_fill_(0, targets[:, 0].flatten(), 0.0)
        return targets.flatten()

    def write(self, layer: int, *, targets: Tensor, heads: Tensor) -> None:
        """Store keys and values; `heads` are [rows × 2 × kv_heads, head_dim]: each row's keys, then its values."""
        self._memory[layer].view(-1, self._head_dim).index_copy_(0, targets, heads)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [pairs of row and kv head, length, head_dim]."""
        keys, values = self._layer(self._memory[layer])
        return keys, values
