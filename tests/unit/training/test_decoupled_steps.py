"""Whole steps on ranks that learn from samples of older weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kintsugi.config.schema import AsynchronySection, CriticSection
from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import sample_of
from kintsugi.types import ShardItem, Trajectory
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import (
    Batch,
    Outcome,
    new_batch,
    new_stage,
    new_state,
    rewarded,
    run_call,
    sampled_by,
    train,
)

NAMES = ("grpo", "rloo", "gspo", "ppo", "reinforce_pp")
FIGURES = {"importance_weight_mean", "importance_weight_max", "importance_capped_share"}


BATCH = new_batch([(8, 3), (12, 7), (5, 1), (9, 0), (24, 20), (10, 4), (7, 2), (16, 9), (2, 1), (11, 6)])


def batch_for(name: str) -> Batch:
    return rewarded(BATCH) if name in ("ppo", "reinforce_pp") else BATCH


def fresh(name: str) -> Batch:
    """As if the weights that the ranks begin with had sampled it."""
    return sampled_by(new_state(new_stage()).model, batch_for(name), temperature=1.0)


def of_ages(batch: Batch, ages: Mapping[int, int], *, step: int) -> Batch:
    """The same batch as it comes to a step: samples (by number) as old as this, or as the run is; the rest fresh."""
    trajectories, items = {}, []
    for index, item in enumerate(batch.items):
        version = max(step - 1 - ages.get(index, 0), 0)
        trajectory = batch.trajectories[item.key]
        mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8)
        versions = np.where(mask, version, -1).astype("<i4").tobytes()
        trajectories[item.key] = msgspec.structs.replace(trajectory, versions=versions)
        items.append(with_value(item, staleness=step - 1 - version))
    return Batch(trajectories, tuple(items))


def with_value(item: ShardItem, **values: float) -> ShardItem:
    return msgspec.structs.replace(item, values={**item.values, **values})


def in_turns(batch: Batch) -> Batch:
    """The same batch as of several turns: where a completion is long enough, two of its tokens were not sampled."""
    trajectories, items = {}, []
    for item in batch.items:
        trajectory = batch.trajectories[item.key]
        mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8).copy()
        mask[np.flatnonzero(mask)[1:3]] = item.num_loss_tokens < 4
        trajectories[item.key] = msgspec.structs.replace(trajectory, loss_mask=mask.tobytes())
        items.append(msgspec.structs.replace(item, num_loss_tokens=int(mask.sum())))
    return Batch(trajectories, tuple(items))


def one_step(batch: Batch, stage: Stage, *, world_size: int = 2) -> Outcome:
    return train(batch, stage=stage, world_size=world_size, num_shards=4, num_steps=1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_fresh_samples_ends_with_the_bits_of_plain_ppo(name: str) -> None:
    """With one update, whose gradient has the same factors in the same order."""
    batch = fresh(name)
    plain = one_step(batch, new_stage(name=name))
    decoupled = one_step(batch, new_stage(name=name, proximal="recompute"))
    assert torch.equal(decoupled.gradient, plain.gradient)
    assert decoupled.digests == plain.digests
    assert {key: decoupled.metrics[key] for key in plain.metrics} == plain.metrics
    assert decoupled.metrics.keys() - plain.metrics.keys() == FIGURES
    assert decoupled.metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_several_updates_on_fresh_samples_are_those_of_plain_ppo_to_rounding(name: str) -> None:
    """π/prox · prox/μ is rounded once more than π/μ."""
    batch = fresh(name)
    clip: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.2,
    }  # Within GSPO's range rounding decides who is clipped.
    plain = one_step(batch, new_stage(name=name, updates_per_step=3, **clip))
    decoupled = one_step(batch, new_stage(name=name, updates_per_step=3, proximal="recompute", **clip))
    torch.testing.assert_close(decoupled.gradient, plain.gradient, rtol=1e-3, atol=1e-6)
    common = {key: decoupled.metrics[key] for key in plain.metrics}
    assert common == pytest.approx(plain.metrics, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_for_fresh_samples_is_plain_ppo_to_the_bit(name: str) -> None:
    batch = of_ages(batch_for(name), {}, step=1)
    plain = one_step(batch, new_stage(name=name, updates_per_step=2))
    estimated = one_step(batch, new_stage(name=name, updates_per_step=2, proximal="approximate"))
    assert estimated.digests == plain.digests


VARIANTS: tuple[dict[str, Any], ...] = (
    {
        "name": "grpo",
        "proximal": "recompute",
        "updates_per_step": 2,
        "importance": "mask",
        "importance_cap": 1.1,
    },
    {"name": "rloo", "importance": "truncate", "updates_per_step": 2},
    {"name": "gspo", "proximal": "recompute", "updates_per_step": 2},
    {"name": "ppo", "proximal": "approximate", "updates_per_step": 2},
    {"name": "reinforce_pp", "proximal": "recompute"},
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant["name"]))
def test_two_workers_give_stale_samples_equal_bits(variant: dict[str, Any]) -> None:
    batch = partial(of_ages, in_turns(batch_for(str(variant["name"]))), {0: 1, 4: 1, 7: 1})
    stage = new_stage(asynchrony=AsynchronySection(max_staleness=1, decay=0.9), **variant)
    (expected,) = train(lambda step: batch(step=step), stage=stage, world_size=1, num_shards=4)
    for outcome in train(lambda step: batch(step=step), stage=stage, world_size=2, num_shards=4):
        assert outcome.digests == expected.digests
        assert outcome.metrics == expected.metrics
    assert expected.metrics["importance_weight_mean"] != 1.0
    assert expected.metrics["token_staleness_mean"] > 0.0


def test_how_far_updates_may_go_does_not_depend_on_how_far_the_sampler_is() -> None:
    """One that was half as likely to choose every token: twice the gradient, and the same tokens are clipped.

    Length and moments of a gradient are normalised, so the first update, and where the second begins, is the same.
    """
    near = fresh("grpo")
    far = Batch(
        {
            key: msgspec.structs.replace(each, logprobs=half_as_likely(each))
            for key, each in near.trajectories.items()
        },
        near.items,
    )
    stage = new_stage(proximal="recompute", updates_per_step=2, clip_low=0.01, clip_high=0.01)
    expected, found = one_step(near, stage), one_step(far, stage)
    torch.testing.assert_close(found.gradient, 2 * expected.gradient, rtol=1e-3, atol=1e-5)
    assert found.metrics["clip_ratio"] == expected.metrics["clip_ratio"] > 0.1
    assert found.metrics["importance_weight_mean"] == pytest.approx(2.0, rel=1e-4)
    assert found.metrics["ratio_mean"] == pytest.approx(2.0, rel=1e-4)


def half_as_likely(trajectory: Trajectory) -> bytes:
    logprobs = np.frombuffer(trajectory.logprobs, dtype="<f4")
    mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8)
    return np.where(mask, logprobs - np.log(2), 0.0).astype("<f4").tobytes()


def test_several_updates_need_the_proximal_policy_first() -> None:
    batch = new_batch([(8, 3), (12, 7)])
    stage = new_stage(proximal="recompute", updates_per_step=2)
    calls = ModelCalls(new_state(stage), deterministic=True)
    call = batch.call(stage, step=1, rank=0, world_size=1, num_shards=2)
    with pytest.raises(RefusedError, match="proximal_inference"):
        run_call(batch, call, calls=calls, group=alone())


def test_truncated_weights_and_the_proximal_policy_agree_on_one_update() -> None:
    batch = BATCH
    decoupled = one_step(batch, new_stage(proximal="recompute", importance_cap=1.1))
    truncated = one_step(batch, new_stage(importance="truncate", importance_cap=1.1))
    assert truncated.digests == decoupled.digests
    assert truncated.metrics["importance_capped_share"] > 0.1


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_what_is_stale_weighs_less_in_every_loss(name: str) -> None:
    """The second step's samples are all one step old, at a quarter of the weight: for actor and critic."""
    everything = dict.fromkeys(range(len(BATCH.items)), 1)

    def outcome(decay: float) -> Outcome:
        asynchrony = AsynchronySection(max_staleness=1, decay=decay)
        stage = new_stage(name=name, asynchrony=asynchrony, critic=CriticSection(value_clip=0))
        return train(
            lambda step: of_ages(batch_for(name), everything, step=step),
            stage=stage,
            world_size=2,
            num_shards=4,
            num_steps=2,
        )[0]

    whole, quarter = outcome(1.0), outcome(0.25)
    assert quarter.digests[0] == whole.digests[0], "in the first step nothing can be stale"
    torch.testing.assert_close(quarter.gradient, whole.gradient / 4)
    assert quarter.metrics["loss"] == pytest.approx(whole.metrics["loss"] / 4)
    if name == "ppo":
        assert quarter.metrics["value_loss"] == pytest.approx(whole.metrics["value_loss"] / 4)


def test_what_is_fresh_keeps_its_weight_beside_what_is_stale() -> None:
    """As if the stale sample, at a weight of nearly nothing, had an advantage of nothing."""
    batch = new_batch([(8, 3), (9, 4)])
    silenced = Batch(batch.trajectories, (with_value(batch.items[0], advantage=0.0), *batch.items[1:]))
    stage = new_stage(asynchrony=AsynchronySection(max_staleness=1, decay=1e-12))
    given: dict[str, Any] = {"stage": stage, "world_size": 1, "num_shards": 1}
    (found,) = train(lambda step: of_ages(batch, {0: 1}, step=step), **given)
    (expected,) = train(lambda step: of_ages(batch if step == 1 else silenced, {}, step=step), **given)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-5, atol=1e-8)


def test_a_token_counts_by_its_own_version_and_its_sample_by_the_oldest() -> None:
    """A completion during which the weights changed: two tokens of version 0, two of version 1."""
    batch = new_batch([(6, 4)])
    versions = np.array([-1, -1, 0, 0, 1, 1], dtype="<i4").tobytes()

    def of_step(step: int) -> Batch:
        if step == 1:
            return of_ages(batch, {}, step=1)
        ((key, trajectory),) = batch.trajectories.items()
        both = msgspec.structs.replace(trajectory, versions=versions)
        return Batch({key: both}, (with_value(batch.items[0], staleness=1.0),))

    stage = new_stage(proximal="approximate", asynchrony=AsynchronySection(max_staleness=1))
    (outcome,) = train(of_step, stage=stage, world_size=1, num_shards=1)
    assert outcome.metrics["token_staleness_mean"] == 0.5


def test_a_sample_that_is_older_than_the_master_thinks_is_not_trained() -> None:
    batch = of_ages(new_batch([(8, 3), (12, 7)]), {1: 3}, step=4)
    wrong = Batch(batch.trajectories, tuple(with_value(item, staleness=0.0) for item in batch.items))
    stage = new_stage()
    state = new_state(stage)
    call = wrong.call(stage, step=4, rank=0, world_size=1, num_shards=2)
    with pytest.raises(IntegrityError, match="staleness of 0 at step 4, got 3"):
        run_call(wrong, call, calls=ModelCalls(state, deterministic=True), group=alone())
    assert not state.half_updated


def test_a_trajectory_that_does_not_say_who_sampled_every_token_is_refused() -> None:
    batch = new_batch([(8, 3)])
    ((key, trajectory),) = batch.trajectories.items()
    short = msgspec.structs.replace(trajectory, versions=trajectory.versions[:-4])
    with pytest.raises(IntegrityError, match=f"sample {key}: expected 8 tokens, .* 7 versions"):
        sample_of(batch.items[0], short)


def test_samples_of_no_weights_of_this_run_are_not_stale() -> None:
    batch = new_batch([(8, 3), (12, 7)])
    replayed = Batch(
        {
            key: msgspec.structs.replace(each, versions=np.full(each.num_tokens, -1, "<i4").tobytes())
            for key, each in batch.trajectories.items()
        },
        tuple(with_value(item, staleness=0.0) for item in batch.items),
    )
    (outcome,) = train(replayed, stage=new_stage(proximal="approximate"), world_size=1, num_shards=2)
    assert outcome.metrics["token_staleness_mean"] == 0.0
