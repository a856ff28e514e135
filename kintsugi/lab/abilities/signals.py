"""Kill, stop and freeze."""

from __future__ import annotations

import signal

from kintsugi.lab.abilities.fault import Fault, Impossible
from kintsugi.lab.abilities.grouped import GroupedFault
from kintsugi.lab.undo import Continue


class Kill(Fault):
    name = "SIGKILL"
    lasts = False

    def begin(self) -> None:
        if not self.scene.target.signal(signal.SIGKILL):
            raise Impossible(f"process {self.pid} had ended before it could be killed")


class Stop(Fault):
    name = "SIGSTOP"

    def begin(self) -> None:
        self.before(Continue(self.scene.target))
        if not self.scene.target.signal(signal.SIGSTOP):
            raise Impossible(f"process {self.pid} had ended before it could be stopped")


class Frozen(GroupedFault):
    """The kernel does not run it, and no signal shows."""

    name = "frozen in a control group"
    controller = "freezer"

    def begin(self) -> None:
        super().begin()
        if self.version == 2:
            self.say("cgroup.freeze", "1")
        else:
            self.say("freezer.state", "FROZEN")
