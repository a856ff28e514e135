from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, time
from contextlib import ExitStack
from kintsugi.cluster.standby import LauncherState, Standby

class BrokenSignals:
    def fileno(self): return self.reader
    def received(self): raise OSError("broken")
    def reopen(self): pass

signals = BrokenSignals()
signals.reader, writer = os.pipe()
first = os.getpid()
with ExitStack() as stack:
    stack.callback(lambda: os.write(1, b"clean-up of %d " % (os.getpid() == first)))
    standby = Standby()
    state = LauncherState((), 0, (0, 0))
    assert standby.ensure(state, signals=signals, now=0.0) is None
    while standby.pid:
        assert os.getpid() != first
        standby.ensure(state, signals=signals, now=time.monotonic())
        if standby.pid != first:
            break
        time.sleep(0.01)
    os.write(1, b"the launcher goes on ")
    standby.dismiss()
"""


def test_an_error_of_a_standby_ends_it_alone_and_never_by_the_clean_up_of_the_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "OSError: broken" in done.stderr
    assert done.stdout == "the launcher goes on clean-up of 0 "
