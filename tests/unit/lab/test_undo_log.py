from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.errors import UntrustedFile
from kintsugi.lab.faults import fpu_rounding
from kintsugi.lab.injector.undo_log import (
    LeaveGroup,
    ProcessIdentity,
    RemovePath,
    RemoveRules,
    RemoveShaping,
    RestoreAffinity,
    RestoreLimit,
    RestoreOomScore,
    RestoreRounding,
    ResumeProcess,
    Undo,
    UndoJournal,
    UnmountPath,
    mounts_at,
    network_of,
    queue_rules,
)
from kintsugi.lab.testbed import cgroups, tools

LEASE_S = 60.0


@pytest.fixture
def sleeper() -> Iterator[ProcessIdentity]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield ProcessIdentity.of(process.pid)
        process.kill()


def state_of(who: ProcessIdentity) -> str:
    return Path(f"/proc/{who.pid}/stat").read_text().rpartition(")")[2].split()[0]


def until_state(who: ProcessIdentity, states: str) -> None:
    deadline = time.monotonic() + 5.0
    while state_of(who) not in states:
        assert time.monotonic() < deadline, state_of(who)
        time.sleep(0.001)


def test_a_process_is_not_mistaken_for_a_later_one_with_its_number(sleeper: ProcessIdentity) -> None:
    earlier = ProcessIdentity(sleeper.pid, sleeper.born - 1)
    assert not earlier.alive
    assert not earlier.signal(signal.SIGKILL)
    assert sleeper.alive


def test_a_stopped_process_is_set_going(sleeper: ProcessIdentity) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    until_state(sleeper, "T")
    ResumeProcess(sleeper).carry_out()
    until_state(sleeper, "SR")


def test_a_limit_is_what_it_was(sleeper: ProcessIdentity) -> None:
    before = resource.prlimit(sleeper.pid, resource.RLIMIT_DATA)
    resource.prlimit(sleeper.pid, resource.RLIMIT_DATA, (1 << 30, before[1]))
    RestoreLimit(sleeper, "DATA", *before).carry_out()
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_DATA) == before


def test_processors_and_score_are_what_they_were(sleeper: ProcessIdentity) -> None:
    before = os.sched_getaffinity(sleeper.pid)
    os.sched_setaffinity(sleeper.pid, {min(before)})
    RestoreAffinity(sleeper, tuple(before), os.getpriority(os.PRIO_PROCESS, sleeper.pid)).carry_out()
    assert os.sched_getaffinity(sleeper.pid) == before
    score = Path(f"/proc/{sleeper.pid}/oom_score_adj")
    was = score.read_text().strip()
    score.write_text("1000")
    RestoreOomScore(sleeper, was).carry_out()
    assert score.read_text().strip() == was


@pytest.mark.skipif(fpu_rounding.missing() is not None, reason=str(fpu_rounding.missing()))
def test_threads_round_to_the_nearest_again(sleeper: ProcessIdentity) -> None:
    try:
        fpu_rounding.set_rounding(sleeper.pid, fpu_rounding.TOWARDS_ZERO)
    except PermissionError:
        pytest.skip("this user may not trace processes")
    assert fpu_rounding.rounding(sleeper.pid) == {fpu_rounding.TOWARDS_ZERO}
    RestoreRounding(sleeper).carry_out()
    assert fpu_rounding.rounding(sleeper.pid) == {fpu_rounding.NEAREST}


def test_what_is_gone_is_undone_already(tmp_path: Path) -> None:
    gone = ProcessIdentity(2**22 - 1, 1)
    for undo in (
        ResumeProcess(gone),
        RestoreLimit(gone, "DATA", 1, 1),
        RestoreOomScore(gone, "0"),
        RestoreAffinity(gone, (0,), 0),
        RestoreRounding(gone),
        RemovePath(str(tmp_path / "nothing")),
        UnmountPath(str(tmp_path)),
        LeaveGroup(str(tmp_path / "group"), str(tmp_path)),
    ):
        undo.carry_out()


def test_a_change_is_outstanding_from_before_it_is_made_until_it_is_undone(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    made = tmp_path / "made"
    first = journal.before(RemovePath(str(made)), lease_s=LEASE_S)
    second = journal.before(RemovePath(str(tmp_path / "other")), lease_s=LEASE_S)
    made.write_text("changed")
    assert UndoJournal(journal.path).outstanding() == [second, first]
    journal.undo(first)
    assert not made.exists()
    assert journal.outstanding() == [second]


def test_what_a_killed_writer_left_of_a_line_is_passed_over(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    entry = journal.before(RemovePath(str(tmp_path / "made")), lease_s=LEASE_S)
    with journal.path.open("ab") as file:
        file.write(b'{"number":"1-2-3","owner":{"pid":')
    assert journal.outstanding() == [entry]
    later = journal.before(RemovePath(str(tmp_path / "other")), lease_s=LEASE_S)
    assert journal.outstanding() == [later, entry]


def test_a_change_that_could_not_be_written_down_whole_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:10]))
    with pytest.raises(OSError, match="No space left"):
        journal.before(RemovePath(str(tmp_path / "made")), lease_s=LEASE_S)


@pytest.mark.skipif(cgroups.missing("freezer") is not None, reason=str(cgroups.missing("freezer")))
def test_a_process_whose_home_group_is_gone_goes_to_the_group_above(sleeper: ProcessIdentity) -> None:
    found = cgroups.hierarchy("freezer")
    assert found is not None
    above = found.group_of(sleeper.pid)
    group, home = found.new_path(sleeper.pid), found.new_path(sleeper.pid)
    group.mkdir()
    (group / "cgroup.procs").write_text(str(sleeper.pid))
    LeaveGroup(str(group), str(home)).carry_out()
    assert not group.exists()
    assert found.group_of(sleeper.pid) == above


@pytest.mark.parametrize(
    "undo",
    [
        RemovePath("/etc/passwd"),
        RemovePath("{folder}/../outside"),
        RemovePath("{folder}/link/file"),
        UnmountPath("/"),
        UnmountPath("/proc"),
        LeaveGroup("/etc/group", "/sys/fs/cgroup"),
        RemoveRules(1, "filter"),
        RemoveShaping(1, "eth0 root; reboot"),
    ],
)
def test_a_change_that_the_laboratory_does_not_make_is_not_undone(tmp_path: Path, undo: Undo) -> None:
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "link").symlink_to("/")
    journal = UndoJournal(folder / "undo.jsonl")
    if isinstance(undo, RemovePath):
        undo = RemovePath(undo.path.format(folder=folder))
    entry = journal.before(undo, lease_s=LEASE_S)
    with pytest.raises(PermissionError):
        journal.undo(entry)
    assert journal.outstanding() == [entry]
    journal.close()


def test_an_entry_with_a_command_of_its_own_carries_out_none(tmp_path: Path) -> None:
    """The attack: a line whose undo is a command that runs in the network of the machine."""
    owner = ProcessIdentity.of(os.getpid())
    network = network_of("self")
    command = ["sh", "-c", f"touch {tmp_path}/ran"]
    undo = {"type": "Rules", "network": network, "table": "k00000000", "commands": [command]}
    line = {"number": "1", "owner": msgspec.to_builtins(owner), "until": 0.0, "undo": undo}
    (tmp_path / "undo.jsonl").touch(mode=0o600)
    (tmp_path / "undo.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    journal = UndoJournal(tmp_path / "undo.jsonl")
    (entry,) = journal.outstanding()
    with contextlib.suppress(OSError, tools.ToolFailed):
        journal.undo(entry)
    assert not (tmp_path / "ran").exists()
    journal.close()


def test_rules_of_iptables_are_built_from_chain_mark_and_queue() -> None:
    (rule,) = queue_rules(("OUTPUT",), mark=0x6B0001, queue=7)
    assert " ".join(rule) == "OUTPUT -m mark --mark 0x6b0001 -j NFQUEUE --queue-num 7 --queue-bypass"


def test_the_journal_is_private(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    assert journal.path.stat().st_mode & 0o777 == 0o600
    journal.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="the folders are checked for root only")
def test_root_opens_no_journal_in_a_folder_that_others_can_change(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "lab").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(UntrustedFile, match="others can write"):
        UndoJournal(shared / "lab" / "undo.jsonl")
    shared.chmod(0o1777)
    UndoJournal(shared / "lab" / "undo.jsonl").close()
    os.chown(shared / "lab", 65534, -1)
    with pytest.raises(UntrustedFile, match="belongs to user 65534"):
        UndoJournal(shared / "lab" / "undo.jsonl")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_only_the_mount_that_was_made_is_undone(tmp_path: Path) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    tools.call(*mount)
    (earlier,) = mounts_at(str(place))
    undo = UnmountPath(str(place), mounts_at(str(place)))
    try:
        undo.carry_out()
        assert mounts_at(str(place)) == (earlier,), "ours was never made"
        tools.call(*mount)
        tools.call(*mount)
        with pytest.raises(OSError, match="another file system was mounted over this one"):
            undo.carry_out()
        tools.call("umount", str(place))
        undo.carry_out()
        assert mounts_at(str(place)) == (earlier,)
    finally:
        while mounts_at(str(place)):
            tools.call("umount", str(place))
