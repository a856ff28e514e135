"""Loss, gradient and updated weights do not depend on who computes what, in which portions, in which order."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
import torch

from kintsugi.config.schema import ActorSection
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.protocol.training import RunCall
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import ProcessGroup, join_group
from tests.unit.training.world import (
    CPU,
    LONGEST,
    Batch,
    Outcome,
    every_length,
    new_batch,
    new_stage,
    new_state,
    run_call,
    sampled_by,
    train,
)

BATCH = every_length()


def assert_equal_bits(outcome: Outcome, expected: Outcome) -> None:
    assert torch.equal(outcome.gradient, expected.gradient)
    assert outcome.digests == expected.digests
    assert outcome.metrics == expected.metrics
    for name, tensor in expected.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name


def assert_equal_to_rounding(outcome: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(outcome.gradient, expected.gradient, rtol=1e-4, atol=1e-7)
    assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-7)


def shuffled(batch: Batch) -> Batch:
    items = list(batch.items)
    random.Random(5).shuffle(items)
    return replace(batch, items=tuple(items))


@pytest.mark.parametrize("num_shards", [4, 5, 8])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_workers_gives_equal_bits(world_size: int, num_shards: int) -> None:
    stage = new_stage()
    (alone,) = train(BATCH, stage=stage, world_size=1, num_shards=num_shards)
    for outcome in train(BATCH, stage=stage, world_size=world_size, num_shards=num_shards):
        assert_equal_bits(outcome, alone)


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_two_workers_give_equal_bits_for_every_loss_and_denominator(name: str, denominator: str) -> None:
    stage = new_stage(name=name, denominator=denominator)
    (alone,) = train(BATCH, stage=stage, world_size=1, num_shards=4)
    for outcome in train(BATCH, stage=stage, world_size=2, num_shards=4):
        assert_equal_bits(outcome, alone)


@pytest.mark.parametrize("budget", [1, 17, 64])
def test_neither_token_budget_nor_order_changes_a_bit_in_deterministic_mode(budget: int) -> None:
    (expected,) = train(BATCH, stage=new_stage(), world_size=1, num_shards=4)
    stage = new_stage(actor=ActorSection(micro_batch_tokens=budget))
    (outcome,) = train(shuffled(BATCH), stage=stage, world_size=1, num_shards=4)
    assert_equal_bits(outcome, expected)


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize(("world_size", "budget"), [(1, 1), (1, 64), (2, 40), (4, 8192)])
def test_without_determinism_workers_budget_and_order_change_only_rounding(
    world_size: int, budget: int, denominator: str
) -> None:
    reference = new_stage(denominator=denominator)
    (expected,) = train(BATCH, stage=reference, world_size=1, num_shards=4, num_steps=1)
    stage = new_stage(actor=ActorSection(micro_batch_tokens=budget), denominator=denominator)
    outcomes = train(
        shuffled(BATCH), stage=stage, world_size=world_size, num_shards=4, num_steps=1, deterministic=False
    )
    for outcome in outcomes:
        assert_equal_to_rounding(outcome, expected)
        assert outcome.digests == outcomes[0].digests


def test_a_fully_masked_sample_contributes_nothing() -> None:
    with_masked = new_batch([(8, 3), (5, 2), (9, 0)])
    without = Batch(with_masked.trajectories, with_masked.items[:2])
    (expected,) = train(without, stage=new_stage(denominator="sequences"), world_size=1, num_shards=1)
    (outcome,) = train(with_masked, stage=new_stage(denominator="sequences"), world_size=1, num_shards=1)
    assert_equal_bits(outcome, expected)


def test_a_batch_without_any_loss_token_leaves_finite_weights() -> None:
    (outcome,) = train(new_batch([(8, 0), (1, 0)]), stage=new_stage(), world_size=1, num_shards=2)
    assert outcome.metrics["loss"] == 0.0
    assert all(bool(tensor.isfinite().all()) for tensor in outcome.weights.values())


def test_more_workers_than_samples_give_equal_bits() -> None:
    batch = new_batch([(8, 3), (5, 2)])
    (alone,) = train(batch, stage=new_stage(), world_size=1, num_shards=4)
    for outcome in train(batch, stage=new_stage(), world_size=4, num_shards=4):
        assert_equal_bits(outcome, alone)


def one_rank_call(batch: Batch, *, calls: ModelCalls, interface: str) -> dict[str, float]:
    call = batch.call(new_stage(), step=1, rank=0, world_size=1, num_shards=2, interface=interface)
    return run_call(batch, call, calls=calls, group=alone()).metrics


def alone() -> ProcessGroup:
    return join_group(
        group_id=1,
        ranks=["model-0"],
        me="model-0",
        store_address="",
        keys=(b"", b""),
        device=CPU,
        timeout_s=1.0,
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_ratio_is_one_when_this_policy_sampled_at_the_calls_temperature(temperature: float) -> None:
    state = new_state(new_stage())
    batch = sampled_by(state.model, new_batch([(8, 3), (12, 7), (5, 1)]), temperature=temperature)
    call = batch.call(new_stage(), step=1, rank=0, world_size=1, num_shards=2)
    call = msgspec.structs.replace(call, arguments={"temperature": temperature})
    metrics = run_call(batch, call, calls=ModelCalls(state, deterministic=True), group=alone()).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logprob_abs_diff_mean"] <= metrics["logprob_abs_diff_max"] < 1e-5
    assert metrics["clip_ratio"] == 0.0


def test_the_first_step_is_at_no_distance_from_its_reference() -> None:
    batch = new_batch([(8, 3), (12, 7), (5, 1)])
    calls = ModelCalls(new_state(new_stage(beta=0.1)), deterministic=True)
    one_rank_call(batch, calls=calls, interface="reference_inference")
    assert one_rank_call(batch, calls=calls, interface="policy_train")["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_penalised_step_needs_the_reference_first() -> None:
    batch = new_batch([(8, 3), (12, 7)])
    calls = ModelCalls(new_state(new_stage(beta=0.1)), deterministic=True)
    with pytest.raises(RefusedError, match="reference_inference"):
        one_rank_call(batch, calls=calls, interface="policy_train")


def test_a_stage_without_penalty_keeps_no_reference() -> None:
    calls = ModelCalls(new_state(new_stage()), deterministic=True)
    with pytest.raises(RefusedError, match="no reference"):
        one_rank_call(new_batch([(8, 3)]), calls=calls, interface="reference_inference")


def test_a_second_update_moves_the_ratio_but_not_the_metrics_of_the_first() -> None:
    (once,) = train(BATCH, stage=new_stage(updates_per_step=1), world_size=1, num_shards=4, num_steps=1)
    (twice,) = train(BATCH, stage=new_stage(updates_per_step=2), world_size=1, num_shards=4, num_steps=1)
    assert twice.metrics["ratio_mean"] == once.metrics["ratio_mean"]
    assert twice.metrics["logprob_abs_diff_max"] == once.metrics["logprob_abs_diff_max"]
    assert twice.metrics["loss"] < once.metrics["loss"]


def test_a_batch_that_is_not_whole_is_refused_before_the_update() -> None:
    batch = new_batch([(8, 3), (12, 7)])
    state = new_state(new_stage())
    before = state.digest()
    calls = ModelCalls(state, deterministic=False)
    call: RunCall = batch.call(new_stage(), step=1, rank=0, world_size=2, num_shards=2)
    with pytest.raises(IntegrityError, match="expected 10 loss tokens"):
        run_call(batch, call, calls=calls, group=alone())
    assert state.digest() == before and not state.half_updated


def test_an_unknown_interface_is_refused_by_name() -> None:
    calls = ModelCalls(new_state(new_stage()), deterministic=True)
    with pytest.raises(RefusedError, match="'grpo_train'"):
        one_rank_call(new_batch([(8, 3)]), calls=calls, interface="grpo_train")


def test_low_precision_passes_still_learn() -> None:
    batch = new_batch([(LONGEST, 10)] * 4)
    stage = new_stage(name="sft", actor=ActorSection(learning_rate=3e-3))

    def losses(dtype: torch.dtype) -> list[float]:
        state = new_state(stage, dtype=dtype)
        calls = ModelCalls(state, deterministic=True)
        found = []
        for step in range(1, 9):
            call = batch.call(stage, step=step, rank=0, world_size=1, num_shards=2)
            found.append(run_call(batch, call, calls=calls, group=alone()).metrics["loss"])
            state.commit(step)
        return found

    low, full = losses(torch.bfloat16), losses(torch.float32)
    assert low[-1] < low[0] - 0.1
    assert low == pytest.approx(full, rel=0.02)
