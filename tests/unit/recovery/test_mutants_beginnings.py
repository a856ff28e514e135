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
