from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from kintsugi.cluster.restarts import STOPPED_S
from kintsugi.cluster.watcher import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, WatcherHandle
from kintsugi.runtime import Child, SystemProcesses


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


def starts(handle: WatcherHandle, processes: FakeProcesses, *, seconds: int) -> list[int]:
    """The seconds in which it was started, each time to end at once."""
    started = []
    for second in range(seconds):
        before = len(processes.children)
        handle.keep(float(second))
        if len(processes.children) > before:
            started.append(second)
            processes.children[-1].wait_ended(whom="it", timeout_s=10.0)
    return started


def test_one_that_ends_at_once_is_started_ever_more_seldom(tmp_path: Path) -> None:
    processes = FakeProcesses("true")
    handle = WatcherHandle(tmp_path, processes)
    assert starts(handle, processes, seconds=200) == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    handle.close()


def test_one_that_stands_still_is_replaced(tmp_path: Path) -> None:
    processes = FakeProcesses("sleep", "60")
    handle = WatcherHandle(tmp_path, processes)
    handle.keep(0.0)
    os.kill(processes.children[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, processes.children[0].pid, os.WSTOPPED | os.WNOWAIT)
    handle.keep(100.0)
    handle.keep(100.0 + STOPPED_S)
    processes.children[0].wait_ended(whom="it", timeout_s=10.0)
    handle.keep(101.0 + STOPPED_S)
    assert len(processes.children) == 2
    handle.close()


def test_one_that_was_killed_after_a_while_is_started_again_at_once(tmp_path: Path) -> None:
    processes = FakeProcesses("sleep", "60")
    handle = WatcherHandle(tmp_path, processes)
    for now in (0.0, 2 * LONGEST_PAUSE_S, 2 * LONGEST_PAUSE_S + SHORTEST_PAUSE_S):
        handle.keep(now)
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
    handle = WatcherHandle(tmp_path, processes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", refuse)
        handle.keep(0.0)
    assert processes.children == [] and handle.pids == frozenset()
    handle.keep(SHORTEST_PAUSE_S)
    assert len(processes.children) == 1
    handle.close()
