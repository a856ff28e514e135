"""How long to wait for an answer: from what was observed, not from a constant of an hour."""

from __future__ import annotations

FLOOR_S = 30.0
FACTOR = 10.0


class Patience:
    """Deadlines per kind of request: ten times the longest answer seen, at least half a minute.

    Before the first answer of a kind, `first_s` holds, which covers the warming-up of libraries.
    """

    def __init__(self, *, first_s: float) -> None:
        self._first_s = first_s
        self._longest: dict[str, float] = {}

    def deadline_s(self, kind: str) -> float:
        if kind not in self._longest:
            return self._first_s
        return max(FLOOR_S, FACTOR * self._longest[kind])

    def observed(self, kind: str, duration_s: float) -> None:
        self._longest[kind] = max(duration_s, self._longest.get(kind, 0.0))
