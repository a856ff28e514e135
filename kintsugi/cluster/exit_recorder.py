"""Exit status of child processes, and whether the kernel killed one for lack of memory (OOM).

An OOM kill is a SIGKILL like any other. It is recognised by the counter of OOM kills that the kernel keeps for every
memory control group: it has increased shortly before. Each increase explains one death.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.orphans import remove_counter_files
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.proc import is_exiting
from kintsugi.runtime.shortages import describe_exit
from kintsugi.telemetry.collect.cgroups import ControlGroups, ProcessGroups
from kintsugi.telemetry.collect.process import oom_kills
from kintsugi.telemetry.events import EventLog, ProcessGone

WINDOW_S = 5.0
"""A large process takes a while to end after the kernel's decision; earlier increases belong to other processes."""
HOST = "host"
"""Counter of the whole host, for a process with an unknown group or one without a counter."""
HOST_WINDOW_S = 2.0
"""Shorter, because other processes of the host increase it as well."""
NEW_GROUP_S = 60.0
"""Age up to which a group can be one that a process was just moved to."""


class OomAttribution:
    """OOM counters of the last seconds, and which increases have already explained a death."""

    def __init__(
        self,
        control_groups: ControlGroups | None = None,
        *,
        is_exiting: Callable[[int], bool] = is_exiting,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._control_groups = control_groups or ControlGroups()
        self._is_exiting = is_exiting
        self._clock = clock
        self._groups: dict[int, ProcessGroups] = {}
        self._counts: dict[str, deque[tuple[float, int]]] = {}
        self._claimed: dict[str, deque[float]] = {}

    def update_groups(self, pids: Iterable[int]) -> None:
        """Read the groups of all living processes, several times a second.

        In version 1, /proc gives the root as the group of a process from the moment in which the kernel begins to end
        it, which takes a third of a second per gigabyte of memory: such a process keeps the group that was read before.
        """
        groups: dict[int, ProcessGroups] = {}
        for pid in pids:
            before = self._groups.get(pid)
            with suppress(OSError):
                found = self._control_groups.of(pid)
                is_moved = found != before
                if not is_moved or found.unified or not self._is_exiting(pid):
                    groups[pid] = found
                elif before is not None:
                    groups[pid] = before
        self._groups = groups

    def update_group(self, pid: int) -> None:
        """Read the group of a zombie before it is reaped: it may have been moved shortly before its death.

        Only cgroup version 2 shows the group of a zombie.
        """
        with suppress(OSError):
            groups = self._control_groups.of(pid)
            if groups.unified:
                self._groups = {**self._groups, pid: groups}

    def count(self, now: float) -> None:
        """Read the counters, about once a second."""
        for each in {each.memory: each for each in self._groups.values()}.values():
            count = self._control_groups.oom_kills(each)
            if count is not None:
                self.add_count(str(each.memory), count, now)
        with suppress(OSError):
            self.add_count(HOST, oom_kills(), now)

    def add_count(self, name: str, count: int, now: float) -> None:
        counts = self._counts.setdefault(name, deque())
        counts.append((now, count))
        # The last entry before the window stays: it is the count at the beginning of the window.
        while len(counts) > 1 and counts[1][0] <= now - WINDOW_S:
            counts.popleft()

    def claim(self, name: str, count: int, now: float, *, window_s: float = WINDOW_S) -> bool:
        """Whether the count has increased and that has not explained another death yet."""
        since, before = self._count_at(name, now - window_s)
        claimed = self._claimed.setdefault(name, deque(maxlen=64))
        if count - before - sum(moment >= since for moment in claimed) <= 0:
            return False
        claimed.append(now)
        return True

    def _count_at(self, name: str, moment: float) -> tuple[float, int]:
        """Count at a moment, and since when it was; a group that was never read began with zero."""
        counts = tuple(self._counts.get(name, ()))  # A copy: another thread counts.
        older = [entry for entry in counts if entry[0] <= moment]
        return older[-1] if older else counts[0] if counts else (moment, 0)

    def _moved_elsewhere(self, pid: int, now: float) -> int:
        """Increase in groups of other processes: those were other deaths."""
        own = self._groups.get(pid)
        others = {each.memory: each for each in self._groups.values() if own and each.memory != own.memory}
        counts = {str(memory): self._control_groups.oom_kills(each) for memory, each in others.items()}
        return sum(
            count - self._count_at(name, now - HOST_WINDOW_S)[1]
            for name, count in counts.items()
            if count is not None
        )

    def explains(self, pid: int, now: float, *, placed: Path | None = None) -> bool:
        """Whether a process was killed by the OOM killer: by the counter of its own group, where that is known.
        `placed` is the group that it was to join at its start, which may have been after its group was last read."""
        groups = self._groups.get(pid, ProcessGroups())
        if placed is not None and placed != groups.memory:
            unified = (placed / "memory.events").exists()
            count = self._control_groups.oom_kills(ProcessGroups(memory=placed, unified=unified))
            if count is not None and self.claim(str(placed), count, now):
                return True
        count = self._control_groups.oom_kills(groups)
        if count is not None:
            if self.claim(str(groups.memory), count, now):
                return True
            return not groups.unified and self._new_group_explains(now)
        try:
            count = oom_kills() - self._moved_elsewhere(pid, now)
            return HOST in self._counts and self.claim(HOST, count, now, window_s=HOST_WINDOW_S)
        except OSError:
            return False

    def _new_group_explains(self, now: float) -> bool:
        """Whether the kernel has just killed a process of a group that is new and that no process was seen in: the dead
        process may have been moved there after its group was last read. Version 1 only, in which its remains do not
        show the group."""
        with suppress(OSError):
            _, before = self._count_at(HOST, now - WINDOW_S)
            if HOST not in self._counts or oom_kills() <= before:
                return False
            seen = {each.memory for each in self._groups.values()}
            for each in self._control_groups.created_since(self._clock.wall() - NEW_GROUP_S):
                count = 0 if each.memory in seen else self._control_groups.oom_kills(each)
                if count and self.claim(str(each.memory), count, now):
                    return True
        return False


class ExitRecorder:
    """Reaps children that have ended and records their exit."""

    def __init__(self, log: EventLog, *, ooms: OomAttribution, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log = log
        self._ooms = ooms
        self._clock = clock

    def take_status(self, child: ChildProcess, *, memory_bytes: float) -> int | None:
        """Reap a child, record its exit, and return its status as `Child.status` does."""
        assert child.handle is not None
        pid = child.handle.pid
        self._ooms.update_group(pid)
        remove_counter_files(pid)
        status = child.handle.status()
        ordered = child.stopping and not child.ended_before_stop
        was_killed = status in (None, -signal.SIGKILL) and not ordered
        oom = was_killed and self._ooms.explains(pid, self._clock.monotonic(), placed=child.placed_group)
        how = describe_exit(status) + (" for want of memory" if oom else "")
        gone = ProcessGone(
            of=child.process,
            incarnation=child.incarnation,
            pid=pid,
            status=status,
            how=how,
            memory_bytes=memory_bytes,
            oom=oom,
            ordered=ordered,
        )
        self._log.emit(gone)
        return status
