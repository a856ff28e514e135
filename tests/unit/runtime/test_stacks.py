"""Stack dumps of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.stacks import STACK_SIGNAL, can_dump_stacks
from kintsugi.telemetry.stack_dump import dumps_in

HANGS = """
import os, signal, sys, threading, time
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.stacks import enable_stack_dumps

enable_stack_dumps()

def hang_in_a_library():
    time.sleep(600)

def hang_in_a_thread():
    time.sleep(600)
"""


@contextmanager
def running(program: str, log: Path) -> Iterator[Child]:
    """A process that has printed "ready"."""
    with log.open("wb") as output:
        child = SystemProcesses().spawn([sys.executable, "-c", HANGS + program], stdout=output, stderr=output)
    try:
        _until(lambda: "ready" in log.read_text(), what="the program")
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait_ended(whom="program", timeout_s=10.0)
        child.close()


def _until(condition: object, *, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.005)


def test_a_hung_process_leaves_the_stacks_of_all_threads_and_lives_on(tmp_path: Path) -> None:
    program = (
        "threading.Thread(target=hang_in_a_thread, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "hang_in_a_library()\n"
    )
    with running(program, log := tmp_path / "log") as child:
        assert can_dump_stacks(child)
        for number in (1, 2):
            child.send_signal(STACK_SIGNAL)
            _until(lambda: log.read_text().count("hang_in_a_library") >= number, what="a dump")  # noqa: B023
        assert not child.ended()
    dump = dumps_in(log.read_text())[-1]
    assert "hang_in_a_library" in dump.main_thread
    assert any("hang_in_a_thread" in frame for stack in dump.threads for frame in stack)


def test_a_process_without_the_handler_is_never_sent_the_signal() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        child = Child(pid=process.pid, pidfd=os.pidfd_open(process.pid))
        assert not can_dump_stacks(child)
        child.close()
        process.kill()


def test_a_stopped_process_is_not_asked_and_dumps_nothing_when_it_continues(tmp_path: Path) -> None:
    with running("print('ready', flush=True)\nhang_in_a_library()\n", log := tmp_path / "log") as child:
        child.send_signal(signal.SIGSTOP)
        _until(lambda: not can_dump_stacks(child), what="its stop")
        child.send_signal(signal.SIGCONT)
        _until(lambda: can_dump_stacks(child), what="its continuation")
    assert dumps_in(log.read_text()) == []


def test_signals_that_a_loop_reads_are_not_disturbed_by_a_dump(tmp_path: Path) -> None:
    program = (
        "import select\n"
        "signals = Signals(signal.SIGTERM)\n"
        "print('ready', flush=True)\n"
        "while not select.select([signals.fileno()], [], [], 600)[0]: pass\n"
        "print(signals.received(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with running(program, log := tmp_path / "log") as child:
        child.send_signal(STACK_SIGNAL)
        _until(lambda: dumps_in(log.read_text()), what="a dump")
        child.send_signal(signal.SIGTERM)
        _until(lambda: "SIGTERM" in log.read_text(), what="the signal")


def test_a_forked_child_dumps_its_own_stacks_to_its_own_log(tmp_path: Path) -> None:
    own = tmp_path / "own"
    program = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    os.dup2(os.open({str(own)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)\n"
        "    print('ready', flush=True)\n"
        "    hang_in_a_library()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid))\n"
        "print('started', flush=True)\n"
        "os.waitpid(pid, 0)\n"
    )
    with running(program, log := tmp_path / "log"):
        _until(lambda: "started" in log.read_text(), what="the pid of the child")
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, STACK_SIGNAL)
        _until(lambda: own.exists() and dumps_in(own.read_text()), what="a dump")
        os.kill(pid, signal.SIGKILL)
    assert "hang_in_a_library" in own.read_text() and dumps_in(log.read_text()) == []


def test_a_crash_leaves_its_stack_and_ends_the_process_by_its_signal(tmp_path: Path) -> None:
    program = "print('ready', flush=True)\nimport ctypes\nctypes.string_at(0)\n"
    with running(program, log := tmp_path / "log") as child:
        assert child.wait_ended(whom="program", timeout_s=10.0) == -signal.SIGSEGV
    (dump,) = dumps_in(log.read_text())
    assert dump.reason == "Segmentation fault" and "string_at" in dump.main_thread
