"""A process that wants to run and is not given the processor."""

from __future__ import annotations

import math
import os
import signal
from functools import partial

from kintsugi.lab.abilities.fault import TICK_S, Fault, Impossible, end_with_parent
from kintsugi.lab.abilities.grouped import GroupedFault
from kintsugi.lab.undo import Processors, threads_of
from kintsugi.runtime import Child, SystemProcesses

PERIOD_US = 50_000
SMALLEST_US = 1_000
"""The kernel refuses less than a millisecond of processor per period."""
DEFAULT_SHARE = 0.9
MOST_COMPETITORS = 16
END_TIMEOUT_S = 5.0


class CpuQuota(GroupedFault):
    """So much of one processor in every 50 ms, and no more."""

    name = "cpu quota of a control group"
    controller = "cpu"
    words = frozenset({"share"})
    ramps = True

    def set_up(self) -> None:
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        share = self.amount("share", DEFAULT_SHARE) * strength
        quota = max(SMALLEST_US, round((1 - share) * PERIOD_US))
        if quota != self.measured.get("quota_us"):
            self.measured["quota_us"] = quota
            if self.version == 2:
                self.say("cpu.max", f"{quota} {PERIOD_US}")
            else:
                self.say("cpu.cfs_period_us", str(PERIOD_US))
                self.say("cpu.cfs_quota_us", str(quota))
        return TICK_S


class Competitors(Fault):
    """Bound to one processor, together with as many busy loops as take the share away."""

    name = "busy loops on the same processor"
    words = frozenset({"share"})
    ramps = True

    def begin(self) -> None:
        before = os.sched_getaffinity(self.pid)
        nice = os.getpriority(os.PRIO_PROCESS, self.pid)
        self.before(Processors(self.scene.target, tuple(sorted(before)), nice))
        self._processor = max(before)
        self._competitors: list[Child] = []
        try:
            for thread in threads_of(self.pid):
                os.sched_setaffinity(thread, {self._processor})
        except (ProcessLookupError, FileNotFoundError) as error:
            raise Impossible(f"process {self.pid} had ended before the fault could begin") from error
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        share = min(0.97, self.amount("share", DEFAULT_SHARE) * strength)
        wanted = min(MOST_COMPETITORS, math.ceil(share / (1 - share)))
        while len(self._competitors) < wanted:
            # A session each: a kernel that shares the processor between sessions counts each of them.
            child = SystemProcesses().spawn(
                ["sh", "-c", "while :; do :; done"],
                before_exec=partial(self._before_exec, os.getpid()),
                new_session=True,
            )
            self._competitors.append(child)
        self.measured["competitors"] = float(len(self._competitors))
        return TICK_S

    def _before_exec(self, parent: int) -> None:
        end_with_parent(parent)
        os.sched_setaffinity(0, {self._processor})

    def end(self) -> None:
        super().end()
        for child in getattr(self, "_competitors", ()):
            child.send_signal(signal.SIGKILL)
            child.wait_ended(whom="a busy loop", timeout_s=END_TIMEOUT_S)
            child.close()
