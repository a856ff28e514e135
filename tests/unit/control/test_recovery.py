"""Processes of every role die at every moment of a run, and the run ends with the same steps as if none had."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import groupby

import msgspec
import pytest

from kintsugi.config.schema import CheckpointSection, ClusterSection
from kintsugi.control.phases.recover import REPAIR_ATTEMPTS, UNADDRESSED_ATTEMPTS
from kintsugi.control.phases.table import Phase
from kintsugi.control.phases.train import FORGET_EVERY
from kintsugi.control.processes import LONGEST_RETRY_S
from kintsugi.control.protocol import ShareBook, Tell
from kintsugi.journal.facts import (
    IncidentClosed,
    IncidentOpened,
    ProcessLost,
    RolledBack,
    RunEnded,
    StrategyChosen,
    TicketReturned,
)
from kintsugi.protocol.agents import StartProcess
from kintsugi.protocol.recovery import ForgetStates, NotifyNormal, PreLock, RebuildGroup, Repair
from kintsugi.protocol.training import RunCall, Save
from kintsugi.recovery.rank import Flow
from kintsugi.recovery.strategy import MAX_ATTEMPTS
from kintsugi.types import Role, sample_key
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import TWO_STAGES, begun, outcome, undisturbed

EXPECTED = undisturbed()
NEVER = CheckpointSection(every=0)
LOSSES = {
    "rank": ("model-0",),
    "both ranks": ("model-0", "model-1"),
    "rollout worker": ("rollout-0",),
    "rollout worker and rank": ("rollout-1", "model-0"),
    "manager and rank": ("manager-0", "model-1"),
    "manager and server": ("manager-0", "server-0"),
}


def at(number: int, *, flow: Flow = Flow.ROLLBACK) -> Driven | None:
    """A run after so many answers, once everybody is there; None behind its end."""
    driven = begun(flow=flow)
    driven.until(Phase.PREPARING)
    for _ in range(number):
        driven.go_on()
    return None if driven.master.phase is Phase.ENDED else driven


def incidents(driven: Driven) -> tuple[list[IncidentOpened], list[IncidentClosed]]:
    return (
        [fact for fact in driven.facts if isinstance(fact, IncidentOpened)],
        [fact for fact in driven.facts if isinstance(fact, IncidentClosed)],
    )


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("lost", LOSSES)
def test_a_loss_at_any_moment_changes_no_step_and_is_one_incident(lost: str, flow: Flow) -> None:
    phases: Counter[Phase] = Counter()
    number = 0
    while (driven := at(number, flow=flow)) is not None:
        phases[driven.master.phase] += 1
        phase, step = driven.master.phase, driven.state.step
        for process in LOSSES[lost]:
            driven.lose(process)
        driven.until(Phase.ENDED)
        assert outcome(driven.facts) == EXPECTED, f"lost after answer {number}, {phase}"
        opened, closed = incidents(driven)
        assert [(fact.step, fact.phase) for fact in opened] == [(step, phase)]
        if driven.state.open_incident:
            assert set(driven.world.hosts) - {process for process, _, _ in driven.world.living()}
        else:
            assert [set(fact.processes) for fact in closed] == [set(LOSSES[lost])]
        number += 1
    assert set(phases) == set(Phase) - {Phase.STARTING, Phase.ADOPTING, Phase.RECOVERING, Phase.ENDED}


@pytest.mark.parametrize("after", [1, 3])
def test_a_death_that_others_notice_first_is_mended_as_well(after: int) -> None:
    number = 0
    while (driven := at(number)) is not None:
        driven.lose("model-1", after=after)
        driven.until(Phase.ENDED)
        assert outcome(driven.facts) == EXPECTED, f"lost after answer {number}"
        number += 1


@pytest.mark.parametrize("process", ["model-0", "rollout-0"])
def test_a_loss_at_any_moment_of_a_recovery_is_part_of_the_same_incident(process: str) -> None:
    number = 0
    while True:
        driven = begun()
        driven.until(Phase.TRAINING)
        driven.lose("model-1")
        for _ in range(number):
            driven.go_on()
        if driven.master.phase is not Phase.RECOVERING:
            break
        driven.lose(process)
        driven.until(Phase.ENDED)
        assert outcome(driven.facts) == EXPECTED, f"lost after answer {number} of the recovery"
        opened, (closed,) = incidents(driven)
        assert len(opened) == 1
        assert set(closed.processes) == {"model-1", process}
        number += 1
    assert number > 10


def keys_in_training(driven: Driven) -> set[str]:
    ledger = driven.state.ledger
    return {meta.key for ticket in ledger.in_batch(driven.state.step + 1) for meta in ledger.metas(ticket)}


def test_a_worker_whose_samples_were_fetched_may_go_and_the_step_is_not_repeated() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    kept = dict(driven.world.kept)
    assert kept["rollout-0"] & keys_in_training(driven)
    driven.lose("rollout-0")
    driven.world.kept = kept  # The ranks have them.
    driven.until(Phase.COMMITTING)
    assert not any(isinstance(fact, TicketReturned) for fact in driven.facts)
    assert not any(isinstance(body, PreLock) for body in driven.world.ranks["model-0"].operations[7:])
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED


def test_samples_that_are_gone_before_the_ranks_have_them_are_made_again_under_the_same_tickets() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    lost = driven.state.ledger.assigned_to("rollout-0")
    driven.lose("rollout-0")
    driven.until(Phase.ENDED)
    assert [fact.ticket for fact in driven.facts if isinstance(fact, TicketReturned)] == lost
    assert outcome(driven.facts) == EXPECTED


def strategies(driven: Driven) -> list[str]:
    chosen = [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)]
    return [strategy for strategy, _ in groupby(chosen)]


def test_a_call_that_fails_once_is_repeated_by_the_same_ranks() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    ranks = dict(driven.world.ranks)
    driven.fail(driven.asked(RunCall)[0], "a bit fell over", kind="RuntimeError")
    driven.until(Phase.ENDED)
    assert strategies(driven) == ["retry"]
    assert driven.world.ranks == ranks
    assert outcome(driven.facts) == EXPECTED


def test_a_rank_whose_call_fails_again_is_replaced() -> None:
    driven = begun()
    for _ in range(2):
        driven.until(lambda: bool(driven.asked(RunCall)))
        driven.fail(driven.asked(RunCall)[0], "a bit fell over", kind="RuntimeError")
    driven.until(Phase.ENDED)
    assert strategies(driven) == ["retry", "recover"]
    (lost,) = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert lost.process == "model-0" and "a bit fell over" in repr(lost.fault.cause)
    assert outcome(driven.facts) == EXPECTED


def test_a_call_that_fails_for_ever_ends_the_run_with_a_dump_and_the_first_fault_as_cause() -> None:
    driven = begun(msgspec.structs.replace(TWO_STAGES, checkpoint=NEVER))
    driven.until(lambda: driven.state.step == 1)
    for number in range(100):
        driven.until(lambda: bool(driven.asked(RunCall)) or driven.master.phase is Phase.ENDED)
        if driven.master.phase is Phase.ENDED:
            break
        driven.fail(driven.asked(RunCall)[0], f"broken the {number}. time", kind="RuntimeError")
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.outcome == "failed" and ended.fault is not None
    assert ended.fault.message == "broken the 0. time"
    assert driven.state.saved_steps == [1] and strategies(driven)[-1] == "dump"
    assert number <= MAX_ATTEMPTS


def test_a_mistake_of_the_user_is_neither_repeated_nor_mended() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.fail(driven.asked(RunCall)[0], "no such reward", kind="ConfigError")
    driven.until(Phase.ENDED)
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None and ended.fault.message == "no such reward"
    assert "retry" not in strategies(driven) and "recover" not in strategies(driven)


def test_without_a_replacement_the_ranks_that_live_go_on_and_grow_back_when_one_comes() -> None:
    config = msgspec.structs.replace(
        TWO_STAGES, algorithm=msgspec.structs.replace(TWO_STAGES.algorithm, steps=3)
    )
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.unstartable = {"model-1"}
    driven.lose("model-1")
    driven.until(lambda: driven.state.step == 3)
    assert strategies(driven) == ["recover", "elastic"]
    assert list(driven.world.ranks) == ["model-0"]
    driven.unstartable = set()
    driven.pass_time(LONGEST_RETRY_S)
    driven.until(Phase.ENDED)
    last = driven.world.ranks["model-1"].operations[-1]
    assert isinstance(last, NotifyNormal) and last.step >= 3
    assert outcome(driven.facts) == undisturbed(config)


def test_a_replacement_that_neither_comes_nor_fails_is_not_waited_for_without_end() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    del driven.open[driven.asked(StartProcess)[0].token]
    driven.until(Phase.ENDED)
    assert strategies(driven) == ["recover", "elastic"]
    assert outcome(driven.facts) == EXPECTED


@pytest.mark.parametrize(
    ("every", "held", "steps"),
    [(0, (), [1, 0]), (0, (1,), [1]), (1, (), [1])],
    ids=["to the beginning", "to the step before", "to the checkpoint"],
)
def test_when_the_state_of_a_step_is_lost_the_run_goes_back_and_repeats_the_same_steps(
    every: int, held: tuple[int, ...], steps: list[int]
) -> None:
    config = msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every=every))
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    old = deepcopy(driven.world.snapshots)
    driven.until(Phase.COMMITTING)
    driven.world.snapshots = {host: snapshots if held else {} for host, snapshots in old.items()}
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    driven.until(Phase.ENDED)
    assert [fact.step for fact in driven.facts if isinstance(fact, RolledBack)] == steps
    assert outcome(driven.facts) == undisturbed(config)


def test_a_rank_that_can_not_take_over_a_state_that_another_holds_is_replaced_and_no_step_is_lost() -> None:
    config = msgspec.structs.replace(TWO_STAGES, checkpoint=NEVER)
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.lose("model-1")
    for _ in range(REPAIR_ATTEMPTS):
        driven.until(lambda: bool(driven.asked(Repair)))
        (repair,) = driven.asked(Repair)
        driven.fail(repair, "nobody has it", kind="RefusedError")
    driven.until(Phase.ENDED)
    assert not [fact for fact in driven.facts if isinstance(fact, RolledBack)]
    assert [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)] == ["model-1", "model-1"]
    assert outcome(driven.facts) == undisturbed(config)


def test_ranks_that_all_die_in_the_first_step_of_a_stage_find_its_beginning_in_their_snapshots() -> None:
    config = msgspec.structs.replace(TWO_STAGES, checkpoint=NEVER)
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    driven.until(Phase.ENDED)
    assert not any(isinstance(fact, RolledBack) for fact in driven.facts)
    assert outcome(driven.facts) == undisturbed(config)


def test_a_repair_that_fails_once_is_tried_again_before_any_step_is_given_up() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.lose("model-1")
    driven.until(lambda: bool(driven.asked(Repair)))
    driven.fail(driven.asked(Repair)[0], "the agent is restarting", kind="RefusedError")
    driven.until(Phase.ENDED)
    assert not any(isinstance(fact, RolledBack) for fact in driven.facts)
    assert outcome(driven.facts) == EXPECTED


def only_host_1_has_the_step(driven: Driven) -> None:
    """Both ranks are lost, host-0 has lost its memory, and the rank of host-1 does not start again."""
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.unstartable = {"model-1"}
    driven.world.snapshots["host-0"].clear()
    for rank in ("model-0", "model-1"):
        driven.lose(rank)


def fail_repairs(driven: Driven, times: int) -> None:
    """Let the only rank that lives look for the step, which it does not find."""
    for _ in range(times):
        driven.until(lambda: bool(driven.asked(Repair)))
        (repair,) = driven.asked(Repair)
        assert repair.to == "model-0"
        driven.answer(repair)


TWO_HOSTS = msgspec.structs.replace(
    TWO_STAGES, checkpoint=NEVER, cluster=ClusterSection(hosts=2, start_timeout_s=30.0)
)


def test_before_a_step_is_undone_the_ranks_wait_for_a_lost_one_on_the_only_host_that_has_its_state() -> None:
    driven = begun(TWO_HOSTS)
    only_host_1_has_the_step(driven)
    fail_repairs(driven, REPAIR_ATTEMPTS)
    failed_at = driven.now
    driven.until(lambda: driven.now > failed_at + TWO_HOSTS.cluster.start_timeout_s / 2)
    assert not driven.asked(Repair) and driven.state.step == 1
    driven.unstartable = set()
    driven.until(Phase.ENDED)
    assert not [fact for fact in driven.facts if isinstance(fact, RolledBack)]
    assert outcome(driven.facts) == undisturbed(TWO_HOSTS)


def test_a_lost_rank_that_does_not_come_is_waited_for_once_and_then_the_step_is_undone() -> None:
    driven = begun(TWO_HOSTS)
    only_host_1_has_the_step(driven)
    fail_repairs(driven, REPAIR_ATTEMPTS)
    failed_at = driven.now
    fail_repairs(driven, REPAIR_ATTEMPTS)
    assert driven.now - failed_at > TWO_HOSTS.cluster.start_timeout_s
    assert [fact.step for fact in driven.facts if isinstance(fact, RolledBack)] == [0]
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == undisturbed(TWO_HOSTS)


def test_a_rank_that_joins_while_the_last_repair_fails_is_asked_before_a_step_is_undone() -> None:
    driven = begun(TWO_HOSTS)
    only_host_1_has_the_step(driven)
    fail_repairs(driven, REPAIR_ATTEMPTS - 1)
    driven.until(lambda: bool(driven.asked(Repair)))
    (repair,) = driven.asked(Repair)
    driven.hold(repair)
    driven.unstartable = set()
    driven.until(lambda: "model-1" in driven.state.members.live(Role.MODEL))
    driven.answer(repair)
    driven.until(Phase.ENDED)
    assert not [fact for fact in driven.facts if isinstance(fact, RolledBack)]
    assert outcome(driven.facts) == undisturbed(TWO_HOSTS)


def test_a_rank_that_had_no_address_of_a_source_is_sent_the_whole_book_and_its_failures_undo_no_step() -> (
    None
):
    config = msgspec.structs.replace(TWO_STAGES, checkpoint=NEVER)
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.lose("model-1")
    for _ in range(UNADDRESSED_ATTEMPTS):
        driven.until(lambda: bool(driven.asked(Repair)))
        (repair,) = driven.asked(Repair)
        decision = driven.fail(repair, "agent-1 is not in the address book", kind="UnknownPeer")
        assert ShareBook(lacking=("model-1",)) in decision.effects
    driven.until(Phase.ENDED)
    assert not [fact for fact in driven.facts if isinstance(fact, RolledBack)]
    assert [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)] == ["model-1"]
    assert outcome(driven.facts) == undisturbed(config)


def test_a_rank_that_never_gets_the_address_of_a_source_is_not_asked_for_ever() -> None:
    config = msgspec.structs.replace(TWO_STAGES, checkpoint=NEVER)
    driven = begun(config)
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.lose("model-1")
    for _ in range(UNADDRESSED_ATTEMPTS + REPAIR_ATTEMPTS):
        driven.until(lambda: bool(driven.asked(Repair)))
        (repair,) = driven.asked(Repair)
        driven.fail(repair, "agent-1 is not in the address book", kind="UnknownPeer")
    driven.until(Phase.ENDED)
    assert [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)] == ["model-1", "model-1"]
    assert outcome(driven.facts) == undisturbed(config)


def test_agents_are_told_now_and_then_to_which_steps_the_run_does_not_return() -> None:
    longer = msgspec.structs.replace(CONFIG.algorithm, steps=2 * FORGET_EVERY)
    driven = Driven(msgspec.structs.replace(CONFIG, algorithm=longer))
    driven.begin()
    driven.until(Phase.ENDED)
    told = [effect for effect in driven.effects if isinstance(effect, Tell)]
    forgotten = [(tell.to, tell.body.step) for tell in told if isinstance(tell.body, ForgetStates)]
    assert forgotten == [("agent-0", FORGET_EVERY - 1), ("agent-0", 2 * FORGET_EVERY - 1)]


def test_failures_of_earlier_steps_are_not_held_against_an_incident_that_stays_open() -> None:
    config = msgspec.structs.replace(
        CONFIG, algorithm=msgspec.structs.replace(CONFIG.algorithm, steps=MAX_ATTEMPTS + 2)
    )
    driven = Driven(config)
    driven.begin()
    driven.until(Phase.TRAINING)
    driven.unstartable = {"server-1"}
    driven.lose("server-1")
    for step in range(1, MAX_ATTEMPTS + 2):
        driven.until(Phase.TRAINING)
        driven.fail(driven.asked(RunCall)[0], "broken", kind="GroupBroken")
        driven.until(lambda step=step: driven.state.step == step)  # type: ignore[misc]
        assert driven.state.open_incident == 1
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_an_incident_tells_how_long_the_start_of_the_replacement_took() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    (start,) = driven.asked(StartProcess)
    driven.pass_time(0.5)
    driven.answer(start)
    driven.pass_time(3.0)
    driven.until(Phase.ENDED)
    _, (closed,) = incidents(driven)
    assert 0.5 <= closed.timing["start"] < 1.0


def test_what_a_recovery_had_asked_does_not_matter_while_it_pauses() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.fail(driven.asked(RunCall)[0], "broken", kind="GroupBroken")
    first, second = driven.asked(PreLock)
    driven.fail(first, "broken", kind="GroupBroken")
    assert driven.asked(PreLock) == []
    assert not driven.master.pending.is_open(second.token)


@pytest.mark.parametrize("lost", ["model-0", "model-1"])
def test_a_group_meets_at_its_first_rank(lost: str) -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose(lost)
    driven.until(lambda: bool(driven.asked(RebuildGroup)))
    stores = {body.store for r in driven.asked(RebuildGroup) if isinstance(body := r.body, RebuildGroup)}
    assert stores == {"model-0"}


def test_ranks_give_each_other_up_before_the_master_gives_up_one_that_only_waits() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    driven.until(lambda: bool(driven.asked(RebuildGroup)))
    asked = [
        (r.body.timeout_s, r.deadline_s)
        for r in driven.asked(RebuildGroup)
        if isinstance(r.body, RebuildGroup)
    ]
    assert asked and all(meeting_s < deadline_s for meeting_s, deadline_s in asked)


@pytest.mark.parametrize("rank", ["model-0", "model-1"])
def test_the_last_checkpoint_is_asked_of_who_made_the_mistake_known_for_the_others_may_wait_for_it(
    rank: str,
) -> None:
    driven = Driven(msgspec.structs.replace(CONFIG, checkpoint=NEVER))
    driven.begin()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    (call,) = [request for request in driven.asked(RunCall) if request.to == rank]
    driven.fail(call, "no such column", kind="DataError")
    assert [request.to for request in driven.asked(Save)] == [rank]
    driven.until(Phase.ENDED)
    assert driven.state.saved_steps == [1]


def test_samples_of_a_step_are_let_go_also_when_a_rank_is_lost_while_the_others_adopt_it() -> None:
    driven = begun()
    driven.until(Phase.COMMITTING)
    trained = {
        sample_key(ticket, index)
        for ticket in driven.state.ledger.trained_in(driven.state.step)
        for index in range(driven.state.ledger.ticket(ticket).num_samples)
    }
    assert any(trained & kept for kept in driven.world.kept.values())
    driven.lose("model-1")
    assert driven.master.phase is Phase.RECOVERING
    assert not any(trained & kept for kept in driven.world.kept.values())
    driven.until(Phase.ENDED)
    assert outcome(driven.facts) == EXPECTED
