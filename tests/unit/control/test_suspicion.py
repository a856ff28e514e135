"""Suspect, look, decide: what stands still is ended and replaced, what only seems so is left alone."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Exited, Raise, Suspected
from kintsugi.journal.facts import CauseDiagnosed, ProcessLost
from kintsugi.protocol.agents import DiagnosisVerdict, Inspect, Inspected, StopProcess
from kintsugi.recovery.liveness import SuspicionKind
from kintsugi.telemetry.events import ProcessBusy, SlowProcess
from tests.unit.control.driven import Driven
from tests.unit.control.outcomes import begun, outcome, undisturbed

EXPECTED = undisturbed()


@pytest.fixture
def driven() -> Driven:
    driven = begun()
    driven.until(Phase.TRAINING)
    return driven


def suspicion(driven: Driven, process: str, kind: SuspicionKind, lasting_s: float) -> Suspected:
    incarnation = driven.state.members.members[process].incarnation
    return Suspected(process, incarnation, "it does not move", kind, lasting_s)


def look(
    driven: Driven, process: str, *looks: Inspected, kind: SuspicionKind, lasting_s: float
) -> list[Raise]:
    """Suspect a process once for each of these looks; what the operator is told."""
    raised = []
    for inspected in looks:
        driven.feed(suspicion(driven, process, kind, lasting_s))
        (inspect,) = driven.asked(Inspect)
        decision = driven.answer(inspect, inspected)
        raised += [effect for effect in decision.effects if isinstance(effect, Raise)]
    return raised


def losses(driven: Driven) -> list[tuple[str, str]]:
    """Process and kind of the cause of each loss."""
    facts = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    return [(fact.process, fact.fault.cause.kind if fact.fault.cause else "") for fact in facts]


@pytest.mark.parametrize("process", ["model-1", "rollout-0", "manager-0", "server-1"])
def test_a_process_that_its_agent_saw_stopped_is_ended_at_once_and_replaced(
    driven: Driven, process: str
) -> None:
    incarnation = driven.state.members.members[process].incarnation
    driven.feed(Suspected(process, incarnation, "state T for 1 s", certain=True))
    (stop,) = driven.asked(StopProcess)
    assert stop.body == StopProcess(process, incarnation, 0.0) and driven.asked(Inspect) == []
    driven.until(Phase.ENDED)
    assert losses(driven) == [(process, "Stopped")]
    assert outcome(driven.facts) == EXPECTED


@pytest.mark.parametrize(
    ("looks", "kind", "fault"),
    [
        ((Inspected("T"),), SuspicionKind.SILENT, "Stopped"),
        ((Inspected("S", 1.0, frozen=True),), SuspicionKind.SILENT, "Stopped"),
        ((Inspected("S", 1.0), Inspected("S", 1.0)), SuspicionKind.SILENT, "Hung"),
        ((Inspected("S", 1.0), Inspected("R", 2.0, recorded=5.0)), SuspicionKind.SILENT, "Unreachable"),
        ((Inspected("S", 1.0), Inspected("S", 1.0)), SuspicionKind.STUCK, "Hung"),
    ],
)
def test_a_suspicion_that_a_look_confirms_costs_the_process(
    driven: Driven, looks: tuple[Inspected, ...], kind: SuspicionKind, fault: str
) -> None:
    look(driven, "model-1", *looks, kind=kind, lasting_s=70.0)
    assert len(driven.asked(StopProcess)) == 1
    driven.until(Phase.ENDED)
    assert losses(driven) == [("model-1", fault)]
    assert outcome(driven.facts) == EXPECTED


@pytest.mark.parametrize(
    ("looks", "kind", "lasting_s"),
    [
        ((Inspected("S", 1.0), Inspected("S", 1.0)), SuspicionKind.SILENT, 0.5),
        ((Inspected("S", 1.0),), SuspicionKind.SILENT, 20.0),
        ((Inspected("R", 1.0), Inspected("R", 2.0)), SuspicionKind.STUCK, 100.0),
        ((Inspected("S", 1.0), Inspected("S", 1.0)), SuspicionKind.SILENT, 40.0),
        ((Inspected("R", 1.0), Inspected("R", 2.0)), SuspicionKind.SILENT, 100.0),
    ],
    ids=["heard again", "only one look", "it computes", "a call sleeps", "a call computes"],
)
def test_a_suspicion_that_a_look_does_not_confirm_costs_nothing(
    driven: Driven, looks: tuple[Inspected, ...], kind: SuspicionKind, lasting_s: float
) -> None:
    look(driven, "model-1", *looks, kind=kind, lasting_s=lasting_s)
    assert driven.asked(StopProcess) == [] and driven.master.phase is Phase.TRAINING
    driven.until(Phase.ENDED)
    assert losses(driven) == []


@pytest.mark.parametrize("cpu_s", [1.0, 2.0], ids=["sleeps", "computes"])
def test_a_process_that_one_call_keeps_is_an_alert_once(driven: Driven, cpu_s: float) -> None:
    raised = [
        each
        for number, lasting_s in enumerate((2.0, 6.0, 9.0, 12.0, 20.0, 40.0))
        for each in look(
            driven,
            "model-1",
            Inspected("S", 1.0 + number * (cpu_s - 1.0)),
            kind=SuspicionKind.SILENT,
            lasting_s=lasting_s,
        )
    ]
    (alert,) = raised
    assert isinstance(alert.event, ProcessBusy)
    assert (alert.event.of, alert.event.computes) == ("model-1", cpu_s > 1.0)
    assert alert.values == {"silent_s": 12.0}
    driven.until(Phase.ENDED)
    assert losses(driven) == []


def test_a_process_that_is_seen_to_have_ended_is_lost_without_waiting_for_the_report(driven: Driven) -> None:
    look(driven, "model-1", Inspected("Z"), kind=SuspicionKind.SILENT, lasting_s=2.0)
    assert driven.asked(StopProcess) == [] and losses(driven) == [("model-1", "")]
    driven.world.kill("model-1")
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_a_look_at_an_earlier_suspicion_does_not_count_for_a_new_one(driven: Driven) -> None:
    look(driven, "model-1", Inspected("S", 1.0), kind=SuspicionKind.SILENT, lasting_s=6.0)
    look(driven, "model-1", Inspected("S", 1.0), kind=SuspicionKind.SILENT, lasting_s=2.0)
    assert driven.asked(StopProcess) == []


def test_nobody_is_looked_at_twice_at_the_same_time(driven: Driven) -> None:
    for lasting_s in (2.0, 3.0):
        driven.feed(suspicion(driven, "model-1", SuspicionKind.SILENT, lasting_s))
    assert len(driven.asked(Inspect)) == 1


def test_a_look_that_fails_decides_nothing(driven: Driven) -> None:
    driven.feed(suspicion(driven, "model-1", SuspicionKind.SILENT, 20.0))
    driven.fail(driven.asked(Inspect)[0], "the agent is gone", kind="Unreachable")
    assert driven.asked(StopProcess) == [] and losses(driven) == []
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_what_is_said_of_a_process_that_was_replaced_meanwhile_changes_nothing(driven: Driven) -> None:
    old = suspicion(driven, "model-1", SuspicionKind.SILENT, 20.0)
    driven.feed(old)
    (inspect,) = driven.asked(Inspect)
    driven.lose("model-1")
    driven.until(lambda: driven.state.members.is_live("model-1"))
    if inspect.token in driven.open:
        driven.answer(inspect, Inspected("T"))
    decision = driven.feed(old)
    assert decision.effects == () and "not a current process" in decision.reason
    assert driven.asked(StopProcess) == []


def test_a_slow_process_is_an_alert_and_nothing_else(driven: Driven) -> None:
    decision = driven.feed(suspicion(driven, "server-0", SuspicionKind.SLOW, 5.0))
    (alert,) = decision.effects
    assert isinstance(alert, Raise) and "server-0 is slow" in alert.message
    assert isinstance(alert.event, SlowProcess) and alert.event.of == "server-0"


def test_a_condemned_process_whose_exit_is_not_reported_is_lost_when_it_is_said_to_have_ended(
    driven: Driven,
) -> None:
    incarnation = driven.state.members.members["model-1"].incarnation
    driven.feed(Suspected("model-1", incarnation, "state T for 1 s", certain=True))
    (stop,) = driven.asked(StopProcess)
    said = driven.world.serve(stop.to, stop.body)
    driven.answer(stop, said)
    assert losses(driven) == [("model-1", "Stopped")]
    assert driven.feed(Exited("model-1", incarnation, -9)).facts == ()
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_a_process_that_stands_stopped_before_it_has_registered_is_ended(driven: Driven) -> None:
    driven.lose("rollout-0")
    incarnation = driven.state.members.members["rollout-0"].incarnation
    driven.feed(Suspected("rollout-0", incarnation, "it is stopped (state T)", certain=True))
    stops = [request.body for request in driven.asked(StopProcess)]
    assert stops == [StopProcess("rollout-0", incarnation, 0.0)]
    driven.feed(Suspected("rollout-1", incarnation, "it is stopped (state T)", certain=True))
    assert len(driven.asked(StopProcess)) == 1


def diagnosed(driven: Driven, process: str, *, replace: bool) -> Suspected:
    incarnation = driven.state.members.members[process].incarnation
    verdict = DiagnosisVerdict(
        process, incarnation, "cpu", 5.0, 0.9, f"{process}: is starved", (process,), replace
    )
    return Suspected(process, incarnation, verdict.summary, SuspicionKind.DIAGNOSED, verdict=verdict)


def test_what_the_watcher_found_is_a_fact_and_changes_nothing_else(driven: Driven) -> None:
    driven.feed(diagnosed(driven, "rollout-0", replace=False))
    (fact,) = [fact for fact in driven.facts if isinstance(fact, CauseDiagnosed)]
    assert (fact.process, fact.kind) == ("rollout-0", "cpu")
    assert driven.asked(StopProcess) == []


@pytest.mark.parametrize("process", ["model-1", "rollout-0", "server-1"])
def test_who_holds_the_run_up_by_itself_is_replaced_once(driven: Driven, process: str) -> None:
    driven.feed(diagnosed(driven, process, replace=True))
    (stop,) = driven.asked(StopProcess)
    assert isinstance(stop.body, StopProcess)
    assert stop.body.process == process
    driven.feed(diagnosed(driven, process, replace=True))
    assert len(driven.asked(StopProcess)) == 1


def test_nobody_replaces_an_agent_or_one_who_is_gone_because_of_a_diagnosis(driven: Driven) -> None:
    driven.feed(diagnosed(driven, "agent-0", replace=True))
    old = diagnosed(driven, "rollout-0", replace=True)
    assert old.verdict is not None
    gone = msgspec.structs.replace(old.verdict, incarnation="0.0")
    driven.feed(msgspec.structs.replace(old, verdict=gone))
    assert driven.asked(StopProcess) == []
