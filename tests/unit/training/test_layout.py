"""Layout of the flat state: its stretches are filled up to whole vectors, and no bit depends on where it is cut."""

from __future__ import annotations

import pytest
import torch

from kintsugi.config.schema import ActorSection
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.boxes import Box
from kintsugi.training.layout import ACTOR, ALIGNMENT, CRITIC, Layout, LayoutPart
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.state import TrainingState, adamw
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import TINY, StoredTensors, every_length, new_stage, run_call

SHAPES = {"a.weight": (5, 7), "a.bias": (7,), "b.weight": (3, 3), "norm.weight": (3,)}


def two_models(*, has_reference: bool = False) -> Layout:
    actor = LayoutPart.of(SHAPES)
    return Layout(
        {ACTOR: actor, CRITIC: LayoutPart.of(SHAPES, start=actor.stop)}, has_reference=has_reference
    )


def test_both_stretches_of_every_model_end_at_whole_vectors() -> None:
    for part in two_models().parts.values():
        assert [part.decayed_stop - part.start, part.size] == [ALIGNMENT, 2 * ALIGNMENT]
        assert [slot.name for slot in part.slots] == ["a.weight", "b.weight", "a.bias", "norm.weight"]
        decayed, plain = part.fillings
        assert decayed == range(part.start + 44, part.decayed_stop)
        assert plain == range(part.decayed_stop + 10, part.stop)


def test_weights_that_are_never_updated_are_laid_out_without_filling() -> None:
    part = LayoutPart.of(SHAPES, is_filled=False)
    assert (part.decayed_stop, part.stop, [len(each) for each in part.fillings]) == (44, 54, [0, 0])


def test_only_the_filling_is_zeroed() -> None:
    layout = two_models(has_reference=True)
    flat = torch.ones(layout.size)
    Box(layout).zero_filling(flat)
    assert all(bool((view == 1).all()) for view in layout.by_name(flat).values())
    assert int(flat.sum()) == (3 * 2 + 1) * 54


@pytest.mark.parametrize("sizes", [(64,), (64, 128), (1024, 64, 448), (6400, 192)])
def test_the_optimizer_has_the_same_bits_wherever_a_stretch_is_cut(sizes: tuple[int, ...]) -> None:
    count = sum(sizes)
    generator = torch.Generator().manual_seed(count)
    start, moment, gradient = torch.randn(3, count, generator=generator)

    def updated(sizes: tuple[int, ...]) -> torch.Tensor:
        weights, moments = start.clone(), torch.stack((moment, moment.square()))
        first = 0
        for size in sizes:
            where = slice(first, first + size)
            adamw(
                LayoutPart((), 0, size, size),
                weights=weights[where],
                moments=moments[:, where],
                gradient=gradient[where],
                actor=ActorSection(weight_decay=0.1),
                rate=0.01,
                count=3,
            )
            first += size
        return torch.cat((weights, moments.reshape(-1)))

    assert torch.equal(updated(sizes), updated((count,)))


def test_training_keeps_the_filling_zero_and_saved_states_do_not_contain_it() -> None:
    stage, batch = (
        new_stage(actor=ActorSection(learning_rate=0.01, weight_decay=0.1), steps=4),
        every_length(),
    )

    def new_state(seed: int) -> TrainingState:
        model = Transformer(TINY)
        initialize(model, seed=seed)
        return TrainingState(model)

    state = new_state(3)
    state.start_stage(stage, step=0)
    for step in (1, 2):
        call = batch.call(stage, step=step, rank=0, world_size=1, num_shards=4)
        run_call(batch, call, calls=ModelCalls(state, deterministic=True), group=alone())
        state.commit(step)
    assert any(len(filling) > 0 for filling in state._layout.actor.fillings), "this model has filling"
    zeroed = state._live.clone()
    state._box.zero_filling(zeroed)
    assert torch.equal(state._live, zeroed)

    stored = {name: tensor.clone() for name, tensor in state.snapshot_tensors().items()}
    sizes = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("weights/"))
    assert (
        sizes
        == sum(parameter.numel() for parameter in state.model.parameters())
        < state._layout.num_parameters
    )
    other = new_state(4)
    other.start_stage(stage, step=0)
    for view in other._copies._views:
        view.fill_(float("nan"))
    other.restore(
        StoredTensors(stored), counters=state.committed_counters, stage=stage, digest=state.digest()
    )
    assert torch.equal(other._live, state._live)
