from __future__ import annotations

import math

import msgspec
import pytest

from kintsugi.config.schema import (
    AlgorithmSection,
    AsynchronySection,
    Config,
    EvaluationSection,
    GenerationSection,
    RewardModelSection,
    WarmupSection,
)
from kintsugi.config.stages import stages
from kintsugi.control.due import (
    carried_stage,
    evaluation_is_due,
    is_last,
    most_tokens,
    save_is_due,
    steps_ahead,
)
from kintsugi.control.state import MasterState
from kintsugi.control.step_metrics import alerts, commit_record, group_counts, slowest, with_final_rewards
from kintsugi.errors import Fault
from kintsugi.journal.facts import CheckpointFailed, CheckpointSaved, EvaluationDone, PaceChanged
from kintsugi.protocol.training import CallDone
from kintsugi.samples.ledger import Ledger
from kintsugi.types import Ticket
from tests.unit.control.driven import CONFIG, new_state, scored

FAULT = Fault("a", "StorageError", "model-0", "disk full", 0.0)


def configured(*, steps: int = 6, warmup: int = 0, every: int = 0, save_every: int = 0) -> Config:
    return msgspec.structs.replace(
        CONFIG,
        algorithm=msgspec.structs.replace(CONFIG.algorithm, steps=steps),
        warmup=WarmupSection(steps=warmup) if warmup else None,
        eval=msgspec.structs.replace(CONFIG.eval, every=every),
        checkpoint=msgspec.structs.replace(CONFIG.checkpoint, every=save_every),
    )


def at(step: int) -> MasterState:
    state = new_state()
    state.step = step
    return state


def evaluated_steps(config: Config) -> list[int]:
    steps = range(stages(config)[-1].last_step + 1)
    return [step for step in steps if evaluation_is_due(config, at(step))]


def saved_steps(config: Config, *, stopping: bool = False) -> list[int]:
    """Of a run in which every save ends before the next step."""
    state, saved = at(0), []
    for state.step in range(8):
        if save_is_due(config, state, stopping=stopping, is_saving=False):
            saved.append(state.step)
            state.saved_steps.append(state.step)
    return saved


def test_evaluations_are_due_before_and_after_the_main_stage_and_every_so_many_steps_of_it() -> None:
    assert evaluated_steps(configured()) == [0, 6]
    assert evaluated_steps(configured(every=2)) == [0, 2, 4, 6]
    assert evaluated_steps(configured(every=4)) == [0, 4, 6]
    assert evaluated_steps(configured(warmup=3)) == [3, 9]
    assert evaluated_steps(configured(warmup=3, every=2)) == [3, 5, 7, 9]


def test_a_run_of_no_steps_is_evaluated_where_it_starts() -> None:
    assert evaluation_is_due(configured(steps=0), at(0))


def test_a_step_is_evaluated_once() -> None:
    state = at(0)
    state.apply(EvaluationDone(0, 0, "grpo", {"eval/accuracy": 0.5}))
    assert not evaluation_is_due(configured(), state)


def test_saves_are_due_every_so_many_steps_at_the_end_and_before_a_stop_but_not_before_the_first_step() -> (
    None
):
    assert saved_steps(configured()) == [6, 7]
    assert saved_steps(configured(save_every=4)) == [4, 6, 7]
    assert saved_steps(configured(), stopping=True) == [1, 2, 3, 4, 5, 6, 7]


def test_a_step_that_is_saved_or_whose_save_failed_is_not_saved_again() -> None:
    state = at(6)
    state.apply(CheckpointSaved(6, "step-6", "digest"))
    assert not save_is_due(configured(), state, stopping=True, is_saving=False)
    state = at(6)
    state.apply(CheckpointFailed(6, FAULT))
    assert not save_is_due(configured(), state, stopping=True, is_saving=False)
    state.step = 5
    assert save_is_due(configured(), state, stopping=True, is_saving=False)


def test_a_save_that_was_lost_or_had_to_wait_is_made_up_for_after_a_later_step() -> None:
    config = configured(steps=40, save_every=4)

    def due_at(state: MasterState, *, is_saving: bool) -> list[int]:
        found = []
        for state.step in range(4, 13):
            if save_is_due(config, state, stopping=False, is_saving=is_saving):
                found.append(state.step)
        return found

    assert due_at(at(0), is_saving=True) == [], "one save at a time"
    assert due_at(at(0), is_saving=False) == list(range(4, 13)), "until one is under way or has ended"
    late = at(9)
    late.apply(CheckpointSaved(9, "folder", "digest"))
    assert due_at(late, is_saving=False) == [12]
    failed = at(4)
    failed.apply(CheckpointFailed(4, FAULT))
    assert due_at(failed, is_saving=False) == [8, 9, 10, 11, 12]


def test_the_last_save_is_due_even_while_another_is_under_way() -> None:
    config = configured(steps=6, save_every=4)
    assert save_is_due(config, at(6), stopping=False, is_saving=True)
    assert save_is_due(config, at(5), stopping=True, is_saving=True)


def test_a_step_carries_the_optimizer_of_the_stage_that_it_ended() -> None:
    config = configured(warmup=3)
    names = [carried_stage(config, step=step).name for step in (0, 3, 4, 9, 10)]
    assert names == ["warmup", "warmup", "grpo", "grpo", "grpo"]
    assert [is_last(config, step=step) for step in (8, 9, 10)] == [False, True, True]


@pytest.mark.parametrize("ratio", [1.01, 0.99, math.nan, math.inf, -math.inf])
def test_a_mean_ratio_other_than_one_raises_an_alert_with_its_value(ratio: float) -> None:
    (alert,) = alerts({"ratio_mean": ratio})
    assert "ratio" in alert.message
    assert alert.values["ratio_mean"] == ratio or math.isnan(ratio)


def test_where_samples_may_be_stale_no_ratio_is_expected() -> None:
    assert alerts({"ratio_mean": 1.5}, off_policy=True) == []


def test_a_skipped_update_raises_an_alert_and_an_ordinary_step_none() -> None:
    assert [alert.values for alert in alerts({"ratio_mean": 1.0, "skipped": 1.0})] == [{"skipped": 1.0}]
    assert alerts({"ratio_mean": 1.0005, "skipped": 0.0, "loss": -3.0}) == alerts({}) == []


def test_a_commits_record_has_the_ranks_metrics_the_batchs_totals_and_the_time() -> None:
    batch = scored(Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 4), version=2).samples
    demonstrated = scored(Ticket("grpo:0:1:0", "grpo", 0, 1, 0, 1), version=-1).samples
    record = commit_record([*batch, *demonstrated], {"loss": 0.5}, {"training": 2.0})
    assert record == {
        "loss": 0.5,
        "samples": 5.0,
        "tokens_trained": 40.0,
        "tokens_generated": 16.0,
        "reward_mean": 0.4,
        "timing/training": 2.0,
    }


def test_the_time_of_a_part_is_that_of_the_slowest_rank_added_up_over_the_calls() -> None:
    answers = {
        "model-0": CallDone(1, "a", {}, {"forward": 1.0, "reduce": 0.5}),
        "model-1": CallDone(1, "a", {}, {"forward": 2.0, "fetch": 0.1}),
    }
    critic = {"model-0": CallDone(1, "a", {}, {"forward": 3.0})}
    assert slowest([answers]) == {"train_fetch": 0.1, "train_forward": 2.0, "train_reduce": 0.5}
    assert slowest([answers, critic])["train_forward"] == 5.0


def test_a_commits_record_of_rows_has_no_reward() -> None:
    rows = scored(Ticket("sft:0:1:0", "sft", 0, 1, 0, 1), version=-1).samples
    plain = [msgspec.structs.replace(meta, reward_components={}) for meta in rows]
    assert "reward_mean" not in commit_record(plain, {}, {})


def test_a_samples_final_reward_has_every_part_of_it_as_a_component() -> None:
    algorithm = AlgorithmSection(name="rloo", beta=0.5, overlong_buffer=2)
    model = RewardModelSection("folder", weight=3.0)
    (stage,) = stages(Config(name="a", algorithm=algorithm, reward_model=model))
    batch = scored(Ticket("rloo:0:0:0", "rloo", 0, 0, 0, 1), version=2).samples
    values = {batch[0].key: {"reward": -0.25, "score": 2.0, "reference_kl": 0.5, "mask": 1.0}}
    (meta,) = with_final_rewards(stage, batch, values)
    assert meta.reward_components == {"exact": 0.0, "overlong": -0.25, "reward_model": 6.0, "kl": -0.25}
    assert meta.reward == sum(meta.reward_components.values())


def test_rows_that_earn_nothing_stay_as_they_are() -> None:
    (stage,) = stages(Config(name="a", algorithm=AlgorithmSection(name="sft")))
    row = msgspec.structs.replace(
        scored(Ticket("sft:0:1:0", "sft", 0, 1, 0, 1), version=-1).samples[0], reward_components={}
    )
    assert with_final_rewards(stage, [row], {row.key: {"reward": 0.0}}) == (row,)


def test_groups_with_equal_rewards_are_counted_over_their_unmasked_samples() -> None:
    (stage,) = stages(CONFIG)
    values = {
        "a/0": {"reward": 1.0, "mask": 1.0},
        "a/1": {"reward": 0.0, "mask": 1.0},
        "b/0": {"reward": 1.0, "mask": 1.0},
        "b/1": {"reward": 1.0, "mask": 1.0},
        "c/0": {"reward": 1.0, "mask": 1.0},
        "c/1": {"reward": 0.0, "mask": 0.0},
    }
    counts = group_counts(stage, values, ledger=Ledger(), step=1)
    assert counts == {"equal_reward_groups": 2.0, "filtered_groups": 0.0, "reissued_groups": 0.0}


def test_where_samples_are_not_compared_only_replaced_groups_are_counted() -> None:
    for algorithm in (AlgorithmSection(name="sft"), AlgorithmSection(name="ppo", group_size=1)):
        (stage,) = stages(Config(name="a", algorithm=algorithm))
        values = {"a/0": {"reward": 0.0, "mask": 1.0}}
        assert group_counts(stage, values, ledger=Ledger(), step=1) == {"reissued_groups": 0.0}


@pytest.mark.parametrize(
    ("warmup_batch", "main_batch", "num_eval_rows", "most"),
    [(50, 3, 0, 50), (3, 50, 0, 100), (3, 5, 30, 90)],
)
def test_the_most_tokens_are_those_of_the_largest_step_or_evaluation(
    warmup_batch: int, main_batch: int, num_eval_rows: int, most: int
) -> None:
    config = Config(
        name="counted",
        algorithm=AlgorithmSection(steps=3, batch_size=main_batch, group_size=2),
        warmup=WarmupSection(steps=1, batch_size=warmup_batch),
        eval=EvaluationSection(num_samples=2),
        generation=GenerationSection(max_length=7),
    )
    assert most_tokens(config, num_eval_rows=num_eval_rows) == 7 * most


def test_rollout_never_runs_further_ahead_than_is_configured_whatever_the_pace_was() -> None:
    config = msgspec.structs.replace(CONFIG, asynchrony=AsynchronySection(max_staleness=2))
    state = new_state()
    assert steps_ahead(config, state) == 2
    for ahead, allowed in ((1, 1), (4, 2)):
        state.apply(PaceChanged(1, ahead, 64, "because"))
        assert steps_ahead(config, state) == allowed
