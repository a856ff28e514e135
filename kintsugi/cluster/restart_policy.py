"""Restart limits, and the detection of processes that are stopped. Both are given the time and have no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kintsugi.runtime.backoff import ShortagePauses, growing_pause
from kintsugi.runtime.proc import ProcessStat, process_stat

STOPPED_S = 1.0
"""Job control or a debugger may stop a process briefly; one that is stopped for longer has to be replaced."""
MOST_RESTARTS = 10
WITHIN_S = 30.0
MOST_PER_DAY = 300
"""A process that dies every few seconds stays below the limit of half a minute for ever."""
DAY_S = 24 * 3600.0
QUICK_RESTARTS = 4
"""Restarts within `WITHIN_S` that are made without a pause."""
FIRST_PAUSE_S = 0.1


class RestartLimit:
    """At most `MOST_RESTARTS` within `WITHIN_S` seconds and `MOST_PER_DAY` a day, with growing pauses: a process that
    dies more often has a fault of its own.

    A process that the host did not give what it needs (descriptors, memory, space) is not at fault: its restarts have
    longer pauses and only the limit of a day.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._shortages = ShortagePauses()

    def allows(self, now: float, *, shortage: bool = False) -> bool:
        """Whether one more is within the limit; if so, it is counted."""
        while self._times and now - self._times[0] > DAY_S:
            self._times.popleft()
        if shortage:
            self._shortages.count(now)
        else:
            self._shortages.reset()
        too_often = self._num_recent(now) >= MOST_RESTARTS and not shortage
        if too_often or len(self._times) >= MOST_PER_DAY:
            return False
        self._times.append(now)
        return True

    def withdraw(self) -> None:
        """Do not count the restart that was allowed last: it could not be made."""
        self._times.pop()

    def pause_s(self, now: float) -> float:
        """Pause before the restart that was allowed last."""
        if self._shortages.number:
            return self._shortages.pause_s
        excess = self._num_recent(now) - QUICK_RESTARTS
        return growing_pause(excess, first_s=FIRST_PAUSE_S) if excess > 0 else 0.0

    def explain(self, now: float) -> str:
        """Describe the limit that was reached: `more than 10 times in 30 s`."""
        if len(self._times) >= MOST_PER_DAY:
            return f"more than {MOST_PER_DAY} times in a day"
        return f"more than {MOST_RESTARTS} times in {WITHIN_S:g} s"

    def _num_recent(self, now: float) -> int:
        return sum(now - time <= WITHIN_S for time in self._times)


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
