"""Generation servers come and go by request, once each, whatever else happens."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import ClusterSection
from kintsugi.control.membership import WorkerStatus
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import most_servers
from kintsugi.control.processes import LEAVE_S, RETIRED
from kintsugi.control.protocol import Forget, ScaleRequested
from kintsugi.journal.facts import (
    IncidentOpened,
    ProcessLost,
    ProcessRequested,
    ProcessRetired,
    ScaleRefused,
    ServersScaled,
)
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.protocol.generation import Retire
from kintsugi.protocol.training import HashWeights
from kintsugi.types import Role
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import TWO_STAGES, begun, outcome, undisturbed

EXPECTED = undisturbed()


def collecting() -> Driven:
    driven = begun()
    driven.until(Phase.COLLECTING)
    return driven


def scale(driven: Driven, servers: int, request: str = "a") -> None:
    driven.feed(ScaleRequested(request, servers))


def live(driven: Driven) -> list[str]:
    return driven.state.members.live(Role.SERVER)


def status(driven: Driven, process: str) -> WorkerStatus:
    return driven.state.members.members[process].status


def ended_as_undisturbed(driven: Driven) -> bool:
    driven.until(Phase.ENDED)
    return bool(outcome(driven.facts) == EXPECTED)


def test_new_servers_are_ordered_at_once_and_spread_over_the_hosts() -> None:
    driven = begun(msgspec.structs.replace(TWO_STAGES, cluster=ClusterSection(hosts=2)))
    driven.until(Phase.COLLECTING)
    before = {member.process: member.host for member in driven.state.members.members.values()}
    scale(driven, 4)
    ordered = [fact for fact in driven.facts if isinstance(fact, ProcessRequested)][-2:]
    assert [fact.process for fact in ordered] == ["server-2", "server-3"]
    assert {fact.host for fact in ordered} == {"host-0", "host-1"}
    driven.until(lambda: len(live(driven)) == 4)
    now = {member.process: member.host for member in driven.state.members.members.values()}
    assert now.items() >= before.items()
    assert ended_as_undisturbed(driven)


def test_a_surplus_server_ends_when_the_manager_has_taken_its_requests_back_and_nothing_is_lost() -> None:
    driven = collecting()
    scale(driven, 1)
    (retire,) = driven.asked(Retire)
    assert retire.body == Retire("server-1", driven.state.members.members["server-1"].incarnation)
    assert driven.asked(StopProcess) == []
    assert status(driven, "server-1") is WorkerStatus.LEAVING
    driven.answer(retire)
    (stop,) = driven.asked(StopProcess)
    assert isinstance(stop.body, StopProcess) and stop.body.grace_s > 0
    driven.answer(stop)
    assert status(driven, "server-1") is WorkerStatus.LOST
    (lost,) = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert lost.fault.kind == RETIRED
    assert ended_as_undisturbed(driven)
    assert not [fact for fact in driven.facts if isinstance(fact, IncidentOpened)]
    report = driven.state.incidents.report()
    assert (report.incidents, report.other_losses) == ((), ())


def test_the_address_book_has_a_leaving_server_until_it_has_ended() -> None:
    driven = collecting()
    scale(driven, 1)
    master = driven.state.members.members["manager-0"].peer
    assert master is not None

    def listed() -> set[str]:
        return {peer.process for peer in driven.state.members.address_book(master).peers}

    assert "server-1" in listed()
    driven.until(lambda: status(driven, "server-1") is WorkerStatus.LOST)
    assert "server-1" not in listed()


def test_a_manager_that_does_not_answer_keeps_no_server() -> None:
    driven = collecting()
    scale(driven, 1)
    (retire,) = driven.asked(Retire)
    del driven.open[retire.token]
    driven.pass_time(LEAVE_S - 0.1)
    assert driven.asked(StopProcess) == []
    driven.pass_time(0.2)
    assert [request.body.process for request in driven.asked(StopProcess)] == ["server-1"]  # type: ignore[union-attr]


def test_without_a_manager_a_server_has_nothing_to_give_back() -> None:
    driven = collecting()
    scale(driven, 1)
    driven.lose("manager-0")
    driven.pass_time(0.2)
    assert driven.asked(StopProcess)
    assert ended_as_undisturbed(driven)


def test_a_server_that_dies_while_it_leaves_has_left() -> None:
    driven = collecting()
    scale(driven, 1)
    driven.lose("server-1")
    assert status(driven, "server-1") is WorkerStatus.LOST
    assert driven.asked(Retire) == [] and driven.asked(StartProcess) == []
    assert ended_as_undisturbed(driven)
    assert not [fact for fact in driven.facts if isinstance(fact, IncidentOpened)]


def test_a_server_that_has_not_come_yet_is_stopped_without_being_taken_back_from() -> None:
    driven = collecting()
    scale(driven, 3)
    scale(driven, 2, "b")
    assert status(driven, "server-2") is WorkerStatus.LEAVING
    assert driven.asked(StartProcess) == [] and driven.asked(Retire) == []
    driven.pass_time(0.2)
    assert driven.asked(StopProcess)
    driven.until(lambda: status(driven, "server-2") is WorkerStatus.LOST)
    assert "server-2" not in {process for process, _, _ in driven.world.living()}
    assert ended_as_undisturbed(driven)


def test_a_leaving_server_that_is_needed_again_is_replaced_once_it_has_ended() -> None:
    driven = collecting()
    scale(driven, 1)
    old = driven.state.members.members["server-1"].incarnation
    scale(driven, 2, "b")
    assert status(driven, "server-1") is WorkerStatus.LEAVING
    assert driven.asked(StartProcess) == []
    driven.until(lambda: status(driven, "server-1") is WorkerStatus.LOST)
    driven.pass_time(0.2)
    driven.until(lambda: len(live(driven)) == 2)
    assert driven.state.members.members["server-1"].incarnation != old
    assert ended_as_undisturbed(driven)


def test_a_new_server_that_can_not_be_started_disturbs_nobody() -> None:
    driven = collecting()
    driven.unstartable.add("server-2")
    scale(driven, 3)
    assert ended_as_undisturbed(driven)
    assert not [fact for fact in driven.facts if isinstance(fact, IncidentOpened)]


def test_a_server_that_is_started_again_and_again_is_not_once_it_is_surplus() -> None:
    driven = collecting()
    driven.unstartable.add("server-2")
    scale(driven, 3)
    driven.answer(driven.asked(StartProcess)[0])
    scale(driven, 2, "b")
    orders = sum(isinstance(fact, ProcessRequested) for fact in driven.facts)
    for _ in range(100):
        driven.pass_time(0.2)
    assert sum(isinstance(fact, ProcessRequested) for fact in driven.facts) == orders


def test_a_killed_server_comes_back_only_while_it_is_wanted() -> None:
    driven = collecting()
    driven.lose("server-1")
    scale(driven, 1)
    driven.pass_time(0.2)
    driven.until(lambda: status(driven, "server-1") is WorkerStatus.LOST)
    assert ended_as_undisturbed(driven)
    assert live(driven) == ["server-0"]


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        (0, "expected at least 1 server, got 0"),
        (
            (most_servers(CONFIG) or 0) + 1,
            f"expected at most as many servers as the {most_servers(CONFIG)} samples of a step",
        ),
    ],
)
def test_a_number_that_the_run_can_not_have_is_refused_with_the_reason(servers: int, reason: str) -> None:
    driven = collecting()
    scale(driven, servers)
    (refused,) = [fact for fact in driven.facts if isinstance(fact, ScaleRefused)]
    assert refused.request == "a" and refused.reason.startswith(reason)
    assert len(live(driven)) == 2 and driven.state.num_servers is None
    assert ended_as_undisturbed(driven)


def test_a_request_is_answered_once() -> None:
    driven = collecting()
    scale(driven, 3)
    scale(driven, 2, "b")
    scale(driven, 3)
    assert [fact.servers for fact in driven.facts if isinstance(fact, ServersScaled)] == [3, 2]
    assert driven.state.answered == {"a": "", "b": ""}


def test_a_request_waits_until_everybody_is_there() -> None:
    driven = begun()
    assert driven.master.phase is Phase.STARTING
    scale(driven, 3)
    assert not any(isinstance(fact, ServersScaled) for fact in driven.facts)
    driven.until(Phase.PREPARING)
    scale(driven, 3)
    assert any(isinstance(fact, ServersScaled) for fact in driven.facts)
    assert ended_as_undisturbed(driven)


def test_a_run_that_is_about_to_end_is_not_scaled() -> None:
    driven = collecting()
    driven.until(lambda: bool(driven.asked(HashWeights)))
    scale(driven, 3)
    assert driven.state.num_servers is None and driven.state.answered.keys() == {"a"}


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("servers", [1, 4])
def test_a_master_that_takes_over_keeps_the_number_and_finishes_what_was_begun(
    servers: int, carried_out: bool
) -> None:
    driven = collecting()
    scale(driven, servers)
    successor = driven.succeed(carried_out=carried_out)
    successor.take_over()
    successor.until(lambda: len(live(successor)) == servers)
    scale(successor, servers)
    assert sum(isinstance(fact, ServersScaled) for fact in successor.facts) == 1
    assert ended_as_undisturbed(successor)
    assert len(live(successor)) == servers


def test_a_master_that_died_between_the_number_and_the_departures_leaves_them_to_the_next() -> None:
    driven = collecting()
    scale(driven, 1)
    driven.facts = [fact for fact in driven.facts if not isinstance(fact, ProcessRetired)]
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    successor.until(lambda: status(successor, "server-1") is WorkerStatus.LOST)
    assert ended_as_undisturbed(successor)
    assert live(successor) == ["server-0"]


def test_a_resumed_run_keeps_the_number() -> None:
    driven = collecting()
    scale(driven, 3)
    driven.until(lambda: bool(driven.state.saved_steps))
    resumed = driven.succeed(carried_out=False)
    resumed.world.children = {host: {} for host in resumed.world.children}
    resumed.begin(restore_step=driven.state.saved_steps[-1])
    resumed.until(Phase.COLLECTING)
    assert len(live(resumed)) == 3


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_come_and_go_while_the_ranks_recover(servers: int) -> None:
    driven = collecting()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    assert driven.master.phase is Phase.RECOVERING
    scale(driven, servers)
    driven.until(lambda: len(live(driven)) == servers)
    assert ended_as_undisturbed(driven)


def test_people_hear_of_a_departure_as_of_no_fault() -> None:
    driven = collecting()
    scale(driven, 1)
    driven.until(lambda: status(driven, "server-1") is WorkerStatus.LOST)
    (forget,) = [effect for effect in driven.effects if isinstance(effect, Forget)]
    assert forget.fault.kind == RETIRED
    assert forget.fault.message == "server-1 (pid 1) was not needed any more and has ended"
