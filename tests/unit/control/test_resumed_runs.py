"""A resumed run continues at its checkpoint: later steps are undone, and trained again."""

from __future__ import annotations

import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Began
from kintsugi.journal.facts import CheckpointSaved, ProcessLost, RolledBack, RunStarted, StepCommitted
from kintsugi.protocol.recovery import Repair
from tests.unit.control.driven import Driven, fold


@pytest.mark.parametrize("restore_step", [1, 2])
def test_what_no_checkpoint_holds_is_undone_and_trained_again(restore_step: int) -> None:
    first = Driven()
    first.begin()
    first.until(lambda: first.state.step == 2)
    first.until(Phase.TRAINING)
    resumed = Driven(state=fold(first.facts))
    resumed.world.checkpoints = first.world.checkpoints
    resumed.begin(restore_step=restore_step)
    assert [fact.step for fact in resumed.facts if isinstance(fact, RolledBack)] == [restore_step]
    assert resumed.state.step == restore_step
    resumed.until(Phase.ENDED)
    steps = [fact.step for fact in resumed.facts if isinstance(fact, StepCommitted)]
    assert steps == list(range(restore_step + 1, 4))
    assert resumed.state.outcome == "finished"


def test_nobody_of_an_earlier_session_lives_and_the_run_keeps_its_name() -> None:
    first = Driven()
    first.begin()
    first.until(Phase.TRAINING)
    living = {name for name, member in first.state.members.members.items() if member.status == "live"}
    resumed = Driven(state=fold(first.facts))
    resumed.begin(restore_step=0)
    assert {fact.process for fact in resumed.facts if isinstance(fact, ProcessLost)} == living
    assert not any(isinstance(fact, RunStarted) for fact in resumed.facts)
    assert resumed.state.term == 2


def test_a_checkpoint_that_the_journal_does_not_know_is_found_by_a_run_that_is_resumed_from_it() -> None:
    path = "elsewhere/step-2"
    first = Driven()
    first.begin()
    first.until(lambda: first.state.step == 2)
    first.until(Phase.TRAINING)
    resumed = Driven(state=fold([fact for fact in first.facts if not isinstance(fact, CheckpointSaved)]))
    resumed.world.checkpoints = {path: first.world.checkpoints["checkpoints/step-2"]}
    resumed.feed(Began("job", "digest", "2", resumed=True, restore_step=2, restore_path=path))
    for agent in resumed.world.agents:
        resumed.join(agent, "2.0", resumed.world.hosts[agent])
    resumed.until(lambda: bool(resumed.asked(Repair)))
    bodies = [request.body for request in resumed.asked(Repair)]
    assert {body.sources[-1] for body in bodies if isinstance(body, Repair)} == {path}
