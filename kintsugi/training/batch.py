"""From fetched trajectories to the packed tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.buffer.packing import DETERMINISTIC_BLOCK_TOKENS, micro_batches
from kintsugi.errors import IntegrityError
from kintsugi.model.attention import PackedLayout
from kintsugi.types import ShardItem, Trajectory


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory as arrays, with the scalars that the master computed for it."""

    key: str
    tokens: NDArray[np.int32]
    loss_positions: NDArray[np.int64]
    """Where the policy chose the token; never 0, because nothing predicts a first token."""
    logprobs: NDArray[np.float32]
    """Of the policy that sampled, at `loss_positions`."""
    advantage: float


def sample_of(item: ShardItem, trajectory: Trajectory) -> Sample:
    """Check a trajectory against what the master knows of it, and decode it."""
    tokens = np.frombuffer(trajectory.tokens, dtype="<i4")
    mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8)
    logprobs = np.frombuffer(trajectory.logprobs, dtype="<f4")
    loss_positions = np.flatnonzero(mask)
    consistent = (
        trajectory.key == item.key
        and len(tokens) == len(mask) == len(logprobs) == item.num_tokens
        and len(loss_positions) == item.num_loss_tokens
        and (len(loss_positions) == 0 or loss_positions[0] > 0)
    )
    if not consistent:
        raise IntegrityError(
            f"sample {item.key}: expected {item.num_tokens} tokens, {item.num_loss_tokens} of them with loss and not "
            f"the first one; got {trajectory.key} with {len(tokens)} tokens, {len(mask)} mask entries, loss at "
            f"{loss_positions[:8].tolist()}"
        )
    return Sample(
        item.key, tokens, loss_positions, logprobs[loss_positions], item.values.get("advantage", 0.0)
    )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed sequences of one forward pass; `sources` to `sequence_index` have one entry per loss token."""

    keys: tuple[str, ...]
    loss_lengths: tuple[int, ...]
    """Loss tokens of each sequence."""
    tokens: Tensor
    layout: PackedLayout
    sources: Tensor
    """The packed token whose hidden state predicts the target: the one before it."""
    targets: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    sequence_index: Tensor


def pack(samples: Sequence[Sample], *, device: torch.device) -> MicroBatch:
    """Lay samples one after another, without padding."""
    lengths = [len(sample.tokens) for sample in samples]
    loss_lengths = [len(sample.loss_positions) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    sequence_index = np.repeat(np.arange(len(samples)), loss_lengths)
    target_places = np.concatenate([sample.loss_positions for sample in samples]) + starts[sequence_index]
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    advantages = np.array([sample.advantage for sample in samples], dtype=np.float32)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        keys=tuple(sample.key for sample in samples),
        loss_lengths=tuple(loss_lengths),
        tokens=tensor(tokens),
        layout=PackedLayout.from_lengths(lengths, device=device),
        sources=tensor(target_places - 1),
        targets=tensor(tokens[target_places]),
        sampler_logprobs=tensor(np.concatenate([sample.logprobs for sample in samples])),
        advantages=tensor(advantages[sequence_index]),
        sequence_index=tensor(sequence_index),
    )


def cut(
    samples: Sequence[Sample], *, deterministic: bool, max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of all samples that have something to learn.

    In deterministic mode the samples are those of one shard and their blocks depend on them alone; otherwise they
    are whatever this rank holds, packed as tightly as `max_tokens` allows.
    """
    learned = sorted(
        (sample for sample in samples if len(sample.loss_positions)), key=lambda sample: sample.key
    )
    groups = micro_batches(
        [len(sample.tokens) for sample in learned],
        max_tokens=DETERMINISTIC_BLOCK_TOKENS if deterministic else max_tokens,
        keep_order=deterministic,
    )
    return [pack([learned[index] for index in group], device=device) for group in groups]
