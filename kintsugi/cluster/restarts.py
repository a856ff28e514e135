"""When to restart what somebody else's doing has ended, and when to give up: two small judges without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kintsugi.cluster.children import ProcessStat, process_stat

STOPPED_S = 1.0
"""A shell's job control or a debugger stops a process for a moment; who stands still for so long has to be replaced."""
MOST_RESTARTS = 10
WITHIN_S = 30.0


class RestartLimit:
    """At most `MOST_RESTARTS` within `WITHIN_S` seconds: what dies more often than that dies of itself."""

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


class StoppedWatch:
    """Notices processes that are stopped (SIGSTOP, a debugger): they keep every connection, and answer nothing."""

    def __init__(self, *, stat: Callable[[int], ProcessStat | None] = process_stat) -> None:
        self._stat = stat
        self._since: dict[int, float] = {}
        self._told: set[int] = set()

    def sample(self, pids: Iterable[int], *, now: float) -> list[int]:
        """Those that have been stopped for `STOPPED_S` seconds, each once per stop. Called several times a second."""
        stopped: dict[int, float] = {}
        for pid in pids:
            stat = self._stat(pid)
            if stat is not None and stat.state in "Tt":
                stopped[pid] = self._since.get(pid, now)
        self._since = stopped
        self._told &= stopped.keys()
        news = [pid for pid, since in stopped.items() if now - since >= STOPPED_S and pid not in self._told]
        self._told.update(news)
        return news
