"""Deadlines of the master's requests, derived from observed durations; `control/pending.py` sets them."""

from __future__ import annotations

FLOOR_S = 75.0
"""Longer than a call of a library that sleeps may keep a process (`recovery/liveness.SLEEPING_CALL_S`), plus an answer:
a process that hangs is found by its heartbeats much earlier."""
FACTOR = 10.0
HALF_LIFE_S = 600.0
"""Time after which an exceptionally long duration counts half. One step of twenty minutes must not hide a rank that
hangs for the rest of the run, and one that is slow every few minutes must not be taken for a fault."""
SLOWEST_TOKENS_PER_S = 20.0
"""Lowest rate of sampling or training that is assumed before the first observation."""


class AdaptiveDeadline:
    """Deadlines per kind of request: ten times the longest recent duration, at least `FLOOR_S`.

    Before the first reply of a kind the deadline is `first_s`, which covers the warm-up of libraries, plus the time
    that the step's tokens take on a very slow machine.
    """

    def __init__(self, *, first_s: float) -> None:
        self._first_s = first_s
        self._longest: dict[str, tuple[float, float]] = {}
        """Kind → longest recent duration, and the time of the last reply."""

    def deadline_s(self, kind: str, *, num_tokens: int = 0, floor_s: float = FLOOR_S) -> float:
        longest_s = self.longest_s(kind)
        if longest_s is None:
            return self._first_s + num_tokens / SLOWEST_TOKENS_PER_S
        return max(floor_s, FACTOR * longest_s)

    def longest_s(self, kind: str) -> float | None:
        """Longest recent duration of a kind, halved for every `HALF_LIFE_S` since; None before the first reply."""
        known = self._longest.get(kind)
        return None if known is None else known[0]

    def observed(self, kind: str, duration_s: float, now: float) -> None:
        """Record the duration of a reply. A failure is not recorded: it must not extend the deadline."""
        longest_s, last = self._longest.get(kind, (0.0, now))
        remaining_s = longest_s * 0.5 ** ((now - last) / HALF_LIFE_S)
        self._longest[kind] = (max(duration_s, remaining_s), now)
