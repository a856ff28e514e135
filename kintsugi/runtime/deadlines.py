"""Deadlines of the master's requests, derived from observed durations; `control/pending.py` sets them."""

from __future__ import annotations

import msgspec

FLOOR_S = 75.0
"""Longer than a call of a library that sleeps may keep a process (`recovery/liveness.SLEEPING_CALL_S`), plus an answer:
a process that hangs is found by its heartbeats much earlier."""
FACTOR = 10.0
"""Factor between a deadline and the longest duration that occurred twice."""
ONCE_FACTOR = 1.5
"""Factor between a deadline and a longer duration that occurred once: it may occur again."""
HALF_LIFE_S = 600.0
"""Time after which an exceptionally long duration counts half. One step of twenty minutes must not hide a rank that
hangs for the rest of the run, and one that is slow every few minutes must not be taken for a fault."""
SLOWEST_TOKENS_PER_S = 20.0
"""Lowest rate of sampling or training that is assumed before the first observation."""


class _Durations(msgspec.Struct):
    """The two longest recent durations of a kind that did not overlap: all ranks are late in the same slow step."""

    longest_s: float
    since: float
    """Start and …"""
    until: float
    """… end of the longest."""
    last: float
    """Time of the last reply."""
    second_s: float | None = None

    def add(self, duration_s: float, now: float) -> None:
        # At most halved by one reply: time without any says nothing about a kind that is rare.
        remaining = 0.5 ** min(1.0, (now - self.last) / HALF_LIFE_S)
        self.longest_s *= remaining
        self.second_s = None if self.second_s is None else self.second_s * remaining
        self.last, since = now, now - duration_s
        if since < self.until and duration_s <= self.longest_s:
            return
        if since >= self.until:
            self.second_s = max(self.second_s or 0.0, min(duration_s, self.longest_s))
        if duration_s > self.longest_s:
            self.longest_s, self.since, self.until = duration_s, since, now


class AdaptiveDeadline:
    """Deadlines per kind of request: ten times the longest recent duration that occurred twice, at least `FLOOR_S`. One
    that occurred once counts little, however long it was.

    Before the first reply of a kind the deadline is `first_s`, which covers the warm-up of libraries, plus the time
    that the step's tokens take on a very slow machine.
    """

    def __init__(self, *, first_s: float) -> None:
        self._first_s = first_s
        self._durations: dict[str, _Durations] = {}

    def deadline_s(self, kind: str, *, num_tokens: int = 0, floor_s: float = FLOOR_S) -> float:
        known = self._durations.get(kind)
        if known is None:
            return self._first_s + num_tokens / SLOWEST_TOKENS_PER_S
        if known.second_s is None:
            return max(floor_s, FACTOR * known.longest_s)
        return max(floor_s, FACTOR * known.second_s, ONCE_FACTOR * known.longest_s)

    def longest_s(self, kind: str) -> float | None:
        """Longest recent duration of a kind, halved for every `HALF_LIFE_S` since, and once more if it occurred once;
        None before the first reply."""
        known = self._durations.get(kind)
        if known is None or known.second_s is None:
            return None if known is None else known.longest_s
        return max(known.second_s, known.longest_s / 2)

    def observed(self, kind: str, duration_s: float, now: float) -> None:
        """Record the duration of a reply. A failure is not recorded: it must not extend the deadline."""
        known = self._durations.get(kind)
        if known is None:
            self._durations[kind] = _Durations(duration_s, now - duration_s, now, now)
        else:
            known.add(duration_s, now)
