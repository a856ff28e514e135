from __future__ import annotations

import math

import msgspec
import pytest

from kintsugi.config import Config, WarmupSection, stages
from kintsugi.control.agenda import (
    alerts,
    carried_stage,
    commit_record,
    evaluation_is_due,
    is_last,
    save_is_due,
    slowest,
)
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault
from kintsugi.facts import CheckpointFailed, CheckpointSaved, EvaluationDone
from kintsugi.messages import CallDone
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
    return [step for step in range(8) if save_is_due(config, at(step), stopping=stopping)]


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
    assert not save_is_due(configured(), state, stopping=True)
    state = at(6)
    state.apply(CheckpointFailed(6, FAULT))
    assert not save_is_due(configured(), state, stopping=True)
    state.step = 5
    assert save_is_due(configured(), state, stopping=True)


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


def test_a_skipped_update_raises_an_alert_and_an_ordinary_step_none() -> None:
    assert [alert.values for alert in alerts({"ratio_mean": 1.0, "skipped": 1.0})] == [{"skipped": 1.0}]
    assert alerts({"ratio_mean": 1.0005, "skipped": 0.0, "loss": -3.0}) == alerts({}) == []


def test_a_commits_record_has_the_ranks_metrics_the_batchs_totals_and_the_time() -> None:
    batch = scored(Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 4), version=2).samples
    demonstrated = scored(Ticket("grpo:0:1:0", "grpo", 0, 1, 0, 1), version=-1).samples
    record = commit_record(
        [*batch, *demonstrated], {"model-0": CallDone(1, "a", {"loss": 0.5})}, {"training": 2.0}
    )
    assert record == {
        "loss": 0.5,
        "samples": 5.0,
        "tokens_trained": 40.0,
        "tokens_generated": 16.0,
        "reward_mean": 0.4,
        "timing/training": 2.0,
    }


def test_the_time_of_a_part_is_that_of_the_slowest_rank() -> None:
    answers = {
        "model-0": CallDone(1, "a", {}, {"forward": 1.0, "reduce": 0.5}),
        "model-1": CallDone(1, "a", {}, {"forward": 2.0, "fetch": 0.1}),
    }
    assert slowest(answers) == {"train_fetch": 0.1, "train_forward": 2.0, "train_reduce": 0.5}
