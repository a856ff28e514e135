"""Growing pauses before something is tried again. Given the time; no clock."""

from __future__ import annotations

from math import inf

MOST_DOUBLINGS = 32
FIRST_SHORTAGE_PAUSE_S, LONGEST_SHORTAGE_PAUSE_S, SHORTAGE_OVER_S = 0.5, 30.0, 300.0
"""Pauses before a process is started again that the host did not give what it needs; after such a time without another
one they begin from the first."""
SHORTAGES_PER_FAILURE = 5
"""Ends for a shortage that count as one failure of the process: a shortage may pass."""


def growing_pause(number: int, *, first_s: float, longest_s: float = inf) -> float:
    """Return the pause after the failure with this number, from 1 on: it doubles up to the longest.

    >>> [growing_pause(number, first_s=0.5, longest_s=3.0) for number in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    return min(first_s * 2.0 ** min(max(number, 1) - 1, MOST_DOUBLINGS), longest_s)


class ShortagePauses:
    """Pauses after ends for a shortage of the host that follow each other."""

    def __init__(self) -> None:
        self.number = 0
        """Ends for a shortage in a row."""
        self._last = -inf

    def count(self, now: float) -> None:
        self.number = self.number + 1 if now - self._last < SHORTAGE_OVER_S else 1
        self._last = now

    def reset(self) -> None:
        """End the row: the process ended for another reason."""
        self.number = 0

    @property
    def pause_s(self) -> float:
        return growing_pause(self.number, first_s=FIRST_SHORTAGE_PAUSE_S, longest_s=LONGEST_SHORTAGE_PAUSE_S)

    @property
    def is_failure(self) -> bool:
        """Whether the last one counts as a failure of the process."""
        return self.number > 0 and self.number % SHORTAGES_PER_FAILURE == 0
