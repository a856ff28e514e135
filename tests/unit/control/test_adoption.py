"""A master dies while the ranks work: they go on with what they do, and what they have done counts once."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kintsugi.config.schema import Config, CriticSection
from kintsugi.control.phases.adopt import AdoptedGroup, JournaledStep, find_group
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RequestFailed, StopRequested
from kintsugi.errors import Fault
from kintsugi.journal.facts import IncidentClosed, StepCommitted, StrategyChosen
from kintsugi.protocol.recovery import AskStanding, PreLock, RankReady, RankStanding
from kintsugi.protocol.training import CommitStep, RunCall
from kintsugi.recovery.rank import Flow
from kintsugi.recovery.strategy import Strategy
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import TWO_STAGES, begun, outcome, undisturbed
from tests.unit.control.test_takeover import finish, moments

EXPECTED = undisturbed()
PPO = msgspec.structs.replace(
    CONFIG,
    algorithm=msgspec.structs.replace(CONFIG.algorithm, name="ppo", steps=2, group_size=1),
    critic=CriticSection(),
)


def calls(driven: Driven) -> Counter[str]:
    return Counter({name: rank.num_calls for name, rank in driven.world.ranks.items()})


def operations(driven: Driven) -> Counter[str]:
    return Counter({name: len(rank.operations) for name, rank in driven.world.ranks.items()})


@pytest.mark.parametrize("config", [TWO_STAGES, PPO], ids=["grpo", "ppo"])
@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("carried_out", [True, False], ids=["done", "never heard"])
def test_no_call_is_run_twice_because_a_master_died(carried_out: bool, flow: Flow, config: Config) -> None:
    whole = begun(config, flow=flow)
    whole.until(Phase.ENDED)
    phases: Counter[Phase] = Counter()
    for number, driven in moments(begun(config, flow=flow)):
        phases[driven.master.phase] += 1
        successor = driven.succeed(carried_out=carried_out)
        finish(successor)
        assert outcome(successor.facts) == outcome(whole.facts), f"after answer {number}"
        assert calls(successor) == calls(whole), f"after answer {number}, {driven.master.phase}"
    assert phases[Phase.TRAINING] > 2


def test_a_master_that_dies_after_one_rank_has_answered_and_the_other_has_not_begun_loses_nothing() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    first, second = driven.asked(RunCall)
    driven.serve(first)
    before = calls(driven)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    successor.until(lambda: successor.state.step == 2)
    assert calls(successor) - before == Counter({second.to: 1})


def test_ranks_that_are_taken_over_carry_out_no_operation_of_recovery() -> None:
    interrupted: Counter[Phase] = Counter()
    for _, driven in moments(begun()):
        if driven.master.phase in (Phase.STARTING, Phase.PREPARING, Phase.RECOVERING):
            continue
        successor = driven.succeed(carried_out=True)
        before = operations(successor)
        finish(successor)
        assert operations(successor) == before, driven.master.phase
        interrupted[driven.master.phase] += 1
    assert interrupted[Phase.TRAINING] and interrupted[Phase.PUBLISHING] and interrupted[Phase.SAVING]


def test_a_commit_that_not_every_rank_has_received_is_sent_again_before_anything_else() -> None:
    driven = begun()
    driven.until(Phase.COMMITTING)
    first, second = driven.asked(CommitStep)
    driven.serve(first)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    for request in successor.asked(AskStanding):
        successor.answer(request)
    (again,) = successor.asked(CommitStep)
    assert (again.to, again.body, successor.master.phase) == (second.to, CommitStep(1), Phase.ADOPTING)
    successor.until(Phase.ENDED)
    assert outcome(successor.facts) == EXPECTED


def test_a_takeover_without_interruption_is_an_incident_with_the_strategy_continue() -> None:
    driven = begun()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    finish(successor)
    (chosen,) = [fact for fact in successor.facts if isinstance(fact, StrategyChosen)]
    (closed,) = [fact for fact in successor.facts if isinstance(fact, IncidentClosed)]
    assert (chosen.strategy, closed.outcome) == (Strategy.CONTINUE, Strategy.CONTINUE)


def test_a_rank_that_does_not_answer_where_it_stands_makes_the_ranks_recover() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    (asked, _) = successor.asked(AskStanding)
    del successor.open[asked.token]
    late = Fault("late", "DeadlineExceeded", asked.to, "no answer", 0.0)
    successor.feed(RequestFailed(asked.token, asked.to, late))
    assert successor.master.phase is Phase.RECOVERING and successor.asked(PreLock)
    successor.until(Phase.ENDED)
    assert outcome(successor.facts) == EXPECTED


def test_a_rank_that_is_lost_while_the_others_say_where_they_stand_is_replaced() -> None:
    driven = begun()
    driven.until(lambda: driven.state.step == 1 and driven.master.phase is Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    assert successor.asked(AskStanding)
    successor.lose("model-1")
    assert successor.master.phase is Phase.RECOVERING
    successor.until(Phase.ENDED)
    assert outcome(successor.facts) == EXPECTED


def test_a_stop_after_a_step_that_was_continued_ends_the_run_with_its_checkpoint() -> None:
    """The servers have loaded no version under this master when the stop arrives."""
    never = msgspec.structs.replace(TWO_STAGES.checkpoint, every=0)
    driven = begun(msgspec.structs.replace(TWO_STAGES, checkpoint=never))
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    successor.until(lambda: any(isinstance(fact, StepCommitted) for fact in successor.facts))
    assert successor.state.version < 0 and not successor.state.open_incident
    successor.feed(StopRequested("SIGTERM"))
    successor.until(Phase.ENDED)
    assert (successor.state.outcome, successor.state.saved_steps) == ("stopped", [1])


JOURNAL = JournaledStep(3, "d3", "main", "main", has_batch=True)
READY = RankReady(3, "d3", generation=5, stage="main")
GROUP = ("model-0", "model-1")
IDLE = RankStanding(READY, GROUP, is_normal=True)
BUSY = msgspec.structs.replace(IDLE, call_step=4)


def ready(**changes: object) -> RankStanding:
    return msgspec.structs.replace(IDLE, ready=msgspec.structs.replace(READY, **changes))


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (IDLE, AdoptedGroup(GROUP, 5, "main", (), None)),
        (BUSY, AdoptedGroup(GROUP, 5, "main", (), (0, 1))),
        (msgspec.structs.replace(BUSY, blocks=(1, 0)), AdoptedGroup(GROUP, 5, "main", (), (1, 0))),
        (ready(prepared_step=4), AdoptedGroup(GROUP, 5, "main", (), None)),
        (
            ready(step=2, state_digest="d2", prepared_step=3),
            AdoptedGroup(GROUP, 5, "main", ("model-1",), None),
        ),
    ],
    ids=["idle", "busy", "placed", "prepared", "missed the commit"],
)
def test_ranks_of_one_group_at_the_step_of_the_journal_are_taken_over(
    second: RankStanding, expected: AdoptedGroup
) -> None:
    assert find_group({"model-0": IDLE, "model-1": second}, journal=JOURNAL) == expected


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (msgspec.structs.replace(IDLE, ranks=()), "generation"),
        (msgspec.structs.replace(IDLE, is_normal=False), "recovery"),
        (ready(half_updated=True), "interrupted"),
        (ready(generation=6), "generation 6"),
        (ready(step=2), "is at step 2"),
        (ready(step=4), "is at step 4"),
        (ready(state_digest="other"), "has state other"),
        (ready(stage="another"), "carries stage 'another'"),
    ],
)
def test_a_rank_that_differs_makes_all_of_them_recover(second: RankStanding, says: str) -> None:
    found = find_group({"model-0": IDLE, "model-1": second}, journal=JOURNAL)
    assert isinstance(found, str) and says in found


def test_ranks_that_have_begun_with_different_shards_recover() -> None:
    other = msgspec.structs.replace(BUSY, blocks=(1, 0))
    found = find_group({"model-0": BUSY, "model-1": other}, journal=JOURNAL)
    assert found == "the ranks have begun the step with different shards"


def test_a_step_whose_batch_is_not_in_the_journal_is_not_continued() -> None:
    """Facts that were not durable are lost with the power, while the ranks live on."""
    lost = msgspec.structs.replace(JOURNAL, has_batch=False)
    for standing in (BUSY, ready(prepared_step=4)):
        found = find_group({"model-0": standing, "model-1": standing}, journal=lost)
        assert isinstance(found, str) and "has begun step 4" in found


def test_ranks_without_a_group_and_ranks_that_are_not_in_it_recover() -> None:
    alone = msgspec.structs.replace(IDLE, ranks=("model-0",))
    assert "not formed" in str(
        find_group({"model-0": msgspec.structs.replace(IDLE, ranks=())}, journal=JOURNAL)
    )
    assert isinstance(find_group({"model-0": alone, "model-1": alone}, journal=JOURNAL), str)
