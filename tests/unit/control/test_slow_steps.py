"""An incident ends with the next step, unless the ranks are slower than before; and its state after a takeover."""

from __future__ import annotations

import pytest

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.recover import SLOW_FACTOR, SLOW_MARGIN_S, SLOW_STEPS, RecoveryCoordinator
from kintsugi.control.processes import ProcessManager
from kintsugi.control.protocol import Raise
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    TermStarted,
)
from kintsugi.recovery.strategy import MAX_FAULTS
from kintsugi.types import Peer, Role
from tests.unit.control.driven import CONFIG, new_state

FAULT = Fault("a", "RuntimeError", "model-0", "a bit fell over", 0.0)
USUAL_S = 1.0
SLOW_S = SLOW_FACTOR * USUAL_S + 0.5


class Desk:
    """The part of a master that mends; nobody is planned, so nobody is missing."""

    def __init__(self) -> None:
        self.decision = DecisionBuilder(new_state())
        pending = PendingRequests(self.decision, first_s=60.0)
        self.recovery = RecoveryCoordinator(
            CONFIG,
            decision=self.decision,
            pending=pending,
            processes=ProcessManager((), decision=self.decision, pending=pending, start_timeout_s=60.0),
            dispatch=EpisodeDispatch(CONFIG, decision=self.decision, pending=pending, num_rows=10),
            checkpoint_folder="checkpoints",
        )

    def undisturbed(self, *training_s: float) -> None:
        for seconds in training_s:
            self.recovery.committed(0.0, training_s=seconds, step_s=2.0 * seconds)
        assert self.decision.take().facts == ()

    def disturbed(self, *training_s: float) -> list[bool]:
        """A fault, then steps that take so long; for each whether the incident is open after it."""
        self.recovery.note(FAULT, 10.0, phase="training")
        is_open = []
        for seconds in training_s:
            self.recovery.committed(20.0, training_s=seconds, step_s=seconds)
            is_open.append(bool(self.decision.state.open_incident))
        return is_open

    def alerts(self) -> list[str]:
        return [effect.message for effect in self.decision.take().effects if isinstance(effect, Raise)]


def test_a_step_that_is_as_fast_as_before_closes_the_incident() -> None:
    desk = Desk()
    desk.undisturbed(USUAL_S, USUAL_S, 50.0)
    assert desk.disturbed(SLOW_FACTOR * USUAL_S) == [False]
    assert desk.alerts() == ["recovered by recover: a bit fell over"]


def test_slow_steps_keep_the_incident_open_for_a_while_then_people_are_told() -> None:
    desk = Desk()
    desk.undisturbed(USUAL_S)
    assert desk.disturbed(*[SLOW_S] * SLOW_STEPS) == [True] * (SLOW_STEPS - 1) + [False]
    assert desk.alerts() == [
        "the ranks are slower than before the incident",
        "recovered by recover: a bit fell over",
    ]


def test_a_step_that_is_fast_again_closes_an_incident_that_slow_ones_kept_open() -> None:
    desk = Desk()
    desk.undisturbed(USUAL_S)
    assert desk.disturbed(SLOW_S, SLOW_S, USUAL_S) == [True, True, False]
    assert desk.alerts() == ["recovered by recover: a bit fell over"]


def test_only_undisturbed_steps_say_what_is_usual() -> None:
    desk = Desk()
    desk.undisturbed(USUAL_S)
    desk.disturbed(*[SLOW_S] * SLOW_STEPS)
    assert desk.disturbed(SLOW_S) == [True]


def test_without_any_undisturbed_step_no_step_is_slow() -> None:
    assert Desk().disturbed(1000.0) == [False]


@pytest.mark.parametrize(("more_s", "is_open"), [(SLOW_MARGIN_S / 2, False), (2 * SLOW_MARGIN_S, True)])
def test_where_steps_are_short_a_moment_more_is_not_slow(more_s: float, is_open: bool) -> None:
    desk = Desk()
    desk.undisturbed(0.01)
    assert desk.disturbed(0.01 + more_s) == [is_open]


def test_what_a_step_takes_is_known_from_the_last_one_disturbed_or_not() -> None:
    desk = Desk()
    desk.undisturbed(3.0)
    assert desk.recovery.step_s == 6.0
    desk.disturbed(4.0)
    assert desk.recovery.step_s == 4.0


def with_a_past(*, num_faults: int = 1) -> Desk:
    """A master that takes over while an incident is open, in which a rank was lost."""
    desk = Desk()
    died = Fault("b", "ProcessDied", "model-1", "model-1 was lost", 0.0)
    desk.decision.add_fact(ProcessRequested("model-1", Role.MODEL, "host-0", "1.1"))
    desk.decision.add_fact(ProcessJoined(Peer("model-1", "1.1", "host-0", "", b""), Role.MODEL, 7))
    desk.decision.add_fact(IncidentOpened(4, 0, "training", FAULT))
    desk.decision.add_fact(ProcessLost("model-1", "1.1", died))
    for number in range(num_faults):
        desk.decision.add_fact(
            FaultNoted(4, Fault(f"c{number}", "GroupBroken", "model-0", "a rank is gone", 0.0))
        )
    desk.decision.add_fact(TermStarted(2, "2", adopting=True))
    desk.recovery.adopt(30.0)
    desk.decision.take()
    return desk


def test_an_heir_finishes_the_incident_with_its_faults_and_who_was_lost() -> None:
    desk = with_a_past()
    assert desk.recovery.cause == FAULT
    desk.recovery.committed(32.0, training_s=1.0, step_s=1.0)
    (closed,) = desk.decision.take().facts
    assert isinstance(closed, IncidentClosed)
    assert (closed.incident, closed.processes, closed.timing["total"]) == (4, ("model-1",), 2.0)


def test_what_the_predecessor_counted_is_not_held_against_its_heir() -> None:
    assert with_a_past(num_faults=2 * MAX_FAULTS).recovery.unrecoverable() == ""


def test_an_heir_to_a_run_in_which_nothing_is_open_has_no_incident() -> None:
    desk = Desk()
    desk.recovery.adopt(0.0)
    assert (desk.recovery.cause, desk.decision.take().facts) == (None, ())


def test_the_users_mistake_is_the_cause_whatever_else_broke_before_and_after_it() -> None:
    desk = with_a_past()
    mistake = Fault("d", "DataError", "model-0", "no such column", 0.0)
    desk.recovery.note(mistake, 31.0, phase="training")
    desk.recovery.note(Fault("e", "ProcessDied", "rollout-0", "killed", 0.0), 32.0, phase="training")
    assert desk.recovery.cause == mistake
