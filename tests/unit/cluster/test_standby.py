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

WITHOUT_DESCRIPTORS = """
import errno, os, resource, signal
from kintsugi.cluster.standby import LauncherState, Standby
from kintsugi.runtime.signals import Signals

def free(number):
    probes = [os.dup(0) for _ in range(number + 1)]
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probes[-1], hard))

signals = Signals(signal.SIGTERM)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
standby, state = Standby(), LauncherState((), 0, (0, 0))
if standby.ensure(state, signals=signals, now=0.0) is not None:
    os._exit(0)  # The first standby, after the end of its launcher.
while standby.pid:  # It has ended: another one is due, which is a child.
    os.kill(standby.pid, signal.SIGKILL)
    standby._is_running(0.0)
before = os.listdir("/proc/self/fd")
for attempt in range(20):
    free(attempt % 4)
    try:
        standby.ensure(state, signals=signals, now=1.0)
        os._exit(3)
    except OSError as error:
        assert error.errno == errno.EMFILE, error
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before
assert standby.ensure(state, signals=signals, now=1.0) is None
assert standby.pid
os.write(1, b"every attempt failed, none leaked, the last one made a standby ")
standby.dismiss()
"""


NO_PIPE_AFTER_THE_FORK = """
import os, signal
from kintsugi.cluster.standby import LauncherState, Standby
from kintsugi.runtime.signals import Signals

class Refusing(Signals):
    refuses = 1
    def reopen(self):
        if self.refuses:
            raise OSError(23, "Too many open files in system")
        super().reopen()

signals = Refusing(signal.SIGTERM)
first = os.getpid()
standby, state = Standby(), LauncherState((), 0, (0, 0))

def ensure(now):
    try:
        return standby.ensure(state, signals=signals, now=now)
    except OSError:  # The launcher tries again later, and goes on.
        if os.getpid() != first:
            os.write(1, b"a second launcher goes on ")
            os._exit(0)
        raise

lost = ensure(0.0)
assert os.getpid() == first and lost is not None, "the forked process has ended, this one is the launcher"
for attempt in range(3):
    assert ensure(100.0 * attempt) is None
    while standby.pid and standby._is_running(0.0):
        pass
signals.refuses = 0
assert ensure(1000.0) is None and standby.pid
os.write(1, b"one launcher, and a standby in the end ")
standby.dismiss()
"""


def test_a_forked_process_that_gets_no_descriptor_ends_and_is_no_second_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_PIPE_AFTER_THE_FORK],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "one launcher, and a standby in the end ", done.stderr
    assert done.stderr.count("Too many open files in system") == 4


def test_an_error_of_a_standby_ends_it_alone_and_never_by_the_clean_up_of_the_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "OSError: broken" in done.stderr
    assert done.stdout == "the launcher goes on clean-up of 0 "


def test_a_standby_for_which_no_descriptor_is_left_leaks_none_and_does_not_count() -> None:
    """The first standby is made, the second only when there are descriptors again."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "every attempt failed, none leaked, the last one made a standby ", done.stderr
