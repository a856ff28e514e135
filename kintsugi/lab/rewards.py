"""Rewards for workloads in which learning does not matter."""

from __future__ import annotations

from typing import Any


def odd_digits(completions: list[str], **columns: Any) -> list[float]:
    """Return the share of odd digits: an untrained model gets some, so that every step has a gradient.

    >>> odd_digits(["13", "24", ""])
    [1.0, 0.0, 0.0]
    """
    return [sum(character in "13579" for character in text) / (len(text) or 1) for text in completions]
