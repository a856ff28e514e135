"""Every algorithm's step on the ranks: whole chains of calls, with equal bits whoever computes what."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kintsugi.config.schema import LEARN_PAIRS, CriticSection, ReferenceSection
from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import ProcessGroup
from tests.unit.training.world import (
    Batch,
    Outcome,
    calls_of,
    every_length,
    in_world,
    new_batch,
    new_pairs,
    new_stage,
    new_state,
    rewarded,
    run_call,
    train,
)

BATCH = rewarded(every_length())
PAIRS = new_pairs(7)
PPO = new_stage(name="ppo", beta=0.05, updates_per_step=2)


def assert_equal_bits(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.digests == expected.digests
    assert outcome.metrics == expected.metrics
    for name, tensor in expected.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_workers_gives_ppo_with_its_critic_equal_bits(world_size: int) -> None:
    (alone,) = train(BATCH, stage=PPO, world_size=1, num_shards=5)
    for outcome in train(BATCH, stage=PPO, world_size=world_size, num_shards=5):
        assert_equal_bits(outcome, alone)


STAGES = [
    new_stage(
        name="ppo", beta=0.1, kl_in="loss", entropy_weight=0.01, reference=ReferenceSection(copy_every=1)
    ),
    new_stage(name="reinforce_pp", beta=0.1, reference=ReferenceSection(moving_average=0.9)),
    new_stage(name="rloo", beta=0.1),
    new_stage(name="gspo"),
    new_stage(name="dpo", beta=0.1),
    new_stage(name="reward_model"),
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_two_workers_give_every_algorithm_equal_bits_and_scalars(stage: Stage) -> None:
    batch = PAIRS if stage.name in LEARN_PAIRS else BATCH
    if stage.name in ("rloo", "gspo"):
        batch = every_length()
    (alone,) = train(batch, stage=stage, world_size=1, num_shards=4)
    both = train(batch, stage=stage, world_size=2, num_shards=4)
    for outcome in both:
        assert_equal_bits(outcome, alone)
    for name, expected in alone.outputs.items():
        assert {**both[0].outputs[name], **both[1].outputs[name]} == expected


def test_a_kl_that_is_taken_off_whole_samples_travels_for_every_one_of_them() -> None:
    batch = every_length()
    (rloo,) = train(batch, stage=STAGES[2], world_size=1, num_shards=2)
    assert rloo.outputs["reference_kl"].keys() == batch.trajectories.keys()
    (ppo,) = train(BATCH, stage=PPO, world_size=1, num_shards=2)
    assert "reference_kl" not in ppo.outputs


def test_masked_samples_change_nothing() -> None:
    kept = Batch(BATCH.trajectories, tuple(item for item in BATCH.items if item.values["mask"]))
    assert len(kept.items) < len(BATCH.items)
    (expected,) = train(kept, stage=PPO, world_size=1, num_shards=1)
    (outcome,) = train(BATCH, stage=PPO, world_size=1, num_shards=1)
    assert_equal_bits(outcome, expected)


def test_a_completion_cut_off_by_length_earns_what_the_critic_expects_of_it() -> None:
    def metrics(truncated: float) -> dict[str, float]:
        items = [
            msgspec.structs.replace(item, values={**item.values, "truncated": truncated})
            for item in BATCH.items
        ]
        batch = Batch(BATCH.trajectories, tuple(items))
        (outcome,) = train(batch, stage=PPO, world_size=1, num_shards=2)
        return outcome.metrics

    assert metrics(0.0)["returns_mean"] != metrics(1.0)["returns_mean"]


def test_the_critic_learns_what_states_are_worth() -> None:
    batch = rewarded(new_batch([(8, 3), (12, 7), (9, 5), (10, 2), (7, 4)]))
    stage = new_stage(name="ppo", updates_per_step=6, critic=CriticSection(learning_rate=5e-3, value_clip=0))
    (before,) = train(batch, stage=stage, world_size=1, num_shards=1, num_steps=1)
    (after,) = train(batch, stage=stage, world_size=1, num_shards=1, num_steps=6)
    assert before.metrics["values_mean"] == 0.0, "a head of zeros"
    assert after.metrics["value_loss"] < 0.5 * before.metrics["value_loss"]
    assert after.metrics["explained_variance"] > 0.5


def test_the_actor_waits_while_the_critic_warms_up() -> None:
    stage = new_stage(name="ppo", critic=CriticSection(warmup_steps=2))
    (outcome,) = train(BATCH, stage=stage, world_size=1, num_shards=2, num_steps=2)
    initial = new_state(stage)
    for name, tensor in initial.weights().items():
        assert torch.equal(outcome.weights[name], tensor), name
    assert outcome.metrics["learning_rate"] == 0.0 and outcome.metrics["critic_grad_norm"] > 0
    assert outcome.metrics["loss_tokens"] == BATCH.totals["tokens"]
    (learned,) = train(BATCH, stage=stage, world_size=1, num_shards=2, num_steps=3)
    assert learned.metrics["learning_rate"] > 0
    assert not torch.equal(learned.weights["model.norm.weight"], outcome.weights["model.norm.weight"])


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_preferences_are_learned(name: str) -> None:
    stage = new_stage(name=name, beta=0.5 if name == "dpo" else 0.0, updates_per_step=4)
    (outcome,) = train(new_pairs(4), stage=stage, world_size=1, num_shards=1, num_steps=6)
    prefix = "dpo" if name == "dpo" else "rm"
    assert outcome.metrics[f"{prefix}_accuracy"] == 1.0
    assert outcome.metrics[f"{prefix}_margin"] > 0


def test_a_pair_that_lost_its_other_half_is_refused() -> None:
    stage = new_stage(name="reward_model")
    broken = Batch(PAIRS.trajectories, PAIRS.items[:-1])
    with pytest.raises(IntegrityError, match="expected pairs"):
        train(broken, stage=stage, world_size=1, num_shards=1)


def test_without_determinism_only_rounding_differs() -> None:
    (expected,) = train(BATCH, stage=PPO, world_size=1, num_shards=4, num_steps=1)
    for outcome in train(BATCH, stage=PPO, world_size=2, num_shards=4, num_steps=1, deterministic=False):
        assert outcome.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        ("gae", "critic_inference"),
        ("policy_train", "gae or reward_to_go"),
        ("critic_train", "critic_inference"),
    ],
)
def test_a_call_whose_inputs_are_missing_is_refused_and_changes_nothing(interface: str, reason: str) -> None:
    batch = rewarded(new_batch([(8, 3), (8, 3), (12, 7)]))
    stage = new_stage(name="ppo")

    def rank_main(rank: int, group: ProcessGroup) -> str:
        state = new_state(stage)
        call = batch.call(stage, step=1, rank=0, world_size=1, num_shards=2, interface=interface)
        before = state.digest()
        with pytest.raises(RefusedError) as caught:
            run_call(batch, call, calls=ModelCalls(state, deterministic=True), group=group)
        assert state.digest() == before and not state.half_updated
        return str(caught.value)

    (message,) = in_world(1, rank_main)
    assert reason in message


def test_ppos_calls_come_in_the_order_in_which_they_read_each_other() -> None:
    assert calls_of(PPO)[-2:] == ["policy_train", "critic_train"]
