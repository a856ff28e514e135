"""Fetched trajectories as arrays: their check, their cut into micro-batches, and the packed arrays of one pass.

Independent of the training framework, which turns `PackedArrays` into tensors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import IntegrityError
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
class PackedArrays:
    """Packed sequences of one forward pass; `sources` to `sequence_index` have one entry per loss token."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    loss_lengths: tuple[int, ...]
    """Loss tokens of each sequence."""
    tokens: NDArray[np.int64]
    sources: NDArray[np.int64]
    """Index of the packed token before the target; its hidden state predicts the target."""
    targets: NDArray[np.int64]
    sampler_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    """Weight version that sampled the token; -1 for tokens not sampled in this run."""
    advantages: NDArray[np.float32] | None
    """Advantage of the sample, repeated at each of its tokens; None if advantages are per token."""
    sequence_index: NDArray[np.int64]
    lasts: NDArray[np.int64]
    """Index of the last packed token of each sequence."""
    staleness: NDArray[np.float32]
    """Staleness of each sequence: that of its oldest token."""


def pack_arrays(samples: Sequence[BatchSample]) -> PackedArrays:
    """Concatenate samples, without padding."""
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
    return PackedArrays(
        keys=tuple(sample.key for sample in samples),
        lengths=tuple(lengths),
        loss_lengths=tuple(loss_lengths),
        tokens=tokens,
        sources=target_places - 1,
        targets=tokens[target_places],
        sampler_logprobs=np.concatenate([sample.logprobs for sample in samples]),
        versions=np.concatenate([sample.versions for sample in samples]),
        advantages=advantages,
        sequence_index=sequence_index,
        lasts=starts + np.array(lengths) - 1,
        staleness=np.array([sample.values.get("staleness", 0.0) for sample in samples], dtype=np.float32),
    )


def blocks_of(
    samples: Sequence[BatchSample], *, in_order: bool, max_tokens: int, kept: Kept = "learned"
) -> list[list[BatchSample]]:
    """Cut the samples selected by `kept` into blocks of one pass each, in the order of their keys.

    `in_order`: a block ends where the next sample would exceed `max_tokens`; otherwise blocks are balanced. With
    "groups" a ticket is never split.
    """
    units = _units(sorted(samples, key=lambda sample: sample.key), kept=kept)
    lengths = [sum(len(sample.tokens) for sample in unit) for unit in units]
    cut = blocks_in_order if in_order else balanced_blocks
    blocks = cut(lengths, max_tokens=max_tokens)
    return [[sample for index in block for sample in units[index]] for block in blocks]


def _units(samples: Sequence[BatchSample], *, kept: Kept) -> list[list[BatchSample]]:
    """Lists of samples that have to stay in one micro-batch."""
    if kept == "groups":
        groups = [[samples[i] for i in group] for group in grouped([sample.key for sample in samples])]
        return [group for group in groups if any(sample.is_learned for sample in group)]
    return [[sample] for sample in samples if kept == "all" or sample.is_learned]
