"""What a look from outside at a suspected process says, state by state."""

from __future__ import annotations

import math

import pytest

from kintsugi.recovery.detection import SILENT_S, STUCK_S, Resolution, confirm
from kintsugi.supervision import Inspected


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_replaced_at_once(state: str) -> None:
    verdict = confirm(Inspected(state), None, 1.5)
    assert (verdict.decision, verdict.fault) == (Resolution.REPLACE, "stopped")


@pytest.mark.parametrize("state", ["Z", "X", ""])
def test_a_process_that_has_ended_is_replaced_at_once(state: str) -> None:
    verdict = confirm(Inspected(state), None, 0.0)
    assert (verdict.decision, verdict.fault) == (Resolution.REPLACE, "dead")


def test_a_process_that_was_heard_again_is_cleared() -> None:
    assert confirm(Inspected("S", 1.0), Inspected("S", 1.0), 0.4).decision is Resolution.CLEAR
    assert confirm(Inspected("S", 1.0), Inspected("S", 1.0), 0.4, speaks=True).decision is Resolution.CLEAR


@pytest.mark.parametrize(
    ("state", "used_s", "limit_s", "fault"),
    [
        ("R", 0.5, 10, "link"),
        ("R", 0.0, 10, "link"),
        ("S", 0.1, 10, "link"),
        ("S", 0.0, 5, "hung"),
        ("D", 0.0, 15, "hung"),
        ("D", 0.5, 15, "hung"),
    ],
)
def test_a_silent_process_is_waited_for_as_long_as_its_state_deserves(
    state: str, used_s: float, limit_s: float, fault: str
) -> None:
    now, earlier = Inspected(state, 3.0 + used_s), Inspected("S", 3.0)
    waiting = confirm(now, earlier, limit_s - 0.1)
    assert (waiting.decision, waiting.fault) == (Resolution.WAIT, "")
    verdict = confirm(now, earlier, limit_s)
    assert (verdict.decision, verdict.fault) == (Resolution.REPLACE, fault)
    assert f"{limit_s:.1f} s" in verdict.reason


def test_one_look_at_a_sleeping_process_decides_nothing() -> None:
    assert confirm(Inspected("S", 3.0), None, 7.0).decision is Resolution.WAIT


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_a_process_that_speaks_and_computes_is_left_to_the_deadline_of_its_request(state: str) -> None:
    verdict = confirm(Inspected(state, 9.0), Inspected("R", 3.0), 100.0, speaks=True)
    assert verdict.decision is Resolution.WAIT


def test_what_heartbeats_cost_is_not_taken_for_work() -> None:
    verdict = confirm(Inspected("S", 3.02), Inspected("S", 3.0), 6.0, speaks=True)
    assert (verdict.decision, verdict.fault) == (Resolution.REPLACE, "hung")


@pytest.mark.parametrize(("speaks", "limit_s"), [(False, SILENT_S), (True, STUCK_S)])
def test_a_process_that_has_just_been_suspicious_long_enough_is_not_cleared(
    speaks: bool, limit_s: float
) -> None:
    look = Inspected("S", 1.0)
    assert confirm(look, look, math.nextafter(limit_s, 0.0), speaks=speaks).decision is Resolution.CLEAR
    assert confirm(look, look, limit_s, speaks=speaks).decision is Resolution.WAIT
