"""From a ticket to trajectories: what is fed, what was sampled, what it is worth. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from kintsugi.errors import IntegrityError
from kintsugi.messages import Generated
from kintsugi.types import Completion, Finish, SampleMeta, Trajectory, sample_key

_encoder = msgspec.msgpack.Encoder()


def int32(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def trajectory_digest(trajectory: Trajectory) -> str:
    """How a fetched trajectory is recognised."""
    return xxhash.xxh3_64_hexdigest(_encoder.encode(trajectory))


def sampled_trajectory(ticket: str, prompt: bytes, completion: Completion) -> Trajectory:
    """Prompt and completion as they went through the model; only sampled tokens are in the loss."""
    assert completion.finish is not None, f"sample {completion.sample} of {ticket} was interrupted"
    num_prompt, num_sampled = len(prompt) // 4, len(completion.tokens) // 4
    return Trajectory(
        key=sample_key(ticket, completion.sample),
        tokens=prompt + completion.tokens,
        loss_mask=bytes(num_prompt) + b"\x01" * num_sampled,
        logprobs=bytes(4 * num_prompt) + completion.logprobs,
        versions=int32([-1] * num_prompt) + completion.versions,
        finish=completion.finish,
    )


def whole(answer: Generated) -> tuple[Completion, ...]:
    """Its completions. One that was cut short is refused: trained on, it would pass for a truncated one."""
    cut = [completion.sample for completion in answer.completions if completion.finish is None]
    if cut:
        raise IntegrityError(f"{answer.server}: expected finished samples of {answer.ticket}, {cut} are not")
    return answer.completions


def demonstrated_trajectory(
    ticket: str, prompt: Sequence[int], completion: Sequence[int], *, sample: int = 0
) -> Trajectory:
    """A row to imitate, or one of a pair: its completion, end token included, is in the loss."""
    count = len(prompt) + len(completion)
    return Trajectory(
        key=sample_key(ticket, sample),
        tokens=int32([*prompt, *completion]),
        loss_mask=bytes(len(prompt)) + b"\x01" * len(completion),
        logprobs=bytes(4 * count),
        versions=int32([-1] * count),
        finish=Finish.EOS,
    )


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
