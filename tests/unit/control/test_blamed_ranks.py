"""Which ranks are replaced when an operation or a call fails at a live rank."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import CheckpointSection
from kintsugi.control.phases.recover import LONGEST_WAIT_S, REPAIR_ATTEMPTS
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Decision, Raise
from kintsugi.journal.facts import IncidentClosed, ProcessLost, RolledBack, StrategyChosen
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.protocol.recovery import PreLock, RankReady, Repair, Rollback
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.protocol.training import RunCall
from kintsugi.recovery.rank import Operation
from kintsugi.recovery.strategy import impact
from tests.unit.control.driven import CONFIG, Driven


def training(*, step: int = 0) -> Driven:
    driven = Driven()
    driven.begin()
    driven.until(lambda: driven.state.step == step and driven.master.phase is Phase.TRAINING)
    return driven


def fail_calls(driven: Driven, *, kind: str, times: int) -> None:
    for _ in range(times):
        driven.until(lambda: bool(driven.asked(RunCall)))
        driven.fail(driven.asked(RunCall)[0], "it did not work", kind=kind)


def replaced(driven: Driven) -> list[str]:
    return [fact.process for fact in driven.facts if isinstance(fact, ProcessLost)]


@pytest.mark.parametrize(
    ("kind", "times", "processes"),
    [
        ("DeviceError", 1, ["model-0"]),
        ("DeadlineExceeded", 1, ["model-0"]),
        ("RuntimeError", 1, []),
        ("RuntimeError", 2, ["model-0"]),
        ("GroupBroken", 3, []),
    ],
)
def test_a_broken_device_or_link_is_replaced_at_once_software_the_second_time_and_a_witness_never(
    kind: str, times: int, processes: list[str]
) -> None:
    driven = training()
    fail_calls(driven, kind=kind, times=times)
    driven.until(Phase.ENDED)
    assert (replaced(driven), driven.state.outcome) == (processes, "finished")


def test_repairs_that_were_not_answered_in_time_cost_no_step() -> None:
    driven = training(step=1)
    driven.lose("model-1")
    for _ in range(REPAIR_ATTEMPTS):
        driven.until(lambda: bool(driven.asked(Repair)))
        driven.fail(driven.asked(Repair)[0], "no answer", kind="DeadlineExceeded")
    driven.until(Phase.ENDED)
    assert not any(isinstance(fact, RolledBack) for fact in driven.facts)
    assert driven.state.outcome == "finished"


def test_people_hear_of_a_loss_and_what_it_means_and_not_of_a_failure_that_is_repeated() -> None:
    driven = training()
    alerts = [effect.message for effect in driven.lose("model-1").effects if isinstance(effect, Raise)]
    assert len(alerts) == 1 and alerts[0].endswith(impact(["model-1"]))
    driven = training()
    call = driven.asked(RunCall)[0]
    assert not any(isinstance(e, Raise) for e in driven.fail(call, "again", kind="RuntimeError").effects)


def test_an_incident_is_over_though_a_rank_is_missing_where_the_others_go_on_without_it() -> None:
    driven = training()
    driven.unstartable = {"model-1"}
    driven.lose("model-1")
    driven.until(lambda: driven.state.step == 1)
    (closed,) = [fact for fact in driven.facts if isinstance(fact, IncidentClosed)]
    assert (closed.outcome, closed.processes, closed.step) == ("elastic", ("model-1",), 1)


def test_an_incident_is_not_over_while_another_process_is_missing() -> None:
    driven = training()
    driven.unstartable = {"server-1"}
    driven.lose("server-1")
    driven.until(lambda: driven.state.step == 1)
    assert not any(isinstance(fact, IncidentClosed) for fact in driven.facts)
    driven.unstartable = set()
    driven.until(lambda: driven.state.step == 2 or driven.state.open_incident == 0)
    driven.until(Phase.ENDED)
    (closed,) = [fact for fact in driven.facts if isinstance(fact, IncidentClosed)]
    assert closed.processes == ("server-1",)


def test_where_no_rank_is_left_replacements_have_as_long_as_at_the_start() -> None:
    driven = training(step=1)
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    for start in driven.asked(StartProcess):
        del driven.open[start.token]
    driven.pass_time(CONFIG.cluster.start_timeout_s - 1.0)
    assert CONFIG.cluster.start_timeout_s > 2 * LONGEST_WAIT_S
    assert driven.master.phase is Phase.RECOVERING
    driven.pass_time(2.0)
    driven.let_grace_pass()
    chosen = [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)]
    assert (chosen[-1], driven.state.outcome) == ("exit", "failed")


@pytest.mark.parametrize(
    ("wrong", "ended"), [(("model-1",), ["model-1"]), (("model-0", "model-1"), ["model-0"])]
)
def test_ranks_whose_state_is_not_the_committed_one_are_replaced_but_never_all_of_them(
    wrong: tuple[str, ...], ended: list[str]
) -> None:
    driven = training(step=1)
    driven.fail(driven.asked(RunCall)[0], "a rank is gone", kind="GroupBroken")
    driven.until(lambda: len(driven.asked(Rollback)) == 2)
    for request in driven.asked(Rollback):
        said = driven.serve(request)
        assert isinstance(said, RankReady)
        if request.to in wrong:
            said = msgspec.structs.replace(said, state_digest="another")
        driven.answer(request, said)
    driven.until(Phase.ENDED)
    losses = [fact for fact in driven.facts if isinstance(fact, ProcessLost)]
    assert [fact.process for fact in losses] == ended
    assert {fact.fault.cause.kind for fact in losses if fact.fault.cause} == {"IntegrityError"}
    assert driven.state.outcome == "finished"


def test_groups_that_run_for_a_step_that_is_given_up_are_not_waited_for_and_run_again_in_their_turn() -> None:
    driven = Driven(msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every=0)))
    driven.begin()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.COLLECTING)
    running = driven.asked(RunEpisodes)
    assert running
    driven.world.snapshots = {host: {} for host in driven.world.snapshots}
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    while not any(isinstance(fact, RolledBack) for fact in driven.facts):
        other = next((r for r in driven.open.values() if not isinstance(r.body, RunEpisodes)), None)
        driven.answer(other) if other is not None else driven.pass_time(0.2)
    assert not any(driven.master.pending.is_open(request.token) for request in running)
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def lose_all_ranks(driven: Driven) -> None:
    for rank in ("model-0", "model-1"):
        driven.lose(rank)


def fail_repairs(driven: Driven) -> Decision:
    """Nobody has the state: gives the decision that follows when both ranks have said so."""
    driven.until(lambda: len(driven.asked(Repair)) == 2)
    decisions = [driven.fail(r, "nobody has it", kind="RefusedError") for r in driven.asked(Repair)]
    return decisions[-1]


def test_after_the_run_fell_back_repairs_have_all_their_attempts_and_begin_at_once_again() -> None:
    driven = Driven(msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every=0)))
    driven.begin()
    driven.until(lambda: driven.state.step == 2 and driven.master.phase is Phase.TRAINING)
    lose_all_ranks(driven)
    for step in (1, 0):
        for attempt in range(1, REPAIR_ATTEMPTS + 1):
            decision = fail_repairs(driven)
            back = [fact.step for fact in decision.facts if isinstance(fact, RolledBack)]
            assert back == ([step] if attempt == REPAIR_ATTEMPTS else [])
            assert bool(driven.asked(PreLock)) == (attempt != 2)
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_a_step_whose_own_checkpoint_did_not_help_is_given_up_for_the_one_before() -> None:
    driven = training(step=2)
    assert driven.state.saved_steps[-1] == 2
    lose_all_ranks(driven)
    for _ in range(REPAIR_ATTEMPTS):
        fail_repairs(driven)
    assert [fact.step for fact in driven.facts if isinstance(fact, RolledBack)] == [1]
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_when_the_run_returns_to_its_beginning_ranks_that_have_begun_are_replaced_and_people_hear_of_it() -> (
    None
):
    driven = Driven(msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every=0)))
    driven.begin()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.fail(driven.asked(RunCall)[0], "broken", kind="GroupBroken")
    astray = RankReady(7, "of no step that counts", stage="grpo")
    while not any(isinstance(fact, RolledBack) for fact in driven.facts):
        request = next(iter(driven.open.values()), None)
        if request is None:
            driven.pass_time(0.2)
        elif isinstance(request.body, Repair):
            driven.fail(request, "nobody has it", kind="RefusedError")
        else:
            driven.answer(request, astray if isinstance(request.body, Operation) else None)
    told = [effect.message for effect in driven.effects if isinstance(effect, Raise)]
    assert "back to step 0: the state of later steps is lost" in told
    stopped = {r.body.process for r in driven.asked(StopProcess) if isinstance(r.body, StopProcess)}
    assert stopped == {"model-0", "model-1"}


def test_a_run_of_which_no_readable_state_is_left_is_given_up_with_that_reason() -> None:
    longer = msgspec.structs.replace(CONFIG.algorithm, steps=5)
    driven = Driven(msgspec.structs.replace(CONFIG, algorithm=longer))
    driven.begin()
    driven.until(lambda: driven.state.step == 3 and driven.master.phase is Phase.TRAINING)
    lose_all_ranks(driven)
    for _ in range(2 * REPAIR_ATTEMPTS):
        fail_repairs(driven)
    assert [fact.step for fact in driven.facts if isinstance(fact, RolledBack)] == [2]
    chosen = [fact.reason for fact in driven.facts if isinstance(fact, StrategyChosen)]
    assert "no readable state is left of any step that the run still knows" in chosen[-1]
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "failed"
