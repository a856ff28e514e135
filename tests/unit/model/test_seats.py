"""Places of ranks in the mesh of shards, stages and tensors."""

from __future__ import annotations

import itertools

import pytest

from kintsugi.model.seats import (
    UNCUT,
    WHOLE,
    Mesh,
    Seat,
    digest_of_box,
    joined,
    replica_of,
    seat_of,
    speakers,
)

MESHES = [Mesh(*sizes) for sizes in itertools.product((1, 2, 3), repeat=3)]


def names(count: int) -> list[str]:
    return [f"model-{index}" for index in range(count)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_take_the_boxes_in_turn_and_every_box_has_its_own_place_and_name(mesh: Mesh) -> None:
    seats = [seat_of(name, mesh) for name in names(2 * mesh.boxes)]
    assert [seat.number for seat in seats] == 2 * list(range(mesh.boxes))
    assert len(set(seats)) == len({seat.box for seat in seats}) == mesh.boxes
    assert all(seat.mesh == mesh for seat in seats)
    assert [replica_of(name, mesh) for name in names(2 * mesh.boxes)] == [0] * mesh.boxes + [1] * mesh.boxes


def test_tensors_vary_fastest_then_stages_then_shards() -> None:
    places = [(each.shard, each.stage, each.tensor) for each in map(Mesh(2, 2, 2).seat, range(8))]
    assert places == sorted(places)
    assert Mesh(2, 2, 2).seat(13) == Seat(1, 2, 0, 2, 1, 2), "the fifth rank of the second replica"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_groups_of_each_kind_cover_all_ranks_once(mesh: Mesh) -> None:
    num_ranks = 2 * mesh.boxes
    for members in (
        lambda rank: mesh.data_column(rank, num_ranks=num_ranks),
        mesh.tensor_row,
        mesh.pipeline,
    ):
        groups = {tuple(members(rank)) for rank in range(num_ranks)}
        assert sorted(rank for group in groups for rank in group) == list(range(num_ranks))
        assert all(rank in members(rank) for rank in range(num_ranks))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_of_one_group_differ_along_its_axis_only(mesh: Mesh) -> None:
    num_ranks = 2 * mesh.boxes
    for rank in range(num_ranks):
        seat, index = mesh.seat(rank), mesh.data_index(rank)
        column = mesh.data_column(rank, num_ranks=num_ranks)
        assert [mesh.data_index(other) for other in column] == list(range(2 * mesh.shards))
        assert {(mesh.seat(other).stage, mesh.seat(other).tensor) for other in column} == {
            (seat.stage, seat.tensor)
        }
        pipeline = [mesh.seat(other) for other in mesh.pipeline(rank)]
        assert [each.stage for each in pipeline] == list(range(mesh.stages))
        assert {(each.shard, each.tensor) for each in pipeline} == {(seat.shard, seat.tensor)}
        assert {mesh.data_index(other) for other in (*mesh.pipeline(rank), *mesh.tensor_row(rank))} == {index}
        assert [mesh.seat(other).tensor for other in mesh.tensor_row(rank)] == list(range(mesh.tensors))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_first_stage_begins_the_model_and_the_last_one_ends_it(mesh: Mesh) -> None:
    seats = [mesh.seat(rank) for rank in range(mesh.boxes)]
    assert all(seat.is_first == (seat.stage == 0) for seat in seats)
    assert all(seat.is_last == (seat.stage == mesh.stages - 1) for seat in seats)
    assert all(seat.is_whole == (mesh == UNCUT) for seat in seats)


def test_the_last_stage_answers_calls() -> None:
    assert speakers(names(4), Mesh(stages=2)) == {"model-1", "model-3"}
    assert speakers(names(3), UNCUT) == set(names(3))
    assert speakers(names(4), Mesh(stages=2, tensors=2)) == {"model-2", "model-3"}


def test_the_digest_of_a_box_is_found_in_that_of_its_own_layout_only() -> None:
    digests = {name: f"{index:x}" for index, name in enumerate(names(4))}
    layouts = [Mesh(4), Mesh(2, 2), Mesh(1, 4), Mesh(1, 2, 2), Mesh(2, 1, 2)]
    for one, other in itertools.product(layouts, repeat=2):
        whole = joined(digests, one)
        found = [digest_of_box(whole, other.seat(rank)) for rank in range(4)]
        assert found == (["0", "1", "2", "3"] if one == other else [""] * 4)
    assert digest_of_box("", WHOLE) == digest_of_box("", Mesh(1, 2).seat(0)) == ""


def test_of_replicas_that_differ_the_most_frequent_one_counts() -> None:
    digests = dict(zip(names(6), ("1", "a", "2", "b", "2", "b"), strict=True))
    assert joined(digests, Mesh(2)) == "2.b"
    assert joined(dict.fromkeys(names(1), "1"), Mesh(2)) == "1."


def test_no_two_boxes_of_any_layouts_have_one_name() -> None:
    boxes = [mesh.seat(number).box for mesh in MESHES for number in range(mesh.boxes)]
    assert len(set(boxes)) == len(boxes)


def test_boxes_of_shards_alone_have_the_names_of_earlier_versions() -> None:
    assert [Mesh(2).seat(rank).box for rank in range(3)] == ["0/2", "1/2", "0/2"]
    assert seat_of("model-3", UNCUT).box == ""
    assert joined({"model-0": "a", "model-1": "b"}, Mesh(2)) == "a.b"
