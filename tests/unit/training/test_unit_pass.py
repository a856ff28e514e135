"""Weights gathered unit by unit: the bits of one rank, and nothing whole on any."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from kintsugi.config.schema import ActorSection, CriticSection, ReferenceSection
from kintsugi.config.stages import Stage
from kintsugi.errors import RefusedError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.seats import Seat
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.boxes import Box
from kintsugi.training.layout import ACTOR
from kintsugi.training.state import TrainingState
from kintsugi.training.units import units_of
from tests.unit.training.test_boxes import layout
from tests.unit.training.world import (
    TINY,
    Batch,
    Outcome,
    every_length,
    new_pairs,
    new_stage,
    rewarded,
    train,
)

UNTIED = msgspec.structs.replace(TINY, tie_embeddings=False, num_layers=3)
CLIPPED = ActorSection(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.05, micro_batch_tokens=40)
ESTIMATED = "update_ratio"
"""From some weights of each box."""


def outcomes(stage: Stage, batch: Batch, **world: Any) -> list[Outcome]:
    return train(batch, stage=stage, **{"num_shards": 4, **world})


def assert_bits(ranks: list[Outcome], one: Outcome) -> None:
    for rank in ranks:
        assert rank.weights.keys() == one.weights.keys()
        for name, tensor in one.weights.items():
            assert torch.equal(rank.weights[name], tensor), name
        assert {**rank.metrics, ESTIMATED: 0.0} == {**one.metrics, ESTIMATED: 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (4, 4), (3, 2)])
def test_weights_and_metrics_are_those_of_one_rank(
    ranks: int, shards: int, config: ModelConfig, dtype: torch.dtype
) -> None:
    world: dict[str, Any] = {"num_shards": 12, "config": config, "dtype": dtype}
    stage = new_stage(actor=CLIPPED, updates_per_step=2)
    (one,) = outcomes(stage, every_length(), world_size=1, **world)
    several = outcomes(stage, every_length(), world_size=ranks, boxes=shards, gathers_layers=True, **world)
    assert_bits(several, one)


def test_every_state_is_that_of_weights_gathered_after_the_update() -> None:
    stage, batch = new_stage(actor=CLIPPED), every_length()
    after = outcomes(stage, batch, world_size=2, boxes=2)
    by_layer = outcomes(stage, batch, world_size=2, boxes=2, gathers_layers=True)
    assert [rank.digests for rank in by_layer] == [rank.digests for rank in after]


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_other_losses_have_the_bits_of_one_rank(name: str) -> None:
    stage = new_stage(name=name, actor=CLIPPED)
    batch = every_length() if name == "sft" else new_pairs(8)
    (one,) = outcomes(stage, batch, world_size=1)
    assert_bits(outcomes(stage, batch, world_size=2, boxes=2, gathers_layers=True), one)


def test_a_critic_and_a_reference_that_begin_as_the_actor_have_the_bits_of_one_rank() -> None:
    stage = new_stage(name="ppo", beta=0.1, critic=CriticSection(warmup_steps=1), actor=CLIPPED)
    batch = rewarded(every_length())
    (one,) = outcomes(stage, batch, world_size=1, num_steps=3)
    assert_bits(outcomes(stage, batch, world_size=2, boxes=2, num_steps=3, gathers_layers=True), one)


def test_without_determinism_only_rounding_differs() -> None:
    stage, batch = new_stage(actor=CLIPPED), every_length()
    (one,) = outcomes(stage, batch, world_size=1, deterministic=False)
    two = outcomes(stage, batch, world_size=2, boxes=2, deterministic=False, gathers_layers=True)
    for name, tensor in one.weights.items():
        assert torch.allclose(two[0].weights[name], tensor, atol=1e-4), name
        assert torch.equal(two[0].weights[name], two[1].weights[name]), name


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_the_units_hold_every_parameter_once_and_aligned_as_in_the_whole(shards: int) -> None:
    box = Box(layout(), Seat(0, shards))
    part = box.layout.parts[ACTOR]
    starts = {slot.name: slot.start for slot in part.slots}
    names: list[str] = []
    for unit in units_of(box, ACTOR):
        names += [slot.name for slot in unit.slots]
        assert all((slot.start - starts[slot.name]) % 64 == 0 for slot in unit.slots)
        assert sum(span.stop - span.start for span in unit.spans) == unit.num_parameters
        for span in unit.spans:
            held = [span.of_shard(shard) for shard in range(shards)]
            assert [place for each in held for place in each] == list(range(span.start, span.stop))
    assert sorted(names) == sorted(starts)


def new_state(stage: Stage) -> TrainingState:
    model = Transformer(TINY)
    initialize(model, seed=3)
    return TrainingState(model, seat=Seat(1, 2), gathers_layers=True)


def test_a_rank_has_no_memory_for_weights_and_gradients_of_others() -> None:
    stage = new_stage()
    state = new_state(stage)
    state.start_stage(stage, step=0)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in state.resident()}
    held = sum(storage.nbytes() for storage in storages.values())
    count = Box(state._layout, Seat(1, 2)).num_parameters
    assert held <= 16 * count + 64, "weights, two moments and a gradient of its own part"
    assert all(parameter.isnan().all() for parameter in state.model.parameters())


def test_a_later_stage_that_begins_as_the_actor_is_refused() -> None:
    first, second = new_stage(), new_stage(beta=0.1, reference=ReferenceSection(), first_step=1)
    state = new_state(first)
    state.start_stage(first, step=0)
    second = msgspec.structs.replace(second, name="second")
    with pytest.raises(RefusedError, match="whole weights of the actor"):
        state.start_stage(second, step=0)


def test_weights_that_no_rank_has_are_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="no whole weights"):
        new_state(new_stage()).weights()
