"""How a process ended, and whether the kernel ended it for want of memory.

A process that the kernel ends that way is killed by SIGKILL like by anybody. What tells is the count of such ends that
the kernel keeps for every memory control group: it has moved shortly before. Each move explains one death.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from kintsugi.cluster.children import Kept
from kintsugi.observe.cgroups import ControlGroups, Groups
from kintsugi.observe.events import EventLog, ProcessGone
from kintsugi.observe.sampling import oom_kills
from kintsugi.runtime import SYSTEM_CLOCK, Clock, describe_status

WINDOW_S = 5.0
"""A large process takes a while to be gone after the kernel has decided; what moved before that is another's."""
HOST = "host"
"""Counts all of them; for processes whose group was never seen, or counts nothing."""
HOST_WINDOW_S = 2.0
"""It moves for processes that are none of ours, too."""


class OomLedger:
    """Counts of the kernel over the last seconds, and which of them have explained a death already."""

    def __init__(self, control_groups: ControlGroups | None = None) -> None:
        self._control_groups = control_groups or ControlGroups()
        self._groups: dict[int, Groups] = {}
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._claimed: dict[str, deque[float]] = {}

    def look_at(self, pids: Iterable[int]) -> None:
        """Note the groups of all living processes, several times a second: the remains of one may not tell any more."""
        groups: dict[int, Groups] = {}
        for pid in pids:
            with suppress(OSError):
                groups[pid] = self._control_groups.of(pid)
        self._groups = groups

    def look_again(self, pid: int) -> None:
        """Before the remains of a process are taken away: it may have died in a group that it had just been put into.

        Of remains, only the second version says which.
        """
        with suppress(OSError):
            groups = self._control_groups.of(pid)
            if groups.unified:
                self._groups = {**self._groups, pid: groups}

    def count(self, now: float) -> None:
        """Note what the kernel has counted, about once a second."""
        for each in {each.memory: each for each in self._groups.values()}.values():
            count = self._control_groups.oom_kills(each)
            if count is not None:
                self.saw(str(each.memory), count, now)
        with suppress(OSError):
            self.saw(HOST, oom_kills(), now)

    def saw(self, name: str, count: int, now: float) -> None:
        seen = self._seen.setdefault(name, deque())
        seen.append((now, count))
        # The last one before the window stays: it is what the count was when the window began.
        while len(seen) > 1 and seen[1][0] <= now - WINDOW_S:
            seen.popleft()

    def claim(self, name: str, count: int, now: float, *, window_s: float = WINDOW_S) -> bool:
        """Whether the count has moved and no death was explained by that yet."""
        since, before = self._before(name, now - window_s)
        claimed = self._claimed.setdefault(name, deque(maxlen=64))
        if count - before - sum(moment >= since for moment in claimed) <= 0:
            return False
        claimed.append(now)
        return True

    def _before(self, name: str, moment: float) -> tuple[float, int]:
        """What the count was then, and since when; a group never seen began with zero."""
        seen = tuple(self._seen.get(name, ()))  # A copy: another thread counts.
        older = [entry for entry in seen if entry[0] <= moment]
        return older[-1] if older else seen[0] if seen else (moment, 0)

    def _elsewhere(self, pid: int, now: float) -> int:
        """What moved in groups that others are in and this one is not: those were other deaths."""
        own = self._groups.get(pid)
        others = {each.memory: each for each in self._groups.values() if own and each.memory != own.memory}
        counts = {str(memory): self._control_groups.oom_kills(each) for memory, each in others.items()}
        return sum(
            count - self._before(name, now - HOST_WINDOW_S)[1]
            for name, count in counts.items()
            if count is not None
        )

    def explains(self, pid: int, now: float) -> bool:
        """Whether a process that was killed died of memory. What its own group counted says it, where that is known."""
        groups = self._groups.get(pid, Groups())
        count = self._control_groups.oom_kills(groups)
        if count is not None:
            return self.claim(str(groups.memory), count, now)
        try:
            count = oom_kills() - self._elsewhere(pid, now)
            return HOST in self._seen and self.claim(HOST, count, now, window_s=HOST_WINDOW_S)
        except OSError:
            return False


class Obituaries:
    """Takes the status of children that have ended, and writes down how they did."""

    def __init__(self, log: EventLog, *, ooms: OomLedger, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log, self._ooms, self._clock = log, ooms, clock

    def take_status(self, kept: Kept, *, memory_bytes: float) -> int | None:
        """As of `Child.status`."""
        assert kept.child is not None
        pid = kept.child.pid
        self._ooms.look_again(pid)
        status = kept.child.status()
        was_killed = status in (None, -signal.SIGKILL) and not kept.stopping
        oom = was_killed and self._ooms.explains(pid, self._clock.monotonic())
        how = describe_status(status) + (" for want of memory" if oom else "")
        gone = ProcessGone(
            of=kept.process,
            incarnation=kept.incarnation,
            pid=pid,
            status=status,
            how=how,
            memory_bytes=memory_bytes,
            oom=oom,
            ordered=kept.stopping,
        )
        self._log.emit(gone)
        return status
