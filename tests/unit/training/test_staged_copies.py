"""A large state is copied by several lanes: every piece once, by whichever lane is free."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.training import staged_copies as module
from kintsugi.training.staged_copies import StagedCopies

PIECE = module.PIECE_BYTES // 4


class HostLane:
    """A lane between two places in host memory, which notes its pieces."""

    def __init__(self, carried: list[int], *, fails: bool = False) -> None:
        self.carried, self.fails = carried, fails
        self.after: list[Any] = []

    def begin(self, after: Any) -> None:
        self.after.append(after)

    def carry(self, source: Tensor, *, into: Tensor) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        into.copy_(source)
        self.carried.append(source.numel())


@pytest.mark.parametrize("numel", [0, 1, PIECE, PIECE + 1, 5 * PIECE + 7])
@pytest.mark.parametrize("most_lanes", [1, 3])
def test_every_element_is_copied_once_for_every_size_and_number_of_lanes(numel: int, most_lanes: int) -> None:
    carried: list[int] = []
    copies = StagedCopies(lambda: HostLane(carried), most_lanes=most_lanes)
    source, into = torch.arange(numel, dtype=torch.float32), torch.full((numel,), -1.0)
    copies.copy(source, into=into, after=None)
    assert torch.equal(source, into) and sum(carried) == numel


def test_lanes_are_opened_as_far_as_there_are_pieces_and_used_again() -> None:
    opened: list[HostLane] = []

    def open_lane() -> HostLane:
        opened.append(HostLane([]))
        return opened[-1]

    copies = StagedCopies(open_lane, most_lanes=4)
    for index, pieces in enumerate((1, 2, 6, 6)):
        source = torch.ones(pieces * PIECE)
        copies.copy(source, into=torch.empty_like(source), after=index)
    assert [lane.after for lane in opened] == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [2, 3]]


def test_lanes_copy_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)

    class Meeting(HostLane):
        def carry(self, source: Tensor, *, into: Tensor) -> None:
            both.wait()
            super().carry(source, into=into)

    source = torch.rand(2 * PIECE)
    into = torch.empty_like(source)
    StagedCopies(lambda: Meeting([]), most_lanes=2).copy(source, into=into, after=None)
    assert torch.equal(source, into)


def test_an_error_of_any_lane_ends_the_copy_and_is_raised() -> None:
    lanes = iter([HostLane([]), HostLane([], fails=True), HostLane([])])
    copies = StagedCopies(lambda: next(lanes), most_lanes=3)
    source = torch.ones(12 * PIECE)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copies.copy(source, into=torch.empty_like(source), after=None)
