"""Conversion of fetched trajectories into the packed tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.errors import IntegrityError
from kintsugi.model.attention import PackedLayout
from kintsugi.samples.sharding import balanced_blocks, blocks_in_order, grouped
from kintsugi.types import ShardItem, Trajectory, staleness

Kept = Literal["learned", "groups", "all"]
"""Samples that a call processes: those with loss tokens ("learned"), whole tickets that contain such a sample
("groups"), or all."""


@dataclass(frozen=True, eq=False)
class BatchSample:
    """One trajectory as arrays, with the scalars that the master computed for it."""

    key: str
    tokens: NDArray[np.int32]
    loss_positions: NDArray[np.int64]
    """Positions of the tokens that the policy chose; never 0, because nothing predicts a first token."""
    logprobs: NDArray[np.float32]
    """Log-probabilities under the policy that sampled, at `loss_positions`."""
    versions: NDArray[np.int32]
    """Weight versions that sampled the tokens at `loss_positions`; -1 for tokens not sampled in this run."""
    values: Mapping[str, float]
    """Scalars from the master: reward, advantage, truncated, mask, staleness, …."""

    @property
    def is_learned(self) -> bool:
        """Whether it has loss tokens and is not masked as a whole."""
        return len(self.loss_positions) > 0 and self.values.get("mask", 1.0) > 0


def sample_of(item: ShardItem, trajectory: Trajectory) -> BatchSample:
    """Check a trajectory against the master's record of it, and decode it."""
    tokens = np.frombuffer(trajectory.tokens, dtype="<i4")
    mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8)
    logprobs = np.frombuffer(trajectory.logprobs, dtype="<f4")
    versions = np.frombuffer(trajectory.versions, dtype="<i4")
    loss_positions = np.flatnonzero(mask)
    consistent = (
        trajectory.key == item.key
        and len(tokens) == len(mask) == len(logprobs) == len(versions) == item.num_tokens
        and len(loss_positions) == item.num_loss_tokens
        and (len(loss_positions) == 0 or loss_positions[0] > 0)
    )
    if not consistent:
        raise IntegrityError(
            f"sample {item.key}: expected {item.num_tokens} tokens, {item.num_loss_tokens} of them with loss and not "
            f"the first one; got {trajectory.key} with {len(tokens)} tokens, {len(mask)} mask entries, "
            f"{len(logprobs)} log-probabilities, {len(versions)} versions, loss at {loss_positions[:8].tolist()}"
        )
    return BatchSample(
        item.key,
        tokens,
        loss_positions=loss_positions,
        logprobs=logprobs[loss_positions],
        versions=versions[loss_positions],
        values=item.values,
    )


def check_staleness(samples: Sequence[BatchSample], *, step: int) -> None:
    """Raise IntegrityError if the staleness from the master differs from that of a sample's tokens."""
    for sample in samples:
        expected = sample.values.get("staleness")
        if expected is not None and len(sample.versions):
            found = staleness(int(sample.versions.min()), step=step)
            if found != expected:
                raise IntegrityError(
                    f"sample {sample.key}: expected a staleness of {expected:g} at step {step}, "
                    f"got {found} from its tokens"
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
    lengths = [len(sample.tokens) for sample in samples]
    loss_lengths = [len(sample.loss_positions) for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    sequence_index = np.repeat(np.arange(len(samples)), loss_lengths)
    target_places = np.concatenate([sample.loss_positions for sample in samples]) + starts[sequence_index]
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    advantages = None
    if all("advantage" in sample.values for sample in samples):
        by_sample = np.array([sample.values["advantage"] for sample in samples], dtype=np.float32)
        advantages = by_sample[sequence_index]

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
        versions=tensor(np.concatenate([sample.versions for sample in samples])),
        advantages=None if advantages is None else tensor(advantages),
        sequence_index=tensor(sequence_index),
        lasts=tensor(starts + np.array(lengths) - 1),
        staleness=tensor(
            np.array([sample.values.get("staleness", 0.0) for sample in samples], dtype=np.float32)
        ),
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
    units = _units(sorted(samples, key=lambda sample: sample.key), kept=kept)
    lengths = [sum(len(sample.tokens) for sample in unit) for unit in units]
    if deterministic and device.type == "cpu":
        blocks = blocks_in_order(lengths, max_tokens=max_tokens)
    else:
        blocks = balanced_blocks(lengths, max_tokens=max_tokens)
    return [pack([sample for index in block for sample in units[index]], device=device) for block in blocks]


def _units(samples: Sequence[BatchSample], *, kept: Kept) -> list[list[BatchSample]]:
    """Lists of samples that have to stay in one micro-batch."""
    if kept == "groups":
        groups = [[samples[i] for i in group] for group in grouped([sample.key for sample in samples])]
        return [group for group in groups if any(sample.is_learned for sample in group)]
    return [[sample] for sample in samples if kept == "all" or sample.is_learned]
