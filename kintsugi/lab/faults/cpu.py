"""CPU starvation of one process."""

from __future__ import annotations

import math
import os
import signal
from functools import partial

from kintsugi.lab.faults.cgroup import GroupedFault
from kintsugi.lab.faults.mechanism import TICK_S, FaultImpossible, FaultMechanism, end_with_parent
from kintsugi.lab.injector.undo_log import RestoreAffinity, threads_of
from kintsugi.runtime.processes import Child, SystemProcesses

PERIOD_US = 50_000
SMALLEST_US = 1_000
"""The kernel refuses quotas below one millisecond per period."""
DEFAULT_SHARE = 0.9
MOST_COMPETITORS = 16
END_TIMEOUT_S = 5.0


class CpuQuota(GroupedFault):
    """Limits the process to a share of one CPU in every 50 ms."""

    name = "cpu quota of a control group"
    controller = "cpu"
    supported_parameters = frozenset({"share"})
    ramps = True

    def set_up(self) -> None:
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        share = self.parameter("share", DEFAULT_SHARE) * strength
        quota = max(SMALLEST_US, round((1 - share) * PERIOD_US))
        if quota != self.measured.get("quota_us"):
            self.measured["quota_us"] = quota
            if self.version == 2:
                self.write_control("cpu.max", f"{quota} {PERIOD_US}")
            else:
                self.write_control("cpu.cfs_period_us", str(PERIOD_US))
                self.write_control("cpu.cfs_quota_us", str(quota))
        return TICK_S


class Competitors(FaultMechanism):
    """Binds the process to one CPU, together with as many busy loops as take the share away."""

    name = "busy loops on the same processor"
    supported_parameters = frozenset({"share"})
    ramps = True

    def begin(self) -> None:
        before = os.sched_getaffinity(self.pid)
        nice = os.getpriority(os.PRIO_PROCESS, self.pid)
        self.before(RestoreAffinity(self.context.target, tuple(sorted(before)), nice))
        self._cpu = max(before)
        self._competitors: list[Child] = []
        try:
            for thread in threads_of(self.pid):
                os.sched_setaffinity(thread, {self._cpu})
        except (ProcessLookupError, FileNotFoundError) as error:
            raise FaultImpossible(f"process {self.pid} had ended before the fault could begin") from error
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        share = min(0.97, self.parameter("share", DEFAULT_SHARE) * strength)
        wanted = min(MOST_COMPETITORS, math.ceil(share / (1 - share)))
        while len(self._competitors) < wanted:
            # One session each: a kernel that schedules by session (autogroup) counts each of them.
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
        os.sched_setaffinity(0, {self._cpu})

    def end(self) -> None:
        super().end()
        for child in getattr(self, "_competitors", ()):
            child.send_signal(signal.SIGKILL)
            child.wait_ended(whom="a busy loop", timeout_s=END_TIMEOUT_S)
            child.close()
