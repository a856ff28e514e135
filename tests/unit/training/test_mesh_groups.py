"""Groups of the ranks of a model that is cut over ranks, over gloo, one thread per rank."""

from __future__ import annotations

import threading

import pytest
import torch

from kintsugi.errors import GroupBroken
from kintsugi.model.seats import Mesh
from kintsugi.training.group import Groups, check_sum, known_numbers
from tests.unit.training.world import in_mesh


def test_every_group_has_its_members_and_adds_up() -> None:
    mesh = Mesh(shards=1, stages=2, tensors=2)

    def rank_main(rank: int, groups: Groups) -> dict[str, tuple[str, ...]]:
        for group in groups:
            if group.size > 1:
                check_sum(group, torch.tensor(known_numbers(group), dtype=torch.float64), timeout_s=20.0)
        assert groups.tensors is not None and groups.stages is not None
        return {"data": groups.data.ranks, "tensors": groups.tensors.ranks, "stages": groups.stages.ranks}

    found = in_mesh(mesh, rank_main, world_size=8)
    assert found[5] == {
        "data": ("model-1", "model-5"),
        "tensors": ("model-4", "model-5"),
        "stages": ("model-5", "model-7"),
    }


def test_the_ends_of_a_tied_model_send_both_ways_past_the_stages_between() -> None:
    def rank_main(rank: int, groups: Groups) -> list[float]:
        edge = groups.embedding
        if edge is None:
            return []
        is_first = groups.previous is None
        mine, theirs = (edge.forward, edge.backward) if is_first else (edge.backward, edge.forward)
        mine.send(torch.full((2,), float(rank)))
        into = torch.empty(2)
        theirs.receive(into, timeout_s=20.0)
        mine.await_sent(timeout_s=20.0)
        return into.tolist()

    found = in_mesh(Mesh(stages=3), rank_main, world_size=6, is_tied=True)
    assert found == [[2.0, 2.0], [], [0.0, 0.0], [5.0, 5.0], [], [3.0, 3.0]]


def test_a_whole_model_per_rank_needs_no_further_group() -> None:
    def rank_main(rank: int, groups: Groups) -> tuple[bool, int]:
        return groups.data is groups.world, len(list(groups))

    assert in_mesh(Mesh(shards=2), rank_main, world_size=2) == [(True, 1)] * 2


def test_neighbouring_stages_send_both_ways_at_once_and_in_order() -> None:
    """Each sends twice before it receives: a sender does not wait for the receiver."""

    def rank_main(rank: int, groups: Groups) -> list[float]:
        received = []
        if groups.following is not None:
            for number in range(2):
                groups.following.forward.send(torch.full((3,), 10.0 * rank + number))
        if groups.previous is not None:
            for number in range(2):
                groups.previous.backward.send(torch.full((3,), -10.0 * rank - number))
        for channel in (
            groups.previous and groups.previous.forward,
            groups.following and groups.following.backward,
        ):
            for _ in range(2 if channel is not None else 0):
                assert channel is not None
                into = torch.empty(3)
                channel.receive(into, timeout_s=20.0)
                received.append(float(into[0]))
        for edge in (groups.previous, groups.following):
            for channel in edge or ():
                channel.await_sent(timeout_s=20.0)
        return received

    assert in_mesh(Mesh(stages=3), rank_main, world_size=3) == [
        [-10.0, -11.0],
        [0.0, 1.0, -20.0, -21.0],
        [10.0, 11.0],
    ]


def test_a_stage_that_waits_for_its_neighbour_is_freed_by_the_end_of_the_groups() -> None:
    waiting = threading.Barrier(2)

    def rank_main(rank: int, groups: Groups) -> str:
        if groups.following is not None:
            waiting.wait()
            groups.close()  # Sends nothing.
            return ""
        assert groups.previous is not None
        waiting.wait()
        threading.Timer(0.1, groups.end, args=["told to stop"]).start()
        with pytest.raises(GroupBroken) as broken:
            groups.previous.forward.receive(torch.empty(3), timeout_s=20.0)
        return str(broken.value)

    _, why = in_mesh(Mesh(stages=2), rank_main, world_size=2)
    assert "generation 1 (forward-0)" in why
