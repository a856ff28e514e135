"""Packed samples of one forward pass as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.model.attention import PackedLayout
from kintsugi.training.packing import BatchSample, Kept, blocks_of, pack_arrays


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed sequences of one forward pass; `sources` to `sequence_index` have one entry per loss token."""

    keys: tuple[str, ...]
    loss_lengths: tuple[int, ...]
    """Loss tokens of each sequence."""
    tokens: Tensor
    layout: PackedLayout
    sources: Tensor
    """Index of the packed token before the target; its hidden state predicts the target."""
    targets: Tensor
    sampler_logprobs: Tensor
    versions: Tensor
    """Weight version that sampled the token; -1 for tokens not sampled in this run."""
    advantages: Tensor | None
    """Advantage of the sample, repeated at each of its tokens; None if advantages are per token."""
    sequence_index: Tensor
    lasts: Tensor
    """Index of the last packed token of each sequence."""
    staleness: Tensor
    """Staleness of each sequence: that of its oldest token."""

    @property
    def num_sequences(self) -> int:
        return len(self.keys)

    def token_staleness(self, *, step: int) -> Tensor:
        """Staleness of each loss token, by its own version."""
        return torch.where(self.versions < 0, 0, (step - 1 - self.versions).clamp(min=0)).float()


def pack(samples: Sequence[BatchSample], *, device: torch.device) -> MicroBatch:
    """Concatenate samples into one micro-batch, without padding."""
    arrays = pack_arrays(samples)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        keys=arrays.keys,
        loss_lengths=arrays.loss_lengths,
        tokens=tensor(arrays.tokens),
        layout=PackedLayout.from_lengths(arrays.lengths, device=device),
        sources=tensor(arrays.sources),
        targets=tensor(arrays.targets),
        sampler_logprobs=tensor(arrays.sampler_logprobs),
        versions=tensor(arrays.versions),
        advantages=None if arrays.advantages is None else tensor(arrays.advantages),
        sequence_index=tensor(arrays.sequence_index),
        lasts=tensor(arrays.lasts),
        staleness=tensor(arrays.staleness),
    )


def cut(
    samples: Sequence[BatchSample],
    *,
    deterministic: bool,
    max_tokens: int,
    device: torch.device,
    kept: Kept = "learned",
) -> list[MicroBatch]:
    """Cut the samples selected by `kept` into micro-batches, in the order of their keys.

    In deterministic mode the samples are those of one shard, and the blocks depend on them and `max_tokens` alone;
    otherwise they are all samples of this rank. With "groups" a ticket is never split.
    """
    in_order = deterministic and device.type == "cpu"
    blocks = blocks_of(samples, in_order=in_order, max_tokens=max_tokens, kept=kept)
    return [pack(block, device=device) for block in blocks]
