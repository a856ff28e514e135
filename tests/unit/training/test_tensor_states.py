"""Training in logical tensor slices: the bits of one rank, checkpoints for every number of slices, publication."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.checkpoint.manifest import StoredFile
from kintsugi.checkpoint.store import load_checkpoint, save_checkpoint, stored_weights, write_box
from kintsugi.errors import IntegrityError, StorageError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.arrays import Array
from kintsugi.model.seats import UNCUT, Mesh
from kintsugi.model.tensor_slices import ModelSlices, SliceName
from kintsugi.protocol.weights import Published
from kintsugi.training.box_saving import own_tensors
from kintsugi.training.group import Groups
from kintsugi.training.initial_weights import new_model
from kintsugi.training.snapshots import CopyCounters
from kintsugi.training.state import TrainingState
from kintsugi.training.tensor_row import joined_weights, tensor_group
from kintsugi.types import StreamSource
from kintsugi.weights.manifest import layout_of, tensor_views, weights_sha256
from kintsugi.weights.publish import Publisher
from kintsugi.weights.selection import ProcessLocation, join, plan
from tests.unit.training.test_pipeline import LENGTHS, SHAPES, STAGES, rewarded
from tests.unit.training.world import Outcome, fill_from_seed, in_mesh, new_batch, new_pairs, train

WIDE: dict[str, ModelConfig] = {
    name: msgspec.structs.replace(config, num_kv_heads=4, num_layers=2) for name, config in SHAPES.items()
}
CONFIG = WIDE["qwen2"]


def outcomes(name: str, shape: str, mesh: Mesh, *, slices: int, replicas: int = 1) -> list[Outcome]:
    batch = new_pairs(8) if name in ("dpo", "reward_model") else rewarded(new_batch(LENGTHS))
    return train(
        batch,
        stage=STAGES[name],
        world_size=replicas * mesh.boxes,
        num_shards=2,
        mesh=mesh,
        config=WIDE[shape],
        num_slices=slices,
    )


QUICK = [("grpo", "qwen3", Mesh(tensors=2), 4, 1), ("sft", "qwen2", Mesh(tensors=2), 2, 2)]
CASES = [
    ("grpo", "llama", Mesh(tensors=4), 4, 1),
    ("grpo", "qwen2", Mesh(tensors=2, shards=2), 2, 1),
    ("grpo", "qwen3", Mesh(tensors=2, stages=2), 2, 1),
    ("ppo", "qwen2", Mesh(tensors=2), 2, 1),
    ("dpo", "llama", Mesh(tensors=2), 4, 1),
    ("reward_model", "qwen3", Mesh(tensors=2), 2, 1),
    ("grpo", "tied qwen3", Mesh(tensors=2, stages=2), 4, 1),
    ("ppo", "tied qwen2", Mesh(tensors=2, stages=2), 2, 1),
]


@pytest.mark.parametrize(
    ("name", "shape", "mesh", "slices", "replicas"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
    ids=[f"{n}-{s}-{m}-{t}-{r}" for n, s, m, t, r in [*QUICK, *CASES]],
)
def test_tensor_ranks_end_with_the_bits_of_one_rank(
    name: str, shape: str, mesh: Mesh, slices: int, replicas: int
) -> None:
    (expected,) = outcomes(name, shape, UNCUT, slices=slices)
    weights = ModelSlices(range(slices), slices).cut(expected.weights)
    held: set[str] = set()
    for rank, found in enumerate(outcomes(name, shape, mesh, slices=slices, replicas=replicas)):
        held |= found.weights.keys()
        assert not [each for each, tensor in found.weights.items() if not tensor.equal(weights[each])]
        for metric, value in expected.metrics.items():
            assert metric == "update_ratio" or found.metrics[metric] == value, metric
        assert not mesh.seat(rank).is_last or found.outputs == expected.outputs
    assert held == weights.keys()


def fresh(mesh: Mesh, rank: int, *, slices: int, seed: int = 3) -> TrainingState:
    seat = mesh.seat(rank)
    tensors = tensor_group(seat, num_slices=slices)
    model = new_model(CONFIG, device=torch.device("cpu"), seat=seat, tensors=tensors)
    fill_from_seed(model, seed=seed)
    state = TrainingState(model, seat=seat, tensors=tensors)
    state.start_stage(STAGES["grpo"], step=0)
    return state


def save(folder: Path, mesh: Mesh, *, slices: int) -> tuple[Path, dict[str, Array]]:
    """A checkpoint of a state, and the weights that its model folder would have."""
    weights: dict[str, Array] = {}
    held = [
        own_tensors(fresh(mesh, rank, slices=slices, seed=5).hold_committed()) for rank in range(mesh.boxes)
    ]
    shapes = fresh(UNCUT, 0, slices=1).weight_shapes

    class Others:
        def ask(self, folder: Path) -> None:
            self.files = dict(write_box(folder, seat=each.seat, state=each.tensors) for each in held[1:])
            self.folder = folder

        def wait(self) -> Mapping[str, StoredFile]:
            weights.update(stored_weights(self.folder, shapes=shapes))
            weights.update({name: tensor.clone() for name, tensor in weights.items()})
            return self.files

    checkpoint = save_checkpoint(
        folder,
        step=0,
        stage="grpo",
        state=held[0].tensors,
        extra=msgspec.to_builtins(CopyCounters(stage="grpo")),
        model_files=(),
        keep=1,
        seat=held[0].seat,
        others=Others() if mesh.boxes > 1 else None,
    )
    return checkpoint.path, weights


TWO, FOUR = Mesh(tensors=2), Mesh(tensors=4)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((TWO, 4), (UNCUT, 1)),
        ((TWO, 4), (FOUR, 4)),
        ((UNCUT, 1), (TWO, 2)),
        ((UNCUT, 2), (TWO, 4)),
        ((Mesh(shards=2, tensors=2), 2), (UNCUT, 1)),
        ((TWO, 2), (Mesh(shards=2, tensors=2), 4)),
    ],
    ids=str,
)
def test_a_checkpoint_can_be_loaded_with_other_slices_and_tensor_ranks(
    saved: tuple[Mesh, int], loaded: tuple[Mesh, int], tmp_path: Path
) -> None:
    path, _ = save(tmp_path, saved[0], slices=saved[1])
    mesh, slices = loaded
    for rank in range(mesh.boxes):
        state = fresh(mesh, rank, slices=slices)
        stored, counters = load_checkpoint(path)
        state.restore(stored, counters=msgspec.convert(counters, CopyCounters), stage=STAGES["grpo"])
        expected = fresh(mesh, rank, slices=slices, seed=5).tensors()
        found = state.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_model_folder_of_a_checkpoint_has_whole_tensors(tmp_path: Path) -> None:
    _, weights = save(tmp_path, Mesh(shards=2, tensors=2), slices=4)
    expected = fresh(UNCUT, 0, slices=1, seed=5).weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_checkpoint_without_one_of_the_slices_is_refused(tmp_path: Path) -> None:
    tensors = dict(fresh(UNCUT, 0, slices=2).tensors())
    del tensors["weights/lm_head.weight#1/2"]
    path = save_checkpoint(
        tmp_path, step=0, stage="grpo", state=tensors, extra={}, model_files=(), keep=1
    ).path
    with pytest.raises(StorageError, match=r"slices of weights/lm_head\.weight do not make a whole"):
        load_checkpoint(path)


def test_the_hash_of_slices_is_that_of_the_whole_weights() -> None:
    def rank_main(rank: int, groups: Groups) -> str:
        state = fresh(TWO, rank, slices=4)
        assert groups.tensors is not None
        return weights_sha256(
            joined_weights(
                state.weights(), shapes=state.weight_shapes, slices=state.slices, group=groups.tensors
            )
        )

    expected = weights_sha256(fresh(UNCUT, 0, slices=1).weights())
    assert in_mesh(TWO, rank_main, world_size=2) == [expected] * 2


def publish(mesh: Mesh, *, slices: int) -> tuple[dict[str, Published], bytearray]:
    """What the ranks publish, and the bytes that a server fetches from them."""
    ranks = [ProcessLocation(f"model-{rank}", "host-0") for rank in range(mesh.boxes)]
    servers = [ProcessLocation("server-0", "host-0")]
    agents = {"host-0": "agent-0"}
    planned = plan("auto", ranks=ranks, servers=servers, agents=agents, version=1, step=0, parts=ranks)
    published: dict[str, Published] = {}
    content = bytearray(1 << 20)
    for rank, (process, order) in enumerate(planned.orders.items()):
        state = fresh(mesh, rank, slices=slices)
        weights = {name: each for name, each in state.weights().items() if state.publishes(name)}
        publisher = Publisher(process=process, host="host-0", segments=None)
        manifest, _ = publisher.publish(
            weights,
            order,
            places=list(layout_of(state.published_shapes, itemsize=4)),
            shapes=state.weight_shapes,
        )
        version = publisher._versions[1]
        for index, piece in version.pieces.items():
            content[piece.offset : piece.offset + piece.size] = version.bytes_of(index)
        source = StreamSource(order.meta_server, owners=(process,), chain=order.chain)
        published[process] = Published(manifest, (source,))
        publisher.close()
    return published, content


def test_servers_get_whole_weights_from_the_slices_of_several_ranks() -> None:
    published, content = publish(TWO, slices=4)
    found: Mapping[str, Tensor] = tensor_views(join(published).manifest, memoryview(content))
    expected = fresh(UNCUT, 0, slices=1).weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_version_without_one_of_the_slices_is_refused() -> None:
    published, _ = publish(TWO, slices=2)
    last = max(published)
    manifest = published[last].manifest
    short = msgspec.structs.replace(manifest, pieces=manifest.pieces[:-1])
    with pytest.raises(IntegrityError, match="was not published"):
        join({**published, last: Published(short, published[last].sources)})


def test_tensor_ranks_hold_each_slice_once_and_what_is_whole_everywhere() -> None:
    names = [fresh(TWO, rank, slices=4).weights().keys() for rank in range(2)]
    assert all(SliceName.parse(name).count == 1 for name in names[0] & names[1])
    assert all(SliceName.parse(name).count == 4 for name in names[0] ^ names[1])


def test_a_gradient_that_differs_between_tensor_ranks_is_noticed() -> None:
    def rank_main(rank: int, groups: Groups) -> None:
        state = fresh(TWO, rank, slices=2)
        state.begin_update()
        state.gradient.fill_(1.0 + rank)
        with pytest.raises(IntegrityError, match="expected equal gradients of the weights"):
            state.update(state.gradient, groups=groups)

    in_mesh(TWO, rank_main, world_size=2)
