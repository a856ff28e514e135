"""Restart limits, and the detection of processes that are stopped. Both are given the time and have no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kintsugi.runtime.proc import ProcessStat, process_stat

STOPPED_S = 1.0
"""Job control or a debugger may stop a process briefly; one that is stopped for longer has to be replaced."""
SETTLED_S = 5.0
"""A process that ran for this long had started: its end is no repetition of the one before."""
MOST_IN_A_ROW = 10
REST_S = 30.0
"""Time after so many restarts in a row after which the count begins again."""
NUM_IMMEDIATE = 2
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
MOST_A_DAY = 1000
DAY_S = 24 * 3600.0


class RestartLimit:
    """Limits of the restarts of one process: `MOST_IN_A_ROW` without settling in between, with pauses that double from
    the third one on, and `MOST_A_DAY`. A process that ends more often has a fault of its own.

    limit = RestartLimit()
    if limit.allows(now):
        start_at = now + limit.pause_s
    """

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=MOST_A_DAY)
        self._in_a_row = 0
        self.pause_s = 0.0
        """Time to wait before the restart that was allowed last."""
        self.reason = ""
        """Limit that the last restart exceeded, which was not allowed."""

    def allows(self, now: float) -> bool:
        """Whether one more is within the limits, for a process that has just ended; if so, it is counted."""
        rest_s = SETTLED_S if self._in_a_row < MOST_IN_A_ROW else REST_S
        if not self._starts or now - self._starts[-1] >= rest_s:
            self._in_a_row = 0
        if self._in_a_row == MOST_IN_A_ROW:
            self.reason = f"more than {MOST_IN_A_ROW} times in a row"
            return False
        if len(self._starts) == MOST_A_DAY and now - self._starts[0] < DAY_S:
            self.reason = f"more than {MOST_A_DAY} times a day"
            return False
        self._in_a_row += 1
        doublings = self._in_a_row - NUM_IMMEDIATE - 1
        self.pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**doublings) if doublings >= 0 else 0.0
        self._starts.append(now + self.pause_s)
        return True


class StoppedProcessDetector:
    """Detects stopped processes (SIGSTOP, a debugger): they keep their connections and answer nothing."""

    def __init__(self, *, stat: Callable[[int], ProcessStat | None] = process_stat) -> None:
        self._stat = stat
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()

    def sample(self, pids: Iterable[int], *, now: float) -> list[int]:
        """Return pids that have been stopped for `STOPPED_S` seconds, once per stop. Called several times a second."""
        stopped: dict[int, float] = {}
        for pid in pids:
            stat = self._stat(pid)
            if stat is not None and stat.state in "Tt":
                stopped[pid] = self._since.get(pid, now)
        self._since = stopped
        self._reported &= stopped.keys()
        found = [
            pid for pid, since in stopped.items() if now - since >= STOPPED_S and pid not in self._reported
        ]
        self._reported.update(found)
        return found
