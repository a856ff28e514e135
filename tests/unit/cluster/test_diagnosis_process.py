from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from kintsugi.cluster.diagnosis_process import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, DiagnosisProcess
from kintsugi.cluster.restart_policy import STOPPED_S
from kintsugi.runtime.processes import Child, SystemProcesses


class FakeProcesses(SystemProcesses):
    """Starts something else in the watcher's place, and remembers how often."""

    def __init__(self, *program: str) -> None:
        self.program = program
        self.children: list[Child] = []

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child:
        self.children.append(super().spawn(self.program, pass_fds=pass_fds))
        return self.children[-1]


def starts(handle: DiagnosisProcess, processes: FakeProcesses, *, seconds: int) -> list[int]:
    """The seconds in which it was started, each time to end at once."""
    started = []
    for second in range(seconds):
        before = len(processes.children)
        handle.ensure_running(float(second))
        if len(processes.children) > before:
            started.append(second)
            processes.children[-1].wait_ended(whom="it", timeout_s=10.0)
    return started


def test_one_that_ends_at_once_is_started_ever_more_seldom(tmp_path: Path) -> None:
    processes = FakeProcesses("true")
    handle = DiagnosisProcess(tmp_path, processes)
    assert starts(handle, processes, seconds=200) == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    handle.close()


def test_one_that_stands_still_is_replaced(tmp_path: Path) -> None:
    processes = FakeProcesses("sleep", "60")
    handle = DiagnosisProcess(tmp_path, processes)
    handle.ensure_running(0.0)
    os.kill(processes.children[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, processes.children[0].pid, os.WSTOPPED | os.WNOWAIT)
    # A descriptor of the test's own: the handle closes the child's as soon as it sees that the child has ended, which
    # may be within the call that kills it.
    pidfd = os.pidfd_open(processes.children[0].pid)
    handle.ensure_running(100.0)
    handle.ensure_running(100.0 + STOPPED_S)
    ended, _, _ = select.select([pidfd], [], [], 10.0)
    os.close(pidfd)
    assert ended
    handle.ensure_running(101.0 + STOPPED_S)
    assert len(processes.children) == 2
    handle.close()


def test_one_that_was_killed_after_a_while_is_started_again_at_once(tmp_path: Path) -> None:
    processes = FakeProcesses("sleep", "60")
    handle = DiagnosisProcess(tmp_path, processes)
    for now in (0.0, 2 * LONGEST_PAUSE_S, 2 * LONGEST_PAUSE_S + SHORTEST_PAUSE_S):
        handle.ensure_running(now)
        processes.children[-1].send_signal(9)
        processes.children[-1].wait_ended(whom="it", timeout_s=10.0)
    assert len(processes.children) == 3
    handle.close()


def test_a_run_goes_on_where_there_is_no_descriptor_left_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    processes = FakeProcesses("true")
    handle = DiagnosisProcess(tmp_path, processes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", refuse)
        handle.ensure_running(0.0)
    assert processes.children == [] and handle.pids == frozenset()
    handle.ensure_running(SHORTEST_PAUSE_S)
    assert len(processes.children) == 1
    handle.close()
