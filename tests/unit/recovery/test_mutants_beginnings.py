"""What an incident and a rank begin with: nothing is held against them yet."""

from __future__ import annotations

from kintsugi.errors import Fault
from kintsugi.recovery.incidents import Incidents
from kintsugi.recovery.policy import MAX_ATTEMPTS, Strategy, plan

FAULT = Fault("a", "ProcessDied", "model-0", "killed", 0.0)


def test_a_new_incident_has_all_its_attempts_before_it() -> None:
    incidents = Incidents()
    incidents.fault(FAULT, number=1, now=0.0)
    assert incidents.current is not None
    for attempt in range(MAX_ATTEMPTS):
        given = incidents.situation(missing=(), living=("model-1",), replacements_fail=False, step_s=1.0)
        assert (given.attempts, plan(given).strategy) == (attempt, Strategy.RETRY)
        incidents.current.attempts += 1


def test_without_an_incident_the_policy_is_told_of_no_fault_no_attempt_and_no_death() -> None:
    given = Incidents().situation(
        missing=("model-0",), living=("model-1",), replacements_fail=True, step_s=3.0
    )
    assert (given.faults, given.attempts, given.most_deaths) == ((), 0, 0)
    assert (given.missing, given.living) == (("model-0",), ("model-1",))
    assert (given.replacements_fail, given.step_s) == (True, 3.0)


def test_a_fault_of_a_process_that_lives_is_no_death() -> None:
    incidents = Incidents()
    assert incidents.fault(FAULT, number=1, now=0.0)
    assert not incidents.fault(FAULT, number=1, now=1.0)
    given = incidents.situation(missing=(), living=("model-0",), replacements_fail=False, step_s=1.0)
    assert (given.faults, given.most_deaths) == ((FAULT, FAULT), 0)
