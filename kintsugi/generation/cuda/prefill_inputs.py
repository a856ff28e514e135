"""Inputs of a prefill: its chunks as one array of numbers, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.generation.cuda.layers import CachePositions
from kintsugi.generation.engine.runner import PrefillChunk


class PrefillShape(NamedTuple):
    """Padded shape of a call. With multiples of four, every part is aligned."""

    num_rows: int
    num_chunks: int
    max_tokens: int
    """Most tokens of one chunk."""
    max_pages: int
    """Most pages of one chunk's sequence."""

    @property
    def num_numbers(self) -> int:
        return 3 * self.num_rows + self.num_chunks * (self.max_pages + 3)


class PrefillInputs(NamedTuple):
    tokens: Tensor
    cache_positions: CachePositions
    tables: Tensor
    """[chunks, pages]"""
    chunks: Tensor
    """[chunks, 3]: first row, number of tokens, position of the first."""
    max_tokens: int


def packed_chunks(
    chunks: Sequence[PrefillChunk], *, shape: PrefillShape, page_size: int, scratch_page: int
) -> NDArray[np.int32]:
    """Pack chunks. Rows of no chunk write nothing, and chunks without tokens are ignored."""
    packed = np.zeros(shape.num_numbers, np.int32)
    tokens, positions, destinations = packed[: 3 * shape.num_rows].reshape(3, -1)
    destinations[:] = -1
    tables = packed[3 * shape.num_rows : -3 * shape.num_chunks].reshape(shape.num_chunks, -1)
    tables[:] = scratch_page
    layout = packed[-3 * shape.num_chunks :].reshape(-1, 3)
    first = 0
    for index, chunk in enumerate(chunks):
        count = len(chunk.tokens)
        rows = slice(first, first + count)
        tokens[rows] = chunk.tokens
        tables[index, : len(chunk.pages)] = chunk.pages
        at = chunk.start + np.arange(count)
        positions[rows] = at
        written = slice(first + chunk.num_known, first + count)
        at = at[chunk.num_known :]
        destinations[written] = tables[index, at // page_size] * page_size + at % page_size
        layout[index] = first, count, chunk.start
        first += count
    return packed


def unpacked(packed: Tensor, *, shape: PrefillShape) -> PrefillInputs:
    tokens, positions, destinations = packed[: 3 * shape.num_rows].view(3, -1)
    return PrefillInputs(
        tokens,
        CachePositions(positions=positions, lengths=positions, destinations=destinations),
        packed[3 * shape.num_rows : -3 * shape.num_chunks].view(shape.num_chunks, -1),
        packed[-3 * shape.num_chunks :].view(-1, 3),
        shape.max_tokens,
    )
