from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kintsugi.telemetry.collect.cgroups import ControlGroups
from kintsugi.telemetry.collect.process import HostStatSampler, OpenFiles, ProcessSampler
from kintsugi.telemetry.readings import ProcessReading

OF_A_PROCESS = {
    "cpu_s",
    "run_delay_s",
    "rss_bytes",
    "threads",
    "descriptors",
    "descriptor_limit",
    "major_faults",
    "processors",
    "voluntary_switches",
    "involuntary_switches",
    "read_bytes",
    "write_bytes",
}
OF_A_HOST = {
    "cpu_count",
    "cpu_busy_s",
    "cpu_iowait_s",
    "cpu_steal_s",
    "load_1",
    "memory_total_bytes",
    "memory_available_bytes",
    "oom_kills",
    "network_in_bytes",
    "network_out_bytes",
    "tcp_retransmits",
}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def look_at(pid: int) -> ProcessReading:
    sample = ProcessSampler("model-0", pid, control_groups=ControlGroups()).sample()
    assert sample is not None
    return sample


def test_a_process_is_seen_with_all_its_figures() -> None:
    sample = look_at(os.getpid())
    assert sample.values.keys() >= OF_A_PROCESS
    assert sample.values["rss_bytes"] > 1e6
    assert sample.values["cpu_s"] > 0


def test_a_stopped_process_is_seen_as_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert look_at(sleeper.pid).state == "T"


def test_a_process_that_is_gone_gives_no_sample(sleeper: subprocess.Popen[bytes]) -> None:
    look = ProcessSampler("model-0", sleeper.pid, control_groups=ControlGroups())
    sleeper.kill()
    sleeper.wait()
    assert look.sample() is None


def test_a_limit_of_the_address_space_is_seen(sleeper: subprocess.Popen[bytes]) -> None:
    resource.prlimit(sleeper.pid, resource.RLIMIT_AS, (1 << 40, 1 << 40))
    values = look_at(sleeper.pid).values
    assert values["memory_limit_bytes"] <= float(1 << 40)
    assert 0 < values["memory_used_bytes"] < values["memory_limit_bytes"]


def test_the_users_code_counts_beside_the_worker_that_started_it() -> None:
    look = ProcessSampler("rollout-0", os.getpid(), control_groups=ControlGroups())
    before = look.sample()
    assert before is not None
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while True:
            during = look.sample()
            assert during is not None
            if during.values.get("children_cpu_s", 0.0) > 0.05:
                break
        child.kill()
    assert during.values["children"] > before.values.get("children", 0.0)
    assert during.values["children_rss_bytes"] > 1e6
    after = look.sample()
    assert after is not None
    assert after.values["children_cpu_s"] >= during.values["children_cpu_s"], "a total only grows"


def test_what_threads_have_waited_stays_counted_when_they_end() -> None:
    look = ProcessSampler("model-0", os.getpid(), control_groups=ControlGroups())
    before = look.sample()
    thread = threading.Thread(target=lambda: sum(range(200_000)))
    thread.start()
    during = look.sample()
    thread.join()
    after = look.sample()
    assert before is not None
    assert during is not None
    assert after is not None
    delays = [sample.values["run_delay_s"] for sample in (before, during, after)]
    assert delays == sorted(delays)


def open_below_proc() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith("/proc/") and path.rsplit("/", 1)[1] != "fd"]


@pytest.mark.parametrize("most", [0, 2, 100])
def test_files_stay_open_between_looks_up_to_a_number_and_none_after_the_last(
    sleeper: subprocess.Popen[bytes], most: int
) -> None:
    before = len(open_below_proc())
    look = ProcessSampler("model-0", sleeper.pid, control_groups=ControlGroups(), files=OpenFiles(most=most))
    first, second = look.sample(), look.sample()
    assert first is not None and second is not None
    assert first.values.keys() == second.values.keys()
    assert len(open_below_proc()) - before == min(most, 4)
    sleeper.kill()
    sleeper.wait()
    assert look.sample() is None
    look.close()
    assert len(open_below_proc()) == before


def test_a_host_is_seen_with_all_its_figures(tmp_path: Path) -> None:
    sample = HostStatSampler("host-0", run_dir=str(tmp_path)).sample({"fsync_s": 0.001})
    assert sample.values.keys() >= OF_A_HOST
    assert sample.values["fsync_s"] == 0.001
    assert 0 < sample.values["memory_available_bytes"] < sample.values["memory_total_bytes"]


def test_processor_time_of_the_host_grows_with_work(tmp_path: Path) -> None:
    look = HostStatSampler("host-0", run_dir=str(tmp_path))
    before = look.sample().values["cpu_busy_s"]
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    assert look.sample().values["cpu_busy_s"] > before


def test_a_kernel_that_says_nothing_of_its_disks_costs_only_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(perdisk: bool = False) -> None:
        raise NotImplementedError("/proc/diskstats nor /sys/block are available on this system")

    monkeypatch.setattr("psutil.disk_io_counters", refuse)
    values = HostStatSampler("host-0", run_dir=str(tmp_path)).sample().values
    assert values.keys() >= OF_A_HOST and "disk_busy_s" not in values
