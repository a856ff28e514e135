from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.telemetry.collect.cgroups import (
    CgroupMount,
    ControlGroups,
    GroupAllowance,
    ProcessGroups,
    available_memory_bytes,
    groups_of,
    mounts,
    usable_memory_bytes,
)

MOUNTINFO = """\
24 29 0:22 / /proc rw,nosuid - proc proc rw
30 29 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 29 0:27 /docker/ab /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 29 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def test_the_hierarchies_are_found_where_they_are_mounted() -> None:
    first, second, third = mounts(MOUNTINFO)
    assert first == CgroupMount("/", Path("/sys/fs/cgroup/memory"), frozenset({"rw", "memory"}))
    assert "cpu" in second.controllers
    assert third.controllers == frozenset()


def test_a_containers_paths_are_read_from_where_it_sees_them(tmp_path: Path) -> None:
    own = write(tmp_path / "cpu" / "mine")
    where = [CgroupMount("/docker/ab", tmp_path / "cpu", frozenset({"cpu"}))]
    assert groups_of("3:cpu,cpuacct:/docker/ab/mine\n", where).cpu == own
    assert groups_of("3:cpu,cpuacct:/elsewhere\n", where).cpu == tmp_path / "cpu"
    assert groups_of("3:cpu,cpuacct:/docker/ab/mine (deleted)\n", where).cpu is None


def reader(*where: CgroupMount) -> ControlGroups:
    groups = ControlGroups()
    groups._mounts = [*where]
    return groups


def test_groups_that_were_created_since_a_time_are_found_at_any_depth(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "old" / "pod" / "new"
    new.mkdir(parents=True)
    for folder in (tmp_path, old, old / "pod"):
        os.utime(folder, (1000.0, 1000.0))
    os.utime(new, (2000.0, 2000.0))
    found = reader(CgroupMount("/", tmp_path, frozenset({"memory"}))).created_since(1999.0)
    assert [each.memory for each in found] == [new]
    assert not [*reader(CgroupMount("/", tmp_path, frozenset())).created_since(0.0)], "version 2"


def test_the_tightest_limit_up_to_the_root_counts_in_the_first_version(tmp_path: Path) -> None:
    root = write(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712\n")
    above = write(root / "lab", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="900\n")
    own = write(above / "model-0", memory__limit_in_bytes="5000\n", memory__usage_in_bytes="10\n")
    write(own, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    cpu = write(tmp_path / "cpu", cpu__stat="nr_throttled 3\nthrottled_time 1500000000\n")
    freezer = write(tmp_path / "freezer", freezer__state="FROZEN\n")
    groups = ProcessGroups(memory=own, cpu=cpu, freezer=freezer)
    control_groups = reader(CgroupMount("/", root, frozenset({"memory"})))
    assert control_groups.allowance(groups) == GroupAllowance(1000.0, 900.0, 1.5, frozen=True)
    assert control_groups.oom_kills(groups) == 2


def test_the_second_version_is_read_too(tmp_path: Path) -> None:
    own = write(tmp_path / "own", memory__max="2000\n", memory__current="1999\n")
    write(own, cpu__stat="usage_usec 5\nthrottled_usec 250000\n", cgroup__events="populated 1\nfrozen 0\n")
    write(own, memory__events="oom 4\noom_kill 3\n", memory__events__local="oom 1\noom_kill 1\n")
    groups = ProcessGroups(memory=own, cpu=own, freezer=own, unified=True)
    control_groups = reader(CgroupMount("/", tmp_path, frozenset()))
    assert control_groups.allowance(groups) == GroupAllowance(2000.0, 1999.0, 0.25)
    assert control_groups.oom_kills(groups) == 1, "those of the groups below are not counted"


@pytest.mark.parametrize(
    ("files", "frozen"),
    [
        ({"freezer__state": "FROZEN\n"}, True),
        ({"freezer__state": "THAWED\n"}, False),
        ({"cgroup__events": "populated 1\nfrozen 1\n"}, True),
        ({"cgroup__events": "populated 1\nfrozen 0\n"}, False),
    ],
)
def test_a_group_is_read_each_time_for_whether_it_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], frozen: bool
) -> None:
    control_groups, own = ControlGroups(), write(tmp_path / "own", **files)
    monkeypatch.setattr(control_groups, "of", lambda pid: ProcessGroups(freezer=own))
    assert control_groups.is_frozen(os.getpid()) is frozen
    for file in own.iterdir():
        file.unlink()
    assert not control_groups.is_frozen(os.getpid())


def test_a_process_that_is_gone_is_not_frozen() -> None:
    assert not ControlGroups().is_frozen(1 << 30)


def test_files_that_the_kernel_keeps_in_memory_are_not_used_memory(tmp_path: Path) -> None:
    control_groups = reader(CgroupMount("/", tmp_path, frozenset()))
    new = write(tmp_path / "new", memory__max="2000\n", memory__current="1900\n")
    write(new, memory__stat="anon 100\nfile 1800\ninactive_file 1500\nactive_file 300\n")
    assert control_groups.allowance(ProcessGroups(memory=new, unified=True)) == GroupAllowance(2000.0, 400.0)
    old = write(tmp_path / "old", memory__limit_in_bytes="2000\n", memory__usage_in_bytes="1900\n")
    write(old, memory__stat="inactive_file 7\ntotal_inactive_file 1700\n")
    assert control_groups.allowance(ProcessGroups(memory=old)) == GroupAllowance(2000.0, 200.0)


def test_no_group_uses_less_than_nothing(tmp_path: Path) -> None:
    own = write(tmp_path / "own", memory__max="2000\n", memory__current="100\n")
    write(own, memory__stat="inactive_file 101\n")
    control_groups = reader(CgroupMount("/", tmp_path, frozenset()))
    assert control_groups.allowance(ProcessGroups(memory=own, unified=True)) == GroupAllowance(2000.0, 0.0)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    own = write(tmp_path / "own", memory__max="max\n", memory__current="1999\n")
    control_groups = reader(CgroupMount("/", tmp_path, frozenset()))
    assert control_groups.allowance(ProcessGroups(memory=own, unified=True)) == GroupAllowance()


def test_a_host_without_groups_limits_nobody() -> None:
    control_groups = reader()
    assert control_groups.allowance(ProcessGroups()) == GroupAllowance()
    assert control_groups.oom_kills(ProcessGroups()) is None


def test_the_groups_of_this_process_can_be_read() -> None:
    control_groups = ControlGroups()
    groups = control_groups.of(os.getpid())
    assert control_groups.of(os.getpid()) is groups, "they are looked up once"


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(5000.0, 1000.0, 4000), (5000.0, 6000.0, 0), (1e15, 0.0, 10**12), (None, None, 10**12)],
)
def test_available_memory_is_what_host_and_group_both_allow(
    limit: float | None, used: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host:
        available = 10**12

    monkeypatch.setattr("psutil.virtual_memory", Host)
    monkeypatch.setattr(ControlGroups, "allowance", lambda self, groups: GroupAllowance(limit, used))
    assert available_memory_bytes() == expected


@pytest.mark.parametrize(("limit", "expected"), [(None, 64e9), (2e9, 2e9), (100e9, 64e9)])
def test_a_host_has_the_memory_of_its_control_group_and_not_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, expected: float
) -> None:
    class Host:
        total = 64_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", Host)
    monkeypatch.setattr(ControlGroups, "allowance", lambda self, groups: GroupAllowance(limit))
    assert usable_memory_bytes() == expected
