"""States and weights of a model that is cut into pipeline stages: checkpoints, the hash of all weights, publication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.checkpoint.manifest import StoredFile
from kintsugi.checkpoint.store import load_checkpoint, save_checkpoint, stored_weights, write_box
from kintsugi.config.stages import Stage
from kintsugi.errors import RefusedError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.arrays import Array
from kintsugi.model.partition import part_of
from kintsugi.model.seats import UNCUT, Mesh
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.weights import Publish, Published
from kintsugi.training.box_saving import own_tensors
from kintsugi.training.group import Groups
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.saving import saved_counters
from kintsugi.training.snapshots import CopyCounters, HeldState
from kintsugi.training.stage_weights import stage_weights_sha256
from kintsugi.training.state import TrainingState
from kintsugi.types import StreamSource
from kintsugi.weights.manifest import layout_of, weights_sha256
from kintsugi.weights.publish import Publisher
from kintsugi.weights.selection import ProcessLocation, join, plan
from tests.unit.training.test_pipeline import LENGTHS, SHAPES, STAGES
from tests.unit.training.world import StoredTensors, calls_of, in_mesh, new_batch, run_call

SEPARATE, TIED = SHAPES["llama"], SHAPES["tied llama"]
STAGE: Stage = STAGES["grpo"]
"""With a frozen reference."""


both = pytest.mark.parametrize("config", [SEPARATE, TIED], ids=["separate", "tied"])


def fresh(mesh: Mesh, rank: int, *, seed: int = 3, config: ModelConfig = SEPARATE) -> TrainingState:
    seat = mesh.seat(rank)
    model = Transformer(config, part=part_of(config, seat))
    initialize(model, seed=seed)
    return TrainingState(model, seat=seat)


def train_step(state: TrainingState, step: int, *, groups: Groups, rank: int, mesh: Mesh, ranks: int) -> None:
    batch, calls = new_batch(LENGTHS), ModelCalls(state, deterministic=True)
    for interface in calls_of(STAGE):
        call = batch.call(
            STAGE,
            step=step,
            rank=mesh.data_index(rank),
            world_size=ranks // mesh.model_ranks,
            num_shards=4,
            interface=interface,
        )
        run_call(batch, call, calls=calls, group=groups)
    state.commit(step)


def begun(mesh: Mesh, config: ModelConfig) -> list[TrainingState]:
    """States of all ranks after one step."""

    def rank_main(rank: int, groups: Groups) -> TrainingState:
        state = fresh(mesh, rank, config=config)
        state.start_stage(STAGE, step=0)
        train_step(state, 1, groups=groups, rank=rank, mesh=mesh, ranks=mesh.boxes)
        return state

    return in_mesh(mesh, rank_main, world_size=mesh.boxes, is_tied=config.tie_embeddings)


class OtherStates:
    """Writes the boxes of other ranks."""

    def __init__(self, held: Sequence[HeldState]) -> None:
        self._held, self._written = held, dict[str, StoredFile]()

    def ask(self, folder: Path) -> None:
        self._written = dict(write_box(folder, seat=each.seat, state=each.tensors) for each in self._held)

    def wait(self) -> Mapping[str, StoredFile]:
        return self._written


def save(states: Sequence[TrainingState], folder: Path) -> Path:
    held = [own_tensors(state.hold_committed()) for state in states]
    for each in held:
        each.await_copy()
    checkpoint = save_checkpoint(
        folder,
        step=1,
        stage=STAGE.name,
        state=held[0].tensors,
        extra=msgspec.to_builtins(saved_counters(held[0])),
        model_files=[],
        keep=1,
        seat=held[0].seat,
        others=OtherStates(held[1:]) if len(held) > 1 else None,
    )
    for each in held:
        each.hold.release()
    return checkpoint.path


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Mesh(stages=2), UNCUT),
        (UNCUT, Mesh(stages=2)),
        pytest.param(Mesh(stages=2), Mesh(stages=3), marks=pytest.mark.slow),
        pytest.param(Mesh(stages=2), Mesh(shards=2), marks=pytest.mark.slow),
        pytest.param(Mesh(shards=2), Mesh(stages=2), marks=pytest.mark.slow),
        pytest.param(Mesh(shards=2, stages=2), Mesh(stages=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@both
def test_a_checkpoint_of_one_layout_goes_on_in_another_with_the_same_bits(
    saved: Mesh, resumed: Mesh, config: ModelConfig, tmp_path: Path
) -> None:
    states = begun(saved, config)
    path = save(states, tmp_path)

    def go_on(rank: int, groups: Groups) -> dict[str, Array]:
        state = fresh(resumed, rank, seed=4, config=config)
        stored, counters = load_checkpoint(path)
        state.restore(stored, counters=msgspec.convert(counters, CopyCounters), stage=STAGE)
        state.gather(groups)
        train_step(state, 2, groups=groups, rank=rank, mesh=resumed, ranks=resumed.boxes)
        return {name: weight.clone() for name, weight in state.weights().items()}

    def undisturbed(rank: int, groups: Groups) -> dict[str, Array]:
        state = fresh(UNCUT, rank, config=config)
        state.start_stage(STAGE, step=0)
        for step in (1, 2):
            train_step(state, step, groups=groups, rank=rank, mesh=UNCUT, ranks=1)
        return {name: weight.clone() for name, weight in state.weights().items()}

    (expected,) = in_mesh(UNCUT, undisturbed, world_size=1)
    found = in_mesh(resumed, go_on, world_size=resumed.boxes, is_tied=config.tie_embeddings)
    assert {name for each in found for name in each} == expected.keys()
    for each in found:
        for name, weight in each.items():
            assert torch.equal(weight, expected[name]), name


@both
def test_the_weights_of_a_model_folder_are_put_together_from_the_stages(
    config: ModelConfig, tmp_path: Path
) -> None:
    states = begun(Mesh(stages=2), config)
    path = save(states, tmp_path)
    weights = stored_weights(path, shapes=states[1].weight_shapes)
    assert weights.keys() == dict(Transformer(config).named_parameters()).keys()
    for state in states:
        for name, weight in state.weights().items():
            assert torch.equal(weights[name], weight), name


@both
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_hash_all_weights_as_one_rank_does(stages: int, config: ModelConfig) -> None:
    mesh = Mesh(stages=stages)

    def rank_main(rank: int, groups: Groups) -> str:
        state = fresh(mesh, rank, config=config)
        assert groups.stages is not None
        return stage_weights_sha256(
            state.weights(),
            shapes=state.weight_shapes,
            stage_of=state.part_of_weights,
            stages=groups.stages,
        )

    first, *others = in_mesh(mesh, rank_main, world_size=stages)
    assert first == weights_sha256(fresh(UNCUT, 0, config=config).weights())
    assert set(others) == {""}, "only the first stage has seen all weights"


@both
def test_stages_publish_their_parts_of_one_version(config: ModelConfig) -> None:
    mesh = Mesh(stages=2)
    ranks = [ProcessLocation(f"model-{rank}", "host-0") for rank in range(2)]
    servers = [ProcessLocation("server-0", "host-0"), ProcessLocation("server-1", "host-1")]
    agents = {"host-0": "agent-0", "host-1": "agent-1"}
    planned = plan("auto", ranks=ranks, servers=servers, agents=agents, version=1, step=1, parts=ranks)
    assert {choice.transport for choice in planned.choices.values()} == {"stream"}
    assert "each of 2 ranks has a part" in planned.reason
    published: dict[str, Published] = {}
    for rank, (process, order) in enumerate(planned.orders.items()):
        state = fresh(mesh, rank, config=config)
        places = list(layout_of(state.weight_shapes, itemsize=4))
        publisher = Publisher(process=process, host="host-0", segments=None)
        manifest, _ = publisher.publish(state.weights(), order, places=places)
        source = StreamSource(order.meta_server, owners=(process,), chain=order.chain)
        published[process] = Published(manifest, (source,))
        publisher.close()
    whole = Publisher(process="model-9", host="host-0", segments=None)
    expected, _ = whole.publish(fresh(UNCUT, 0, config=config).weights(), Publish(1, 1))
    whole.close()
    found = join(published).manifest
    assert found.digest == expected.digest
    assert [(piece.name, piece.offset, piece.size) for piece in found.pieces] == [
        (piece.name, piece.offset, piece.size) for piece in expected.pieces
    ]


def test_the_first_stage_computes_with_the_tied_embedding_of_the_last_one_again_after_a_rollback() -> None:
    mesh = Mesh(stages=2)

    def rank_main(rank: int, groups: Groups) -> Tensor:
        state = fresh(mesh, rank, config=TIED)
        state.start_stage(STAGE, step=0)
        train_step(state, 1, groups=groups, rank=rank, mesh=mesh, ranks=2)
        embedding = state.model.model.embed_tokens.weight
        expected = embedding.detach().clone()
        if rank == 0:
            embedding.data.zero_()  # As a copy that was interrupted leaves it.
        state.rollback(1)
        state.gather(groups)
        groups.world.all_gather(torch.zeros(1), timeout_s=30.0)  # Neither ends before the other has received.
        assert embedding.equal(expected)
        return expected

    first, last = in_mesh(mesh, rank_main, world_size=2, is_tied=True)
    assert first.equal(last)


def test_a_stage_does_not_start_on_a_copy_of_another_state() -> None:
    state = fresh(Mesh(stages=2), 0, config=TIED)
    state.start_stage(STAGE, step=0)
    stored = StoredTensors(state.tensors(), box=state.seat.box)
    replacement = fresh(Mesh(stages=2), 0, config=TIED, seed=4)
    replacement.restore(stored, counters=state.committed_counters, stage=STAGE)
    following = msgspec.structs.replace(STAGE, name="next", first_step=1)
    with pytest.raises(RefusedError, match="before the weights have been gathered"):
        replacement.start_stage(following, step=0)


def test_the_gradient_of_a_tied_embedding_forgets_an_interrupted_pass() -> None:
    state = fresh(Mesh(stages=2), 1, config=TIED)
    tied, embedding = state.tied_gradient("actor"), state.model.model.embed_tokens.weight
    assert tied is not None and state.tied_gradient("critic") is None
    tokens = torch.tensor([3, 5, 3])
    embedding.square().sum().backward()
    tied.hold()
    state.zero_gradient()
    embedding.sum().backward()
    tied.hold()
    tied.complete(tokens, torch.full((3, TIED.hidden_size), 0.5))
    total = state.gradient_of("actor")[: embedding.numel()].view_as(embedding)
    expected = torch.ones_like(total)
    expected[3], expected[5] = 2.0, 1.5
    assert total.equal(expected) and embedding.grad is None
