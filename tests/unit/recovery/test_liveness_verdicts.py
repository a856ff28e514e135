"""What a look from outside at a suspected process says, state by state."""

from __future__ import annotations

import math

import pytest

from kintsugi.protocol.agents import Inspected
from kintsugi.recovery.liveness import (
    COMPUTING_CALL_S,
    SILENT_S,
    SLEEPING_CALL_S,
    STUCK_S,
    UNREACHABLE_S,
    Activity,
    Inspection,
    LivenessDecision,
    SuspicionResolution,
    confirm,
)
from kintsugi.runtime.deadlines import FLOOR_S

WAIT, REPLACE = SuspicionResolution.WAIT, SuspicionResolution.REPLACE


def seen(inspected: Inspected) -> Inspection:
    return Inspection(inspected)


def looks(*inspected: Inspected, first_s: float = 1.5, every_s: float = 1.0) -> list[LivenessDecision]:
    """What is decided about a silent process that is looked at again and again."""
    decisions: list[LivenessDecision] = []
    for number, each in enumerate(inspected):
        earlier = decisions[-1].inspection if decisions else None
        decisions.append(confirm(each, earlier, first_s + number * every_s))
    return decisions


def replaced_after(decisions: list[LivenessDecision], *, first_s: float = 1.5) -> tuple[float, str]:
    """Silence at which the process is replaced, and as what."""
    for number, each in enumerate(decisions):
        if each.decision is REPLACE:
            return first_s + number, each.fault
    return math.inf, ""


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_replaced_at_once(state: str) -> None:
    verdict = confirm(Inspected(state), None, 1.5)
    assert (verdict.decision, verdict.fault) == (REPLACE, "stopped")


@pytest.mark.parametrize("state", ["S", "D"])
def test_a_process_whose_control_group_is_frozen_is_replaced_at_once(state: str) -> None:
    verdict = confirm(Inspected(state, 3.0, frozen=True), None, 1.5)
    assert (verdict.decision, verdict.fault) == (REPLACE, "stopped")


@pytest.mark.parametrize("state", ["Z", "X", ""])
def test_a_process_that_has_ended_is_replaced_at_once(state: str) -> None:
    verdict = confirm(Inspected(state), None, 0.0)
    assert (verdict.decision, verdict.fault) == (REPLACE, "dead")


def test_a_process_that_was_heard_again_is_cleared() -> None:
    look = Inspected("S", 1.0)
    assert confirm(look, seen(look), 0.4).decision is SuspicionResolution.CLEAR
    assert confirm(look, seen(look), 0.4, speaks=True).decision is SuspicionResolution.CLEAR


@pytest.mark.parametrize(
    ("now", "limit_s", "fault"),
    [
        (Inspected("S", 3.0, recorded=9.0), UNREACHABLE_S, "link"),
        (Inspected("R", 3.5, recorded=9.0), UNREACHABLE_S, "link"),
        (Inspected("D", 3.0, switches=7, recorded=8.0), 15.0, "hung"),
        (Inspected("D", 3.0, switches=9, recorded=8.0), SLEEPING_CALL_S, "hung"),
        (Inspected("S", 3.0, switches=7, recorded=8.0), SLEEPING_CALL_S, "hung"),
        (Inspected("S", 3.04, switches=9, recorded=8.0), SLEEPING_CALL_S, "hung"),
        (Inspected("R", 4.0, switches=9, recorded=8.0), COMPUTING_CALL_S, "hung"),
        (Inspected("S", 3.5, switches=9, recorded=8.0), COMPUTING_CALL_S, "hung"),
        (Inspected("D", 3.5, switches=7, recorded=8.0), COMPUTING_CALL_S, "hung"),
    ],
    ids=[
        "unreachable",
        "unreachable and computing",
        "blocked",
        "reads page after page",
        "sleeps",
        "waits for the interpreter",
        "computes",
        "other threads compute",
        "computes between two reads",
    ],
)
def test_a_silent_process_is_waited_for_as_long_as_its_state_deserves(
    now: Inspected, limit_s: float, fault: str
) -> None:
    earlier = seen(Inspected("S", 3.0, switches=7, recorded=8.0))
    waiting = confirm(now, earlier, limit_s - 0.1)
    assert (waiting.decision, waiting.fault) == (WAIT, "")
    verdict = confirm(now, earlier, limit_s)
    assert (verdict.decision, verdict.fault) == (REPLACE, fault)
    assert f"{limit_s:.1f} s" in verdict.reason


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_one_look_at_a_silent_process_decides_nothing(state: str) -> None:
    assert confirm(Inspected(state, 3.0), None, 300.0).decision is WAIT


@pytest.mark.parametrize("used_s", [0.0, 1.0])
def test_a_call_of_thirty_seconds_costs_nothing_whether_it_sleeps_or_computes(used_s: float) -> None:
    during = [Inspected("S", used_s * number, recorded=1.0) for number in range(30)]
    after = [Inspected("S", used_s * 30, recorded=2.0), Inspected("S", used_s * 30, recorded=3.0)]
    decisions = looks(*during, *after)
    assert {each.decision for each in decisions} == {WAIT}
    assert decisions[-1].inspection.activity is Activity.TURNING


def test_a_process_that_is_cut_off_after_a_long_call_is_replaced_as_any_that_is_cut_off() -> None:
    during = [Inspected("S", recorded=1.0)] * 30
    cut_off = [Inspected("S", recorded=2.0 + number) for number in range(30)]
    silent_s, fault = replaced_after(looks(*during, *cut_off))
    assert fault == "link" and 0 <= silent_s - 30.0 - UNREACHABLE_S <= 2.0
    assert replaced_after(looks(*cut_off)) == (10.5, "link")


def test_a_call_that_computes_and_then_waits_for_a_disk_is_given_the_time_of_each() -> None:
    computes = [Inspected("R", number * 1.0, recorded=1.0) for number in range(50)]
    reads = [Inspected("D", 50.0, switches=5, recorded=1.0)] * 10
    decisions = looks(*computes, *reads)
    assert {each.decision for each in decisions} == {WAIT}
    assert replaced_after(looks(*computes, *reads * 2))[1] == "hung"


def test_a_call_that_never_ends_is_ended_however_its_work_changes() -> None:
    mixed = [Inspected("S", float(number // 40), recorded=1.0) for number in range(300)]
    silent_s, fault = replaced_after(looks(*mixed))
    assert (silent_s, fault) == (180.5, "hung")


def test_requests_are_waited_for_longer_than_a_call_may_sleep() -> None:
    assert FLOOR_S >= SLEEPING_CALL_S + 10.0


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_a_process_that_speaks_and_computes_is_left_to_the_deadline_of_its_request(state: str) -> None:
    verdict = confirm(Inspected(state, 9.0), seen(Inspected("R", 3.0)), 100.0, speaks=True)
    assert verdict.decision is WAIT


def test_what_heartbeats_cost_is_not_taken_for_work() -> None:
    verdict = confirm(
        Inspected("S", 3.02, recorded=2.0), seen(Inspected("S", 3.0, recorded=1.0)), 6.0, speaks=True
    )
    assert (verdict.decision, verdict.fault) == (REPLACE, "hung")


@pytest.mark.parametrize(("limit_s", "state"), [(5.0, "S"), (15.0, "D")])
def test_a_process_that_speaks_and_stands_still_is_replaced_as_soon_as_ever(
    limit_s: float, state: str
) -> None:
    earlier = seen(Inspected("S", 3.0, recorded=1.0))
    still = Inspected(state, 3.0, recorded=2.0)
    assert confirm(still, earlier, limit_s - 0.1, speaks=True).decision is WAIT
    assert confirm(still, earlier, limit_s, speaks=True).fault == "hung"


@pytest.mark.parametrize(("speaks", "limit_s"), [(False, SILENT_S), (True, STUCK_S)])
def test_a_process_that_has_just_been_suspicious_long_enough_is_not_cleared(
    speaks: bool, limit_s: float
) -> None:
    look = Inspected("S", 1.0)
    before_s = math.nextafter(limit_s, 0.0)
    assert confirm(look, seen(look), before_s, speaks=speaks).decision is SuspicionResolution.CLEAR
    assert confirm(look, seen(look), limit_s, speaks=speaks).decision is WAIT
