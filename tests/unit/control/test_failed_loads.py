"""A failed load of new weights is repeated; after several failures the server, then the manager, is replaced."""

from __future__ import annotations

import math

import pytest

from kintsugi.control.pending import Purpose
from kintsugi.control.phases.publish import FIRST_PAUSE_S, MAX_FAILURES
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Decision, Request, RequestFailed, Tick
from kintsugi.errors import Fault
from kintsugi.journal.facts import VersionCurrent
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.protocol.weights import LoadWeights
from tests.unit.control.driven import Driven


@pytest.fixture
def driven() -> Driven:
    """At the first load of the run."""
    driven = Driven()
    driven.begin()
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    return driven


def fail_load(driven: Driven, *, culprit: str) -> None:
    """The load that is under way fails because of this process."""
    driven.until(lambda: bool(driven.asked(LoadWeights)))
    (request,) = driven.asked(LoadWeights)
    del driven.open[request.token]
    fault = Fault(f"{request.token} failed", "StorageError", culprit, "it could not load", 0.0)
    driven.feed(RequestFailed(request.token, request.to, fault))


def terminated(driven: Driven) -> list[str]:
    bodies = [request.body for request in driven.asked(StopProcess)]
    return [body.process for body in bodies if isinstance(body, StopProcess)]


def versions(driven: Driven) -> list[int]:
    return [fact.version for fact in driven.facts if isinstance(fact, VersionCurrent)]


def test_a_server_that_can_not_load_is_replaced_and_the_load_repeated_after_a_pause(driven: Driven) -> None:
    fail_load(driven, culprit="server-0")
    assert terminated(driven) == ["server-0"]
    assert driven.asked(LoadWeights) == []
    driven.pass_time(FIRST_PAUSE_S / 2)
    assert driven.asked(LoadWeights) == []
    driven.pass_time(FIRST_PAUSE_S / 2)
    assert [request.to for request in driven.asked(LoadWeights)] == ["manager-0"]
    driven.until(Phase.COLLECTING)
    assert versions(driven) == [0]


def test_a_load_that_failed_is_repeated_once(driven: Driven) -> None:
    fail_load(driven, culprit="model-0")
    driven.pass_time(FIRST_PAUSE_S)
    (request,) = driven.asked(LoadWeights)
    driven.pass_time(FIRST_PAUSE_S)
    assert driven.asked(LoadWeights) == [request]


@pytest.mark.parametrize("culprit", ["model-0", "manager-0"])
def test_a_manager_is_replaced_when_loads_have_failed_several_times_not_before(
    driven: Driven, culprit: str
) -> None:
    for _ in range(MAX_FAILURES - 1):
        fail_load(driven, culprit=culprit)
        assert terminated(driven) == []
    fail_load(driven, culprit=culprit)
    assert terminated(driven) == ["manager-0"]
    driven.until(Phase.COLLECTING)
    assert versions(driven) == [0]


def test_a_load_that_fails_with_the_next_manager_too_ends_the_run(driven: Driven) -> None:
    for _ in range(2 * MAX_FAILURES - 1):
        fail_load(driven, culprit="model-0")
        driven.let_grace_pass()
        assert driven.master.phase is Phase.PUBLISHING
    fail_load(driven, culprit="model-0")
    driven.let_grace_pass()
    assert (driven.master.phase, driven.state.outcome) == (Phase.ENDED, "failed")


def test_a_manager_that_died_is_not_asked_until_the_next_one_has_come(driven: Driven) -> None:
    driven.lose("manager-0")
    assert driven.asked(LoadWeights) == []
    driven.until(Phase.COLLECTING)
    assert versions(driven) == [0]


def test_failures_of_one_version_are_not_held_against_the_next(driven: Driven) -> None:
    for num_versions in (1, 2, 3):
        for _ in range(MAX_FAILURES - 1):
            fail_load(driven, culprit="model-0")
            assert terminated(driven) == []
        driven.until(Phase.COLLECTING)
        assert versions(driven) == list(range(num_versions))


def test_the_pause_before_a_load_is_repeated_doubles_and_is_short_again_for_the_next_version(
    driven: Driven,
) -> None:
    for num_failures in (4, 2):
        for number in range(num_failures):
            fail_load(driven, culprit="model-0")
            due = driven.now + FIRST_PAUSE_S * 2**number
            assert requests(driven.master.decide(Tick(), math.nextafter(due, 0.0))) == []
            (again,) = requests(driven.master.decide(Tick(), due))
            driven.now, driven.open[again.token] = due, again
            for stop in driven.asked(StopProcess):
                driven.answer(stop)
        driven.until(Phase.COLLECTING)
        driven.until(lambda: bool(driven.asked(LoadWeights)))


def requests(decision: Decision) -> list[Request]:
    """For a load."""
    asked = [effect for effect in decision.effects if isinstance(effect, Request)]
    return [request for request in asked if isinstance(request.body, LoadWeights)]


def with_another_manager() -> Driven:
    """In the middle of training the manager was replaced: it is asked to load what is current."""
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.lose("manager-0")
    while not driven.asked(LoadWeights):
        driven.answer(driven.asked(StartProcess)[0])
    return driven


def test_a_new_manager_is_given_the_current_version_beside_the_step_and_nothing_becomes_current_again() -> (
    None
):
    driven = with_another_manager()
    (load,) = driven.asked(LoadWeights)
    assert load.token.startswith(f"{Purpose.RELOAD}:") and load.to == "manager-0"
    assert driven.master.phase is Phase.TRAINING
    driven.answer(load)
    assert (driven.master.phase, versions(driven)) == (Phase.TRAINING, [0])
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_a_load_beside_the_step_that_fails_is_repeated_after_a_pause_and_ends_nothing() -> None:
    """Its version may be overwritten by the step; the next one has its own failures."""
    driven = with_another_manager()
    for number in range(2 * MAX_FAILURES + 1):
        (load,) = driven.asked(LoadWeights)
        driven.fail(load, "it could not load")
        assert driven.asked(LoadWeights) == [] and terminated(driven) == []
        driven.pass_time(FIRST_PAUSE_S * 2**number)
    assert driven.master.phase is Phase.TRAINING
    step = driven.state.step
    driven.until(lambda: driven.master.phase is Phase.PUBLISHING and driven.state.step > step)
    for _ in range(MAX_FAILURES - 1):
        fail_load(driven, culprit="model-0")
        assert terminated(driven) == []
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_a_load_that_failed_is_not_repeated_when_the_ranks_have_to_come_together_again(
    driven: Driven,
) -> None:
    fail_load(driven, culprit="model-0")
    driven.lose("model-1")
    driven.pass_time(2 * FIRST_PAUSE_S)
    assert driven.asked(LoadWeights) == []
    driven.until(Phase.COLLECTING)
    assert versions(driven) == [0]


def test_a_load_whose_manager_is_gone_waits_for_the_next_manager_and_ends_nothing(driven: Driven) -> None:
    (request,) = driven.asked(LoadWeights)
    driven.fail(request, "the link is closed", kind="ProcessDied")
    driven.let_grace_pass()
    assert driven.master.phase is Phase.PUBLISHING
    assert driven.asked(LoadWeights) == []
    driven.lose("manager-0")
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
