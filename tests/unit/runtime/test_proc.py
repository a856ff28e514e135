"""Reading /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kintsugi.runtime.proc import (
    boot_id,
    catches_signal,
    context_switches,
    ending_status,
    has_ended,
    is_exiting,
    process_start_time,
    process_stat,
    stat_fields,
    status_of,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_command_name_with_parentheses_and_spaces_does_not_shift_the_fields() -> None:
    assert stat_fields("4711 (a) S (b) R 1 2\n") == ["R", "1", "2"]


def test_a_living_process_has_a_state_a_start_time_and_cpu_time() -> None:
    stat = process_stat(os.getpid())
    assert stat is not None and stat.state in "RS" and stat.cpu_s > 0
    assert stat.start_time == process_start_time(os.getpid())


@pytest.mark.parametrize(("wait_status", "status"), [(9, -9), (11 | 0x80, -11), (3 << 8, 3), (0, 0)])
def test_a_status_is_a_code_or_minus_the_signal_with_or_without_a_core_dump(
    wait_status: int, status: int
) -> None:
    assert status_of(wait_status) == status


def test_a_process_that_was_killed_and_is_not_reaped_has_the_status_with_which_it_ended(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert ending_status(sleeper.pid) is None, "it runs"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert ending_status(sleeper.pid) == -signal.SIGKILL
    sleeper.wait()
    assert ending_status(sleeper.pid) is None


def test_a_process_whose_main_thread_alone_has_ended_is_not_ending() -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while (stat := process_stat(process.pid)) is not None and stat.state != "Z":
            os.sched_yield()
        assert ending_status(process.pid) is None
        process.kill()


def test_the_main_thread_has_context_switches_and_a_process_that_is_gone_has_none(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert context_switches(os.getpid()) > 0
    sleeper.kill()
    sleeper.wait()
    assert context_switches(sleeper.pid) == 0


def test_there_is_no_stat_of_a_process_that_was_reaped(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert (process_stat(sleeper.pid), process_start_time(sleeper.pid)) == (None, None)
    assert not has_ended(sleeper.pid), "there is nothing left of it"
    assert not catches_signal(sleeper.pid, signal.SIGUSR1)


def test_a_zombie_has_ended_and_has_no_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    assert not has_ended(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(sleeper.pid) and process_start_time(sleeper.pid) is None


def test_a_process_is_exiting_from_the_signal_that_ends_it_until_it_is_reaped(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert not is_exiting(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert is_exiting(sleeper.pid)
    sleeper.wait()
    assert is_exiting(sleeper.pid), "there is nothing left of it"


def test_a_handler_for_a_signal_is_seen_from_outside(sleeper: subprocess.Popen[bytes]) -> None:
    assert not catches_signal(sleeper.pid, signal.SIGUSR1)
    program = "import signal; signal.signal(signal.SIGUSR2, print); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert catches_signal(process.pid, signal.SIGUSR2)
        assert not catches_signal(process.pid, signal.SIGUSR1)
        process.kill()


def test_a_boot_has_an_identity() -> None:
    assert boot_id() == boot_id() != ""


def test_a_process_that_dies_with_its_parent_is_killed_when_the_parent_ends() -> None:
    child = (
        "from kintsugi.runtime.proc import die_with_parent; die_with_parent(); print(1, flush=True); input()"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
    )
    reader, writer = os.pipe()
    with os.fdopen(reader) as output:
        subprocess.run([sys.executable, "-c", parent], stdout=writer, check=True, timeout=20)
        os.close(writer)
        pid = int(output.readline())
    stat = process_stat(pid)
    assert stat is None or stat.state in "ZX" or _ends(pid)


def _ends(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(pidfd, "rb") as descriptor:
        import select

        return bool(select.select([descriptor], [], [], 10.0)[0])
