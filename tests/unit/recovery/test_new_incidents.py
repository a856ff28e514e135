"""A new incident, and a recovery that begins again, start with empty counters."""

from __future__ import annotations

from kintsugi.errors import Fault
from kintsugi.recovery.incident_log import IncidentLog
from kintsugi.recovery.states import RecoveryState
from kintsugi.recovery.strategy import MAX_ATTEMPTS, Strategy, plan
from tests.unit.recovery.test_rank_protocol import started

FAULT = Fault("a", "ProcessDied", "model-0", "killed", 0.0)


def test_a_new_incident_has_all_its_attempts_before_it() -> None:
    incidents = IncidentLog()
    incidents.fault(FAULT, number=1, now=0.0)
    assert incidents.current is not None
    for attempt in range(MAX_ATTEMPTS):
        given = incidents.situation(missing=(), living=("model-1",), replacements_fail=False, step_s=1.0)
        assert (given.attempts, plan(given).strategy) == (attempt, Strategy.RETRY)
        incidents.current.attempts += 1


def test_without_an_incident_the_policy_is_told_of_no_fault_no_attempt_and_no_death() -> None:
    given = IncidentLog().situation(
        missing=("model-0",), living=("model-1",), replacements_fail=True, step_s=3.0
    )
    assert (given.faults, given.num_faults, given.attempts, given.most_deaths) == ((), 0, 0, 0)
    assert (given.missing, given.living) == (("model-0",), ("model-1",))
    assert (given.replacements_fail, given.step_s) == (True, 3.0)


def test_a_fault_of_a_process_that_lives_is_no_death() -> None:
    incidents = IncidentLog()
    for now in (0.0, 1.0):
        incidents.fault(FAULT, number=1, now=now)
    given = incidents.situation(missing=(), living=("model-0",), replacements_fail=False, step_s=1.0)
    assert (given.faults, given.most_deaths) == ((FAULT, FAULT), 0)


def test_a_recovery_that_fails_stands_at_its_beginning_until_it_is_begun_again() -> None:
    cluster = started()
    cluster.begin()
    while cluster.state() is not RecoveryState.DEVICE_CLEANING:
        cluster.answer(next(iter(cluster.open)))
    cluster.protocol.fail(7.0)
    assert cluster.state() is RecoveryState.PRE_LOCKING
    assert cluster.protocol.since[RecoveryState.PRE_LOCKING] == 7.0
    assert cluster.protocol.waits_for == frozenset()
