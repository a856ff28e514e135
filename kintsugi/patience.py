"""How long to wait for an answer: from what was observed, not from a constant of an hour."""

from __future__ import annotations

from collections import deque

FLOOR_S = 30.0
FACTOR = 10.0
REMEMBERED = 256
"""Answers of a kind; one that took absurdly long is forgotten after as many."""
SLOWEST_TOKENS_PER_S = 20.0
"""Slower than this, sampling or training counts as stuck while nothing better is known."""


class Patience:
    """Deadlines per kind of request: ten times the longest answer seen, at least half a minute.

    Before the first answer of a kind, `first_s` holds, which covers the warming-up of libraries, plus the time that
    the step's tokens take on a very slow machine.
    """

    def __init__(self, *, first_s: float) -> None:
        self._first_s = first_s
        self._recent: dict[str, deque[float]] = {}

    def deadline_s(self, kind: str, *, num_tokens: int = 0, floor_s: float = FLOOR_S) -> float:
        longest_s = self.longest_s(kind)
        if longest_s is None:
            return self._first_s + num_tokens / SLOWEST_TOKENS_PER_S
        return max(floor_s, FACTOR * longest_s)

    def longest_s(self, kind: str) -> float | None:
        """The longest recent answer of a kind; None before the first."""
        recent = self._recent.get(kind)
        return None if recent is None else max(recent)

    def observed(self, kind: str, duration_s: float) -> None:
        """An answer took this long. A failure is no answer: it must not teach patience."""
        self._recent.setdefault(kind, deque(maxlen=REMEMBERED)).append(duration_s)
