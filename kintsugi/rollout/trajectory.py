"""Construction of trajectories from prompts, sampled turns and rewards. Pure functions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress

import msgspec
import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.protocol.generation import Generated
from kintsugi.rollout.environments.protocol import Turn
from kintsugi.types import Completion, FinishReason, SampleMeta, Trajectory, sample_key

_encoder = msgspec.msgpack.Encoder()


def int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def trajectory_digest(trajectory: Trajectory) -> str:
    """Digest by which a fetched trajectory is verified."""
    return xxhash.xxh3_64_hexdigest(_encoder.encode(trajectory))


def episode_trajectory(key: str, turns: Sequence[Turn], *, finish: FinishReason) -> Trajectory:
    """Concatenate the turns as the model processed them; only sampled tokens are in the loss."""
    parts = [(turn.fed, len(turn.fed) // 4, turn.completion) for turn in turns]
    return Trajectory(
        key=key,
        tokens=b"".join(fed + completion.tokens for fed, _, completion in parts),
        loss_mask=b"".join(
            bytes(count) + b"\x01" * (len(completion.tokens) // 4) for _, count, completion in parts
        ),
        logprobs=b"".join(bytes(4 * count) + completion.logprobs for _, count, completion in parts),
        versions=b"".join(int32([-1] * count) + completion.versions for _, count, completion in parts),
        finish=finish,
    )


def sampled_trajectory(ticket: str, prompt: bytes, completion: Completion) -> Trajectory:
    """Build the trajectory of one turn: prompt and completion."""
    assert completion.finish is not None, f"sample {completion.sample} of {ticket} was interrupted"
    key = sample_key(ticket, completion.sample)
    return episode_trajectory(key, [Turn(prompt, completion)], finish=completion.finish)


def whole(answer: Generated) -> tuple[Completion, ...]:
    """Return the completions; IntegrityError if one was interrupted, because it would be trained as a truncated one."""
    cut = [completion.sample for completion in answer.completions if completion.finish is None]
    if cut:
        raise IntegrityError(f"{answer.server}: expected finished samples of {answer.ticket}, {cut} are not")
    return answer.completions


def is_empty(completion: Completion) -> bool:
    """Whether no token was sampled, so that nothing can be learned from it."""
    return not completion.tokens


def demonstrated_completion(ids: Sequence[int], *, finish: FinishReason, sample: int = 0) -> Completion:
    """Build a completion to imitate, in the form of a sampled one, with version -1."""
    return Completion(sample, int32(ids), bytes(4 * len(ids)), int32([-1] * len(ids)), finish)


def demonstrated_trajectory(
    ticket: str, prompt: Sequence[int], completion: Sequence[int], *, sample: int = 0
) -> Trajectory:
    """Build a trajectory to imitate, or one of a pair: its completion, with the end token, is in the loss."""
    shown = demonstrated_completion(completion, finish=FinishReason.EOS, sample=sample)
    return sampled_trajectory(ticket, int32(prompt), shown)


def discounted(rewards: Sequence[float], *, discount: float) -> float:
    """Return of an episode: the sum of its turns' rewards, discounted by this factor per turn.

    >>> discounted([0.0, 0.5, 1.0], discount=0.5)
    0.5
    """
    return sum((discount**turn * reward for turn, reward in enumerate(rewards)), start=0.0)


def describe(
    trajectory: Trajectory, *, ticket: str, holder: str, components: dict[str, float], reward: float
) -> SampleMeta:
    """Build the record of a sample for the control plane; the reward components are unweighted."""
    # All groups of a batch may end together, and a step waits for this: no loops over tokens in Python.
    mask = trajectory.loss_mask
    return SampleMeta(
        key=trajectory.key,
        ticket=ticket,
        num_tokens=trajectory.num_tokens,
        num_loss_tokens=len(mask) - mask.count(0),
        reward=reward,
        reward_components=components,
        finish=trajectory.finish,
        version=min(compress(array("i", trajectory.versions), mask), default=-1),
        holder=holder,
        digest=trajectory_digest(trajectory),
        repetition=repetition(list(compress(array("i", trajectory.tokens), mask))),
    )


def repetition(tokens: Sequence[int], *, size: int = 4) -> float:
    """Fraction of n-grams that occurred before.

    >>> repetition([1, 2, 3, 4, 5]), repetition([7] * 8)
    (0.0, 0.8)
    """
    num_grams = len(tokens) - size + 1
    if num_grams <= 0:
        return 0.0
    return 1.0 - len(set(zip(*(tokens[start:] for start in range(size)), strict=False))) / num_grams
