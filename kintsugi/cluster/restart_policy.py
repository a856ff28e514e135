"""Restart limits, and the detection of processes that are stopped. Both are given the time and have no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kintsugi.runtime.proc import ProcessStat, process_stat

STOPPED_S = 1.0
"""Job control or a debugger may stop a process briefly; one that is stopped for longer has to be replaced."""
MOST_RESTARTS = 10
WITHIN_S = 30.0


class RestartLimit:
    """At most `MOST_RESTARTS` within `WITHIN_S` seconds: a process that dies more often has a fault of its own."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def allows(self, now: float) -> bool:
        """Whether one more is within the limit; if so, it is counted."""
        while self._times and now - self._times[0] > WITHIN_S:
            self._times.popleft()
        if len(self._times) >= MOST_RESTARTS:
            return False
        self._times.append(now)
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
