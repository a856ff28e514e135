"""The journal of a run, followed by the page: before, during and after it is compacted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.control.protocol import Tick
from kintsugi.journal.facts import (
    Fact,
    RunStarted,
    SampleQuarantined,
    StateFolded,
    StepCommitted,
    TermStarted,
    TicketsIssued,
)
from kintsugi.journal.inputs import InputRecorder
from kintsugi.journal.journal import Journal, read_facts
from kintsugi.page.incidents import spoken
from kintsugi.page.journal_tail import JournalTail
from kintsugi.page.run_reader import RunReader
from kintsugi.run_folder.incidents import IncidentIndex
from kintsugi.runtime.clock import SystemClock
from tests.unit.page.made_runs import make_run
from tests.unit.run_folder.test_incidents import RECOVERED

RUN: tuple[Fact, ...] = (
    RunStarted("job", "digest"),
    *RECOVERED,
    SampleQuarantined("grpo:0:1:0/0", "no answer"),
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal with one incident; each fact is a record."""
    with Journal.create(make_run(tmp_path / "run") / "journal", owner="test") as journal:
        for fact in RUN:
            journal.append((fact,))
        journal.sync()
        yield journal


def compact(journal: Journal, path: Path) -> None:
    """Fold everything so far, as the master does."""
    index = IncidentIndex()
    for fact in read_facts(path):
        index.take(fact)
    journal.compact(
        StateFolded(
            term=journal.term,
            job="job",
            step=8,
            processes={"model-1": 21},
            saved_steps=(4,),
            servers=None,
            answers={},
            parts={"incidents": index.fold()},
        )
    )


class SlowMachine(SystemClock):
    """A clock by which every look takes longer than a request may read."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 60.0
        return self._now


def read(run_dir: Path) -> JournalTail:
    tail = JournalTail(run_dir)
    while not tail.is_complete:
        tail.refresh()
    return tail


def known(tail: JournalTail) -> tuple[object, ...]:
    incidents = [each.incident for each in tail.report().incidents]
    return incidents, dict(tail.restarts), dict(tail.dropped), dict(tail.hosts), tail.pids["model-1"]


def test_a_reader_that_comes_after_a_compaction_knows_what_came_before(
    journal: Journal, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    before, timed = known(read(run_dir)), read(run_dir).timed
    for _ in range(3):
        compact(journal, run_dir / "journal")
        journal.append((StepCommitted(9, "digest"),))
    after = read(run_dir)
    assert before[0] == [1] and before[1] == {"model-1": 1}
    assert known(after) == before
    assert (after.committed_step, after.saved_steps) == (9, [4])
    assert sorted(after.timed, key=lambda each: each[0]) == timed


def test_a_reader_that_follows_a_compaction_takes_every_fact_once(journal: Journal, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tail = read(run_dir)
    # Not read before the compaction: they are only in the file that it replaces.
    journal.append((SampleQuarantined("grpo:0:2:0/0", "no answer"),))
    compact(journal, run_dir / "journal")
    journal.append((SampleQuarantined("grpo:0:3:0/0", "no answer"),))
    tail.refresh()
    assert dict(tail.dropped) == {"sample quarantined: no answer": 3}
    assert known(tail) == known(read(run_dir))


def test_the_incidents_of_a_compacted_run_are_known_before_its_earlier_files_are_read(
    journal: Journal, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    compact(journal, run_dir / "journal")
    tail = JournalTail(run_dir)
    tail.refresh(budget_s=0.0)
    assert tail.is_current and not tail.is_complete
    assert [each.incident for each in tail.report().incidents] == [1]
    assert "still being read" in tail.all_problems()[-1]


def test_earlier_files_that_were_removed_cost_only_what_they_had(journal: Journal, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    compact(journal, run_dir / "journal")
    (run_dir / "journal.1").unlink()
    tail = read(run_dir)
    assert [each.incident for each in tail.report().incidents] == [1]
    assert dict(tail.restarts) == {} and tail.all_problems() == ()


def test_service_levels_are_not_told_from_a_part_of_the_journal(journal: Journal, tmp_path: Path) -> None:
    for _ in range(500):
        journal.append((TicketsIssued(()),))
    reader = RunReader(tmp_path / "run", clock=SlowMachine())
    early = reader.service_levels()
    assert (early.lost_s, early.incidents, early.effective_ratio) == (None, None, None)
    assert any("still being read" in problem for problem in early.problems)
    while reader.read_journal():
        pass
    late = reader.service_levels()
    assert (late.lost_s, late.incidents) == (0.5, 1)
    assert late.losses[0].title == "model-1 broke"


def test_a_summary_is_spoken_without_a_colon_before_its_verb() -> None:
    assert spoken("server-0: is stopped (state T)", "server-0") == "server-0 is stopped (state T)"
    assert spoken("KeyError: 'x'", "server-0") == "KeyError: 'x'"


def test_a_fact_has_the_time_of_its_input_though_that_was_read_before_it(
    journal: Journal, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    tail = read(run_dir)
    inputs = InputRecorder(run_dir / "inputs")
    inputs.write(Tick(), 1.0, wall=500.0, after=journal.sequence)
    inputs.close()
    assert tail.facts_between(499.0, 501.0) == []
    journal.append((TermStarted(2, "second", adopting=True),))
    tail.refresh()
    (found,) = tail.facts_between(499.0, 501.0)
    assert found.time == 500.0 and isinstance(found.fact, TermStarted)
