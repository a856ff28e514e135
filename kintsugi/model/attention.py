"""Attention over packed sequences.

Linear layers never see padding. Attention does on the CPU, where sequences are right-padded for it: with a causal mask
no real token attends to padding, so no mask is built.

Bits: the result of attention depends on one query versus many and, except for bfloat16, on how many keys a row is
padded to. A caller that needs equal bits fixes `padded_length`. Elsewhere rows of one product agree when it has at
least four of them and `intermediate_size` is a multiple of 32, as in every published model: the remainder of an
activation that does not fill a vector is computed by other instructions, to other bits. Products of different numbers
of rows agree only on some CPUs, so a caller that promises equal bits keeps that number fixed too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from kintsugi.model.torch_internals import flash_attention, flash_attention_gradient

MIN_EQUAL_BITS_ROWS = 4
"""A matrix product of fewer rows takes another kernel with different bits."""


PADDED_MULTIPLE = 16
"""Keys that do not fill a vector are summed in another order, which is visible in bf16; the sampler has none such
either."""
_SPAN = 512
"""Keys that torch's attention on the CPU processes together; their values are one product."""
_RUN = 192
"""Values that such a product in bf16 (MKL) sums together. A product of less than two runs is halved instead."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Locations of the sequences among packed tokens; made once per micro-batch and used by every layer.

    Lengths (2, 3) give `cumulative_lengths` [0, 2, 5], `positions` [0, 1, 0, 1, 2] and, padded to 3,
    `padded_index` [0, 1, 3, 4, 5].
    """

    lengths: tuple[int, ...]
    padded_length: int
    """Keys per sequence in padded attention: the longest length, rounded up, or what the caller fixes."""
    cumulative_lengths: Tensor
    positions: Tensor
    sequence_index: Tensor
    """Index of the sequence that each token belongs to."""
    padded_index: Tensor
    """Each token's row when sequences are laid out one after another at `padded_length`."""

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        padded_length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        assert len(lengths) > 0 and min(lengths) > 0, (
            f"a layout needs sequences of at least one token: {lengths}"
        )
        longest = max(lengths)
        padded = -(-longest // PADDED_MULTIPLE) * PADDED_MULTIPLE if padded_length is None else padded_length
        assert padded >= longest, f"padded_length {padded} is shorter than the longest sequence {longest}"
        device, num_tokens, starts = torch.device(device), sum(lengths), [0, *accumulate(lengths)]
        # One copy to the device for all, and from pinned memory, so that the host does not wait for it.
        rows = torch.empty(3 * num_tokens + len(starts), dtype=torch.int64, pin_memory=device.type == "cuda")
        rows[3 * num_tokens :] = torch.tensor(starts)
        positions, sequence_index, padded_index = rows[: 3 * num_tokens].view(3, num_tokens).unbind()
        sequence_index[...] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        torch.sub(torch.arange(num_tokens), rows[3 * num_tokens :][sequence_index], out=positions)
        torch.add(positions, sequence_index, alpha=padded, out=padded_index)
        rows = rows.to(device, non_blocking=True)
        positions, sequence_index, padded_index = rows[: 3 * num_tokens].view(3, num_tokens).unbind()
        return cls(
            lengths=tuple(lengths),
            padded_length=padded,
            cumulative_lengths=rows[3 * num_tokens :].to(torch.int32),
            positions=positions,
            sequence_index=sequence_index,
            padded_index=padded_index,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def pad(self, packed: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to [sequences, heads, padded_length, head_dim], zeros after each sequence."""
        num_rows = self.num_sequences * self.padded_length
        if num_rows != packed.shape[0]:
            packed = packed.new_zeros(num_rows, *packed.shape[1:]).index_copy(0, self.padded_index, packed)
        return packed.unflatten(0, (self.num_sequences, self.padded_length)).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if rows.shape[0] == self.num_tokens else rows.index_select(0, self.padded_index)


def with_whole_runs(heads: Tensor) -> Tensor:
    """Keys or values [..., keys, head_dim] of attention on the CPU, padded with zeros where their number would
    otherwise decide how sums are split: it differs between trainer and sampler."""
    last_span = heads.shape[-2] % _SPAN
    if heads.dtype != torch.bfloat16 or not _RUN < last_span < 2 * _RUN:
        return heads
    return functional.pad(heads, (0, 0, 0, 2 * _RUN - last_span))


def packed_attention(
    query: Tensor, *, key: Tensor, value: Tensor, layout: PackedLayout, repeat_keys: bool = False
) -> Tensor:
    """Causal attention within each sequence; all tensors are [tokens, heads, head_dim].

    With `repeat_keys` keys and values are repeated for each query head also where that is not needed, for comparison.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        group_size = query.shape[1] // key.shape[1]
        if group_size > 1 and (repeat_keys or not _shares_keys(query.device, query.dtype, query.shape[2])):
            key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
        attended: Tensor = _FlashAttention.apply(
            query, key, value, layout.cumulative_lengths, max(layout.lengths)
        )
        return attended
    keys, values = (with_whole_runs(layout.pad(each)) for each in (key, value))
    attended = functional.scaled_dot_product_attention(
        layout.pad(query),
        keys,
        values,
        is_causal=True,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return layout.unpad(attended)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
        output, normalizers = flash_attention(query, key=key, value=value, starts=starts, longest=longest)
        ctx.save_for_backward(query, key, value, output, normalizers, starts)
        ctx.longest = longest
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, normalizers, starts = ctx.saved_tensors
        found = flash_attention_gradient(
            gradient,
            query=query,
            key=key,
            value=value,
            output=output,
            normalizers=normalizers,
            starts=starts,
            longest=ctx.longest,
        )
        return *found, None, None


@cache
def _shares_keys(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's kernel takes fewer key than query heads, also backward; decided by a first call."""
    query = torch.zeros(1, 2, head_dim, dtype=dtype, device=device)
    key, starts = query[:, :1], torch.arange(2, dtype=torch.int32, device=device)
    try:
        output, normalizers = flash_attention(query, key=key, value=key, starts=starts, longest=1)
        _, found, _ = flash_attention_gradient(
            output,
            query=query,
            key=key,
            value=key,
            output=output,
            normalizers=normalizers,
            starts=starts,
            longest=1,
        )
    except RuntimeError as error:
        # Refusals have this very type; running out of memory, and errors of the device, have types of their own.
        if type(error) is not RuntimeError:
            raise
        return False
    return found.shape == key.shape
