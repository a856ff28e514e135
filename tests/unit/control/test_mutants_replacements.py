"""Replacements that are slow to come: who is asked again, when the others stop waiting, and that they do."""

from __future__ import annotations

from kintsugi.control.mending import LONGEST_WAIT_S, START_FACTOR
from kintsugi.control.phases import Phase
from kintsugi.control.staff import FIRST_RETRY_S
from kintsugi.facts import ProcessRequested, StrategyChosen
from kintsugi.messages import StartProcess
from kintsugi.recovery.policy import Strategy
from kintsugi.recovery.states import RecoveryState
from tests.unit.control.driven import CONFIG, Driven

FIRST_GUESS_S = 2.0
"""What a start is taken to need before one was seen."""


def waiting_for_a_rank() -> Driven:
    """A rank was lost in training; the others have stopped, its start is ordered and nobody answers."""
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    while driven.master.recovery_state != RecoveryState.WAITING:
        driven.answer(next(r for r in driven.open.values() if not isinstance(r.body, StartProcess)))
    return driven


def strategies(driven: Driven) -> list[str]:
    return [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)]


def test_a_replacement_that_is_silent_is_waited_for_a_while_and_far_less_than_a_first_start() -> None:
    driven = waiting_for_a_rank()
    patience_s = max(LONGEST_WAIT_S, START_FACTOR * FIRST_GUESS_S)
    assert patience_s < CONFIG.cluster.start_timeout_s / 2
    driven.pass_time(patience_s - 1.0)
    assert strategies(driven) == [Strategy.RECOVER]
    driven.pass_time(2.0)
    assert strategies(driven) == [Strategy.RECOVER, Strategy.ELASTIC]
    driven.until(Phase.TRAINING)
    assert driven.master.recovery_state == RecoveryState.NORMAL


def test_a_start_whose_agent_did_not_answer_is_asked_again_after_a_pause_under_the_same_incarnation() -> None:
    driven = waiting_for_a_rank()
    num_ordered = sum(isinstance(fact, ProcessRequested) for fact in driven.facts)
    for kind in ("ProcessDied", "DeadlineExceeded"):
        (start,) = driven.asked(StartProcess)
        driven.fail(start, "no answer", kind=kind)
        assert driven.asked(StartProcess) == []
        driven.pass_time(FIRST_RETRY_S / 2)
        assert driven.asked(StartProcess) == []
        driven.pass_time(FIRST_RETRY_S)
        (again,) = driven.asked(StartProcess)
        assert (again.to, again.body) == (start.to, start.body)
    assert sum(isinstance(fact, ProcessRequested) for fact in driven.facts) == num_ordered
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
