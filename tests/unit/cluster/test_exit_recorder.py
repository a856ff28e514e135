from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.cluster import exit_recorder, orphans
from kintsugi.cluster.child import ChildProcess, ChildRecord
from kintsugi.cluster.exit_recorder import HOST, WINDOW_S, ExitRecorder, OomAttribution
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.telemetry.collect.cgroups import ControlGroups, ProcessGroups
from kintsugi.telemetry.events import EventLog, ProcessGone, read_events


def test_a_count_that_has_moved_explains_one_death() -> None:
    ledger = OomAttribution()
    ledger.add_count("group", 4, 10.0)
    assert not ledger.claim("group", 4, 10.5)
    assert ledger.claim("group", 5, 11.0)
    assert not ledger.claim("group", 5, 11.1), "another died at the same time, of something else"
    assert ledger.claim("group", 6, 11.2)


def test_a_count_that_was_seen_to_move_before_the_process_was_gone_explains_it_too() -> None:
    ledger = OomAttribution()
    ledger.add_count("group", 4, 10.0)
    ledger.add_count("group", 5, 11.0)
    assert ledger.claim("group", 5, 11.4)


def test_a_move_of_long_ago_explains_nothing() -> None:
    ledger = OomAttribution()
    ledger.add_count("group", 4, 10.0)
    for second in range(1, 10):
        ledger.add_count("group", 5, 10.0 + second)
    assert not ledger.claim("group", 5, 11.0 + WINDOW_S + 4.0)


def test_a_group_that_was_never_seen_began_with_none() -> None:
    assert OomAttribution().claim("new", 1, 3.0)
    assert not OomAttribution().claim("new", 0, 3.0)


class Kernel(ControlGroups):
    """Two processes in a group each, and what was counted there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {Path("/a"): 0, Path("/b"): 0}
        self.created: list[Path] = []

    def created_since(self, wall: float) -> Iterator[ProcessGroups]:
        return (ProcessGroups(memory=path) for path in self.created)

    def of(self, pid: int) -> ProcessGroups:
        return ProcessGroups(memory=Path("/a") if pid == 1 else Path("/b"))

    def oom_kills(self, groups: ProcessGroups) -> int | None:
        return None if groups.memory is None else self.counts[groups.memory]


@pytest.mark.parametrize(
    ("pid", "where", "of_memory"),
    [(1, "/a", True), (1, "/b", False), (1, "/unseen", False), (3, "/unseen", True)],
    ids=["its own", "another's", "a stranger's", "one that was never seen"],
)
def test_a_process_died_of_memory_if_its_own_group_says_so_and_the_host_speaks_for_unknown_ones_only(
    monkeypatch: pytest.MonkeyPatch, pid: int, where: str, of_memory: bool
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(exit_recorder, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomAttribution(kernel)
    ledger.update_groups([1, 2])
    ledger.count(10.0)
    kernel.counts[Path(where)] = 1
    assert ledger.explains(pid, 11.0) is of_memory


def test_the_group_that_a_process_joins_at_its_start_speaks_for_it_though_its_group_was_read_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(exit_recorder, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomAttribution(kernel)
    ledger.update_groups([1])
    ledger.count(10.0)
    kernel.counts[Path("/new")] = 1
    assert not ledger.explains(1, 11.0)
    assert ledger.explains(1, 11.0, placed=Path("/new"))
    assert not ledger.explains(1, 11.0, placed=Path("/new")), "it has explained a death already"


@pytest.mark.parametrize("unified", [True, False])
def test_a_process_that_was_moved_just_before_it_died_is_found_by_its_remains(
    monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(exit_recorder, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomAttribution(kernel)
    ledger.update_groups([1, 2])
    ledger.count(10.0)
    kernel.counts[Path("/new")] = 1
    monkeypatch.setattr(kernel, "of", lambda pid: ProcessGroups(memory=Path("/new"), unified=unified))
    ledger.update_group(1)
    assert ledger.explains(1, 11.0) is unified, "remains say nothing in the first version"


def test_a_process_that_is_being_ended_keeps_the_group_that_it_was_last_seen_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, exiting = Kernel(), set[int]()
    monkeypatch.setattr(exit_recorder, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomAttribution(kernel, is_exiting=lambda pid: pid in exiting)
    ledger.update_groups([1, 2])
    ledger.count(10.0)
    kernel.counts |= {Path("/a"): 1, Path("/"): 0}
    monkeypatch.setattr(kernel, "of", lambda pid: ProcessGroups(memory=Path("/")))
    exiting.add(1)
    ledger.update_groups([1, 2])
    assert ledger.explains(1, 11.0)
    kernel.counts[Path("/b")] = 1
    assert not ledger.explains(2, 11.0), "this one lives, and has been moved to the root"


@pytest.mark.parametrize(
    ("created", "host_counts", "of_memory"),
    [("/new", True, True), ("/b", True, False), ("/new", False, False), (None, True, False)],
    ids=["killed there", "group of another process", "nothing was killed just now", "no new group"],
)
def test_a_new_group_in_which_the_kernel_killed_explains_a_process_that_was_moved_unseen(
    monkeypatch: pytest.MonkeyPatch, created: str | None, host_counts: bool, of_memory: bool
) -> None:
    kernel, killed = Kernel(), [5]
    monkeypatch.setattr(exit_recorder, "oom_kills", lambda: killed[0])
    ledger = OomAttribution(kernel)
    ledger.update_groups([1, 2])
    ledger.count(10.0)
    killed[0] += host_counts
    if created is not None:
        kernel.created = [Path(created)]
        kernel.counts[Path(created)] = 1
    assert ledger.explains(1, 11.0) is of_memory
    assert not ledger.explains(1, 11.1), "each kill explains one death"


class Moved(OomAttribution):
    """The kernel has ended somebody a moment ago."""

    def explains(self, pid: int, now: float, *, placed: Path | None = None) -> bool:
        return self.claim(HOST, 1, now)


def ended(
    tmp_path: Path,
    *argv: str,
    number: int | None = None,
    ooms: OomAttribution,
    stopped: str = "",
) -> ProcessGone:
    """`stopped`: its stop was requested before or after it was signalled."""
    child = SystemProcesses().spawn(argv)
    record = ChildRecord("model-0", "1.4", child.pid, 0)
    kept = ChildProcess.adopted(record, child, log=tmp_path / "log")
    if stopped == "before":
        kept.stop(terminate_at=0.0, kill_at=0.0)
    if number is not None:
        child.send_signal(number)
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    if stopped == "after":
        kept.stop(terminate_at=0.0, kill_at=0.0)
    log = EventLog(RunFolder(tmp_path).events_file("agent-0"), process="agent-0")
    status = ExitRecorder(log, ooms=ooms).take_status(kept, memory_bytes=5e6)
    child.close()
    log.close()
    gone = read_events(tmp_path)[-1].event
    assert isinstance(gone, ProcessGone)
    assert gone.status == status
    return gone


def test_how_a_child_ended_is_written_down(tmp_path: Path) -> None:
    gone = ended(tmp_path, "sleep", "60", number=signal.SIGKILL, ooms=OomAttribution())
    expected = ProcessGone("model-0", "1.4", gone.pid, -signal.SIGKILL, "killed by SIGKILL", 5e6)
    assert gone == expected


def test_a_child_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed(
    tmp_path: Path,
) -> None:
    gone = ended(tmp_path, "sleep", "60", number=signal.SIGKILL, ooms=Moved())
    assert gone.oom
    assert gone.how == "killed by SIGKILL for want of memory"


def test_a_child_that_exited_was_not_killed_for_memory_whoever_else_was(tmp_path: Path) -> None:
    gone = ended(tmp_path, "false", ooms=Moved())
    assert (gone.status, gone.how, gone.oom) == (1, "exited with code 1", False)


def test_what_torch_and_the_driver_left_in_shared_memory_goes_with_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "SHARED_MEMORY", tmp_path)
    child = SystemProcesses().spawn([sys.executable, "-c", "input()"])
    theirs = [tmp_path / f"torch_{child.pid}_17_0", tmp_path / f"cuda.shm.0.{child.pid:x}.1"]
    strangers = [tmp_path / f"torch_{child.pid}9_17_0", tmp_path / f"cuda.shm.0.{child.pid:x}9.1"]
    for path in (*theirs, *strangers):
        path.touch()
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    kept = ChildProcess.adopted(ChildRecord("model-0", "1.4", child.pid, 0), child, log=tmp_path / "log")
    log = EventLog(RunFolder(tmp_path).events_file("agent-0"), process="agent-0")
    status = ExitRecorder(log, ooms=OomAttribution()).take_status(kept, memory_bytes=0.0)
    assert status == -signal.SIGKILL
    assert not any(path.exists() for path in theirs) and all(path.exists() for path in strangers)


@pytest.mark.parametrize(("stopped", "is_ordered"), [("before", True), ("after", False)])
def test_an_end_is_ordered_only_if_the_process_was_not_exiting_already(
    tmp_path: Path, stopped: str, is_ordered: bool
) -> None:
    gone = ended(tmp_path, "sleep", "60", number=signal.SIGKILL, ooms=OomAttribution(), stopped=stopped)
    assert gone.ordered is is_ordered
