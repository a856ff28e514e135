from __future__ import annotations

import pytest

from kintsugi.cli.sample_check import _caveat, _lines, _remarks, _sampling_only
from kintsugi.config.recipe import load
from kintsugi.errors import UserError
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import FinishReason


def record(reward: float, *, completion: str = "15", finish: FinishReason = FinishReason.EOS) -> SampleRecord:
    return SampleRecord(1, "a", 0, 0, "12+39=", completion, reward, {"exact": reward}, finish, None, "15")


def test_the_run_that_samples_has_no_warmup_one_process_of_each_role_and_the_wanted_number_of_samples() -> (
    None
):
    config = _sampling_only(load("grpo_arithmetic"), count=8)
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.steps, config.warmup) == ("rollout", 1, None)
    assert algorithm.group_size is not None and algorithm.batch_size * algorithm.group_size == 8
    assert (config.actor.workers, config.generation.servers, config.rollout.workers) == (1, 1, 1)


def test_an_algorithm_that_samples_nothing_is_refused_with_its_name() -> None:
    with pytest.raises(UserError, match="`sft`, which learns from rows"):
        _sampling_only(load("sft_arithmetic"), count=8)


def test_samples_are_shown_with_reward_and_expected_answer() -> None:
    text = "\n".join(_lines([record(1.0), record(0.0, completion="7")]))
    assert "reward 0: '12+39=' → '7', expected '15'" in text
    assert "reward: 0.500 on average, from 0 to 1" in text
    assert list(_remarks([record(1.0), record(0.0, completion="7")])) == []


def test_a_reward_that_overlooks_the_answer_and_truncation_are_remarked() -> None:
    text = "\n".join(_remarks([record(0.0, finish=FinishReason.LENGTH)] * 2))
    assert "all of them are truncated" in text
    assert "all of them earn 0" in text
    assert "2 of them contain the expected answer" in text


def test_nothing_is_concluded_from_samples_of_random_weights_or_before_a_warm_up() -> None:
    (said,) = _caveat(load("grpo_arithmetic").config)
    assert "still lack 155 steps of warm-up" in said
    (said,) = _caveat(load("grpo_arithmetic", ["warmup=null"]).config)
    assert "the weights are random" in said
    assert _caveat(load("grpo_qwen_gsm8k").config) == []
