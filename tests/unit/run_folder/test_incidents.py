from __future__ import annotations

import pytest

from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    RolledBack,
    RunEnded,
    StateFolded,
    StepCommitted,
    StrategyChosen,
    TermStarted,
    TicketReturned,
)
from kintsugi.run_folder.incidents import (
    MOST_FAULTS,
    MOST_INCIDENTS,
    MOST_LOSSES,
    EarlierIncidents,
    FaultRelation,
    IncidentHistory,
    IncidentIndex,
    ProcessLoss,
    headline,
    report_of,
)
from kintsugi.types import Peer, role_of

OTHERS = ("retry: not possible, model-1 lost", "recover: about 2.1 s", "elastic: about 0.2 s")


def fault(
    process: str, *, kind: str = "ProcessDied", time: float = 100.0, cause: Fault | None = None
) -> Fault:
    return Fault(f"{process}.{kind}", kind, process, f"{process} broke", time, cause)


def joined(process: str, incarnation: str, pid: int) -> ProcessJoined:
    return ProcessJoined(Peer(process, incarnation, "host-0", "tcp://", b"key"), role_of(process), pid)


def lost(process: str, incarnation: str, *, time: float = 100.0) -> ProcessLost:
    return ProcessLost(process, incarnation, fault(process, time=time))


STARTED: tuple[Fact, ...] = (
    TermStarted(1, "first"),
    joined("agent-0", "0", 10),
    joined("model-1", "1.3", 11),
    joined("rollout-0", "1.4", 12),
    StepCommitted(7, "digest"),
)
OPENED: tuple[Fact, ...] = (
    *STARTED,
    lost("model-1", "1.3"),
    IncidentOpened(1, 7, "training", fault("model-1")),
    StrategyChosen(1, "recover", f"model-1 replaced; {OTHERS[0]}", OTHERS),
)
RECOVERED: tuple[Fact, ...] = (
    *OPENED,
    joined("model-1", "1.8", 21),
    StepCommitted(8, "digest"),
    IncidentClosed(1, "recover", 8, ("model-1",), {"total": 0.5, "start": 0.2, "outage": 0.5}),
)


def only(facts: tuple[Fact, ...]) -> IncidentHistory:
    (incident,) = report_of(facts).incidents
    return incident


def test_a_resolved_incident_has_losses_strategy_and_timing() -> None:
    incident = only(RECOVERED)
    assert (incident.step, incident.phase, incident.time) == (7, "training", 100.0)
    assert (incident.strategy, incident.mended_step, incident.seconds) == ("recover", 8, 0.5)
    assert incident.losses == (ProcessLoss("model-1", "1.3", 11, "1.8", 21),)
    assert [fault.process for fault in incident.faults] == ["model-1"]


def test_a_choice_has_its_reason_and_every_other_option_once() -> None:
    (choice,) = only(RECOVERED).choices
    assert (choice.reason, choice.alternatives) == ("model-1 replaced", (OTHERS[0], OTHERS[2]))


def test_the_same_choice_again_is_counted_not_repeated() -> None:
    (choice,) = only((*OPENED, OPENED[-1], OPENED[-1])).choices
    assert choice.times == 3


def test_the_cause_stands_first_though_a_consequence_was_seen_before_it() -> None:
    broken = fault("model-0", kind="GroupBroken")
    stopped = fault("model-1", kind="Stopped")
    facts = (
        *STARTED,
        IncidentOpened(1, 7, "training", broken),
        FaultNoted(1, fault("model-1", cause=stopped)),
        FaultNoted(1, fault("rollout-0")),
    )
    told = [(fault.relation, fault.process, fault.kind) for fault in only(facts).faults]
    assert told[0] == (FaultRelation.CAUSE, "model-1", "Stopped")
    assert set(told[1:]) == {
        (FaultRelation.THEN, "model-1", "ProcessDied"),
        (FaultRelation.THEN, "model-0", "GroupBroken"),
        (FaultRelation.ALSO, "rollout-0", "ProcessDied"),
    }


def test_an_incident_is_open_until_it_is_closed_or_its_run_ends() -> None:
    assert only(OPENED).is_open
    assert not only(RECOVERED).is_open
    failed = only((*OPENED, RunEnded("failed", fault("model-1"))))
    assert (failed.is_open, failed.run_ended, failed.mended_step) == (False, "failed", None)


def test_an_open_incident_of_a_killed_and_resumed_run_is_unresolved() -> None:
    resumed = (*OPENED, TermStarted(2, "second"), lost("rollout-0", "1.4"), joined("rollout-0", "2.1", 31))
    assert only(resumed).run_ended == "interrupted"
    assert report_of(resumed).other_losses == ()


def test_an_incident_that_ended_the_run_is_unresolved() -> None:
    ended = only((*RECOVERED, RunEnded("failed", fault("model-1"))))
    assert (ended.mended_step, ended.run_ended) == (None, "failed")
    finished = only((*RECOVERED, RunEnded("finished")))
    assert (finished.mended_step, finished.run_ended) == (8, "")


def test_undone_steps_and_groups_given_out_again_are_part_of_the_cost() -> None:
    facts = (
        *OPENED,
        RolledBack(5, "the state of step 7 is lost"),
        TicketReturned("a", "rollout-0 was lost"),
        TicketReturned("a", "moved"),
        TicketReturned("b", "rollout-0 was lost"),
        StepCommitted(6, "digest"),
    )
    incident = only(facts)
    assert (incident.steps_undone, incident.groups_again) == (2, 2)


def test_what_happens_outside_an_incident_costs_none() -> None:
    facts = (*RECOVERED, TicketReturned("c", "moved"), RolledBack(5, "resumed"))
    assert (only(facts).steps_undone, only(facts).groups_again) == (0, 0)


def test_time_between_faults_counts_though_a_new_master_timed_only_its_own_part() -> None:
    facts = (
        *OPENED,
        TermStarted(2, "second", adopting=True),
        FaultNoted(1, fault("master-0", time=103.0)),
        IncidentClosed(1, "retry", 8, (), {"total": 0.5, "outage": 0.5}),
    )
    assert only(facts).seconds == pytest.approx(3.5)


def test_a_master_that_was_lost_is_named_with_its_successor() -> None:
    facts = (
        *STARTED,
        TermStarted(2, "second", adopting=True),
        IncidentOpened(1, 7, "recovering", fault("master-0")),
    )
    assert only(facts).losses == (ProcessLoss("master-0", "first", 0, "second"),)


def test_an_agent_that_came_back_without_an_incident_is_listed_apart() -> None:
    facts = (
        *STARTED,
        lost("agent-0", "0"),
        joined("agent-0", "1", 22),
        StepCommitted(8, "digest"),
        *RECOVERED[5:],
    )
    report = report_of(facts)
    assert report.other_losses == (ProcessLoss("agent-0", "0", 10, "1", 22),)
    assert [loss.process for loss in report.incidents[0].losses] == ["model-1"]


def test_an_agent_whose_processes_died_with_it_is_the_cause() -> None:
    facts = (
        *STARTED,
        lost("agent-0", "0"),
        joined("agent-0", "1", 22),
        *OPENED[5:],
    )
    incident = only(facts)
    assert (incident.cause.process, [loss.process for loss in incident.losses]) == (
        "agent-0",
        ["agent-0", "model-1"],
    )


def test_a_replacement_that_did_not_start_is_a_fault_but_no_loss() -> None:
    failed = lost("model-1", "1.8")
    incident = only((*OPENED, failed, joined("model-1", "1.9", 23)))
    assert incident.losses == (ProcessLoss("model-1", "1.3", 11, "1.9", 23),)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("killed by SIGKILL", "killed by SIGKILL"),
        ("exited with code 2; its last words: no such file", "exited with code 2: no such file"),
        ("exited; its last words: Traceback:\n  File f\nKeyError: 'x'\n", "exited: KeyError: 'x'"),
        ("exited; its last words: \n  File f\n    ^^^^\n", "exited: ^^^^"),
        ("", ""),
    ],
)
def test_of_a_processs_last_words_the_line_that_says_what_it_died_of_is_kept(message: str, line: str) -> None:
    assert headline(message) == line


def many_incidents(count: int) -> list[Fact]:
    facts: list[Fact] = [TermStarted(1, "a")]
    for number in range(1, count + 1):
        facts += [
            IncidentOpened(number, number, "train", fault("model-0", time=float(number))),
            IncidentClosed(number, "recover", number + 1, ("model-0",), {"total": 2.0}),
            StepCommitted(number + 1, "digest"),
        ]
    return facts


def test_the_state_keeps_the_newest_incidents_and_sums_of_the_others() -> None:
    index = IncidentIndex()
    sizes = []
    for number, fact in enumerate(many_incidents(5 * MOST_INCIDENTS)):
        index.take(fact)
        if number % 100 == 0:
            sizes.append(len(index.fold()))
    report = index.report()
    assert [each.incident for each in report.incidents] == list(
        range(4 * MOST_INCIDENTS + 1, 5 * MOST_INCIDENTS + 1)
    )
    assert report.earlier == EarlierIncidents(4 * MOST_INCIDENTS, 4 * MOST_INCIDENTS, 8.0 * MOST_INCIDENTS)
    assert max(sizes) < 1.1 * max(sizes[: len(sizes) // 2])
    restored = IncidentIndex()
    restored.take(folded(index))
    assert restored.report() == report


def test_every_incident_that_is_not_kept_is_handed_out_once() -> None:
    facts = many_incidents(MOST_INCIDENTS + 30)
    index = IncidentIndex()
    dropped = []
    for fact in facts:
        index.take(fact)
        dropped += index.take_dropped()
    assert [each.incident for each in dropped] == list(range(1, 31))
    assert index.take_dropped() == []


def test_faults_and_losses_of_one_incident_have_a_bound() -> None:
    index = IncidentIndex()
    index.take(IncidentOpened(1, 1, "train", fault("model-0")))
    for number in range(3 * MOST_LOSSES):
        index.take(FaultNoted(1, fault("model-0", kind=f"kind {number}")))
        index.take(joined("model-0", str(number), 1))
        index.take(lost("model-0", str(number)))
    (incident,) = index.report().incidents
    assert len(incident.faults) <= MOST_FAULTS and len(incident.losses) == MOST_LOSSES


def folded(index: IncidentIndex) -> StateFolded:
    return StateFolded(
        term=1,
        job="",
        step=1,
        processes={},
        saved_steps=(),
        servers=None,
        answers={},
        parts={"incidents": index.fold()},
    )
