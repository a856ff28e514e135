"""Hosts on other machines: the hosts file, refusals, decisions by time, files that travel, placement by slots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.backends.ssh import RemoteHost, read_hosts_file, ssh_command
from kintsugi.cluster.host_manager import SILENT_S, HostPhase, HostRecord, decide
from kintsugi.cluster.host_supervisor import RECORD, ScratchRecord, own_machine, remove_leftovers
from kintsugi.cluster.joining import HostNeeds, versions, why_refused
from kintsugi.cluster.run_files import SCRATCH, RunFiles
from kintsugi.config.schema import AlgorithmSection, ClusterSection, Config
from kintsugi.control.placement import hosts_without_slots, plan_layout
from kintsugi.errors import ConfigError
from kintsugi.protocol.hosts import HostFacts
from kintsugi.runtime.proc import process_start_time
from kintsugi.types import Role

FACTS = HostFacts(
    "b", "10.0.0.2", versions(), cores=8, memory_bytes=64 << 30, wall=1000.0, free_bytes=1 << 40
)


def test_a_hosts_file_is_read_with_its_options_and_spares_come_last(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# all\na 10.0.0.1 spare\n\nb me@10.0.0.2 slots=2 gpus=8 port=2222 # fast\n")
    assert read_hosts_file(path) == (
        RemoteHost("b", "me@10.0.0.2", slots=2, gpus=8, port=2222),
        RemoteHost("a", "10.0.0.1", spare=True),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n", "hosts.txt:1: expected `name address [options]`, got 'a'"),
        ("a 10.0.0.1\nb 10.0.0.2 slot=2\n", "hosts.txt:2: expected options slots=NUMBER"),
        ("a 10.0.0.1 slots=0\n", "hosts.txt:1: expected at least one slot"),
        ("a 10.0.0.1\na 10.0.0.2\n", "expected each name once, found 'a'"),
        ("a 10.0.0.1 spare\n", "found none that is no spare"),
        ("a -oProxyCommand=x\n", "expected a name and an address"),
    ],
)
def test_a_wrong_line_of_a_hosts_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_hosts_file(tmp_path / "hosts.txt")
    assert said in str(raised.value)


def test_ssh_asks_nothing_and_passes_the_command_as_one_quoted_word() -> None:
    command = ssh_command(RemoteHost("b", "me@10.0.0.2", port=2222), ["python", "a b"])
    assert command[-3:] == ["me@10.0.0.2", "--", "python 'a b'"]
    assert "BatchMode=yes" in command and "2222" in command


@pytest.mark.parametrize(
    ("facts", "needs", "said"),
    [
        ({}, {}, ""),
        ({}, {"gpus": 2}, "expected 2 GPUs, as the hosts file says, found 0"),
        ({"memory_bytes": 1 << 30}, {"memory_bytes": 2 << 30}, "expected 2.0 GiB of memory"),
        ({"free_bytes": 1 << 30}, {"needed_bytes": 2 << 30}, "expected 2.0 GiB of disk space"),
        ({"wall": 1200.0}, {}, "found one +200 s off"),
    ],
)
def test_a_host_that_lacks_something_is_refused_with_both_sides_named(
    facts: dict[str, object], needs: dict[str, Any], said: str
) -> None:
    found = msgspec.structs.replace(FACTS, **facts)
    assert said in why_refused(found, HostNeeds(versions(), **needs), now=1000.0)
    assert bool(said) == bool(why_refused(found, HostNeeds(versions(), **needs), now=1000.0))


def test_another_version_and_an_absent_torch_are_refused_with_both_sides_named() -> None:
    other = msgspec.structs.replace(FACTS, versions=msgspec.structs.replace(versions(), torch="2.1"))
    expected = versions().torch
    assert why_refused(other, HostNeeds(versions()), now=1000.0) == (
        f"expected torch {expected}, as on the launcher's machine, found 2.1"
    )
    absent = msgspec.structs.replace(FACTS, versions=msgspec.structs.replace(versions(), torch="none"))
    assert "found none" in why_refused(absent, HostNeeds(versions()), now=1000.0)


def test_time_alone_loses_silent_hosts_fails_those_that_never_came_and_orders_lost_ones_with_growing_pauses() -> (
    None
):
    def action(record: HostRecord, *, since: float, heard_at: float = 0.0) -> str:
        return decide(record, now=100.0, since=since, heard_at=heard_at, join_s=60.0).action

    ready = HostRecord("host-1", HostPhase.READY, was_ready=True)
    assert action(ready, since=0.0, heard_at=100.0 - SILENT_S - 0.1) == "lose"
    assert action(ready, since=0.0, heard_at=100.0 - SILENT_S + 0.1) == ""
    assert action(HostRecord("host-1"), since=39.0) == "fail"
    assert action(HostRecord("host-1", was_ready=True), since=39.0) == "lose"
    lost = HostRecord("host-1", HostPhase.LOST, was_ready=True, num_losses=1)
    assert action(lost, since=97.0) == "order"
    assert action(msgspec.structs.replace(lost, num_losses=3), since=97.0) == ""
    assert action(HostRecord("host-1", HostPhase.ENDED), since=0.0) == ""


def test_files_of_a_run_travel_by_digest_and_the_configuration_names_them_where_they_arrive(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    code = tmp_path / "code"
    code.mkdir()
    (code / "rewards.py").write_text("import other\n")
    (code / "other.py").write_text("")
    reward = f"{code / 'rewards.py'}:brevity"
    config = Config(name="a", algorithm=AlgorithmSection(reward=(reward,)))
    files = RunFiles(config, run_dir=run_dir, job="job")
    by_name = {Path(each.path).name: each for each in files.files}
    assert by_name.keys() == {"rewards.py", "other.py", "config.yaml"}
    assert Path(by_name["rewards.py"].path).parent == Path(by_name["other.py"].path).parent
    content, size = files.read(by_name["config.yaml"].digest, offset=0, size=1 << 20)
    assert len(content) == size
    assert f"{SCRATCH}/{by_name['rewards.py'].path}:brevity".encode() in content
    assert str(tmp_path).encode() not in content
    assert files.imports == (f"{SCRATCH}/{by_name['rewards.py'].path}:brevity",)
    assert {path.name for path in run_dir.iterdir()} == {"host_files"}


def test_ranks_are_placed_by_slots_and_neither_on_a_head_without_slots_nor_on_spares() -> None:
    cluster = ClusterSection(hosts=4, slots=(0, 2, 1, 1), spare_hosts=1)
    config = Config(name="a", cluster=cluster)
    placed = [
        plan.host for plan in plan_layout(config) if plan.role in (Role.MODEL, Role.ROLLOUT, Role.SERVER)
    ]
    assert placed[:4] == ["host-1", "host-2", "host-1", "host-1"]
    assert set(placed) == {"host-1", "host-2"}
    assert hosts_without_slots(config) == {"host-0"}
    assert {plan.host for plan in plan_layout(config) if plan.role is Role.AGENT} == {
        f"host-{index}" for index in range(4)
    }


def test_scratch_folders_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    records = {
        "dead here": ScratchRecord(2**22 - 1, 1, own_machine()),
        "alive here": ScratchRecord(os.getpid(), process_start_time(os.getpid()) or 0, own_machine()),
        "elsewhere": ScratchRecord(2**22 - 1, 1, "another machine on the same disk"),
    }
    for name, record in records.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_bytes(msgspec.json.encode(record))
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive here", "elsewhere"]
