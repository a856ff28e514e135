"""From a ticket to trajectories: what is fed, what was sampled, what it is worth. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.messages import Generated
from kintsugi.rollout.environment import Turn
from kintsugi.types import Completion, Finish, SampleMeta, Trajectory, sample_key

_encoder = msgspec.msgpack.Encoder()


def int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def trajectory_digest(trajectory: Trajectory) -> str:
    """How a fetched trajectory is recognised."""
    return xxhash.xxh3_64_hexdigest(_encoder.encode(trajectory))


def episode_trajectory(key: str, turns: Sequence[Turn], *, finish: Finish) -> Trajectory:
    """The turns one after the other, as they went through the model; only sampled tokens are in the loss."""
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
    """An episode of one turn: prompt and completion."""
    assert completion.finish is not None, f"sample {completion.sample} of {ticket} was interrupted"
    key = sample_key(ticket, completion.sample)
    return episode_trajectory(key, [Turn(prompt, completion)], finish=completion.finish)


def whole(answer: Generated) -> tuple[Completion, ...]:
    """Its completions. One that was cut short is refused: trained on, it would pass for a truncated one."""
    cut = [completion.sample for completion in answer.completions if completion.finish is None]
    if cut:
        raise IntegrityError(f"{answer.server}: expected finished samples of {answer.ticket}, {cut} are not")
    return answer.completions


def is_empty(completion: Completion) -> bool:
    """Whether not a single token was sampled: nothing can be learned from it."""
    return not completion.tokens


def demonstrated_completion(ids: Sequence[int], *, finish: Finish, sample: int = 0) -> Completion:
    """What shall be imitated, as if a policy had sampled it; no weights have."""
    return Completion(sample, int32(ids), bytes(4 * len(ids)), int32([-1] * len(ids)), finish)


def demonstrated_trajectory(
    ticket: str, prompt: Sequence[int], completion: Sequence[int], *, sample: int = 0
) -> Trajectory:
    """A row to imitate, or one of a pair: its completion, end token included, is in the loss."""
    shown = demonstrated_completion(completion, finish=Finish.EOS, sample=sample)
    return sampled_trajectory(ticket, int32(prompt), shown)


def discounted(rewards: Sequence[float], *, discount: float) -> float:
    """What an episode is worth: its turns' rewards, each later one worth less by this factor.

    >>> discounted([0.0, 0.5, 1.0], discount=0.5)
    0.5
    """
    return sum((discount**turn * reward for turn, reward in enumerate(rewards)), start=0.0)


def describe(
    trajectory: Trajectory, *, ticket: str, holder: str, components: dict[str, float], reward: float
) -> SampleMeta:
    """What the control plane is told of a sample; the components are as the functions gave them, unweighted."""
    versions = array("i", trajectory.versions)
    sampled = [version for version, mask in zip(versions, trajectory.loss_mask, strict=True) if mask]
    tokens = array("i", trajectory.tokens)
    chosen = [token for token, mask in zip(tokens, trajectory.loss_mask, strict=True) if mask]
    return SampleMeta(
        key=trajectory.key,
        ticket=ticket,
        num_tokens=trajectory.num_tokens,
        num_loss_tokens=len(sampled),
        reward=reward,
        reward_components=components,
        finish=trajectory.finish,
        version=min(sampled, default=-1),
        holder=holder,
        digest=trajectory_digest(trajectory),
        repetition=repetition(chosen),
    )


def repetition(tokens: Sequence[int], *, size: int = 4) -> float:
    """Share of n-grams that occurred before.

    >>> repetition([1, 2, 3, 4, 5]), repetition([7] * 8)
    (0.0, 0.8)
    """
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
