from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.recovery.flows import MESSAGES, NAMES, page
from kintsugi.recovery.rank import FLOWS, Flow
from kintsugi.recovery.states import STEPS, TRANSITIONS, RecoveryEvent, RecoveryState, following

DOCUMENT = Path(__file__).parents[3] / "docs" / "recovery.md"
_S, _E = RecoveryState, RecoveryEvent
UNDER_WAY = [state for state, _ in STEPS]


def test_every_pair_of_state_and_event_is_defined() -> None:
    for state in RecoveryState:
        for event in RecoveryEvent:
            assert following(state, event) is TRANSITIONS.get((state, event), state)


def test_the_document_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text() == page()


def test_undisturbed_every_state_is_passed_once_and_the_end_is_normal() -> None:
    state, passed = following(_S.NORMAL, _E.FAULT), []
    for expected, event in STEPS:
        assert state is expected
        passed.append(state)
        state = following(state, event)
    assert state is _S.NORMAL and len(set(passed)) == len(passed)


@pytest.mark.parametrize("state", UNDER_WAY)
def test_a_fault_or_a_failure_begins_again_from_any_state(state: RecoveryState) -> None:
    assert following(state, _E.FAULT) is following(state, _E.FAILED) is _S.PRE_LOCKING
    assert following(state, _E.HOPELESS) is _S.DUMPING


@pytest.mark.parametrize("state", UNDER_WAY)
def test_a_state_is_left_forwards_only_by_the_event_that_ends_it(state: RecoveryState) -> None:
    ends = {event for other, event in STEPS if other is state}
    forwards = {event for _, event in STEPS if following(state, event) is not state}
    assert forwards == ends


@pytest.mark.parametrize("event", [_E.DUMPED, _E.FAILED, _E.FAULT])
def test_a_dump_ends_whatever_comes_of_it_and_nothing_leads_out_of_the_end(event: RecoveryEvent) -> None:
    assert following(_S.DUMPING, event) is _S.GIVEN_UP
    assert {following(_S.GIVEN_UP, any_event) for any_event in RecoveryEvent} == {_S.GIVEN_UP}


def test_only_what_is_wrong_leads_out_of_normal() -> None:
    out = {event for event in RecoveryEvent if following(_S.NORMAL, event) is not _S.NORMAL}
    assert out == {_E.FAULT, _E.FAILED, _E.HOPELESS}


@pytest.mark.parametrize("flow", Flow)
def test_the_page_has_the_operations_of_each_flow_in_their_order(flow: Flow) -> None:
    in_order = [MESSAGES[state] for state, _ in STEPS if state in MESSAGES]
    assert [operation for operation in in_order if operation in FLOWS[flow]] == list(FLOWS[flow])
    assert list(NAMES[flow]) == list(FLOWS[flow])
