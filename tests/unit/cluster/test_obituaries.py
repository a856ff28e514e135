from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kintsugi.cluster import obituaries
from kintsugi.cluster.children import ChildRecord, Kept
from kintsugi.cluster.obituaries import HOST, WINDOW_S, Obituaries, OomLedger
from kintsugi.observe.cgroups import ControlGroups, Groups
from kintsugi.observe.events import EventLog, ProcessGone, events_path, read_events
from kintsugi.runtime import SystemProcesses


def test_a_count_that_has_moved_explains_one_death() -> None:
    ledger = OomLedger()
    ledger.saw("group", 4, 10.0)
    assert not ledger.claim("group", 4, 10.5)
    assert ledger.claim("group", 5, 11.0)
    assert not ledger.claim("group", 5, 11.1), "another died at the same time, of something else"
    assert ledger.claim("group", 6, 11.2)


def test_a_count_that_was_seen_to_move_before_the_process_was_gone_explains_it_too() -> None:
    ledger = OomLedger()
    ledger.saw("group", 4, 10.0)
    ledger.saw("group", 5, 11.0)
    assert ledger.claim("group", 5, 11.4)


def test_a_move_of_long_ago_explains_nothing() -> None:
    ledger = OomLedger()
    ledger.saw("group", 4, 10.0)
    for second in range(1, 10):
        ledger.saw("group", 5, 10.0 + second)
    assert not ledger.claim("group", 5, 11.0 + WINDOW_S + 4.0)


def test_a_group_that_was_never_seen_began_with_none() -> None:
    assert OomLedger().claim("new", 1, 3.0)
    assert not OomLedger().claim("new", 0, 3.0)


class Kernel(ControlGroups):
    """Two processes in a group each, and what was counted there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {Path("/a"): 0, Path("/b"): 0}

    def of(self, pid: int) -> Groups:
        return Groups(memory=Path("/a") if pid == 1 else Path("/b"))

    def oom_kills(self, groups: Groups) -> int | None:
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
    monkeypatch.setattr(obituaries, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomLedger(kernel)
    ledger.look_at([1, 2])
    ledger.count(10.0)
    kernel.counts[Path(where)] = 1
    assert ledger.explains(pid, 11.0) is of_memory


@pytest.mark.parametrize("unified", [True, False])
def test_a_process_that_was_moved_just_before_it_died_is_found_by_its_remains(
    monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(obituaries, "oom_kills", lambda: sum(kernel.counts.values()))
    ledger = OomLedger(kernel)
    ledger.look_at([1, 2])
    ledger.count(10.0)
    kernel.counts[Path("/new")] = 1
    monkeypatch.setattr(kernel, "of", lambda pid: Groups(memory=Path("/new"), unified=unified))
    ledger.look_again(1)
    assert ledger.explains(1, 11.0) is unified, "remains say nothing in the first version"


class Moved(OomLedger):
    """The kernel has ended somebody a moment ago."""

    def explains(self, pid: int, now: float) -> bool:
        return self.claim(HOST, 1, now)


def ended(tmp_path: Path, *argv: str, number: int | None = None, ooms: OomLedger) -> ProcessGone:
    child = SystemProcesses().spawn(argv)
    if number is not None:
        child.send_signal(number)
    os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    record = ChildRecord("model-0", "1.4", child.pid, 0)
    kept = Kept.adopted(record, child, log=tmp_path / "log")
    log = EventLog(events_path(tmp_path, "agent-0"), process="agent-0")
    status = Obituaries(log, ooms=ooms).take_status(kept, memory_bytes=5e6)
    child.close()
    log.close()
    gone = read_events(tmp_path)[-1].event
    assert isinstance(gone, ProcessGone)
    assert gone.status == status
    return gone


def test_how_a_child_ended_is_written_down(tmp_path: Path) -> None:
    gone = ended(tmp_path, "sleep", "60", number=signal.SIGKILL, ooms=OomLedger())
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
