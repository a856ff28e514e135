"""Kill and stop."""

from __future__ import annotations

import signal

from kintsugi.lab.abilities.fault import Fault, Impossible
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
