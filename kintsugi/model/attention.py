"""Attention over packed sequences.

Linear layers never see padding. Attention does on the CPU, where sequences are laid out right-padded just for it:
with a causal mask no real token looks at padding, so no mask is built.

Bits: the result of attention depends on one query versus many and, but for bfloat16, on how many keys a row is padded
to. A caller who needs equal bits fixes `padded_length`. Elsewhere rows of one product agree when it has at least four
of them and `intermediate_size` is a multiple of 32, as in every published model: what does not fill a vector at the
end of an activation is computed by other instructions, to other bits. Products of different numbers of rows agree on
some processors only, so whoever promises equal bits keeps that number fixed too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

MIN_EQUAL_BITS_ROWS = 4
"""A matrix product of fewer rows takes another kernel, whose bits differ."""


PADDED_MULTIPLE = 16
"""Keys that do not fill a vector are added up in another order, which bf16 shows; the sampler has none such either."""
_SPAN = 512
"""Keys that torch's attention on the CPU takes at once; their values are one product."""
_RUN = 192
"""Values that such a product in bf16 (MKL's) adds up at once. One of less than two runs it halves instead."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where each sequence lies among packed tokens; made once per micro-batch and used by every layer.

    Lengths (2, 3) give `cumulative_lengths` [0, 2, 5], `positions` [0, 1, 0, 1, 2] and, padded to 3,
    `padded_index` [0, 1, 3, 4, 5].
    """

    lengths: tuple[int, ...]
    padded_length: int
    """Keys per sequence in padded attention: the longest length, rounded up, or what the caller fixes."""
    cumulative_lengths: Tensor
    positions: Tensor
    sequence_index: Tensor
    """Which sequence each token belongs to."""
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
        per_sequence = torch.tensor(lengths, dtype=torch.int64)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
        sequence_index = torch.repeat_interleave(torch.arange(len(lengths)), per_sequence)
        positions = torch.arange(int(starts[-1])) - starts[sequence_index]
        return cls(
            lengths=tuple(lengths),
            padded_length=padded,
            cumulative_lengths=starts.to(device=device, dtype=torch.int32),
            positions=positions.to(device),
            sequence_index=sequence_index.to(device),
            padded_index=(sequence_index * padded + positions).to(device),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def pad(self, packed: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to [sequences, heads, padded_length, head_dim], zeros behind each sequence."""
        num_rows = self.num_sequences * self.padded_length
        if num_rows != packed.shape[0]:
            packed = packed.new_zeros(num_rows, *packed.shape[1:]).index_copy(0, self.padded_index, packed)
        return packed.unflatten(0, (self.num_sequences, self.padded_length)).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if rows.shape[0] == self.num_tokens else rows.index_select(0, self.padded_index)


def with_whole_runs(heads: Tensor) -> Tensor:
    """Keys or values [..., keys, head_dim] of attention on the CPU, with zeros behind them where their number would
    otherwise decide where sums are cut: a trainer and a sampler do not know each other's."""
    last_span = heads.shape[-2] % _SPAN
    if heads.dtype != torch.bfloat16 or not _RUN < last_span < 2 * _RUN:
        return heads
    return functional.pad(heads, (0, 0, 0, 2 * _RUN - last_span))


def packed_attention(query: Tensor, *, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
    """Causal attention within each sequence; all tensors are [tokens, heads, head_dim]."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _variable_length_attention(query, key=key, value=value, layout=layout)
    keys, values = (with_whole_runs(layout.pad(each)) for each in (key, value))
    attended = functional.scaled_dot_product_attention(
        layout.pad(query),
        keys,
        values,
        is_causal=True,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return layout.unpad(attended)


def _variable_length_attention(query: Tensor, *, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
    """torch's flash kernel for packed sequences; torch 2.11 has it without grouped heads.

    Imported only where it is used: it brings in torch's compiler, which takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    group_size = query.shape[1] // key.shape[1]
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = group_size > 1
    elif group_size > 1:
        key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    starts, longest = layout.cumulative_lengths, max(layout.lengths)
    attended = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    assert isinstance(attended, Tensor)
    return attended
