"""Ranks that hold parts of the state come to the bits of ranks that hold all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import ActorSection, CriticSection
from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.architecture import parameter_shapes
from kintsugi.model.seats import Mesh, Seat, digest_of_box, joined, replica_of, seat_of
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.boxes import Box
from kintsugi.training.group import Groups
from kintsugi.training.layout import ACTOR, ALIGNMENT, CRITIC, Layout, LayoutPart
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import ProcessGroup
from kintsugi.training.state import TrainingState
from tests.unit.training.fakes import FakeSegments
from tests.unit.training.world import (
    TINY,
    StoredTensors,
    every_length,
    in_world,
    new_stage,
    rewarded,
    run_call,
    train,
)

ACTOR_SETTINGS = ActorSection(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.05)


def layout() -> Layout:
    shapes = {name: tuple(shape) for name, shape in parameter_shapes(TINY).items()}
    actor = LayoutPart.of(shapes)
    critic = LayoutPart.of({**shapes, "score.weight": (1, 32)}, start=actor.stop, prefix="critic.")
    return Layout({ACTOR: actor, CRITIC: critic}, has_reference=False)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 64])
def test_the_boxes_tile_the_state_and_are_cut_where_a_vector_ends(shards: int) -> None:
    whole = layout()
    flat = torch.arange(whole.num_parameters, dtype=torch.float32)
    covered = torch.zeros_like(flat)
    for shard in range(shards):
        box = Box(whole, Seat(shard, shards))
        row = torch.zeros(box.num_parameters)
        box.take(row, flat)
        assert torch.equal(row.sort().values, row), "the box is in the order of the whole"
        covered[row.long()] += 1
        for part in (ACTOR, CRITIC):
            for stretch in box.stretches(part):
                assert (stretch.own.start - stretch.start) % ALIGNMENT == 0 or not stretch.own
    assert torch.equal(covered, torch.ones_like(covered))


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_the_named_tensors_of_the_boxes_are_those_of_the_whole(shards: int) -> None:
    whole = layout()
    flat = torch.randn(whole.size, generator=torch.Generator().manual_seed(1))
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in whole.by_name(flat).items()}
    for shard in range(shards):
        box = Box(whole, Seat(shard, shards))
        live = torch.zeros(box.size)
        box.take(box.weights(live), whole.weights(flat))
        for row in (0, 1):
            box.take(box.moments(live)[row], whole.moments(flat)[row])
        for name, tensor in box.by_name(live).items():
            base, _, start = name.partition("@")
            first = int(start or 0)
            found[base].view(-1)[first : first + tensor.numel()] = tensor.reshape(-1)
    for name, tensor in whole.by_name(flat).items():
        assert torch.equal(found[name], tensor), name


def test_a_rank_of_four_shards_has_a_quarter_of_the_state() -> None:
    whole = layout()
    sizes = [Box(whole, Seat(shard, 4)).size for shard in range(4)]
    assert sum(sizes) == whole.size
    assert max(sizes) <= whole.size / 4 + 3 * 4 * ALIGNMENT


def test_a_seat_follows_from_the_name_of_the_process() -> None:
    assert [seat_of(f"model-{index}", Mesh(2)) for index in range(4)] == [
        Seat(0, 2),
        Seat(1, 2),
        Seat(0, 2),
        Seat(1, 2),
    ]
    assert [replica_of(f"model-{index}", Mesh(2)) for index in range(4)] == [0, 0, 1, 1]
    assert (seat_of("model-3", Mesh(1)).box, seat_of("model-3", Mesh(2)).box) == ("", "1/2")


def test_the_digest_of_the_state_is_that_of_its_boxes() -> None:
    held = {"model-0": "a", "model-1": "b", "model-2": "a", "model-3": "b"}
    assert joined(held, Mesh(2)) == "a.b"
    assert joined({"model-0": "a", "model-1": "a"}, Mesh(1)) == "a"
    assert digest_of_box("a.b", Seat(1, 2)) == "b"
    assert digest_of_box("a.b", Seat(1, 4)) == "", "the digest of another layout says nothing"
    assert digest_of_box("", Seat(0, 1)) == ""


@pytest.mark.parametrize(
    ("world_size", "boxes", "dtype"),
    [
        (2, 2, torch.float32),
        (4, 4, torch.float32),
        (4, 2, torch.float32),
        (3, 2, torch.float32),
        (5, 3, torch.float32),
        (3, 3, torch.float32),
        (4, 4, torch.bfloat16),
    ],
)
def test_shards_and_replicas_train_to_the_bits_of_one_rank(
    world_size: int, boxes: int, dtype: torch.dtype
) -> None:
    stage, batch = new_stage(actor=ACTOR_SETTINGS, steps=3), every_length()
    num_shards = 12

    (whole,) = train(batch, stage=stage, world_size=1, num_shards=num_shards, num_steps=3, dtype=dtype)
    cut = train(
        batch,
        stage=stage,
        world_size=world_size,
        num_shards=num_shards,
        num_steps=3,
        dtype=dtype,
        boxes=boxes,
    )
    for rank, outcome in enumerate(cut):
        assert outcome.weights.keys() == whole.weights.keys()
        for name, tensor in outcome.weights.items():
            assert torch.equal(tensor, whole.weights[name]), f"{name} on rank {rank}"
        assert outcome.digests == cut[rank % boxes].digests
        assert outcome.metrics == cut[0].metrics
        assert outcome.metrics["grad_norm"] == whole.metrics["grad_norm"]
    assert whole.metrics["grad_norm"] > ACTOR_SETTINGS.max_grad_norm, "the gradient was clipped"
    assert len({outcome.digests[-1] for outcome in cut}) == boxes


def test_a_critic_is_cut_like_the_actor() -> None:
    stage = new_stage(name="ppo", actor=ACTOR_SETTINGS, critic=CriticSection(learning_rate=0.01), steps=3)
    batch = rewarded(every_length())
    (whole,) = train(batch, stage=stage, world_size=1, num_shards=4)
    cut = train(batch, stage=stage, world_size=2, num_shards=4, boxes=2)
    for outcome in cut:
        assert all(torch.equal(tensor, whole.weights[name]) for name, tensor in outcome.weights.items())
        same = [
            name for name in whole.metrics if "ratio" not in name
        ]  # Ratios are estimated from other weights.
        assert any(name.startswith("critic") for name in same)
        assert [outcome.metrics[name] for name in same] == [whole.metrics[name] for name in same]


def test_a_group_without_a_box_is_refused() -> None:
    stage, batch = new_stage(actor=ACTOR_SETTINGS, steps=3), every_length()
    with pytest.raises(IntegrityError, match=r"expected a rank for each of 4 boxes .* found none for 3/4"):
        train(batch, stage=stage, world_size=3, num_shards=12, boxes=4)


def step_of(state: TrainingState, step: int, *, rank: int, group: ProcessGroup, stage: Stage) -> None:
    batch = every_length()
    calls = ModelCalls(state, deterministic=True)
    call = batch.call(stage, step=step, rank=rank, world_size=group.size, num_shards=12)
    run_call(batch, call, calls=calls, group=group)
    state.commit(step)


@pytest.mark.parametrize(("boxes", "source"), [(4, "snapshot"), (2, "snapshot"), (2, "replica")])
def test_only_the_box_of_a_lost_rank_is_restored_and_the_bits_are_those_of_an_undisturbed_run(
    boxes: int, source: str
) -> None:
    """The lost rank leaves the others in the middle of an update, with weights that belong to no step."""
    stage, segments = new_stage(actor=ACTOR_SETTINGS, steps=4), FakeSegments()

    def new_rank(rank: int) -> TrainingState:
        model = Transformer(TINY)
        initialize(model, seed=3 if rank < 10 else 4)
        name = f"model-{rank % 10}"
        return TrainingState(model, process=name, segments=segments, seat=seat_of(name, Mesh(boxes)))

    def begin(rank: int, group: ProcessGroup) -> TrainingState:
        state = new_rank(rank)
        state.start_stage(stage, step=0)
        for step in (1, 2):
            step_of(state, step, rank=rank, group=group, stage=stage)
        return state

    states = in_world(4, begin)
    committed = [state.committed_digest for state in states]
    for state in states:
        state.begin_update()
        state._weights.add_(1.0)
        state._compute_weights.fill_(float("nan"))
    lost = states[1]
    states[1] = replacement = new_rank(11)
    if source == "snapshot":
        replacement.restore_snapshot(2, process="model-1", stages={stage.name: stage}, digest=committed[1])
    else:
        held = StoredTensors(states[3].snapshot_tensors(), box=states[3].seat.box)
        counters = states[3].committed_counters
        replacement.restore(held, counters=counters, stage=stage, digest=committed[1])
    del lost

    def go_on(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        state = states[rank]
        state.rollback(2)
        with pytest.raises(RefusedError, match="not complete on this rank"):
            state.weights()
        state.gather(Groups.of(group))
        for step in (3, 4):
            step_of(state, step, rank=rank, group=group, stage=stage)
        return {name: tensor.clone() for name, tensor in state.weights().items()}

    found = in_world(4, go_on)
    (whole,) = train(every_length(), stage=stage, world_size=1, num_shards=12, num_steps=4)
    for weights in found:
        assert all(torch.equal(weights[name], whole.weights[name]) for name in whole.weights)
    segments.close()


def test_a_state_of_another_box_is_refused_and_changes_nothing() -> None:
    stage, segments = new_stage(actor=ACTOR_SETTINGS, steps=4), FakeSegments()

    def begin(rank: int, group: ProcessGroup) -> TrainingState:
        model = Transformer(TINY)
        initialize(model, seed=3)
        name = f"model-{rank}"
        state = TrainingState(model, process=name, segments=segments, seat=seat_of(name, Mesh(2)))
        state.start_stage(stage, step=0)
        step_of(state, 1, rank=rank, group=group, stage=stage)
        return state

    first, second = in_world(2, begin)
    before = first.digest()
    with pytest.raises(IntegrityError, match="expected a snapshot of box '0/2', got '1/2'"):
        first.restore_snapshot(1, process="model-1", stages={stage.name: stage})
    held = StoredTensors(second.snapshot_tensors(), box="1/2")
    with pytest.raises(IntegrityError, match="expected box '0/2' of the state, got '1/2'"):
        first.restore(held, counters=second.committed_counters, stage=stage)
    assert first.digest() == before
    segments.close()
