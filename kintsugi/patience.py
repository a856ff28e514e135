"""How long to wait for an answer: from what was observed, not from a constant of an hour."""

from __future__ import annotations

FLOOR_S = 30.0
FACTOR = 10.0
SLOWEST_TOKENS_PER_S = 20.0
"""Slower than this, sampling or training counts as stuck while nothing better is known."""


class Patience:
    """Deadlines per kind of request: ten times the longest answer seen, at least half a minute.

    Before the first answer of a kind, `first_s` holds, which covers the warming-up of libraries, plus the time that
    the step's tokens take on a very slow machine.
    """

    def __init__(self, *, first_s: float) -> None:
        self._first_s = first_s
        self._longest: dict[str, float] = {}

    def deadline_s(self, kind: str, *, num_tokens: int = 0, floor_s: float = FLOOR_S) -> float:
        if kind not in self._longest:
            return self._first_s + num_tokens / SLOWEST_TOKENS_PER_S
        return max(floor_s, FACTOR * self._longest[kind])

    def longest_s(self, kind: str) -> float | None:
        """The longest answer of a kind; None before the first."""
        return self._longest.get(kind)

    def observed(self, kind: str, duration_s: float) -> None:
        """An answer took this long. A failure is no answer: it must not teach patience."""
        self._longest[kind] = max(duration_s, self._longest.get(kind, 0.0))
