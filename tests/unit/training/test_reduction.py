from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from kintsugi.samples.sharding import shards_of_rank
from kintsugi.training import reduction
from kintsugi.training.group import Group
from kintsugi.training.process_group import ProcessGroup
from kintsugi.training.reduction import (
    Contribution,
    Cut,
    Node,
    finish_tree,
    owned_nodes,
    sum_any_order,
    sum_owned,
)
from tests.unit.training.world import in_world

SIZE = 37
"""Divisible by no number of ranks."""


def shard(index: int) -> Contribution:
    generator = torch.Generator().manual_seed(index)
    gradient = torch.randn(SIZE, generator=generator) * 10.0 ** (index % 7)
    return Contribution(
        gradient, torch.tensor([0.1 * index, 1.0]).double(), torch.tensor([float(index % 5)]).double()
    )


def tree(world_size: int, num_shards: int, *, blocks: Sequence[int] = ()) -> list[Contribution]:
    def rank_main(rank: int, group: ProcessGroup) -> Contribution:
        block = blocks[rank] if blocks else rank
        mine = shards_of_rank(num_shards, rank=block, world_size=world_size)
        owned = sum_owned(num_shards, owned=mine, of_shard=shard)
        return finish_tree(group, num_shards=num_shards, owned=owned, timeout_s=10.0, blocks=blocks)

    return in_world(world_size, rank_main)


def test_the_tree_splits_at_the_largest_power_of_two() -> None:
    assert Node(0, 8).children == (Node(0, 4), Node(4, 8))
    assert Node(0, 5).children == (Node(0, 4), Node(4, 5))
    assert Node(4, 7).children == (Node(4, 6), Node(6, 7))
    assert Node(2, 4).children == (Node(2, 3), Node(3, 4))


@pytest.mark.parametrize("num_shards", range(1, 14))
def test_ranks_together_own_every_shard_once_in_order(num_shards: int) -> None:
    for world_size in range(1, num_shards + 1):
        nodes = [
            node
            for rank in range(world_size)
            for node in owned_nodes(
                num_shards, owned=shards_of_rank(num_shards, rank=rank, world_size=world_size)
            )
        ]
        assert [index for node in nodes for index in range(*node)] == list(range(num_shards))


def test_a_tree_of_four_adds_pairs() -> None:
    (total,) = tree(1, 4)
    parts = [shard(index).gradient for index in range(4)]
    assert torch.equal(total.gradient, (parts[0] + parts[1]) + (parts[2] + parts[3]))


@pytest.mark.parametrize(
    ("world_size", "num_shards"), [(2, 4), (3, 4), (4, 4), (3, 8), (2, 5), (3, 7), (4, 6)]
)
def test_the_sum_has_the_same_bits_on_every_rank_and_for_every_number_of_ranks(
    world_size: int, num_shards: int
) -> None:
    (alone,) = tree(1, num_shards)
    for total in tree(world_size, num_shards):
        assert torch.equal(total.gradient, alone.gradient)
        assert torch.equal(total.sums, alone.sums)
        assert torch.equal(total.maxima, alone.maxima)


@pytest.mark.parametrize("size", [1, 8, SIZE])
def test_the_sum_has_the_same_bits_however_small_the_pieces_are_that_are_exchanged(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = tree(1, 5)
    monkeypatch.setattr(reduction, "PIECE_ELEMENTS", size)
    for total in tree(3, 5):
        assert torch.equal(total.gradient, alone.gradient)
        assert torch.equal(total.sums, alone.sums)
        assert torch.equal(total.maxima, alone.maxima)


@pytest.mark.parametrize("num_shards", range(1, 9))
def test_shards_may_be_computed_in_one_buffer_and_the_last_is_never_copied(num_shards: int) -> None:
    (expected,) = tree(1, num_shards)
    buffer = torch.empty(SIZE)

    def in_buffer(index: int) -> Contribution:
        found = shard(index)
        return Contribution(buffer.copy_(found.gradient), found.sums, found.maxima)

    (total,) = sum_owned(num_shards, owned=range(num_shards), of_shard=in_buffer).values()
    assert torch.equal(total.gradient, expected.gradient)
    assert (total.gradient is buffer) == (num_shards == 1)
    assert torch.equal(buffer, shard(num_shards - 1).gradient)


@pytest.mark.parametrize("blocks", [(1, 0), (2, 0, 1), (3, 1, 0, 2)])
@pytest.mark.parametrize("num_shards", [4, 7])
def test_the_sum_has_the_same_bits_whichever_rank_has_which_block_of_shards(
    blocks: Sequence[int], num_shards: int
) -> None:
    (alone,) = tree(1, num_shards)
    for total in tree(len(blocks), num_shards, blocks=blocks):
        assert torch.equal(total.gradient, alone.gradient)
        assert torch.equal(total.sums, alone.sums)
        assert torch.equal(total.maxima, alone.maxima)


def test_statistics_are_sums_and_maxima_over_all_shards() -> None:
    for total in tree(2, 4):
        assert total.sums.tolist() == pytest.approx([0.6, 4.0])
        assert total.maxima.tolist() == [3.0]


PIECES = (
    (range(5), range(5, 12), range(12, 13), range(13, 13)),
    (range(13, 20), range(20, 30), range(30, 31), range(31, SIZE)),
)
"""Of up to four boxes: unequal, and one of them empty."""


@pytest.mark.parametrize("boxes", [(0, 1), (0, 1, 2), (0, 1, 0), (0, 1, 0, 1), (0, 1, 2, 3), (1, 0, 0, 0)])
def test_a_rank_receives_its_box_of_the_sum_with_the_bits_of_the_whole(boxes: tuple[int, ...]) -> None:
    (alone,) = tree(1, 5)
    cut = Cut(boxes, tuple(merged(piece, max(boxes) + 1) for piece in PIECES))

    def rank_main(rank: int, group: ProcessGroup) -> Contribution:
        owned = sum_owned(5, owned=shards_of_rank(5, rank=rank, world_size=len(boxes)), of_shard=shard)
        return finish_tree(group, num_shards=5, owned=owned, timeout_s=10.0, cut=cut)

    for box, total in zip(boxes, in_world(len(boxes), rank_main), strict=True):
        assert torch.equal(total.sums, alone.sums)
        for piece in cut.pieces:
            mine = slice(piece[box].start, piece[box].stop)
            assert torch.equal(total.gradient[mine], alone.gradient[mine])


def merged(piece: Sequence[range], count: int) -> tuple[range, ...]:
    """The first boxes of a piece; the last of them takes the elements of all others that follow it."""
    return (*piece[: count - 1], range(piece[count - 1].start, max(piece[count - 1].stop, piece[-1].stop)))


class CountingGroup:
    """Counts the elements that a rank sends to other ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size, self.sent = group.rank, group.size, 0

    def all_gather(self, tensor: torch.Tensor, *, timeout_s: float) -> torch.Tensor:
        if tensor.dtype == torch.float32:
            self.sent += tensor.numel() * (self.size - 1)
        return self._group.all_gather(tensor, timeout_s=timeout_s)

    def all_to_all(
        self, tensor: torch.Tensor, *, sent: Sequence[int], received: Sequence[int], timeout_s: float
    ) -> torch.Tensor:
        self.sent += sum(sent) - sent[self.rank]
        return self._group.all_to_all(tensor, sent=sent, received=received, timeout_s=timeout_s)


@pytest.mark.parametrize(("shards", "expected"), [(1, 1.5), (2, 1.0), (4, 0.75)])
def test_the_more_boxes_the_fewer_elements_are_sent(shards: int, expected: float) -> None:
    """Of four ranks with one shard of the batch each, relative to the length of the gradient."""
    width = 64 // shards
    cut = Cut(
        tuple(rank % shards for rank in range(4)),
        (tuple(range(box * width, (box + 1) * width) for box in range(shards)),),
    )

    def rank_main(rank: int, group: ProcessGroup) -> int:
        counting = CountingGroup(group)
        mine = Contribution(torch.ones(64), torch.zeros(1).double(), torch.zeros(0).double())
        found = finish_tree(
            cast("Group", counting), num_shards=4, owned={Node(rank, rank + 1): mine}, timeout_s=10.0, cut=cut
        )
        received = cut.pieces[0][rank % shards]
        assert torch.equal(found.gradient[received.start : received.stop], torch.full((width,), 4.0))
        return counting.sent

    assert in_world(4, rank_main) == [int(expected * 64)] * 4


def test_the_quick_sum_agrees_to_rounding_and_is_equal_on_all_ranks() -> None:
    def rank_main(rank: int, group: ProcessGroup) -> Contribution:
        return sum_any_order(group, owned=shard(rank), timeout_s=10.0)

    totals = in_world(3, rank_main)
    expected = shard(0).add(shard(1)).add(shard(2))
    for total in totals:
        torch.testing.assert_close(total.gradient, expected.gradient)
        torch.testing.assert_close(total.sums, expected.sums)
        assert torch.equal(total.maxima, expected.maxima)
        assert torch.equal(total.gradient, totals[0].gradient)
