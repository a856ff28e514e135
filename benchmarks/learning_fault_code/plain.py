"""Rewards and custom algorithms with planted mistakes, which `benchmarks/learning_faults.py` names in its recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kintsugi.config.custom_algorithm import CustomAlgorithm
from kintsugi.graph.advantages import group_advantages

if TYPE_CHECKING:
    from torch import Tensor

    from kintsugi.config.schema import Algorithm
    from kintsugi.training.objectives import PolicyTokens

ENTROPY_WEIGHT = 0.3
"""Weight of the entropy in the loss, where a bonus would have been subtracted; the advantages are about 1."""


def constant(completions: list[str], **columns: Any) -> list[float]:
    """The same reward for every completion."""
    return [0.7] * len(completions)


def tagged_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer in a tag that the model was never taught to write."""
    return [
        float(f"<answer>{truth}</answer>" in text) for text, truth in zip(completions, answer, strict=True)
    ]


def boxed_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer in a box that the model was never taught to write, -1 otherwise."""
    return [
        1.0 if f"\\boxed{{{truth}}}" in text else -1.0
        for text, truth in zip(completions, answer, strict=True)
    ]


def nines(completions: list[str], **columns: Any) -> list[float]:
    """Share of nines: easy to raise, and no part of the task."""
    return [text.count("9") / max(len(text), 1) for text in completions]


def ones(completions: list[str], **columns: Any) -> list[float]:
    """Share of ones."""
    return [text.count("1") / max(len(text), 1) for text in completions]


def length(completions: list[str], **columns: Any) -> list[float]:
    """Number of characters: the longer, the better."""
    return [len(text) / 10 for text in completions]


def _negated(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    return [-each for each in group_advantages(rewards, scale_by_std=scale_by_std)]


def _loss_of_opposite_sign(tokens: PolicyTokens, settings: Algorithm) -> Tensor:
    ratio = (tokens.logprobs - tokens.sampler_logprobs).exp()
    return ratio * tokens.advantages


def _loss_against_entropy(tokens: PolicyTokens, settings: Algorithm) -> Tensor:
    ratio = (tokens.logprobs - tokens.sampler_logprobs).exp()
    return ENTROPY_WEIGHT * tokens.entropy - ratio * tokens.advantages


def _loss_with_division_by_zero(tokens: PolicyTokens, settings: Algorithm) -> Tensor:
    ratio = (tokens.logprobs - tokens.sampler_logprobs).exp()
    return -ratio * tokens.advantages / tokens.staleness


wrong_sign = CustomAlgorithm(base="grpo", group_advantages=_negated)
wrong_loss = CustomAlgorithm(base="grpo", token_loss=_loss_of_opposite_sign)
against_entropy = CustomAlgorithm(base="grpo", token_loss=_loss_against_entropy)
not_finite = CustomAlgorithm(base="grpo", token_loss=_loss_with_division_by_zero)
