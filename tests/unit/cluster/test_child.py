from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.child import ChildRecord, ChildrenTable, end_orphans, find_alive, tail
from kintsugi.cluster.orphans import children_of
from kintsugi.runtime.proc import boot_id, process_start_time
from kintsugi.runtime.processes import SystemProcesses
from tests.unit.cluster.conftest import ShortOfDescriptors, open_descriptors


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def record_of(process: subprocess.Popen[bytes]) -> ChildRecord:
    start_time = process_start_time(process.pid)
    assert start_time is not None
    return ChildRecord("model-0", "a", process.pid, start_time)


def alive(table: ChildrenTable, path: Path) -> list[int]:
    path.write_bytes(msgspec.json.encode(table))
    found = find_alive(path, processes=SystemProcesses())
    for _, child in found:
        child.close()
    return [record.pid for record, _ in found]


def test_a_living_child_is_found_by_its_table(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    table = ChildrenTable(boot_id(), (record_of(sleeper),))
    assert alive(table, tmp_path / "agent-0.json") == [sleeper.pid]


def test_a_number_given_to_another_process_is_not_taken_for_the_child(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    other = msgspec.structs.replace(record_of(sleeper), start_time=1)
    assert alive(ChildrenTable(boot_id(), (other,)), tmp_path / "agent-0.json") == []


def test_a_table_of_another_boot_says_nothing(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert alive(ChildrenTable("another boot", (record_of(sleeper),)), tmp_path / "agent-0.json") == []


def test_no_table_means_no_children(tmp_path: Path) -> None:
    assert find_alive(tmp_path / "agent-0.json", processes=SystemProcesses()) == []


def test_a_process_that_has_ended_has_no_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_start_time(sleeper.pid) is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_time(sleeper.pid) is None, "its remains do not count"


def test_children_are_those_of_the_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.pid in children_of(os.getpid())
    assert children_of(sleeper.pid) == []


def test_the_tail_of_a_log_begins_no_earlier_than_its_offset(tmp_path: Path) -> None:
    log = tmp_path / "model-0.log"
    assert tail(log) == ""
    log.write_text("the predecessor's words\n" + "mine\n")
    assert tail(log, offset=24) == "mine\n"
    log.write_text("é" * 10_000)
    assert tail(log) == "é" * 2000


def test_ending_orphans_takes_along_what_they_started_in_their_groups(tmp_path: Path) -> None:
    """A reward's subprocess, for example; a process of another group that is in no table is left alone."""
    program = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, start_new_session=True) as worker:
        assert worker.stdout is not None
        started = int(worker.stdout.readline())
        its_end = os.pidfd_open(started)
        path = tmp_path / "agent-0.json"
        path.write_bytes(msgspec.json.encode(ChildrenTable(boot_id(), (record_of(worker),))))
        end_orphans(path, processes=SystemProcesses(), timeout_s=5.0)
        assert select.select([its_end], [], [], 5.0)[0], "it was told to end, and ends in its own time"
        os.close(its_end)
        assert (process_start_time(worker.pid), process_start_time(started)) == (None, None)
    assert not path.exists()


def test_an_orphan_in_the_group_of_another_does_not_take_that_group_along(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "agent-0.json"
    path.write_bytes(msgspec.json.encode(ChildrenTable(boot_id(), (record_of(sleeper),))))
    assert os.getpgid(sleeper.pid) == os.getpgid(0), "it is in the group of this test"
    end_orphans(path, processes=SystemProcesses(), timeout_s=5.0)
    assert process_start_time(sleeper.pid) is None


@pytest.fixture
def table_of_two(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Path]:
    """The first child is `sleeper`."""
    with subprocess.Popen(["sleep", "600"]) as second:
        path = tmp_path / "agent-0.json"
        table = ChildrenTable(boot_id(), (record_of(sleeper), record_of(second)))
        path.write_bytes(msgspec.json.encode(table))
        yield path
        second.kill()


def test_a_table_is_held_completely_or_not_at_all(table_of_two: Path) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        find_alive(table_of_two, processes=ShortOfDescriptors(1))
    assert open_descriptors() == before


def test_orphans_are_killed_as_far_as_descriptors_go_and_their_table_stays(
    sleeper: subprocess.Popen[bytes], table_of_two: Path
) -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        end_orphans(table_of_two, processes=ShortOfDescriptors(1), timeout_s=20.0)
    assert sleeper.wait() == -signal.SIGKILL
    assert open_descriptors() == before and table_of_two.exists()
