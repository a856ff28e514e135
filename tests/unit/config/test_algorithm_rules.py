from __future__ import annotations

from typing import Any, get_args

import pytest

from kintsugi.config.algorithm_rules import USED_BY, algorithm_problems
from kintsugi.config.schema import (
    AlgorithmName,
    AlgorithmSection,
    AsynchronySection,
    Config,
    CriticSection,
    ReferenceSection,
    RewardModelSection,
    SamplingSection,
)
from kintsugi.config.stages import stages

NAMES: tuple[AlgorithmName, ...] = get_args(AlgorithmName)


def problems(config: Config) -> dict[str, str]:
    """Field → the first thing that is wrong with it."""
    return dict(reversed([*algorithm_problems(config, stages(config)[-1])]))


def problems_of(name: AlgorithmName, **values: object) -> dict[str, str]:
    section = AlgorithmSection(name=name, **values)  # type: ignore[arg-type]
    return problems(Config(name="a", algorithm=section))


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_with_its_own_values_is_in_order(name: AlgorithmName) -> None:
    beta = 0.1 if name == "dpo" else 0.0
    assert problems_of(name, beta=beta) == {}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo"])
def test_an_algorithm_of_groups_needs_at_least_two_samples_per_prompt(name: AlgorithmName) -> None:
    assert "at least 2" in problems_of(name, group_size=1)["algorithm.group_size"]
    assert problems_of(name, group_size=2) == {}


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_an_algorithm_with_another_baseline_may_have_one_sample_per_prompt(name: AlgorithmName) -> None:
    assert problems_of(name, group_size=1) == {}


def test_pairs_are_two_and_rows_are_one() -> None:
    assert "2 with reward_model" in problems_of("reward_model", group_size=4)["algorithm.group_size"]
    assert "1 with SFT" in problems_of("sft", group_size=2)["algorithm.group_size"]
    sizes = {name: stages(Config(name="a", algorithm=AlgorithmSection(name=name)))[-1] for name in NAMES}
    assert {name for name, stage in sizes.items() if stage.algorithm.group_size == 2} == {
        "dpo",
        "reward_model",
    }


OTHER = {
    "clip_low": 0.1,
    "clip_high": 0.3,
    "ratio": "sequence",
    "proximal": "recompute",
    "importance": "mask",
    "importance_cap": 2.0,
    "beta": 0.5,
    "kl": "k2",
    "kl_in": "reward",
    "entropy_weight": 0.1,
    "denominator": "sequences",
    "scale_by_std": False,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "mask_truncated": True,
    "resampling_rounds": 2,
    "overlong_buffer": 4,
    "overlong_penalty": 0.5,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_the_algorithm_does_not_look_at_is_refused(name: AlgorithmName) -> None:
    refused = {
        field
        for field, value in OTHER.items()
        if "does not use it" in problems_of(name, **{field: value}).get(f"algorithm.{field}", "")
    }
    assert refused == {field for field, users in USED_BY.items() if name not in users}


def test_dpo_without_a_temperature_is_refused() -> None:
    assert "positive" in problems_of("dpo")["algorithm.beta"]


def test_how_to_estimate_a_kl_that_weighs_nothing_is_refused() -> None:
    assert problems_of("grpo", kl="k3").keys() == {"algorithm.kl"}
    assert problems_of("ppo", kl_in="loss").keys() == {"algorithm.kl_in"}
    assert problems_of("ppo", kl_in="loss", kl="k3", beta=0.1) == {}


@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_every_estimate_may_stand_in_the_loss_and_in_the_reward(
    name: AlgorithmName, kl_in: str, kl: str
) -> None:
    """Whichever it is, the loss has the gradient of the divergence itself (`losses.kl_loss`)."""
    assert problems_of(name, beta=0.1, kl_in=kl_in, kl=kl) == {}


STALE = AsynchronySection(max_staleness=2)


def off_policy_problems(*, asynchrony: AsynchronySection = STALE, **values: Any) -> dict[str, str]:
    section = AlgorithmSection(**values)
    return problems(Config(name="a", algorithm=section, asynchrony=asynchrony))


def proximal_of(asynchrony: AsynchronySection, **values: object) -> str:
    section = AlgorithmSection(**values)  # type: ignore[arg-type]
    return stages(Config(name="a", algorithm=section, asynchrony=asynchrony))[-1].algorithm.proximal


def test_a_run_stays_close_to_its_sampler_unless_that_lags_behind() -> None:
    fresh = AsynchronySection()
    assert proximal_of(fresh) == "sampler"
    assert proximal_of(STALE) == "recompute"
    assert proximal_of(STALE, proximal="sampler") == "sampler"
    assert proximal_of(STALE, importance="truncate") == "sampler"
    assert proximal_of(STALE, name="rollout") == "sampler"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "ppo", "reinforce_pp"])
@pytest.mark.parametrize("proximal", ["sampler", "recompute", "approximate", None])
def test_every_algorithm_that_samples_may_learn_from_stale_samples(
    name: AlgorithmName, proximal: str | None
) -> None:
    assert off_policy_problems(name=name, proximal=proximal) == {}


def test_an_estimate_of_what_is_not_stale_is_refused() -> None:
    fresh = AsynchronySection()
    refused = off_policy_problems(asynchrony=fresh, proximal="approximate")
    assert refused.keys() == {"algorithm.proximal"}
    assert off_policy_problems(asynchrony=fresh, proximal="recompute") == {}


def test_weights_that_are_all_one_can_neither_be_capped_nor_left_out() -> None:
    every: tuple[dict[str, Any], ...] = ({"importance": "mask"}, {"importance_cap": 2.0})
    for said in every:
        assert off_policy_problems(proximal="sampler", **said).keys() == {
            f"algorithm.{field}" for field in said
        }
        assert off_policy_problems(**said) == {}
    assert off_policy_problems(importance="truncate", importance_cap=2.0) == {}


def test_truncated_weights_are_of_the_sampler() -> None:
    refused = off_policy_problems(proximal="recompute", importance="truncate")
    assert refused.keys() == {"algorithm.importance"}


@pytest.mark.parametrize("field", ["clip_low", "clip_high"])
def test_a_range_that_no_ratio_can_leave_is_refused(field: str) -> None:
    said: dict[str, Any] = {field: 0.1}
    assert "second" in off_policy_problems(**said)[f"algorithm.{field}"]
    assert off_policy_problems(updates_per_step=2, **said) == {}
    assert off_policy_problems(proximal="approximate", **said) == {}
    truncated = off_policy_problems(importance="truncate", updates_per_step=2, **said)
    assert truncated.keys() == {f"algorithm.{field}"}


def test_what_is_never_stale_can_not_weigh_less() -> None:
    assert off_policy_problems(asynchrony=AsynchronySection(decay=0.5)).keys() == {"asynchrony.decay"}
    assert off_policy_problems(asynchrony=AsynchronySection(max_staleness=1, decay=0.5)) == {}


def test_the_overlong_buffer_is_shorter_than_a_completion() -> None:
    algorithm = AlgorithmSection(name="dapo", overlong_buffer=8)
    assert (
        "less than"
        in problems(Config(name="a", algorithm=algorithm, sampling=SamplingSection(max_new_tokens=8)))[
            "algorithm.overlong_buffer"
        ]
    )
    assert "algorithm.overlong_penalty" in problems_of("dapo", overlong_penalty=0.5)


def test_groups_can_not_be_resampled_by_scores_that_come_later() -> None:
    model = RewardModelSection("folder")
    with_model = Config(name="a", algorithm=AlgorithmSection(name="dapo"), reward_model=model)
    assert problems(with_model).keys() == {"algorithm.resampling_rounds"}
    algorithm = AlgorithmSection(name="dapo", resampling_rounds=0)
    assert problems(Config(name="a", algorithm=algorithm, reward_model=model)) == {}


def test_a_section_about_a_model_that_is_not_there_is_refused_by_field() -> None:
    grpo = AlgorithmSection()
    assert problems(Config(name="a", algorithm=grpo, critic=CriticSection(value_clip=0.1))).keys() == {
        "critic.value_clip"
    }
    reference = ReferenceSection(copy_every=10)
    assert problems(Config(name="a", algorithm=grpo, reference=reference)).keys() == {"reference.copy_every"}
    with_kl = AlgorithmSection(beta=0.1)
    assert problems(Config(name="a", algorithm=with_kl, reference=reference)) == {}


@pytest.mark.parametrize("name", ["sft", "rollout"])
def test_a_reward_model_that_nobody_would_ask_is_refused(name: AlgorithmName) -> None:
    algorithm = AlgorithmSection(name=name)
    config = Config(name="a", algorithm=algorithm, reward_model=RewardModelSection("folder"))
    assert problems(config).keys() == {"reward_model.path"}


def test_a_reference_moves_in_one_way_only() -> None:
    reference = ReferenceSection(copy_every=10, moving_average=0.9)
    config = Config(name="a", algorithm=AlgorithmSection(beta=0.1), reference=reference)
    assert problems(config).keys() == {"reference.moving_average"}


def test_an_actor_that_never_learns_is_refused() -> None:
    algorithm = AlgorithmSection(name="ppo", steps=5)
    waits = Config(name="a", algorithm=algorithm, critic=CriticSection(warmup_steps=5))
    assert problems(waits).keys() == {"critic.warmup_steps"}
