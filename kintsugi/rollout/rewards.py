"""Reward functions shipped with the system. Any function with this signature can be named in a recipe."""

from __future__ import annotations

from typing import Any


def exact_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion is exactly the answer, else 0.

    >>> exact_answer(["46", "7"], answer=["46", "46"])
    [1.0, 0.0]
    """
    return [float(completion.strip() == truth) for completion, truth in zip(completions, answer, strict=True)]
