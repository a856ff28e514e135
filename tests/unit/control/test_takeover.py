"""A master dies after any of its decisions, and the next one finishes the run from the journal as if nothing was."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kintsugi.config.schema import CheckpointSection, ClusterSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Admit, Finish, ShareBook, StopRequested, Tell
from kintsugi.journal.facts import IncidentClosed, IncidentOpened, StopAccepted, StrategyChosen, TermStarted
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.protocol.recovery import PreLock
from kintsugi.protocol.rollout import Drop
from kintsugi.recovery.rank import Flow
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import TWO_STAGES, begun, outcome, undisturbed

EXPECTED = undisturbed()


def moments(driven: Driven) -> Iterator[tuple[int, Driven]]:
    """A run that is driven to its end, after each answer on the way."""
    for number in range(1000):
        yield number, driven
        if driven.master.phase is Phase.ENDED:
            return
        driven.answer(next(iter(driven.open.values())))


def finish(successor: Driven) -> None:
    successor.take_over()
    successor.until(Phase.ENDED)


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("carried_out", [True, False], ids=["done", "never heard"])
def test_whenever_a_master_dies_the_next_one_ends_the_run_with_the_same_steps(
    carried_out: bool, flow: Flow
) -> None:
    for number, driven in moments(begun(flow=flow)):
        successor = driven.succeed(carried_out=carried_out)
        finish(successor)
        assert outcome(successor.facts) == EXPECTED, f"after answer {number}, {driven.master.phase}"
    assert number > 40


def test_a_master_that_dies_after_a_save_is_followed_where_only_one_checkpoint_is_kept() -> None:
    checkpoint = CheckpointSection(every=1, keep=1)
    config = msgspec.structs.replace(TWO_STAGES, checkpoint=checkpoint)
    saved = set()
    for number, driven in moments(begun(config)):
        successor = driven.succeed(carried_out=True)
        finish(successor)
        assert outcome(successor.facts) == EXPECTED, f"after answer {number}, {driven.master.phase}"
        saved.add(driven.state.step in driven.state.saved_steps)
    assert saved == {True, False}


def test_a_successor_that_dies_at_any_moment_of_its_recovery_is_followed_as_well() -> None:
    seen: set[Phase] = set()
    for _, driven in moments(begun()):
        if driven.master.phase in seen:
            continue
        seen.add(driven.master.phase)
        first = driven.succeed(carried_out=True)
        first.take_over()
        for number, second in moments(first):
            third = second.succeed(carried_out=number % 2 == 0)
            finish(third)
            assert outcome(third.facts) == EXPECTED, f"{driven.master.phase}, then {second.master.phase}"
            if second.master.phase not in (Phase.STARTING, Phase.PREPARING, Phase.RECOVERING):
                break
    assert len(seen) > 7


@pytest.mark.parametrize("process", ["model-0", "model-1", "rollout-0", "manager-0", "server-1"])
@pytest.mark.parametrize("carried_out", [True, False], ids=["done", "never heard"])
def test_whoever_dies_with_the_master_is_replaced_by_the_next_one(process: str, carried_out: bool) -> None:
    num_deaths = 0
    for number, driven in moments(begun()):
        successor = driven.succeed(carried_out=carried_out)
        if successor.world.kill(process) is None:
            continue
        num_deaths += 1
        finish(successor)
        assert outcome(successor.facts) == EXPECTED, f"after answer {number}, {driven.master.phase}"
    assert num_deaths > 30


def test_all_ranks_may_die_with_the_master_as_long_as_their_agents_hold_the_snapshots() -> None:
    for number, driven in moments(begun()):
        successor = driven.succeed(carried_out=True)
        for rank in list(successor.world.ranks):
            successor.world.kill(rank)
        finish(successor)
        assert outcome(successor.facts) == EXPECTED, f"after answer {number}, {driven.master.phase}"


def test_processes_that_report_before_their_agents_are_adopted_as_well() -> None:
    for number, driven in moments(begun()):
        successor = driven.succeed(carried_out=False)
        successor.take_over(agents_first=False)
        successor.until(Phase.ENDED)
        assert outcome(successor.facts) == EXPECTED, f"after answer {number}, {driven.master.phase}"


def test_a_new_master_admits_and_greets_everybody_of_its_journal_before_anybody_speaks() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    known = [member.peer for member in successor.state.members.members.values()]
    successor.take_over()
    admitted = [effect.peer for effect in successor.effects if isinstance(effect, Admit)]
    assert admitted[: len(known)] == known and len(known) == 8
    assert any(isinstance(effect, ShareBook) for effect in successor.effects)
    assert successor.asked(StartProcess) == []
    assert [fact.adopting for fact in successor.facts if isinstance(fact, TermStarted)] == [False, True]


def test_a_take_over_is_an_incident_that_is_over_with_the_next_step() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    finish(successor)
    (opened,) = [fact for fact in successor.facts if isinstance(fact, IncidentOpened)]
    (closed,) = [fact for fact in successor.facts if isinstance(fact, IncidentClosed)]
    assert (opened.fault.process, closed.processes, closed.step) == ("master-0", ("master-0",), 1)


@pytest.mark.parametrize(("carried_out", "step"), [(True, 0), (False, 1)], ids=["done", "never heard"])
def test_a_stop_that_was_accepted_is_obeyed_by_the_next_master(carried_out: bool, step: int) -> None:
    """After the step that the ranks are in, which counts; a step that no rank has begun is not trained."""
    never = msgspec.structs.replace(TWO_STAGES.checkpoint, every=0)
    driven = begun(msgspec.structs.replace(TWO_STAGES, checkpoint=never))
    driven.until(lambda: driven.state.step == step and driven.master.phase is Phase.TRAINING)
    driven.feed(StopRequested("SIGTERM"))
    successor = driven.succeed(carried_out=carried_out)
    finish(successor)
    assert outcome(successor.facts).ended[0] == "stopped"
    assert len([fact for fact in successor.facts if isinstance(fact, StopAccepted)]) == 1
    assert (successor.state.step, successor.state.saved_steps) == (1, [1])


def test_who_hangs_as_it_starts_under_a_new_master_is_replaced_and_does_not_end_the_run() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose("server-1")
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    for _ in range(int(CONFIG.cluster.start_timeout_s) + 1):
        for start in successor.asked(StartProcess):  # It is started, and nobody hears of it.
            del successor.open[start.token]
        successor.pass_time(1.0)
    assert successor.master.phase is Phase.STARTING and successor.asked(StopProcess)
    successor.until(Phase.ENDED)
    assert outcome(successor.facts) == EXPECTED


def test_a_master_that_dies_after_the_end_is_followed_by_one_that_only_says_goodbye() -> None:
    driven = begun()
    driven.until(Phase.ENDED)
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    assert successor.master.phase is Phase.ENDED
    assert successor.facts == driven.facts
    assert [effect.outcome for effect in successor.effects if isinstance(effect, Finish)] == ["finished"]


def test_a_host_that_died_with_the_master_loses_no_step() -> None:
    """Its agent is back without children; what its ranks held is with the ranks of the other host."""
    config = msgspec.structs.replace(TWO_STAGES, cluster=ClusterSection(hosts=2))
    expected = undisturbed(config)
    for number, driven in moments(begun(config)):
        successor = driven.succeed(carried_out=True)
        for process in list(successor.world.children["host-1"]):
            successor.world.kill(process)
        successor.world.snapshots["host-1"] = {}
        finish(successor)
        assert outcome(successor.facts) == expected, f"after answer {number}, {driven.master.phase}"


def test_an_heir_finishes_what_its_predecessor_was_mending_as_one_incident() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    driven.lose("model-1")
    successor = driven.succeed(carried_out=True)
    finish(successor)
    (opened,) = [fact for fact in successor.facts if isinstance(fact, IncidentOpened)]
    (closed,) = [fact for fact in successor.facts if isinstance(fact, IncidentClosed)]
    assert opened.incident == closed.incident
    assert set(closed.processes) == {"model-1", "master-0"}


def test_an_heir_tells_the_workers_again_which_samples_are_trained() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.COMMITTING)
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    dropped = [(e.to, e.body) for e in successor.effects if isinstance(e, Tell) and isinstance(e.body, Drop)]
    trained = Drop(driven.state.ledger.trained_in(1))
    assert trained.tickets
    assert dropped == [("rollout-0", trained), ("rollout-1", trained)]


def test_a_rank_that_died_with_the_master_is_recovered_and_not_only_tried_again() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    driven.lose("model-1")
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    for request in successor.asked(PreLock):
        successor.answer(request)
    chosen = [fact.strategy for fact in successor.facts if isinstance(fact, StrategyChosen)]
    assert chosen == ["recover"]


def test_a_start_that_fails_once_under_a_new_master_before_the_first_step_is_tried_again() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    assert driven.state.step == 0
    driven.lose("rollout-1")
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    assert successor.master.phase is Phase.STARTING
    assert successor.asked(PreLock) == [], "the ranks come together when everybody is there"
    (start,) = successor.asked(StartProcess)
    successor.fail(start, "no memory", kind="WorldError")
    successor.until(Phase.ENDED)
    assert successor.state.outcome == "finished"
