from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kintsugi.errors import DeadlineExceeded, UntrustedFile, UserError
from kintsugi.lab.injector import reaper
from kintsugi.lab.injector.reaper import ReaperGuard, reap_abandoned
from kintsugi.lab.injector.undo_log import ProcessIdentity, RemovePath, UndoJournal, group_mounts
from kintsugi.runtime.processes import Child, SystemProcesses

LEASE_S = 60.0


@pytest.fixture(autouse=True)
def own_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals of other laboratories on this machine are left alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def until_gone(path: Path) -> None:
    deadline = time.monotonic() + 10.0
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def a_change_by_somebody_who_ends(journal: Path, path: Path, *, lease_s: float) -> None:
    program = (
        "import sys; from pathlib import Path; from kintsugi.lab.injector.undo_log import *\n"
        f"UndoJournal(Path({str(journal)!r})).before(RemovePath({str(path)!r}), lease_s={lease_s})\n"
        f"Path({str(path)!r}).touch()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_what_a_dead_process_changed_is_undone(tmp_path: Path) -> None:
    guard = ReaperGuard(tmp_path / "undo.jsonl")
    a_change_by_somebody_who_ends(guard.path, tmp_path / "made", lease_s=LEASE_S)
    until_gone(tmp_path / "made")
    guard.close()
    assert not reaper.lists_folder().exists()


def test_what_is_left_is_undone_when_the_laboratory_closes(tmp_path: Path) -> None:
    guard = ReaperGuard(tmp_path / "undo.jsonl")
    guard.before(RemovePath(str(tmp_path / "made")), lease_s=LEASE_S)
    (tmp_path / "made").touch()
    for entry in guard.outstanding():
        guard.undo(entry)
    assert not (tmp_path / "made").exists()
    guard.close()
    assert UndoJournal(guard.path).outstanding() == []


def test_a_killed_reaper_is_replaced(tmp_path: Path) -> None:
    guard = ReaperGuard(tmp_path / "undo.jsonl")
    pid = reaper_of(guard)
    os.kill(pid, 9)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    guard.renew()
    a_change_by_somebody_who_ends(guard.path, tmp_path / "made", lease_s=LEASE_S)
    until_gone(tmp_path / "made")
    guard.close()


def reaper_of(guard: ReaperGuard) -> int:
    """Known by its arguments, which the kernel shows a moment after it was started."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            if str(guard.path).encode() in command_of(entry):
                return int(entry)
        time.sleep(0.005)
    raise AssertionError("no reaper was started")


def command_of(entry: str) -> bytes:
    try:
        return Path("/proc", entry, "cmdline").read_bytes()
    except OSError:
        return b""


def an_abandoned_journal(tmp_path: Path) -> Path:
    """Of a laboratory that is gone; gives what it made."""
    made, journal = tmp_path / "made", tmp_path / "undo.jsonl"
    a_change_by_somebody_who_ends(journal, made, lease_s=LEASE_S)
    folder = reaper.lists_folder()
    folder.mkdir(mode=0o700)
    world = reaper.own_world()
    (folder / f"{world}-4194303-1-aaaa").symlink_to(journal)
    return made


def test_what_a_laboratory_left_that_was_killed_with_its_reaper_is_undone_by_the_next(tmp_path: Path) -> None:
    made, folder = an_abandoned_journal(tmp_path), reaper.lists_folder()
    world = reaper.own_world()
    (folder / "1-4194303-1-cccc").symlink_to(tmp_path / "of another container")
    (folder / "somebody's-dddd").touch()
    (folder / f"{world}-{os.getpid()}-{ProcessIdentity.of(os.getpid()).born}-bbbb").symlink_to(
        tmp_path / "of a living one"
    )
    assert reap_abandoned() == 1
    assert not made.exists()
    assert {path.name.rpartition("-")[2] for path in folder.iterdir()} == {"bbbb", "cccc", "dddd"}


def test_a_list_that_others_may_write_to_is_not_carried_out(tmp_path: Path) -> None:
    made = an_abandoned_journal(tmp_path)
    reaper.lists_folder().chmod(0o777)
    assert reap_abandoned() == 0
    assert made.exists()
    with pytest.raises(UserError, match="expected a folder of yours"):
        ReaperGuard(tmp_path / "own.jsonl")


def test_a_list_that_is_a_link_to_elsewhere_is_not_carried_out(tmp_path: Path) -> None:
    made = an_abandoned_journal(tmp_path)
    reaper.lists_folder().rename(tmp_path / "elsewhere")
    reaper.lists_folder().symlink_to(tmp_path / "elsewhere")
    assert reap_abandoned() == 0
    assert made.exists()


def test_a_journal_that_others_may_write_is_not_carried_out(tmp_path: Path) -> None:
    made = an_abandoned_journal(tmp_path)
    (tmp_path / "undo.jsonl").chmod(0o666)
    assert reap_abandoned() == 0
    assert made.exists()


GUARDED = """
import os, signal, sys, time
from pathlib import Path
from kintsugi.lab.injector.reaper import ReaperGuard
from kintsugi.lab.injector.undo_log import RemovePath
folder = Path(sys.argv[1])
guard = ReaperGuard(folder / "undo.jsonl")
guard.before(RemovePath(str(folder / "made")), lease_s=60.0)
(folder / "made").touch()
(folder / "first").touch()
guard.before(RemovePath(str(folder / "first")), lease_s=-2.0)
while (folder / "first").exists():  # Then the reaper is there.
    time.sleep(0.005)
if sys.argv[2] == "gone":
    (folder / "undo.jsonl").unlink()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("journal", ["there", "gone"])
def test_a_killed_laboratory_is_not_listed_any_more_when_its_reaper_has_undone_everything(
    tmp_path: Path, journal: str
) -> None:
    subprocess.run([sys.executable, "-c", GUARDED, str(tmp_path), journal], check=False, timeout=30)
    until_gone(tmp_path / "made")
    until_gone(reaper.lists_folder())


class ReapersThatGiveUp:
    """Instead of a reaper, one that ends with nothing undone."""

    def spawn(self, argv: list[str], **options: Any) -> Child:
        return SystemProcesses().spawn(["false"], **options)


def test_what_a_reaper_could_not_undo_is_said_and_left_to_the_next_laboratory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "SystemProcesses", ReapersThatGiveUp)
    guard = ReaperGuard(tmp_path / "undo.jsonl")
    guard.before(RemovePath(str(tmp_path / "made")), lease_s=LEASE_S)
    with pytest.raises(DeadlineExceeded, match=r"to undo RemovePath\(.*made"):
        guard.close()
    assert len(list(reaper.lists_folder().iterdir())) == 1


def test_a_reaper_undoes_what_its_laboratory_left_too_long_and_lets_it_live(tmp_path: Path) -> None:
    guard = ReaperGuard(tmp_path / "undo.jsonl")
    guard.before(RemovePath(str(tmp_path / "made")), lease_s=0.0)
    (tmp_path / "made").touch()
    until_gone(tmp_path / "made")
    guard.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_guard_does_not_carry_out_a_journal_that_another_user_put_there(tmp_path: Path) -> None:
    journal, victim = tmp_path / "undo.jsonl", tmp_path / "victim"
    victim.mkdir()
    a_change_by_somebody_who_ends(journal, victim / "made", lease_s=LEASE_S)
    os.chown(journal, 65534, -1)
    with pytest.raises(UntrustedFile, match="found one of user 65534"):
        ReaperGuard(journal)
    assert (victim / "made").exists()


def test_a_guard_follows_no_link_to_a_file_of_this_user(tmp_path: Path) -> None:
    target = tmp_path / "important"
    target.write_text("mine\n")
    (tmp_path / "undo.jsonl").symlink_to(target)
    with pytest.raises(UntrustedFile, match="symbolic link"):
        ReaperGuard(tmp_path / "undo.jsonl")
    assert target.read_text() == "mine\n"


def test_a_change_that_the_laboratory_does_not_make_is_named_and_left(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    for _ in range(3):
        journal.before(RemovePath("/proc/1/status"), lease_s=-60.0)
    reader, writer = os.pipe()
    log = (tmp_path / "errors").open("w")
    command = [sys.executable, "-m", "kintsugi.lab.injector.reaper", str(journal.path), str(reader), "x"]
    process = subprocess.Popen(command, pass_fds=(reader,), stderr=log)
    try:
        deadline = time.monotonic() + 30.0
        while len(lines := (tmp_path / "errors").read_text().splitlines()) < 9:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "expected a path below" in lines[0]
    finally:
        process.kill()
        process.wait(timeout=20)
        os.close(reader)
        os.close(writer)
        log.close()
        journal.close()


A_LABORATORY = """
import os, sys, time
from pathlib import Path
from kintsugi.lab.injector.reaper import ReaperGuard
from kintsugi.lab.injector.undo_log import RemovePath
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
folder = Path(sys.argv[2])
guard = ReaperGuard(folder / "undo.jsonl")
guard.before(RemovePath(str(folder / "made")), lease_s=60.0)
(folder / "made").touch()
print("made", flush=True)
time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of its own, as a service or a login session has it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a control group")
    for mount in group_mounts():
        path = mount.path / f"kintsugi-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("this host has no control groups that can be made")


def test_a_laboratory_that_is_killed_with_all_of_its_control_group_is_undone(
    tmp_path: Path, group: Path
) -> None:
    """As `systemctl stop`, the end of a login session, or a group without memory does it."""
    command = [sys.executable, "-c", A_LABORATORY, str(group), str(tmp_path)]
    laboratory = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert laboratory.stdout is not None and laboratory.stdout.readline() == b"made\n"
    deadline = time.monotonic() + 30.0
    while (there := (group / "cgroup.procs").read_text().split()) != [str(laboratory.pid)]:
        assert time.monotonic() < deadline, f"the reaper is still in the group: {there}"
        time.sleep(0.01)
    for pid in there:
        os.kill(int(pid), signal.SIGKILL)
    laboratory.wait(10)
    laboratory.stdout.close()
    until_gone(tmp_path / "made")
