from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.clock import WorkingClock, random_stream
from kintsugi.runtime.counters import Counters
from kintsugi.runtime.processes import SystemProcesses, describe_status
from kintsugi.runtime.waits import WaitTable, join, wait
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import Wait


def test_a_wait_is_declared_while_it_lasts_and_gone_after_it() -> None:
    waits, clock = WaitTable(), VirtualClock(start=10.0)
    seen: list[Wait] = []

    def attempt(remaining_s: float) -> str:
        seen.extend(waits.declared())
        return "value"

    assert wait(attempt, whom="model-0", what="CallDone", timeout_s=5, clock=clock, waits=waits) == "value"
    assert seen == [Wait("model-0", "CallDone", 10.0, 15.0)]
    assert waits.declared() == ()


def test_a_wait_ends_at_its_deadline_and_says_for_whom_and_what() -> None:
    waits, clock = WaitTable(), VirtualClock()
    granted: list[float] = []

    def attempt(remaining_s: float) -> None:
        granted.append(remaining_s)
        clock.advance(2.0)

    with pytest.raises(DeadlineExceeded, match=r"waited 6\.0 s for model-0: CallDone") as caught:
        wait(attempt, whom="model-0", what="CallDone", timeout_s=5, clock=clock, waits=waits)
    assert granted == [5.0, 3.0, 1.0]
    assert (caught.value.whom, caught.value.what) == ("model-0", "CallDone")
    assert waits.declared() == ()


def test_a_wait_tries_once_even_without_time() -> None:
    assert wait(lambda remaining_s: remaining_s + 1, whom="x", what="y", timeout_s=-3) == 1.0


def test_a_false_value_is_a_value() -> None:
    assert wait(lambda remaining_s: 0, whom="x", what="y", timeout_s=0) == 0


def test_an_error_in_an_attempt_ends_the_wait() -> None:
    waits = WaitTable()

    def attempt(remaining_s: float) -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        wait(attempt, whom="x", what="y", timeout_s=5, waits=waits)
    assert waits.declared() == ()


def test_streams_of_different_names_differ_and_of_the_same_name_agree() -> None:
    def first(*names: str | int) -> float:
        return random_stream(7, *names).random()

    assert first("shuffle", 0) == first("shuffle", 0)
    assert (
        len({first("shuffle", 0), first("shuffle", 1), first("shuffle", "0"), first("shuffle0"), first()})
        == 5
    )


def test_counters_add_up_over_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(500):
            counters.add("steps")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().counters == {"steps": 2000}


def test_the_end_of_a_child_is_seen_through_its_pidfd() -> None:
    child = SystemProcesses().spawn([sys.executable, "-c", "raise SystemExit(7)"])
    assert child.wait_ended(whom="child", timeout_s=20) == 7
    assert child.ended()
    child.send_signal(signal.SIGKILL)
    child.close()


def test_a_killed_child_reports_its_signal() -> None:
    readable, writable = os.pipe()
    script = f"import os; os.read({readable}, 1)"
    child = SystemProcesses().spawn([sys.executable, "-c", script], pass_fds=[readable])
    assert not child.ended() and child.status() is None
    child.send_signal(signal.SIGKILL)
    assert child.wait_ended(whom="child", timeout_s=20) == -signal.SIGKILL
    child.close()
    os.close(readable)
    os.close(writable)


WITH_A_THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\n"
    "print(flush=True); time.sleep(60)"
)
TRACER = """
import ctypes, os, sys, time
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if libc.ptrace(PTRACE_SEIZE, int(thread), None, None) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
print("traced", flush=True)
time.sleep(60)
"""


def test_a_child_whose_remains_a_debugger_holds_has_ended() -> None:
    read, write = os.pipe()
    child = SystemProcesses().spawn([sys.executable, "-c", WITH_A_THREAD], stdout=write)
    os.close(write)
    assert os.read(read, 10) == b"\n"
    os.close(read)
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(child.pid)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as tracer:
        assert tracer.stdout is not None and tracer.stderr is not None
        if tracer.stdout.readline() != "traced\n":
            child.send_signal(signal.SIGKILL)
            pytest.skip(f"nothing may be traced here: {tracer.stderr.read().strip()}")
        assert not child.ended()
        child.send_signal(signal.SIGKILL)
        assert child.wait_ended(whom="child", timeout_s=10.0) is None
        assert child.ended()
        tracer.kill()
    status = wait(lambda _: child.status(), whom="the tracer", what="the remains", timeout_s=10.0)
    assert status == -signal.SIGKILL
    child.close()


def test_a_child_gets_its_environment_and_runs_what_comes_before_exec() -> None:
    def be_nice() -> None:
        os.nice(3)

    readable, writable = os.pipe()
    script = f"import os; os.write({writable}, (os.environ['KEY'] + str(os.nice(0))).encode())"
    child = SystemProcesses().spawn(
        [sys.executable, "-c", script],
        pass_fds=[writable],
        environment={"KEY": "value"},
        before_exec=be_nice,
    )
    os.close(writable)
    assert child.wait_ended(whom="child", timeout_s=20) == 0
    assert os.read(readable, 100) == f"value{os.nice(0) + 3}".encode()
    os.close(readable)
    child.close()


def test_a_status_is_described_in_words() -> None:
    assert describe_status(-signal.SIGKILL) == "killed by SIGKILL"
    assert describe_status(3) == "exited with code 3"
    assert describe_status(None) == "ended, status unknown"


def test_a_child_is_ours_if_we_started_it_also_when_it_has_ended() -> None:
    child, parent = SystemProcesses().spawn(["true"]), SystemProcesses().adopt(os.getppid())
    assert child.is_ours() and not parent.is_ours()
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    assert poller.poll(10_000)
    assert child.is_ours(), "its remains are still to be taken away"
    assert child.wait_ended(whom="true", timeout_s=10.0) == 0
    assert not child.is_ours()
    child.close()
    parent.close()


def test_on_a_working_clock_time_that_was_skipped_has_not_passed_and_the_wall_goes_on() -> None:
    machine = VirtualClock(start=10.0, wall=100.0)
    clock = WorkingClock(machine)
    machine.advance(5.0)
    clock.skip(3.0)
    clock.skip(-7.0)
    assert (clock.monotonic(), clock.wall()) == (12.0, 105.0)
    machine.advance(1.0)
    assert clock.monotonic() == 13.0


def test_joining_a_thread_waits_for_its_end_and_names_it_at_the_deadline() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    with pytest.raises(DeadlineExceeded, match="the writer"):
        join(thread, whom="the writer", timeout_s=0.01)
    over.set()
    join(thread, whom="the writer", timeout_s=10.0)
    assert not thread.is_alive()
