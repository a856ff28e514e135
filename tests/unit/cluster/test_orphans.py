import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kintsugi.cluster import orphans
from kintsugi.cluster.orphans import children_of, kill_children, reap_orphans, remove_counter_files
from kintsugi.runtime.processes import SystemProcesses
from tests.unit.cluster.conftest import ShortOfDescriptors, open_descriptors


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(orphans, "SHARED_MEMORY", tmp_path)
    return tmp_path


def counter_file(folder: Path, pid: int) -> Path:
    """A file as torch makes it for a process that shares GPU memory."""
    path = folder / f"torch_{pid}_1234567_0"
    path.touch()
    return path


def test_children_are_found_while_threads_of_their_parent_come_and_go() -> None:
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    churning = threading.Thread(target=churn)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        churning.start()
        try:
            looks = [children_of(os.getpid()) for _ in range(200)]
        finally:
            over.set()
            churning.join()
        assert all(child.pid in children for children in looks)


def test_a_process_that_is_gone_has_no_children_to_tell() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    with pytest.raises(ProcessLookupError):
        children_of(gone.pid)


def test_the_counter_files_of_children_that_are_killed_are_removed(shared_memory: Path) -> None:
    others = children_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        theirs, stranger = counter_file(shared_memory, child.pid), counter_file(shared_memory, 4_000_001)
        kill_children(SystemProcesses(), but=others, timeout_s=20.0)
        assert not theirs.exists() and stranger.exists()


def test_the_counter_files_of_an_orphan_that_has_ended_are_removed_with_it(shared_memory: Path) -> None:
    others = children_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        theirs = counter_file(shared_memory, child.pid)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        reap_orphans(but=others)
        assert not theirs.exists()


def test_the_counter_files_of_a_process_that_runs_stay(shared_memory: Path) -> None:
    own = counter_file(shared_memory, os.getpid())
    remove_counter_files(os.getpid())
    assert own.exists()


def test_children_are_killed_as_far_as_descriptors_go_and_none_is_leaked() -> None:
    others = children_of(os.getpid())
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as second,
    ):
        before = open_descriptors()
        with pytest.raises(OSError, match="Too many open files"):
            kill_children(ShortOfDescriptors(1), but=others, timeout_s=20.0)
        assert open_descriptors() == before
        killed = min(first, second, key=lambda each: each.pid)
        assert killed.wait() == -signal.SIGKILL
        assert (first if killed is second else second).poll() is None
        kill_children(SystemProcesses(), but=others, timeout_s=20.0)
        assert children_of(os.getpid()) == others
