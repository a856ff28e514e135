"""Attention over packed sequences (training, prefill) and over a static cache (decoding).

Linear layers never see padding. Attention does on the CPU, where sequences are laid out right-padded just for it:
with a causal mask no real token looks at padding, so no mask is built.

Bits: the result of attention depends on how many keys a row is padded to, and on one query versus many. Decoding
therefore always attends over the cache's whole length, whatever the other rows hold, and a caller who needs equal
bits from packed attention fixes `padded_length`. Elsewhere rows of one product agree when it has at least four of them
and `intermediate_size` is a multiple of 32, as in every published model: what does not fill a vector at the end of an
activation is computed by other instructions, to other bits. Products of different numbers of rows agree on some
processors only, so whoever promises equal bits keeps that number fixed too.
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

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.rotary import Rotation, inverse_frequencies, rotation_at

MIN_EQUAL_BITS_ROWS = 4
"""A matrix product of fewer rows takes another kernel, whose bits differ."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where each sequence lies among packed tokens; made once per micro-batch and used by every layer.

    Lengths (2, 3) give `cumulative_lengths` [0, 2, 5], `positions` [0, 1, 0, 1, 2] and, padded to 3,
    `padded_index` [0, 1, 3, 4, 5].
    """

    lengths: tuple[int, ...]
    padded_length: int
    """Keys per sequence in padded attention: the longest length, or more when the caller fixes it."""
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
        padded = longest if padded_length is None else padded_length
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


def packed_attention(query: Tensor, *, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
    """Causal attention within each sequence; all tensors are [tokens, heads, head_dim]."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _variable_length_attention(query, key=key, value=value, layout=layout)
    attended = functional.scaled_dot_product_attention(
        layout.pad(query),
        layout.pad(key),
        layout.pad(value),
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


class KVCache:
    """Keys and values of `num_slots` independent rows, allocated once at a fixed length.

    A row is used by writing position 0, 1, 2, … in turn; starting again at position 0 starts a new sequence, and what
    lies behind the position is masked, so a slot needs no clearing. Only values that are not finite would leak
    through the mask (0 × NaN): call `clear` after a model produced them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_length > config.max_positions:
            raise ModelError(
                f"expected a cache of at most `max_positions` {config.max_positions}, got {max_length}"
            )
        if num_slots < MIN_EQUAL_BITS_ROWS:
            raise ModelError(
                f"expected at least {MIN_EQUAL_BITS_ROWS} slots (fewer rows give other bits), got {num_slots}"
            )
        self.num_slots = num_slots
        self.max_length = max_length
        device = torch.device(device)
        shape = (config.num_layers, num_slots * max_length, config.num_kv_heads, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._slot_starts = torch.arange(num_slots, device=device) * max_length
        positions = torch.arange(max_length, device=device)
        visible = positions[:, None] >= positions
        self._masks = torch.where(visible, 0.0, float("-inf")).to(dtype)
        frequencies = inverse_frequencies(config, device=device)
        self._rotations = rotation_at(positions, frequencies=frequencies, config=config, dtype=dtype)

    def clear(self) -> None:
        self._keys.zero_()
        self._values.zero_()

    def begin_step(self, positions: Tensor) -> DecodeStep:
        """What every layer of one decoding step shares; `positions` holds one position per slot."""
        return DecodeStep(
            cache=self,
            rows=self._slot_starts + positions,
            mask=self._masks.index_select(0, positions)[:, None, None, :],
            rotation=self._rotations.select(positions),
        )

    def rows_of(self, slots: Tensor, *, positions: Tensor) -> Tensor:
        """Row of each (slot, position) pair, as `store` takes them."""
        return slots * self.max_length + positions

    def store(self, layer: int, *, rows: Tensor, key: Tensor, value: Tensor) -> None:
        self._keys[layer].index_copy_(0, rows, key)
        self._values[layer].index_copy_(0, rows, value)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as [slots, kv_heads, max_length, head_dim]."""
        shape = (self.num_slots, self.max_length)
        return (
            self._keys[layer].unflatten(0, shape).transpose(1, 2),
            self._values[layer].unflatten(0, shape).transpose(1, 2),
        )


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """One new token per slot: where its keys go, what it sees, how it is rotated."""

    cache: KVCache
    rows: Tensor
    mask: Tensor
    rotation: Rotation

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store this token's key and value, then attend over the slot's whole length, masked by position."""
        self.cache.store(layer, rows=self.rows, key=key, value=value)
        keys, values = self.cache.read(layer)
        attended = functional.scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=self.mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.squeeze(2)
