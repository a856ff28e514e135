"""Replacements that are slow to start: repeated requests, and the limits of waiting."""

from __future__ import annotations

import math

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.recover import LONGEST_WAIT_S, START_FACTOR
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import ProcessPlan
from kintsugi.control.processes import (
    ASK_AGAIN_S,
    FIRST_RETRY_S,
    QUICK_RETRIES,
    STOP_AGAIN_S,
    Arrival,
    ProcessManager,
)
from kintsugi.control.protocol import Admit, Exited, Joined, Request
from kintsugi.errors import EndedByError, Fault
from kintsugi.journal.facts import ProcessRequested, StrategyChosen
from kintsugi.protocol.agents import ProcessStarted, StartProcess, StopProcess
from kintsugi.protocol.messages import Body
from kintsugi.recovery.states import RecoveryState
from kintsugi.recovery.strategy import Strategy
from kintsugi.runtime.backoff import FIRST_SHORTAGE_PAUSE_S, LONGEST_SHORTAGE_PAUSE_S
from kintsugi.types import Peer, Role, role_of
from tests.unit.control.driven import CONFIG, Driven, new_state

FIRST_GUESS_S = 2.0
"""What a start is taken to need before one was seen."""


def waiting_for_a_rank(*, first_start_s: float = 0.0) -> Driven:
    """A rank was lost in training; the others have stopped, its start is ordered and nobody answers."""
    driven = Driven()
    driven.begin()
    driven.pass_time(first_start_s)
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    while driven.master.recovery_state != RecoveryState.WAITING:
        driven.answer(next(r for r in driven.open.values() if not isinstance(r.body, StartProcess)))
    return driven


def strategies(driven: Driven) -> list[str]:
    return [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)]


def test_a_replacement_that_is_silent_is_waited_for_a_while_and_far_less_than_a_first_start() -> None:
    driven = waiting_for_a_rank()
    patience_s = max(LONGEST_WAIT_S, START_FACTOR * FIRST_GUESS_S)
    assert patience_s < CONFIG.cluster.start_timeout_s / 2
    driven.pass_time(patience_s - 1.0)
    assert strategies(driven) == [Strategy.RECOVER]
    driven.pass_time(2.0)
    assert strategies(driven) == [Strategy.RECOVER, Strategy.ELASTIC]
    driven.until(Phase.TRAINING)
    assert driven.master.recovery_state == RecoveryState.NORMAL


def test_where_the_first_start_was_slow_a_replacement_is_given_more_time() -> None:
    driven = waiting_for_a_rank(first_start_s=2 * FIRST_GUESS_S)
    driven.pass_time(2 * START_FACTOR * FIRST_GUESS_S - 1.0)
    assert strategies(driven) == [Strategy.RECOVER]
    driven.pass_time(5.0)
    assert strategies(driven) == [Strategy.RECOVER, Strategy.ELASTIC]


def test_ranks_that_were_all_lost_are_waited_for_though_their_starts_fail_at_first() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.unstartable = {"model-0", "model-1"}
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    until_s = driven.now + CONFIG.cluster.start_timeout_s / 2
    driven.until(lambda: driven.now > until_s)
    assert strategies(driven) == [Strategy.RECOVER]
    driven.unstartable = set()
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
    assert Strategy.EXIT not in strategies(driven)


def test_a_run_whose_ranks_never_start_again_ends_when_the_time_for_a_start_has_passed() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.unstartable = {"model-0", "model-1"}
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    since = driven.now
    driven.until(Phase.ENDED)
    assert CONFIG.cluster.start_timeout_s < driven.now - since < 1.1 * CONFIG.cluster.start_timeout_s
    assert strategies(driven) == [Strategy.RECOVER, Strategy.EXIT]


def test_a_start_whose_agent_did_not_answer_is_asked_again_after_a_pause_under_the_same_incarnation() -> None:
    driven = waiting_for_a_rank()
    num_ordered = sum(isinstance(fact, ProcessRequested) for fact in driven.facts)
    for kind in ("ProcessDied", "DeadlineExceeded"):
        (start,) = driven.asked(StartProcess)
        driven.fail(start, "no answer", kind=kind)
        assert driven.asked(StartProcess) == []
        driven.pass_time(FIRST_RETRY_S / 2)
        assert driven.asked(StartProcess) == []
        driven.pass_time(FIRST_RETRY_S)
        (again,) = driven.asked(StartProcess)
        assert (again.to, again.body) == (start.to, start.body)
    assert sum(isinstance(fact, ProcessRequested) for fact in driven.facts) == num_ordered
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def manager() -> tuple[ProcessManager, DecisionBuilder]:
    """One rank is planned; its agent has come."""
    decision = DecisionBuilder(new_state())
    plans = (ProcessPlan("agent-0", Role.AGENT, "host-0"), ProcessPlan("model-0", Role.MODEL, "host-0"))
    manager = ProcessManager(
        plans, decision=decision, pending=PendingRequests(decision, first_s=60.0), start_timeout_s=60.0
    )
    assert manager.joined(registered("agent-0", "0")) is Arrival.NEW
    decision.take()
    return manager, decision


NOT_STARTED = Fault("n", "StartFailed", "model-0", "it did not start", 0.0)
NO_THREADS = Fault(
    "t", "ProcessDied", "model-0", "code 75", 0.0, detail=EndedByError("RuntimeError", "no thread")
)


def registered(process: str, incarnation: str) -> Joined:
    return Joined(Peer(process, incarnation, "host-0", "tcp://here", b"key"), role_of(process), 1, {}, ())


def asked(decision: DecisionBuilder) -> list[Body]:
    return [effect.body for effect in decision.take().effects if isinstance(effect, Request)]


def test_a_registration_is_new_once_then_again_and_refused_when_it_is_of_somebody_else() -> None:
    team, _ = manager()
    team.order("model-0", 0.0)
    assert team.joined(registered("model-0", "another")) is Arrival.REFUSED
    assert team.joined(registered("model-0", "0.1")) is Arrival.NEW
    assert team.joined(registered("model-0", "0.1")) is Arrival.AGAIN
    assert team.missing() == []


def test_what_is_due_is_ordered_at_the_very_moment_and_not_before() -> None:
    team, decision = manager()
    team.order_later("model-0", NOT_STARTED, 1.0)
    due = 1.0 + FIRST_RETRY_S
    team.tick(math.nextafter(due, 0.0))
    assert asked(decision) == []
    team.tick(due)
    assert asked(decision) == [StartProcess("model-0", Role.MODEL, "0.1")]
    team.tick(due)
    assert asked(decision) == []


def test_a_process_that_could_not_be_stopped_is_stopped_at_the_very_moment_that_is_due() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    team.joined(registered("model-0", "0.1"))
    decision.take()
    team.stop_failed("0.1", 1.0)
    team.tick(math.nextafter(1.0 + STOP_AGAIN_S, 0.0))
    assert asked(decision) == []
    team.tick(1.0 + STOP_AGAIN_S)
    assert asked(decision) == [StopProcess("model-0", "0.1", 0.0)]


def test_a_process_that_does_not_come_in_its_time_is_stopped_and_one_that_came_is_not() -> None:
    team, decision = manager()
    team.order("model-0", 1.0)
    decision.take()
    team.tick(61.0)
    assert asked(decision) == []
    team.tick(61.5)
    assert asked(decision) == [StopProcess("model-0", "0.1", 0.0)]
    team, decision = manager()
    team.order("model-0", 1.0)
    team.joined(registered("model-0", "0.1"))
    decision.take()
    team.tick(61.5)
    assert asked(decision) == []


def test_a_start_that_is_said_to_have_failed_when_the_process_is_there_costs_nothing() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    team.joined(registered("model-0", "0.1"))
    decision.take()
    fault = Fault("a", "WorldError", "agent-0", "no such command", 0.0)
    assert team.start_failed("0.1", fault, 1.0) is None
    assert team.start_failed("0.7", fault, 1.0) is None
    assert (team.missing(), decision.take().facts) == ([], ())


def test_who_never_came_did_not_start_and_who_came_was_lost() -> None:
    team, _ = manager()
    team.order("model-0", 0.0)
    never = team.exited(Exited("model-0", "0.1", -9))
    assert never is not None and never.message.startswith("model-0 did not start")
    team.order("model-0", 1.0)
    team.joined(registered("model-0", "0.2"))
    came = team.exited(Exited("model-0", "0.2", -9))
    assert came is not None and came.message.startswith("model-0 (pid 1) was lost")


def lost(team: ProcessManager, incarnation: str) -> None:
    assert team.exited(Exited("model-0", incarnation, -9)) is not None


def test_a_stop_that_is_to_be_repeated_does_not_hit_the_replacement() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    team.joined(registered("model-0", "0.1"))
    team.stop_failed("0.1", 1.0)
    lost(team, "0.1")
    team.order("model-0", 1.0)
    decision.take()
    team.tick(1.0 + 2 * STOP_AGAIN_S)
    assert asked(decision) == []


def test_the_time_that_a_start_may_take_begins_with_its_own_order() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    lost(team, "0.1")
    team.order("model-0", 50.0)
    decision.take()
    team.tick(100.0)
    assert asked(decision) == []
    team.tick(111.0)
    assert asked(decision) == [StopProcess("model-0", "0.2", 0.0)]


def test_pauses_double_with_every_start_that_fails_and_are_short_again_when_one_has_come() -> None:
    team, decision = manager()
    for number in range(4):
        team.order_later("model-0", NOT_STARTED, 0.0)
        team.tick(math.nextafter(FIRST_RETRY_S * 2**number, 0.0))
        assert asked(decision) == []
        team.tick(FIRST_RETRY_S * 2**number)
        assert asked(decision) == [StartProcess("model-0", Role.MODEL, f"0.{number + 1}")]
        assert team.cannot_start(Role.MODEL) == (number + 1 >= QUICK_RETRIES)
        if number < 3:
            lost(team, f"0.{number + 1}")
    team.joined(registered("model-0", "0.4"))
    assert not team.cannot_start(Role.MODEL)
    lost(team, "0.4")
    decision.take()
    team.order_later("model-0", NOT_STARTED, 0.0)
    team.tick(FIRST_RETRY_S)
    assert asked(decision) == [StartProcess("model-0", Role.MODEL, "0.5")]


def test_a_process_that_the_host_starves_is_started_again_after_growing_pauses_and_for_long() -> None:
    team, decision = manager()
    now = 0.0
    pauses: list[float] = []
    while not team.cannot_start(Role.MODEL):
        if len(pauses) % 2:
            team.order_again("model-0", NO_THREADS, now)
            team.tick(now)
            assert asked(decision) == []
        team.order_later("model-0", NO_THREADS, now)
        began = now
        while not asked(decision):
            now += 0.25
            team.tick(now)
        pauses.append(now - began)
        lost(team, f"0.{len(pauses)}")
        decision.take()
    assert (
        pauses == sorted(pauses)
        and pauses[0] == FIRST_SHORTAGE_PAUSE_S
        and pauses[-1] == LONGEST_SHORTAGE_PAUSE_S
    )
    assert sum(pauses) > 200.0


def test_the_first_reason_to_end_a_process_is_the_cause_of_its_loss_and_not_of_the_next_one() -> None:
    team, _ = manager()
    team.order("model-0", 0.0)
    team.joined(registered("model-0", "0.1"))
    first = Fault("a", "Hung", "model-0", "it hangs", 0.0)
    assert not team.is_terminating("model-0")
    team.terminate("model-0", first, 1.0)
    team.terminate("model-0", Fault("b", "Stopped", "model-0", "it was stopped", 0.0), 2.0)
    assert team.is_terminating("model-0")
    fault = team.exited(Exited("model-0", "0.1", -9))
    assert fault is not None and fault.cause == first
    team.order("model-0", 3.0)
    team.joined(registered("model-0", "0.2"))
    assert not team.is_terminating("model-0")
    again = team.exited(Exited("model-0", "0.2", -9))
    assert again is not None and again.cause is None


def test_only_the_incarnation_that_is_awaited_is_admitted_when_its_agent_says_that_it_runs() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    lost(team, "0.1")
    team.order("model-0", 1.0)
    decision.take()
    for process, incarnation in (("model-0", "0.1"), ("model-7", "0.2"), ("model-0", "0.2")):
        team.started(ProcessStarted(process, incarnation, 1, b"key"))
    admitted = [effect.peer for effect in decision.take().effects if isinstance(effect, Admit)]
    assert [(peer.process, peer.incarnation) for peer in admitted] == [("model-0", "0.2")]
    team.joined(registered("model-0", "0.2"))
    decision.take()
    team.started(ProcessStarted("model-0", "0.2", 1, b"key"))
    assert decision.take().effects == ()


def test_what_is_ordered_while_no_agent_is_there_is_ordered_again_when_one_has_come() -> None:
    decision = DecisionBuilder(new_state())
    pending = PendingRequests(decision, first_s=60.0)
    team = ProcessManager(
        (ProcessPlan("model-0", Role.MODEL, "host-0"),),
        decision=decision,
        pending=pending,
        start_timeout_s=60.0,
    )
    team.order("model-0", 1.0)
    assert decision.take().facts == ()
    team.joined(registered("agent-0", "0"))
    decision.take()
    team.tick(math.nextafter(1.0 + FIRST_RETRY_S, 0.0))
    assert asked(decision) == []
    team.tick(1.0 + FIRST_RETRY_S)
    assert asked(decision) == [StartProcess("model-0", Role.MODEL, "0.1")]


def test_a_stop_that_was_repeated_and_answered_is_not_repeated_again() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    team.joined(registered("model-0", "0.1"))
    team.stop_failed("0.1", 1.0)
    decision.take()
    team.tick(1.0 + STOP_AGAIN_S)
    assert asked(decision) == [StopProcess("model-0", "0.1", 0.0)]
    team._pending.close("stop:0.1", "agent-0")
    team.tick(10.0)
    assert asked(decision) == []


def test_nobody_waits_for_the_start_of_a_process_that_has_ended_before_it_came() -> None:
    team, _ = manager()
    team.order("model-0", 0.0)
    assert team._pending.is_open("start:0.1")
    lost(team, "0.1")
    assert not team._pending.is_open("start:0.1")


def test_a_process_moves_to_the_host_where_fewest_live_whoever_was_lost_there() -> None:
    decision = DecisionBuilder(new_state())
    agents = [ProcessPlan(f"agent-{index}", Role.AGENT, f"host-{index}") for index in range(3)]
    ranks = [ProcessPlan(f"model-{index}", Role.MODEL, f"host-{index % 2}") for index in range(4)]
    plans = (*agents, *ranks, ProcessPlan("model-4", Role.MODEL, "host-2"))
    team = ProcessManager(
        plans, decision=decision, pending=PendingRequests(decision, first_s=60.0), start_timeout_s=60.0
    )
    for index in range(2):
        peer = Peer(f"agent-{index}", "0", f"host-{index}", "tcp://here", b"key")
        team.joined(Joined(peer, Role.AGENT, 1, {}, ()))
    for name in ("model-0", "model-1", "model-2", "model-3"):
        team.order(name, 0.0)
    members = decision.state.members.members
    for name in ("model-1", "model-3"):
        team.exited(Exited(name, members[name].incarnation, -9))
    team.order("model-4", 0.0)
    assert members["model-4"].host == "host-1"


def test_what_was_ordered_by_the_last_master_and_never_came_is_asked_for_again() -> None:
    team, decision = manager()
    decision.add_fact(ProcessRequested("model-0", Role.MODEL, "host-0", "0.7"))
    team.adjust(0.0, first=True)
    assert asked(decision) == [StartProcess("model-0", Role.MODEL, "0.7")]


def test_a_process_that_does_not_come_is_asked_for_again_and_again_with_a_pause_each_time() -> None:
    team, decision = manager()
    team.order("model-0", 0.0)
    times = []
    for tick in range(1, 5 * int(ASK_AGAIN_S)):
        team._pending.close("start:0.1", "agent-0")
        decision.take()
        team.tick(float(tick))
        times += [tick for body in asked(decision) if isinstance(body, StartProcess)]
    assert times == [ASK_AGAIN_S * number for number in (1, 2, 3, 4)]
