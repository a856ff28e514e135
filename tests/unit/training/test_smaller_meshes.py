"""A rank that takes another seat: its box is assembled from others, with the bits that the new mesh would have."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from kintsugi.bulk.server import BulkServer
from kintsugi.checkpoint.snapshot import HeldSnapshots, Snapshots, find_slot
from kintsugi.config.schema import ActorSection, Config, LayoutSection
from kintsugi.errors import DoesNotFit, IntegrityError, RefusedError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.partition import part_of
from kintsugi.model.seats import UNCUT, Mesh, seat_of
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.recovery import BoxCopies, BoxCopy, FetchState, MeshShape
from kintsugi.training.group import Groups
from kintsugi.training.held_boxes import BoxReader, KeptSnapshots
from kintsugi.training.peer_replication import describe_state
from kintsugi.training.rank_state import RankState
from kintsugi.training.seating import RankSeating
from kintsugi.training.snapshots import CopyCounters, StoredState
from kintsugi.training.state import TrainingState
from kintsugi.training.state_transfer import StateSource
from tests.unit.training.fakes import FakeSegments
from tests.unit.training.test_stage_states import SEPARATE, STAGE, TIED, train_step
from tests.unit.training.world import in_mesh

STAGES = {STAGE.name: STAGE}


def fresh(mesh: Mesh, rank: int, *, segments: FakeSegments, config: ModelConfig = SEPARATE) -> TrainingState:
    seat = mesh.seat(rank)
    model = Transformer(config, part=part_of(config, seat))
    initialize(model, seed=3)
    return TrainingState(model, seat=seat, process=f"model-{rank} of {mesh}", segments=segments)


def begun(mesh: Mesh, segments: FakeSegments, config: ModelConfig = SEPARATE) -> list[TrainingState]:
    """States of all ranks of a mesh after one step; their snapshots are in the segments of their host."""

    def rank_main(rank: int, groups: Groups) -> TrainingState:
        state = fresh(mesh, rank, segments=segments, config=config)
        state.start_stage(STAGE, step=0)
        train_step(state, 1, groups=groups, rank=rank, mesh=mesh, ranks=mesh.boxes)
        state.await_copy()
        return state

    return in_mesh(mesh, rank_main, world_size=mesh.boxes, is_tied=config.tie_embeddings)


def boxes_of(states: Sequence[TrainingState], mesh: Mesh) -> list[BoxCopies]:
    names = [f"model-{rank} of {mesh}" for rank in range(mesh.boxes)]
    return [
        BoxCopies(state.seat.box, state.committed_digest, (BoxCopy(f"snapshot:{name}", name),))
        for name, state in zip(names, states, strict=True)
    ]


def nothing(step: int, process: str, owner: str, box: str) -> tuple[StoredState, CopyCounters]:
    raise RefusedError(f"{process} has no box {box}")


def reader_of(state: TrainingState, segments: FakeSegments) -> BoxReader:
    return BoxReader(KeptSnapshots(segments), nothing, state.form_of)


@pytest.mark.parametrize(
    ("before", "after", "config"),
    [
        (Mesh(4), Mesh(3), SEPARATE),
        (Mesh(3), Mesh(2), SEPARATE),
        (Mesh(2), UNCUT, SEPARATE),
        (UNCUT, Mesh(2), SEPARATE),
        (Mesh(2), Mesh(4), SEPARATE),
        (Mesh(shards=2, stages=2), Mesh(stages=2), SEPARATE),
        (Mesh(stages=2), UNCUT, SEPARATE),
        (Mesh(2), Mesh(stages=2), SEPARATE),
        (Mesh(stages=2), UNCUT, TIED),
        (UNCUT, Mesh(stages=2), TIED),
    ],
)
def test_a_box_that_is_assembled_is_the_one_that_this_mesh_would_have_trained(
    before: Mesh, after: Mesh, config: ModelConfig
) -> None:
    segments = FakeSegments()
    boxes = boxes_of(begun(before, segments, config), before)
    trained = begun(after, FakeSegments(), config)
    for rank in range(after.boxes):
        state = fresh(after, rank, segments=segments, config=config)
        state.assemble(1, boxes=boxes, reader=reader_of(state, segments), stages=STAGES)
        assert state.committed_digest == trained[rank].committed_digest == state.digest()
        assert state.committed_counters == trained[rank].committed_counters


def assembled(boxes: Sequence[BoxCopies], segments: FakeSegments) -> TrainingState:
    state = fresh(UNCUT, 0, segments=segments)
    state.assemble(1, boxes=boxes, reader=reader_of(state, segments), stages=STAGES)
    return state


def test_a_damaged_box_is_refused_and_changes_nothing() -> None:
    segments = FakeSegments()
    boxes = boxes_of(begun(Mesh(2), segments), Mesh(2))
    for slot in HeldSnapshots("model-1 of 2x1x1", segments=segments).slots:
        slot.payload[100] ^= 1
    with pytest.raises(RefusedError, match=r"box 1/2 of step 1 is nowhere: snapshot:model-1.*hashes to"):
        assembled(boxes, segments)


def test_a_box_of_other_weights_is_refused() -> None:
    segments = FakeSegments()
    first, second = boxes_of(begun(Mesh(2), segments), Mesh(2))
    other = BoxCopies(second.box, "feed", second.copies)
    with pytest.raises(RefusedError, match="no snapshot of step 1 feed"):
        assembled([first, other], segments)


def test_without_one_of_the_boxes_the_state_is_refused() -> None:
    segments = FakeSegments()
    first, _ = boxes_of(begun(Mesh(2), segments), Mesh(2))
    with pytest.raises(IntegrityError, match=r"leave .* elements of the state open"):
        assembled([first], segments)


def test_a_state_that_begins_the_next_stage_is_taken_only_where_it_may_have_begun() -> None:
    segments = FakeSegments()
    boxes = [BoxCopies(each.box, "feed", each.copies) for each in boxes_of(begun(Mesh(2), segments), Mesh(2))]
    state = fresh(UNCUT, 0, segments=segments)
    reader = reader_of(state, segments)
    with pytest.raises(RefusedError, match="is of stage 'grpo', not of 'other'"):
        state.assemble(1, boxes=boxes, reader=reader, stages=STAGES, begun="other")
    state.assemble(1, boxes=boxes, reader=reader, stages=STAGES, begun=STAGE.name)
    assert state.committed_step == 1


def test_snapshots_of_the_seat_before_are_kept_for_two_steps() -> None:
    segments = FakeSegments()
    kept = KeptSnapshots(segments)
    kept.keep(Snapshots("model-0", size=64, segments=segments), step=4)
    kept.forget_before(5)
    assert kept.find("model-0").slots
    kept.forget_before(6)
    with pytest.raises(RefusedError):
        kept.find("model-0")


def test_a_rank_of_a_mesh_that_names_its_ranks_is_seated_by_their_order() -> None:
    mesh = Mesh(2, ranks=("model-1", "model-3"))
    assert [seat_of(name, mesh).box for name in mesh.ranks] == ["0/2", "1/2"]


class Offers:
    """Offers of a rank that no process fetches."""

    def offer(self, name: str, export: object) -> BulkOffer:
        return BulkOffer("model-0", name)


def test_a_rank_without_a_seat_gives_others_what_its_predecessor_has_left_on_this_host() -> None:
    segments = FakeSegments()
    (trained, _), mesh = begun(Mesh(2), segments), Mesh(2)
    state = fresh(mesh, 0, segments=segments)
    source = StateSource(state, cast(BulkServer, Offers()), boxes=reader_of(state, segments))
    owner = f"model-0 of {mesh}"
    given = source.answer(FetchState(1, owner=owner, box="0/2"))
    assert (given.manifest.step, given.box, given.stage) == (1, "0/2", STAGE.name)
    assert given.manifest.pieces == describe_state(trained.snapshot_tensors(), step=1).pieces
    with pytest.raises(RefusedError, match="no snapshot of step 2"):
        source.answer(FetchState(2, owner=owner, box="0/2"))
    with pytest.raises(RefusedError, match="has committed step 0, not 1"):
        source.answer(FetchState(1, box="0/2"))


def seated(segments: FakeSegments, *, available_bytes: int) -> tuple[RankSeating, list[RankState]]:
    """The first rank of two parts, and the states that it has had."""
    config = Config(name="t", actor=ActorSection(workers=2, layout=LayoutSection(shards=2)))
    (state, _), opened = begun(Mesh(2), segments), list[RankState]()
    seating = RankSeating(
        state,
        config,
        process="model-0",
        segments=segments,
        open_state=lambda mesh: fresh(mesh.shape, 0, segments=segments),
        fetch=nothing,
        changed=opened.append,
        available_bytes=lambda: available_bytes,
    )
    opened.append(state)
    return seating, opened


def test_a_rank_keeps_its_part_where_the_larger_one_does_not_fit() -> None:
    seating, opened = seated(FakeSegments(), available_bytes=1000)
    before = opened[0].digest()
    with pytest.raises(
        DoesNotFit, match=r"box '' needs \d+ bytes more on the host of model-0 than box '0/2', 1000"
    ):
        seating.take_seat(MeshShape(), ("model-0",), step=1)
    assert len(opened) == 1 and opened[0].digest() == before


def test_a_rank_takes_another_seat_and_its_snapshots_stay_for_the_others() -> None:
    segments = FakeSegments()
    seating, opened = seated(segments, available_bytes=1 << 40)
    digest = opened[0].committed_digest
    assert seating.take_seat(MeshShape(shards=2), ("model-0", "model-1"), step=1) is opened[0]
    state = seating.take_seat(MeshShape(), ("model-0",), step=1)
    assert state is opened[1] and state.is_fresh and state.seat.is_whole
    held = seating.boxes.kept.find("model-0 of 2x1x1")
    assert find_slot(held.slots, 1)[1].digest == digest
    seating.committed(3)
    assert not any("model-0 of 2x1x1" in name for name in segments.names())


def mapped(name: str) -> int:
    """Segments of this name that are mapped into this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum(name in line for line in maps.splitlines())


def num_bytes(tensors: Sequence[weakref.ref[Tensor]]) -> int:
    """Memory that the tensors have which are not gone."""
    return sum(tensor.untyped_storage().nbytes() for each in tensors if (tensor := each()) is not None)


def test_of_a_state_that_was_given_up_nothing_stays_in_memory_even_if_something_still_refers_to_it() -> None:
    gc.collect()  # What earlier tests have left has the same names.
    segments = FakeSegments()
    seating, opened = seated(segments, available_bytes=1 << 40)
    before = opened[0]
    assert isinstance(before, TrainingState)
    tensors = [weakref.ref(tensor) for tensor in before.resident()]
    assert mapped("snapshot-model-0 of 2x1x1") > 0 < num_bytes(tensors)
    seating.take_seat(MeshShape(), ("model-0",), step=1)
    assert num_bytes(tensors) == 0
    assert mapped("snapshot-model-0 of 2x1x1") > 0, "the snapshots are kept for two steps"
    seating.committed(3)
    assert mapped("snapshot-model-0 of 2x1x1") == 0
    assert opened[0] is before
