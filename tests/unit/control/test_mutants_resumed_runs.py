"""A run that is resumed stands where its checkpoint stands: later steps are undone, and trained again."""

from __future__ import annotations

import pytest

from kintsugi.control.phases import Phase
from kintsugi.facts import ProcessLost, RolledBack, RunStarted, StepCommitted
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
    assert resumed.state.epoch == 2
