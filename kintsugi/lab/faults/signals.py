"""Faults by signal: kill a process, stop it or the user's code that it runs, or freeze its control group."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil

from kintsugi.lab.faults.cgroup import GroupedFault
from kintsugi.lab.faults.mechanism import FaultImpossible, FaultMechanism
from kintsugi.lab.injector.undo_log import ProcessIdentity, ResumeProcess


class KillSignal(FaultMechanism):
    """SIGKILL: the process is gone, and the kernel reports its end."""

    name = "SIGKILL"
    lasts = False
    number = signal.SIGKILL

    def begin(self) -> None:
        if not self.context.target.signal(self.number):
            raise FaultImpossible(f"process {self.pid} had ended before it could be killed")


class LostHost(FaultMechanism):
    """SIGKILL of an agent and of all that it has started, in one instant: the agent first, which would record their
    ends."""

    name = "SIGKILL of an agent and its processes"
    lasts = False
    number = signal.SIGKILL

    def begin(self) -> None:
        try:
            below = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess as error:
            raise FaultImpossible(f"process {self.pid} had ended before it could be killed") from error
        if not self.context.target.signal(self.number):
            raise FaultImpossible(f"process {self.pid} had ended before it could be killed")
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()


class StopSignal(FaultMechanism):
    """SIGSTOP: the process exists and does nothing; only a missing heartbeat or its state in /proc shows it."""

    name = "SIGSTOP"
    number = signal.SIGSTOP

    def begin(self) -> None:
        self.before(ResumeProcess(self.context.target))
        if not self.context.target.signal(self.number):
            raise FaultImpossible(f"process {self.pid} had ended before it could be stopped")


class FreezeGroup(GroupedFault):
    """The kernel does not schedule the process; its state in /proc does not show it."""

    name = "frozen in a control group"
    controller = "freezer"

    def begin(self) -> None:
        super().begin()
        if self.version == 2:
            self.write_control("cgroup.freeze", "1")
        else:
            self.write_control("freezer.state", "FROZEN")


class StoppedUserCode(FaultMechanism):
    """SIGSTOP to the process that runs the user's code: for its rollout worker, a reward that never returns."""

    name = "SIGSTOP of its user-code process"

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        return None if children_of(pid) else f"process {pid} has no user-code process"

    def begin(self) -> None:
        stopped = 0
        for child in children_of(self.pid):
            identity = ProcessIdentity.of(child)
            self.before(ResumeProcess(identity))
            stopped += identity.signal(signal.SIGSTOP)
        if not stopped:
            raise FaultImpossible(f"process {self.pid} has no user-code process any more")


def children_of(pid: int) -> list[int]:
    """Return the children that the main thread of a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
