"""An accelerator breaks: who uses it is replaced, where another is left; it is the cause, whoever noticed first."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import ActorSection, ClusterSection
from kintsugi.control.failure_detector import event_of_report
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Joined, Raise, Suspected
from kintsugi.errors import EndedByError, FaultClass, classify
from kintsugi.journal.facts import ProcessLost, RunEnded, StrategyChosen
from kintsugi.protocol.agents import (
    ChipFault,
    ProcessExited,
    ProcessSuspected,
    StartProcess,
    StopProcess,
)
from kintsugi.protocol.training import RunCall
from kintsugi.run_folder.incidents import report_of
from kintsugi.telemetry.events import AcceleratorWarning
from kintsugi.types import Peer, role_of
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import begun, outcome, undisturbed

EXPECTED = undisturbed()
TWO_HOSTS = msgspec.structs.replace(
    CONFIG, cluster=ClusterSection(hosts=2), actor=ActorSection(workers=2, logical_shards=2)
)


def fault_of_chip(**values: object) -> ChipFault:
    given = {
        "host": "host-0",
        "chip": "GPU 0",
        "uuid": "a1",
        "kind": "xid",
        "detail": "XID 79",
        "num_healthy": 1,
    }
    return ChipFault(**{**given, **values})  # type: ignore[arg-type]


def tell(driven: Driven, chip: ChipFault, agent: str = "agent-0") -> None:
    peer = driven.state.members.members[agent].peer
    assert peer is not None
    driven.feed(event_of_report(peer, chip, time=7.0))


def users(driven: Driven, *processes: str) -> dict[str, str]:
    return {process: driven.state.members.members[process].incarnation for process in processes}


def losses(driven: Driven) -> list[tuple[str, str]]:
    facts = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    return [(fact.process, fact.fault.cause.kind if fact.fault.cause else "") for fact in facts]


def alerts(driven: Driven) -> list[str]:
    return [effect.message for effect in driven.effects if isinstance(effect, Raise)]


@pytest.fixture
def driven() -> Driven:
    driven = begun()
    driven.until(Phase.TRAINING)
    return driven


def test_what_agents_tell_becomes_an_event_each() -> None:
    agent = Peer("agent-0", "7", "host-0", "", b"key")
    exited = event_of_report(agent, ProcessExited("model-0", "1.2", -9, "bye"), time=3.0)
    assert exited == msgspec.structs.replace(
        exited, process="model-0", incarnation="1.2", status=-9, time=3.0
    )
    stopped = event_of_report(agent, ProcessSuspected("model-0", "1.2", "state T"), time=3.0)
    assert stopped == Suspected("model-0", "1.2", "state T", certain=True, time=3.0)
    chip = event_of_report(agent, fault_of_chip(), time=3.0)
    assert isinstance(chip, Suspected)
    assert (chip.process, chip.incarnation, chip.kind, chip.chip) == ("agent-0", "7", "chip", fault_of_chip())


def test_everybody_on_a_broken_chip_is_replaced_for_that_one_cause(driven: Driven) -> None:
    named = users(driven, "model-1", "server-0")
    tell(driven, fault_of_chip(processes=named))
    assert {request.body.process for request in driven.asked(StopProcess)} == set(named)  # type: ignore[union-attr]
    driven.until(Phase.ENDED)
    assert sorted(losses(driven)) == [("model-1", "ChipFault"), ("server-0", "ChipFault")]
    (incident,) = report_of(driven.facts).incidents
    assert (incident.cause.kind, incident.cause.process) == ("ChipFault", "agent-0")
    assert "GPU 0 of host-0 is broken: XID 79" in incident.cause.message
    assert outcome(driven.facts) == EXPECTED


def test_who_said_that_it_uses_the_chip_is_found_without_the_drivers_help(driven: Driven) -> None:
    member = driven.state.members.members["model-0"]
    member.capabilities["chip"] = "a1"
    tell(driven, fault_of_chip())
    driven.until(Phase.ENDED)
    assert losses(driven) == [("model-0", "ChipFault")]


def test_who_said_that_it_uses_another_chip_is_left_alone_whatever_number_it_has(driven: Driven) -> None:
    driven.state.members.members["model-0"].capabilities["chip"] = "b2"
    tell(driven, fault_of_chip(processes=users(driven, "model-0", "model-1")))
    driven.until(Phase.ENDED)
    assert losses(driven) == [("model-1", "ChipFault")]


def test_the_same_chip_of_another_host_concerns_nobody_here(driven: Driven) -> None:
    driven.state.members.members["model-0"].capabilities["chip"] = "a1"
    tell(driven, fault_of_chip(host="host-9"))
    driven.until(Phase.ENDED)
    assert losses(driven) == []


def test_a_worrying_sign_is_told_to_people_and_costs_nobody(driven: Driven) -> None:
    named = users(driven, "model-1")
    tell(driven, fault_of_chip(detail="120 corrected memory errors", broken=False, processes=named))
    assert alerts(driven) == ["GPU 0 of host-0 is worrying: 120 corrected memory errors"]
    driven.until(Phase.ENDED)
    assert losses(driven) == []


def test_an_agent_that_was_replaced_is_not_believed(driven: Driven) -> None:
    peer = Peer("agent-0", "an earlier one", "host-0", "", b"key")
    driven.feed(event_of_report(peer, fault_of_chip(processes=users(driven, "model-1")), time=0.0))
    assert driven.asked(StopProcess) == [] and alerts(driven) == []


def test_the_chip_is_the_cause_of_the_end_of_a_server_that_recorded_a_device_error(driven: Driven) -> None:
    incarnation = driven.state.members.members["server-0"].incarnation
    exited = ProcessExited("server-0", incarnation, 1, "Traceback …", "DeviceError")
    driven.feed(event_of_report(Peer("agent-0", "1", "host-0", "", b"key"), exited, time=0.0))
    (lost,) = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert lost.fault.detail == EndedByError("DeviceError")
    tell(driven, fault_of_chip())
    driven.until(Phase.ENDED)
    (incident,) = report_of(driven.facts).incidents
    assert incident.cause.kind == "ChipFault"


def test_an_alert_about_a_chip_names_its_agent_and_its_sign(driven: Driven) -> None:
    tell(driven, fault_of_chip())
    (warning,) = [
        effect.event
        for effect in driven.effects
        if isinstance(effect, Raise) and isinstance(effect.event, AcceleratorWarning)
    ]
    assert warning.of == "agent-0" and warning.is_broken


def test_the_chip_is_the_cause_of_the_device_error_that_came_before_it(driven: Driven) -> None:
    (call, *_) = [one for one in driven.asked(RunCall) if one.to == "model-0"]
    driven.fail(call, "CUDA error: unspecified launch failure", kind="DeviceError")
    driven.until(lambda: bool(losses(driven)))
    assert losses(driven) == [("model-0", "DeviceError")]
    tell(driven, fault_of_chip())
    driven.until(Phase.ENDED)
    (incident,) = report_of(driven.facts).incidents
    assert incident.cause.kind == "ChipFault"
    assert [fault.kind for fault in incident.faults].count("DeviceError") == 1
    assert outcome(driven.facts) == EXPECTED


def test_a_device_error_without_a_broken_chip_stays_the_cause(driven: Driven) -> None:
    (call, *_) = [one for one in driven.asked(RunCall) if one.to == "model-0"]
    driven.fail(call, "CUDA error: an illegal memory access", kind="DeviceError")
    driven.until(Phase.ENDED)
    (incident,) = report_of(driven.facts).incidents
    assert incident.cause.kind == "DeviceError"


def test_who_comes_up_on_a_chip_that_broke_meanwhile_is_replaced_too(driven: Driven) -> None:
    tell(driven, fault_of_chip())
    driven.lose("server-0")
    driven.until(lambda: bool(driven.asked(StartProcess)))
    incarnation = driven.state.members.members["server-0"].incarnation
    peer = Peer("server-0", incarnation, "host-0", "tcp://server-0", b"key")
    driven.feed(Joined(peer, role_of("server-0"), 1, {"chip": "a1"}))
    (stop,) = driven.asked(StopProcess)
    assert stop.body == StopProcess("server-0", incarnation, 0.0)


def test_a_host_without_a_working_chip_gets_no_ranks_while_another_has_one() -> None:
    driven = Driven(TWO_HOSTS)
    driven.begin()
    driven.until(Phase.TRAINING)
    hosts = {name: member.host for name, member in driven.state.members.members.items()}
    here = [name for name, host in hosts.items() if host == "host-1" and name.startswith(("model", "server"))]
    assert here
    tell(driven, fault_of_chip(host="host-1", num_healthy=0, processes=users(driven, *here)), agent="agent-1")
    driven.until(Phase.ENDED)
    members = driven.state.members.members
    assert {members[name].host for name in here} == {"host-0"}
    assert [fact.outcome for fact in driven.facts if isinstance(fact, RunEnded)] == ["finished"]


def test_where_no_chip_is_left_anywhere_the_run_ends_with_the_chip_as_its_cause(driven: Driven) -> None:
    ranks = [name for name in driven.state.members.members if name.startswith("model")]
    driven.unstartable.update(ranks)
    tell(driven, fault_of_chip(num_healthy=0, processes=users(driven, *ranks)))
    driven.until(Phase.ENDED)
    chosen = [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)]
    assert chosen[-1] == "exit"
    (ended,) = [fact for fact in driven.facts if isinstance(fact, RunEnded)]
    assert ended.fault is not None and ended.fault.kind == "ChipFault"


def test_a_chip_fault_is_a_fault_of_the_device() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    tell(driven, fault_of_chip(processes=users(driven, "model-0")))
    driven.until(lambda: bool(losses(driven)))
    (lost,) = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert lost.fault.cause is not None and classify(lost.fault.cause) is FaultClass.DEVICE
