"""Advantages of groups against values computed by hand."""

import math

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config, RewardModelSection
from kintsugi.config.stages import Stage, stages
from kintsugi.graph.advantages import (
    MASTER_CALLS,
    STD_EPSILON,
    batch_totals,
    group_advantages,
    has_equal_rewards,
    initial_values,
    is_uninformative,
    leave_one_out,
    overlong_cost,
)
from kintsugi.types import FinishReason, SampleMeta, ShardItem


def stage_of(section: AlgorithmSection, *, reward_model: RewardModelSection | None = None) -> Stage:
    return stages(Config(name="x", algorithm=section, reward_model=reward_model))[0]


GRPO = stage_of(AlgorithmSection(name="grpo"))
MASKING = stage_of(AlgorithmSection(name="dr_grpo", mask_truncated=True))


def meta(
    ticket: str, index: int, reward: float, *, tokens: int = 3, finish: FinishReason = FinishReason.EOS
) -> SampleMeta:
    return SampleMeta(
        f"{ticket}/{index}", ticket, tokens + 2, tokens, reward, {"r": reward}, finish, 0, "rollout-0", ""
    )


def item(key: str, **values: float) -> ShardItem:
    return ShardItem(key, "rollout-0", "", 5, 3, {"mask": 1.0, "truncated": 0.0, **values})


def test_advantages_are_centred_and_scaled_by_the_sample_deviation() -> None:
    """Rewards 1, 0, 0, 0: mean ¼, squares of the differences 9/16 + 3/16 = ¾, divided by 3: deviation ½."""
    values = group_advantages([1.0, 0.0, 0.0, 0.0], scale_by_std=True)
    assert values == pytest.approx([0.75 / (0.5 + 1e-4)] + [-0.25 / (0.5 + 1e-4)] * 3)
    assert pytest.approx(1e-4) == STD_EPSILON


def test_without_scaling_advantages_are_only_centred() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_the_baseline_of_leave_one_out_is_the_mean_of_the_others() -> None:
    """3 − (1 + 2)/2, 1 − (3 + 2)/2, 2 − (3 + 1)/2."""
    assert leave_one_out([3.0, 1.0, 2.0], scale_by_std=False) == [1.5, -1.5, 0.0]
    assert leave_one_out([3.0, 1.0, 2.0], scale_by_std=True) == pytest.approx(
        [1.5 / (1 + 1e-4), -1.5 / (1 + 1e-4), 0.0]
    )


@pytest.mark.parametrize("baseline", [group_advantages, leave_one_out])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7], []])
def test_a_group_that_can_not_be_told_apart_gives_exactly_nothing(baseline, rewards) -> None:  # type: ignore[no-untyped-def]
    assert baseline(rewards, scale_by_std=True) == [0.0] * len(rewards)


def test_equal_rewards_are_seen() -> None:
    assert has_equal_rewards([1.0, 1.0]) and has_equal_rewards([1.0]) and has_equal_rewards([])
    assert not has_equal_rewards([1.0, 1.0, 0.5])


def test_groups_are_told_apart_by_ticket_whatever_the_order() -> None:
    items = [
        item("g:0:0:0/0", reward=1.0),
        item("g:0:1:0/0", reward=5.0),
        item("g:0:1:0/1", reward=5.0),
        item("g:0:0:0/1", reward=0.0),
    ]
    deviation = math.sqrt(0.5)
    expected = 0.5 / (deviation + STD_EPSILON)
    found = MASTER_CALLS["group_advantages"](GRPO, items)
    assert found == MASTER_CALLS["group_advantages"](GRPO, items[::-1])
    assert found["advantage"] == pytest.approx(
        {"g:0:0:0/0": expected, "g:0:0:0/1": -expected, "g:0:1:0/0": 0.0, "g:0:1:0/1": 0.0}
    )


def test_score_and_divergence_are_part_of_what_is_compared() -> None:
    """1 + 2·0.5 − 0.1·4 = 1.6 against 0 + 2·1 − 0.1·2 = 1.8."""
    stage = stage_of(
        AlgorithmSection(name="rloo", beta=0.1), reward_model=RewardModelSection(path="r", weight=2.0)
    )
    items = [
        item("g/0", reward=1.0, score=0.5, reference_kl=4.0),
        item("g/1", reward=0.0, score=1.0, reference_kl=2.0),
    ]
    found = MASTER_CALLS["leave_one_out"](stage, items)["advantage"]
    assert found == pytest.approx({"g/0": -0.2, "g/1": 0.2})


def test_a_score_that_is_missing_is_not_taken_for_nought() -> None:
    stage = stage_of(AlgorithmSection(), reward_model=RewardModelSection(path="r"))
    with pytest.raises(KeyError, match="score"):
        stage.total_reward({"reward": 1.0})


def test_a_masked_sample_neither_learns_nor_moves_the_baseline() -> None:
    items = [
        item("g/0", reward=1.0),
        item("g/1", reward=0.0),
        item("g/2", reward=-9.0, mask=0.0),
    ]
    found = MASTER_CALLS["group_advantages"](MASKING, items)["advantage"]
    assert found == {"g/0": 0.5, "g/1": -0.5, "g/2": 0.0}


def test_a_single_valid_sample_has_no_baseline() -> None:
    items = [item("g/0", reward=1.0), item("g/1", reward=0.0, mask=0.0)]
    assert MASTER_CALLS["leave_one_out"](MASKING, items)["advantage"] == {"g/0": 0.0, "g/1": 0.0}


def test_the_last_tokens_before_the_limit_cost_linearly_more() -> None:
    costs = [overlong_cost(n, max_new_tokens=20, buffer=5, penalty=2.0) for n in (1, 15, 16, 18, 20, 40)]
    assert costs == pytest.approx([0.0, 0.0, 0.4, 1.2, 2.0, 2.0])
    assert overlong_cost(20, max_new_tokens=20, buffer=0, penalty=2.0) == 0.0


def test_items_begin_with_their_shaped_reward_and_how_they_ended() -> None:
    stage = stage_of(
        AlgorithmSection(name="dapo", overlong_buffer=4, overlong_penalty=0.5, mask_truncated=True)
    )
    metas = [meta("g", 0, 1.0, tokens=6), meta("g", 1, 1.0, tokens=8, finish=FinishReason.LENGTH)]
    assert initial_values(stage, metas, max_new_tokens=8, version=0) == {
        "g/0": {"reward": 0.75, "truncated": 0.0, "mask": 1.0, "staleness": 0.0},
        "g/1": {"reward": 0.5, "truncated": 1.0, "mask": 0.0, "staleness": 0.0},
    }


def test_a_cut_off_sample_is_learned_from_unless_the_recipe_says_otherwise() -> None:
    cut_off = [meta("g", 0, 1.0, finish=FinishReason.LENGTH)]
    (values,) = initial_values(GRPO, cut_off, max_new_tokens=8, version=0).values()
    assert values == {"reward": 1.0, "truncated": 1.0, "mask": 1.0, "staleness": 0.0}


def test_items_begin_with_how_old_they_are_against_the_weights_that_the_step_begins_with() -> None:
    metas = [
        msgspec.structs.replace(meta("g", sample, 1.0), version=version)
        for sample, version in enumerate((4, 6, -1))
    ]
    found = initial_values(GRPO, metas, max_new_tokens=8, version=6)
    assert [values["staleness"] for values in found.values()] == [2.0, 0.0, 0.0]


def test_a_group_is_uninformative_when_its_valid_samples_earned_the_same() -> None:
    equal = [meta("g", 0, 1.0), meta("g", 1, 1.0)]
    assert is_uninformative(GRPO, equal, max_new_tokens=8)
    assert not is_uninformative(GRPO, [*equal, meta("g", 2, 0.0)], max_new_tokens=8)
    cut_off = meta("g", 2, 0.0, finish=FinishReason.LENGTH)
    assert is_uninformative(MASKING, [*equal, cut_off], max_new_tokens=8)


def test_overlong_shaping_tells_equal_answers_apart() -> None:
    shaping = stage_of(AlgorithmSection(name="dapo", overlong_buffer=4))
    group = [meta("g", 0, 1.0, tokens=2), meta("g", 1, 1.0, tokens=7)]
    assert not is_uninformative(shaping, group, max_new_tokens=8)


def test_a_group_that_a_reward_model_will_score_is_not_judged_beforehand() -> None:
    scored = stage_of(AlgorithmSection(name="dapo"), reward_model=RewardModelSection(path="r"))
    assert not is_uninformative(scored, [meta("g", 0, 0.0), meta("g", 1, 0.0)], max_new_tokens=8)


@pytest.mark.parametrize("num_valid", [0, 1])
def test_a_group_with_fewer_than_two_valid_samples_says_nothing_whoever_scores_it(num_valid: int) -> None:
    algorithm = AlgorithmSection(name="dapo", mask_truncated=True)
    group = [meta("g", i, 1.0, finish=FinishReason.LENGTH) for i in range(2 - num_valid)]
    group += [meta("g", 2, 0.0)] * num_valid
    for stage in (stage_of(algorithm), stage_of(algorithm, reward_model=RewardModelSection(path="r"))):
        assert is_uninformative(stage, group, max_new_tokens=8)


def test_denominators_count_what_is_learned_from_in_the_whole_batch() -> None:
    metas = [
        meta("a", 0, 1.0, tokens=5),
        meta("a", 1, 0.0, tokens=0),
        meta("b", 0, 0.0, tokens=7, finish=FinishReason.LENGTH),
    ]
    assert batch_totals(GRPO, metas, max_new_tokens=8) == {
        "tokens": 12.0,
        "sequences": 2.0,
        "constant": 16.0,
        "groups": 2.0,
    }
    assert batch_totals(MASKING, metas, max_new_tokens=8) == {
        "tokens": 5.0,
        "sequences": 1.0,
        "constant": 8.0,
        "groups": 1.0,
    }
