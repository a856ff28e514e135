"""Gradients of a model that is computed unit by unit: a unit's gradient is summed over this rank's samples, then over
the ranks, of which each keeps the elements of its box. Only one unit's gradients are whole at a time, and those of the
unit before are on their way.

The sums are those of `reduction.finish_tree`, in the same order: a unit's gradient is complete before the next one
begins, because all micro-batches pass through a unit one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.model.transformer import Transformer
from kintsugi.training.boxes import Box
from kintsugi.training.group import Column, Exchange
from kintsugi.training.reduction import (
    Contribution,
    Cut,
    Node,
    exchange_shares,
    finished_share,
    nodes_of_ranks,
    slices_by_node,
    slices_to_send,
    sum_owned,
)
from kintsugi.training.unit_weights import EXCHANGE_TIMEOUT_S
from kintsugi.training.units import Span, Unit


class Leaves(NamedTuple):
    """Part of a sum over the batch that this rank computes: places of its micro-batches, by leaf of the tree."""

    num_leaves: int
    own: Mapping[int, range]
    blocks: Sequence[int]
    """Blocks of leaves of all ranks, by rank; empty: block i belongs to rank i."""


class _Leaving(NamedTuple):
    """A range of a unit's gradient on its way to the ranks that hold it."""

    span: Span
    cut: Cut
    shares: list[range]
    exchange: Exchange


class UnitGradients:
    """Sums the gradients of one model."""

    def __init__(self, model: Transformer, *, box: Box, part: str, gradient: Tensor) -> None:
        """`gradient`: the box's elements of the gradient of this model."""
        self._box, self._part, self._gradient = box, part, gradient
        self._targets: dict[str, Tensor] = {}
        self._leaving: list[_Leaving] = []
        self._leaves = Leaves(0, {}, ())
        self._group: Column | None = None
        self.waited_s = 0.0
        """Time in which this rank waited for gradients."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad = True
            parameter.register_post_accumulate_grad_hook(partial(self._collect, name))

    def enter(self, box: Box) -> None:
        """Exchange with the ranks of another mesh, in which this rank holds the same box."""
        self._box = box

    def begin(self, leaves: Leaves, group: Column) -> None:
        """Begin a backward pass over these samples."""
        self._leaves, self._group = leaves, group
        self._leaving, self.waited_s = [], 0.0
        self._gradient.zero_()

    def add(self, unit: Unit, backward: Callable[[int], None]) -> None:
        """Call `backward` with the place of each micro-batch, in their order, and start to sum the unit's gradient over
        the ranks. A collective."""
        memory = self._gradient.new_zeros(unit.size)
        nothing = torch.zeros(0, dtype=torch.float64, device=memory.device)

        def of_leaf(index: int) -> Contribution:
            memory.zero_()
            for place in own[index]:
                backward(place)
            return Contribution(memory, nothing, nothing)

        num_leaves, own, blocks = self._leaves
        self._targets = unit.views(memory)
        owned = range(min(own), max(own) + 1)
        sums = sum_owned(num_leaves, owned=owned, of_shard=of_leaf)
        self._targets = {}
        self.finish()
        self._start(unit, {node: each.gradient for node, each in sums.items()}, blocks=blocks)

    def finish(self) -> None:
        """Wait for the gradients that are on their way, and sum them. A collective."""
        start, group = time.perf_counter(), self._group
        assert group is not None, "a backward pass was begun"
        nodes = self._nodes(group, self._leaves.blocks)
        for span, cut, shares, exchange in self._leaving:
            slices = slices_by_node(exchange.received(timeout_s=EXCHANGE_TIMEOUT_S), nodes=nodes)
            finished = finished_share(self._leaves.num_leaves, slices)
            received = exchange_shares(group, finished, shares=shares, cut=cut, timeout_s=EXCHANGE_TIMEOUT_S)
            place = self._place_of(span)
            self._gradient[place : place + len(received)] = received
        self._leaving = []
        self.waited_s += time.perf_counter() - start

    def _start(self, unit: Unit, sums: Mapping[Node, Tensor], *, blocks: Sequence[int]) -> None:
        group, shards = self._group, range(self._box.seat.shards)
        assert group is not None
        nodes = self._nodes(group, blocks)
        boxes = tuple(self._box.seat_of(name).shard for name in group.ranks)
        for span in unit.spans:
            piece = tuple(span.in_unit(shard) for shard in shards)
            cut = Cut(boxes, (piece,))
            shares = cut.shares(piece)
            outgoing, sent, received = slices_to_send(sums, rank=group.rank, nodes=nodes, shares=shares)
            exchange = group.start_all_to_all(
                outgoing, sent=sent, received=received, timeout_s=EXCHANGE_TIMEOUT_S
            )
            self._leaving.append(_Leaving(span, cut, shares, exchange))

    def _nodes(self, group: Column, blocks: Sequence[int]) -> list[list[Node]]:
        return nodes_of_ranks(self._leaves.num_leaves, num_ranks=group.size, blocks=blocks)

    def _place_of(self, span: Span) -> int:
        """Where the box's elements of a range begin in its gradient of this model."""
        stretch = span.stretch
        first = self._box.stretches(self._part)[0].place
        return stretch.place - first + span.of_shard(self._box.seat.shard).start - stretch.own.start

    def _collect(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None, "called after a gradient was accumulated"
        if name in self._targets:
            self._targets[name].add_(parameter.grad)
        parameter.grad = None
