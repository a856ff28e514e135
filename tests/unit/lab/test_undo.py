from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.lab import floating, groups
from kintsugi.lab.undo import (
    Continue,
    Leave,
    Limit,
    Processors,
    Remove,
    Rounding,
    Score,
    UndoJournal,
    Unmount,
    Who,
)

LEASE_S = 60.0


@pytest.fixture
def sleeper() -> Iterator[Who]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Who.of(process.pid)
        process.kill()


def state_of(who: Who) -> str:
    return Path(f"/proc/{who.pid}/stat").read_text().rpartition(")")[2].split()[0]


def until_state(who: Who, states: str) -> None:
    deadline = time.monotonic() + 5.0
    while state_of(who) not in states:
        assert time.monotonic() < deadline, state_of(who)
        time.sleep(0.001)


def test_a_process_is_not_mistaken_for_a_later_one_with_its_number(sleeper: Who) -> None:
    earlier = Who(sleeper.pid, sleeper.born - 1)
    assert not earlier.alive
    assert not earlier.signal(signal.SIGKILL)
    assert sleeper.alive


def test_a_stopped_process_is_set_going(sleeper: Who) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    until_state(sleeper, "T")
    Continue(sleeper).carry_out()
    until_state(sleeper, "SR")


def test_a_limit_is_what_it_was(sleeper: Who) -> None:
    before = resource.prlimit(sleeper.pid, resource.RLIMIT_DATA)
    resource.prlimit(sleeper.pid, resource.RLIMIT_DATA, (1 << 30, before[1]))
    Limit(sleeper, "DATA", *before).carry_out()
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_DATA) == before


def test_processors_and_score_are_what_they_were(sleeper: Who) -> None:
    before = os.sched_getaffinity(sleeper.pid)
    os.sched_setaffinity(sleeper.pid, {min(before)})
    Processors(sleeper, tuple(before), os.getpriority(os.PRIO_PROCESS, sleeper.pid)).carry_out()
    assert os.sched_getaffinity(sleeper.pid) == before
    score = Path(f"/proc/{sleeper.pid}/oom_score_adj")
    was = score.read_text().strip()
    score.write_text("1000")
    Score(sleeper, was).carry_out()
    assert score.read_text().strip() == was


@pytest.mark.skipif(floating.missing() is not None, reason=str(floating.missing()))
def test_threads_round_to_the_nearest_again(sleeper: Who) -> None:
    try:
        floating.set_rounding(sleeper.pid, floating.TOWARDS_ZERO)
    except PermissionError:
        pytest.skip("this user may not trace processes")
    assert floating.rounding(sleeper.pid) == {floating.TOWARDS_ZERO}
    Rounding(sleeper).carry_out()
    assert floating.rounding(sleeper.pid) == {floating.NEAREST}


def test_what_is_gone_is_undone_already(tmp_path: Path) -> None:
    gone = Who(2**22 - 1, 1)
    for undo in (
        Continue(gone),
        Limit(gone, "DATA", 1, 1),
        Score(gone, "0"),
        Processors(gone, (0,), 0),
        Rounding(gone),
        Remove(str(tmp_path / "nothing")),
        Unmount(str(tmp_path)),
        Leave(str(tmp_path / "group"), str(tmp_path)),
    ):
        undo.carry_out()


def test_a_change_is_outstanding_from_before_it_is_made_until_it_is_undone(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    made = tmp_path / "made"
    first = journal.before(Remove(str(made)), lease_s=LEASE_S)
    second = journal.before(Remove(str(tmp_path / "other")), lease_s=LEASE_S)
    made.write_text("changed")
    assert UndoJournal(journal.path).outstanding() == [second, first]
    journal.undo(first)
    assert not made.exists()
    assert journal.outstanding() == [second]


def test_what_a_killed_writer_left_of_a_line_is_passed_over(tmp_path: Path) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    entry = journal.before(Remove(str(tmp_path / "made")), lease_s=LEASE_S)
    with journal.path.open("ab") as file:
        file.write(b'{"number":"1-2-3","owner":{"pid":')
    assert journal.outstanding() == [entry]
    later = journal.before(Remove(str(tmp_path / "other")), lease_s=LEASE_S)
    assert journal.outstanding() == [later, entry]


def test_a_change_that_could_not_be_written_down_whole_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UndoJournal(tmp_path / "undo.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:10]))
    with pytest.raises(OSError, match="No space left"):
        journal.before(Remove(str(tmp_path / "made")), lease_s=LEASE_S)


@pytest.mark.skipif(groups.missing("freezer") is not None, reason=str(groups.missing("freezer")))
def test_a_process_whose_home_group_is_gone_goes_to_the_group_above(sleeper: Who) -> None:
    found = groups.hierarchy("freezer")
    assert found is not None
    above = found.group_of(sleeper.pid)
    group, home = found.new_path(sleeper.pid), found.new_path(sleeper.pid)
    group.mkdir()
    (group / "cgroup.procs").write_text(str(sleeper.pid))
    Leave(str(group), str(home)).carry_out()
    assert not group.exists()
    assert found.group_of(sleeper.pid) == above
