"""Runs of every shape of graph: whoever dies whenever, the steps are those of an undisturbed run."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import ActorSection, AlgorithmSection, Config, LayoutSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RecordStep, Tell
from kintsugi.journal.facts import (
    BatchFormed,
    EvaluationDone,
    FilterReason,
    RolledBack,
    StepCommitted,
    TicketFiltered,
    VersionCurrent,
)
from kintsugi.protocol.rollout import Drop, EpisodesDone, RunEpisodes
from kintsugi.protocol.training import EvaluatePairs, RunCall
from kintsugi.protocol.weights import Publish
from kintsugi.types import Role, SampleText, Ticket
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import outcome


def seldom_right(ticket: Ticket, index: int) -> float:
    """Two of three groups earn the same throughout."""
    return float(ticket.position % 3 == 2 and index == 0)


def with_algorithm(section: AlgorithmSection) -> Config:
    return msgspec.structs.replace(CONFIG, algorithm=msgspec.structs.replace(section, steps=2, batch_size=2))


CONFIGS = {
    "ppo": with_algorithm(AlgorithmSection(name="ppo", group_size=2)),
    "dapo": with_algorithm(AlgorithmSection(name="dapo", group_size=2, resampling_rounds=2)),
    "rloo": with_algorithm(AlgorithmSection(name="rloo", group_size=2, beta=0.1)),
    "reward_model": with_algorithm(AlgorithmSection(name="reward_model")),
}


def begun(name: str) -> Driven:
    driven = Driven(CONFIGS[name], num_eval_rows=3, rewards=seldom_right)
    driven.begin()
    return driven


def finished(name: str) -> Driven:
    driven = begun(name)
    driven.until(Phase.ENDED)
    return driven


def batches(driven: Driven) -> dict[int, tuple[str, ...]]:
    return {fact.step: fact.tickets for fact in driven.facts if isinstance(fact, BatchFormed)}


@pytest.mark.parametrize("process", ["model-1", "rollout-0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_process_that_dies_at_any_moment_changes_no_step(name: str, process: str) -> None:
    expected = outcome(finished(name).facts)
    for number in range(0, 1000, 2):
        driven = begun(name)
        driven.until(Phase.PREPARING)
        for _ in range(number):
            driven.go_on()
        if driven.master.phase is Phase.ENDED:
            break
        driven.lose(process)
        driven.until(Phase.ENDED)
        assert outcome(driven.facts) == expected, f"after {number} answers"
    assert number > 30


@pytest.mark.parametrize("carried_out", [True, False], ids=["done", "never heard"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_master_that_dies_at_any_moment_changes_no_step(name: str, carried_out: bool) -> None:
    expected = outcome(finished(name).facts)
    driven = begun(name)
    for _number in range(1000):
        successor = driven.succeed(carried_out=carried_out)
        successor.take_over()
        successor.until(Phase.ENDED)
        assert outcome(successor.facts) == expected, f"{driven.master.phase}"
        if driven.master.phase is Phase.ENDED:
            break
        driven.answer(next(iter(driven.open.values())))


# Dynamic sampling.


def test_groups_with_equal_rewards_are_replaced_by_the_next_prompts_until_the_bound_is_reached() -> None:
    driven = finished("dapo")
    filtered = [fact for fact in driven.facts if isinstance(fact, TicketFiltered)]
    assert {fact.reason for fact in filtered} == {FilterReason.EQUAL_REWARDS}
    # At most 2 rounds × 2 groups per step: 0, 1, 3 and 4 go, 2 and 5 stay; then 6, 7, 9 and 10 (a term has ten rows,
    # and the second one begins again at 0).
    assert batches(driven) == {
        1: ("dapo:0:2:0", "dapo:0:5:0"),
        2: ("dapo:0:8:0", "dapo:1:1:0"),
    }
    assert [fact.ticket for fact in filtered][:4] == ["dapo:0:0:0", "dapo:0:1:0", "dapo:0:3:0", "dapo:0:4:0"]
    assert len(filtered) == 8


def test_past_the_bound_groups_with_equal_rewards_are_kept_and_counted() -> None:
    driven = finished("dapo")
    metrics = [fact.metrics for fact in driven.facts if isinstance(fact, StepCommitted)]
    counts = [(step["filtered_groups"], step["equal_reward_groups"]) for step in metrics]
    assert counts == [(4.0, 0.0), (4.0, 1.0)]
    assert [step["reissued_groups"] for step in metrics] == [0.0, 0.0]


def test_the_batch_does_not_depend_on_which_group_arrives_first() -> None:
    expected = batches(finished("dapo"))
    driven = begun("dapo")
    while driven.master.phase is not Phase.ENDED:
        groups = [request for request in driven.asked(RunEpisodes) if driven.world.is_alive(request.to)]
        if driven.master.phase is Phase.COLLECTING and groups:
            driven.answer(groups[-1])
        else:
            driven.go_on()
    assert batches(driven) == expected


def test_a_group_is_not_judged_before_all_older_ones_are_complete() -> None:
    driven = begun("dapo")
    driven.until(Phase.COLLECTING)
    oldest, *_, youngest = driven.asked(RunEpisodes)
    assert not [fact for fact in driven.answer(youngest).facts if isinstance(fact, TicketFiltered)]
    filtered = [fact.ticket for fact in driven.answer(oldest).facts if isinstance(fact, TicketFiltered)]
    assert filtered == ["dapo:0:0:0", "dapo:0:1:0"]


def test_more_filtered_groups_than_a_batch_has_are_no_failure_of_the_step() -> None:
    driven = finished("dapo")
    assert driven.state.outcome == "finished"
    assert driven.state.ledger.stage("dapo").num_failed == 0
    assert driven.state.ledger.stage("dapo").num_dropped == 8


def test_steps_that_are_undone_are_collected_again_with_the_same_groups() -> None:
    driven = begun("dapo")
    driven.until(lambda: driven.state.step == 2)
    expected = batches(driven)
    driven.state.apply(RolledBack(0, "the state is lost"))
    ledger = driven.state.ledger
    assert [ticket.id for ticket in ledger.issued_unassigned()] == [*expected[1], *expected[2]]
    assert len(ledger.dropped_in(1, reason=FilterReason.EQUAL_REWARDS)) == 4


def test_the_workers_are_told_to_let_filtered_groups_go_with_the_trained_ones() -> None:
    driven = begun("dapo")
    driven.until(lambda: driven.master.phase is Phase.PUBLISHING and driven.state.step == 1)
    told = [effect.body for effect in driven.effects if isinstance(effect, Tell)]
    dropped = [body.tickets for body in told if isinstance(body, Drop)]
    assert set(dropped[-1]) == {f"dapo:0:{position}:0" for position in range(6)}


def test_what_filtered_groups_said_is_not_kept_when_the_step_is_over() -> None:
    driven = begun("dapo")
    driven.until(Phase.COLLECTING)
    while driven.master.phase is Phase.COLLECTING:
        request = driven.asked(RunEpisodes)[0]
        done = driven.serve(request)
        assert isinstance(done, EpisodesDone)
        texts = {meta.key: SampleText("question", "answer") for meta in done.samples}
        driven.answer(request, msgspec.structs.replace(done, texts=texts))
    assert [fact for fact in driven.facts if isinstance(fact, TicketFiltered)]
    driven.until(Phase.PUBLISHING)
    (record,) = [effect for effect in driven.effects if isinstance(effect, RecordStep)]
    assert len(record.texts) == 4
    assert driven.master._dispatch._texts == {}


def test_algorithms_without_resampling_keep_groups_with_equal_rewards_and_count_them() -> None:
    driven = Driven(with_algorithm(AlgorithmSection(group_size=2)), rewards=seldom_right)
    driven.begin()
    driven.until(Phase.ENDED)
    metrics = [fact.metrics for fact in driven.facts if isinstance(fact, StepCommitted)]
    assert [step["equal_reward_groups"] for step in metrics] == [2.0, 1.0]
    assert not [fact for fact in driven.facts if isinstance(fact, TicketFiltered)]


# Several training calls.


def test_both_training_calls_of_ppo_are_under_way_at_once_and_one_step_comes_of_them() -> None:
    driven = begun("ppo")
    driven.until(lambda: len({_call(request.body) for request in driven.asked(RunCall)}) == 2)
    calls = {_call(request.body): request.body for request in driven.asked(RunCall)}
    assert list(calls) == ["actor_train", "critic_train"]
    driven.until(Phase.PUBLISHING)
    (committed,) = [fact for fact in driven.facts if isinstance(fact, StepCommitted)]
    assert {"loss", "critic_train_loss"} <= committed.metrics.keys()


def _call(body: object) -> str:
    assert isinstance(body, RunCall)
    return body.call


def test_a_samples_record_has_the_reward_that_it_learned_from() -> None:
    driven = finished("rloo")
    record = next(effect for effect in driven.effects if isinstance(effect, RecordStep))
    for meta in record.metas:
        kl = record.values[meta.key]["reference_kl"]
        assert meta.reward_components["kl"] == -0.1 * kl
        assert meta.reward == meta.reward_components["exact"] - 0.1 * kl
        assert "advantage" in record.values[meta.key]


# A reward model: nothing is sampled.


def test_a_reward_model_has_neither_servers_nor_manager_and_publishes_nothing() -> None:
    driven = finished("reward_model")
    roles = {member.role for member in driven.state.members.members.values()}
    assert roles == {Role.AGENT, Role.MODEL, Role.ROLLOUT}
    assert not [request for request in driven.effects if isinstance(getattr(request, "body", None), Publish)]
    assert [fact.version for fact in driven.facts if isinstance(fact, VersionCurrent)] == [0, 1, 2]


def test_the_ranks_share_the_held_out_pairs_and_their_verdicts_make_one_accuracy() -> None:
    driven = begun("reward_model")
    driven.until(Phase.EVALUATING)
    asked = [request.body for request in driven.asked(EvaluatePairs)]
    assert asked == [EvaluatePairs(0, 0, 2), EvaluatePairs(0, 2, 1)]
    driven.until(Phase.ENDED)
    evaluations = [fact for fact in driven.facts if isinstance(fact, EvaluationDone)]
    assert [fact.step for fact in evaluations] == [0, 2]
    assert {fact.metrics["eval/problems"] for fact in evaluations} == {3.0}


def test_of_ranks_that_rank_the_same_pairs_together_one_answer_counts() -> None:
    cut = ActorSection(workers=4, logical_shards=2, layout=LayoutSection(stages=2, tensors=2))
    driven = Driven(msgspec.structs.replace(CONFIGS["reward_model"], actor=cut), num_eval_rows=3)
    driven.begin()
    driven.until(Phase.EVALUATING)
    assert [request.body for request in driven.asked(EvaluatePairs)] == [EvaluatePairs(0, 0, 3)] * 4
    driven.until(lambda: any(isinstance(fact, EvaluationDone) for fact in driven.facts))
    evaluated = next(fact for fact in driven.facts if isinstance(fact, EvaluationDone))
    assert evaluated.metrics["eval/problems"] == 3.0


def test_a_rank_that_is_lost_while_it_ranks_pairs_is_mended_and_all_are_asked_again() -> None:
    driven = begun("reward_model")
    driven.until(Phase.EVALUATING)
    driven.answer(driven.asked(EvaluatePairs)[0])
    driven.lose("model-1")
    assert driven.asked(EvaluatePairs) == []
    driven.until(Phase.EVALUATING)
    assert [request.to for request in driven.asked(EvaluatePairs)] == ["model-0", "model-1"]
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
