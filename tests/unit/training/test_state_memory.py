"""A rank holds its state, one fp32 gradient and one copy of the weights to compute with, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import ActorSection
from kintsugi.training.batch import cut
from kintsugi.training.group import Groups
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.objectives import Supervised
from kintsugi.training.packing import sample_of
from kintsugi.training.rank_state import Update
from kintsugi.training.state import TrainingState
from kintsugi.training.step_cache import StepCache
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import CPU, every_length, new_stage, new_state, run_call

BF16 = torch.bfloat16


def backward(state: TrainingState, *, max_tokens: int) -> int:
    """Pass a batch through the model in micro-batches; return their number."""
    batch, stage = every_length(), state.stage
    call = batch.call(stage, step=1, rank=0, world_size=1, num_shards=1, interface="sft_train")
    samples = [sample_of(item, batch.trajectories[item.key]) for item in call.shards[0].items]
    batches = cut(samples, deterministic=False, max_tokens=max_tokens, device=CPU)
    for each in batches:
        Supervised(state, StepCache()).loss(each, call).loss.backward()
    return len(batches)


def test_bf16_gradients_are_added_in_fp32_and_dropped_at_once() -> None:
    state = new_state(new_stage(name="sft"), dtype=BF16)
    assert backward(state, max_tokens=64) > 2
    assert state.gradient.dtype == torch.float32 and state.gradient.any()
    assert all(parameter.grad is None for parameter in state.model.parameters())
    rounded = state.gradient.to(BF16).float()
    assert not torch.equal(state.gradient, rounded), "the sum over micro-batches is not rounded"


def test_fp32_gradients_are_views_of_the_buffer() -> None:
    state = new_state(new_stage(name="sft"))
    backward(state, max_tokens=64)
    storage = state.gradient.untyped_storage().data_ptr()
    for parameter in state.model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == storage


def test_what_an_interrupted_backward_pass_left_is_dropped() -> None:
    state = new_state(new_stage(name="sft"), dtype=BF16)
    backward(state, max_tokens=64)
    expected = state.gradient.clone()
    state.zero_gradient()
    state.model.output_weight.grad = torch.ones_like(state.model.output_weight)
    state.gradient.fill_(3.0)
    state.zero_gradient("actor")
    assert all(parameter.grad is None for parameter in state.model.parameters())
    backward(state, max_tokens=64)
    assert torch.equal(state.gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_committed_weights_are_views_of_those_that_the_rank_computes_with(dtype: torch.dtype) -> None:
    state = new_state(new_stage(actor=ActorSection(learning_rate=0.1)), dtype=dtype)
    storage = state.model.output_weight.untyped_storage().data_ptr()
    before = {name: tensor.clone() for name, tensor in state.weights().items()}
    assert {tensor.untyped_storage().data_ptr() for tensor in state.weights().values()} == {storage}
    state.begin_update()
    state.update(torch.ones_like(state.gradient))
    state.end_update(1)
    prepared = state.weights()
    for name, tensor in prepared.items():
        assert tensor.dtype == dtype and torch.equal(tensor, before[name]), "step 1 is not committed yet"
    state.commit(1)
    for name, tensor in state.weights().items():
        assert not torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_model_that_was_loaded_leaves_no_memory_of_its_own(dtype: torch.dtype) -> None:
    state = new_state(new_stage(name="ppo"), dtype=dtype)
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.resident()}
    assert len(storages) == (2 if dtype == torch.float32 else 3), "state, gradient, weights to compute with"


class Recording(TrainingState):
    given: Tensor

    def update(self, gradient: Tensor, *, part: str = "actor", groups: Groups | None = None) -> Update:
        self.given = gradient
        return super().update(gradient, part=part, groups=groups)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("name", "interface"), [("grpo", "policy_train"), ("sft", "sft_train")])
def test_a_rank_with_one_shard_updates_from_the_buffer_itself(
    name: str, interface: str, deterministic: bool
) -> None:
    stage = new_stage(name=name)
    state = new_state(stage, dtype=BF16)
    state.__class__ = Recording
    assert isinstance(state, Recording)
    batch = every_length()
    call = batch.call(stage, step=1, rank=0, world_size=1, num_shards=1, interface=interface)
    run_call(batch, call, calls=ModelCalls(state, deterministic=deterministic), group=alone())
    assert state.given.data_ptr() == state.gradient.data_ptr()


def test_recomputation_is_set_on_every_trained_model() -> None:
    stage = new_stage(name="ppo")
    state = new_state(stage, recompute=True)
    assert state.model.recompute and state.critic.recompute
    assert not new_state(stage).model.recompute
