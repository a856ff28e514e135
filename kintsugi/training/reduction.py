"""Gradients are added up: in one fixed order whoever computed them, or in whatever order the collective likes.

In deterministic mode the shards of a batch are the leaves of a binary tree that depends on their number only. A rank
holds a contiguous range of shards and adds up the largest subtrees that lie wholly within it; the sums of these
subtrees are exchanged and everybody finishes the same tree. One rank or many, the same pairs are added, so the
result has the same bits.

For 5 shards on two ranks (0–2 and 3–4), ((0+1)+(2+3))+4: the first rank brings the nodes 0+1 and 2, the second 3
and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.buffer.packing import shards_of_rank
from kintsugi.training.group import ProcessGroup


class Node(NamedTuple):
    """The subtree over shards [start, stop)."""

    start: int
    stop: int

    @property
    def children(self) -> tuple[Node, Node]:
        """The left child holds the largest power of two that leaves something for the right one."""
        middle = self.start + (1 << (self.stop - self.start - 1).bit_length() - 1)
        return Node(self.start, middle), Node(middle, self.stop)


@dataclass
class Contribution:
    """What a shard, a subtree or the whole batch adds to a step."""

    gradient: Tensor
    """Flat, fp32; empty where nothing is learned."""
    sums: Tensor
    """float64, one entry per statistic."""
    maxima: Tensor
    """float64, one entry per statistic."""

    def add(self, other: Contribution) -> Contribution:
        """Take `other` in; it stands to the right of this one."""
        self.gradient += other.gradient
        self.sums += other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)
        return self


def owned_nodes(num_shards: int, *, owned: range) -> list[Node]:
    """The largest subtrees wholly within a rank's shards, from left to right.

    >>> owned_nodes(5, owned=range(0, 3))
    [Node(start=0, stop=2), Node(start=2, stop=3)]
    """

    def walk(node: Node) -> list[Node]:
        if node.stop <= owned.start or node.start >= owned.stop:
            return []
        if owned.start <= node.start and node.stop <= owned.stop:
            return [node]
        left, right = node.children
        return walk(left) + walk(right)

    return walk(Node(0, num_shards))


def sum_node(node: Node, *, known: Callable[[Node], Contribution | None]) -> Contribution:
    """Add up a subtree depth first, so that one value per level is alive; `known` gives what needs no adding."""
    contribution = known(node)
    if contribution is not None:
        return contribution
    left, right = node.children
    return sum_node(left, known=known).add(sum_node(right, known=known))


def sum_owned(
    num_shards: int, *, owned: range, of_shard: Callable[[int], Contribution]
) -> dict[Node, Contribution]:
    """What this rank brings to the tree; `of_shard` computes one shard's contribution into tensors of its own."""

    def known(node: Node) -> Contribution | None:
        return of_shard(node.start) if node.stop - node.start == 1 else None

    return {node: sum_node(node, known=known) for node in owned_nodes(num_shards, owned=owned)}


def finish_tree(
    group: ProcessGroup,
    *,
    num_shards: int,
    owned: Mapping[Node, Contribution],
    timeout_s: float,
    blocks: Sequence[int] = (),
) -> Contribution:
    """The whole batch's contribution, with the same bits on every rank, for every number of ranks, and whichever block
    of shards each has (`blocks`, by rank; empty: its own number).

    Each rank finishes the tree for its own slice of the gradient (adding is elementwise, so slicing changes no bits)
    and the slices are gathered: as many bytes per rank as one all-reduce, however many ranks there are.
    """
    assert num_shards >= group.size, f"{num_shards} shards leave some of {group.size} ranks without any"
    root = Node(0, num_shards)
    if group.size == 1:
        return owned[root]
    nodes = [
        owned_nodes(num_shards, owned=shards_of_rank(num_shards, rank=block, world_size=group.size))
        for block in blocks or range(group.size)
    ]
    gradient = next(iter(owned.values())).gradient
    gradient_size = gradient.numel()
    statistics = _exchange_statistics(group, owned=owned, nodes=nodes, timeout_s=timeout_s)
    if gradient_size == 0:
        everyone = {node: Contribution(gradient, *found) for node, found in statistics.items()}
        return sum_node(root, known=everyone.get)
    slices = _exchange_slices(group, owned=owned, nodes=nodes, timeout_s=timeout_s)
    everyone = {node: Contribution(slices[node], *statistics[node]) for node in slices}
    total = sum_node(root, known=everyone.get)
    gathered = group.all_gather(total.gradient, timeout_s=timeout_s)
    total.gradient = gathered.flatten()[:gradient_size]
    return total


def sum_any_order(group: ProcessGroup, *, owned: Contribution, timeout_s: float) -> Contribution:
    """The whole batch's contribution by one all-reduce: fastest, equal on every rank, its rounding unspecified."""
    if group.size == 1:
        return owned
    if owned.gradient.numel() > 0:
        group.all_reduce(owned.gradient, timeout_s=timeout_s)
    num_sums = owned.sums.numel()
    everyone = group.all_gather(torch.cat((owned.sums, owned.maxima)), timeout_s=timeout_s)
    return Contribution(owned.gradient, everyone[:, :num_sums].sum(dim=0), everyone[:, num_sums:].amax(dim=0))


def _exchange_slices(
    group: ProcessGroup,
    *,
    owned: Mapping[Node, Contribution],
    nodes: Sequence[Sequence[Node]],
    timeout_s: float,
) -> dict[Node, Tensor]:
    """This rank's slice of every node's gradient; the last slices are padded with zeros to equal width."""
    mine = nodes[group.rank]
    first = next(iter(owned.values())).gradient
    width = -(-first.numel() // group.size)
    outgoing = first.new_zeros(group.size, len(mine), width)
    for position, node in enumerate(mine):
        padded = torch.nn.functional.pad(owned[node].gradient, (0, group.size * width - first.numel()))
        outgoing[:, position] = padded.view(group.size, width)
    incoming = group.all_to_all(
        outgoing.flatten(),
        sent=[len(mine) * width] * group.size,
        received=[len(theirs) * width for theirs in nodes],
        timeout_s=timeout_s,
    )
    in_order = [node for theirs in nodes for node in theirs]
    return dict(zip(in_order, incoming.view(-1, width).unbind(), strict=True))


def _exchange_statistics(
    group: ProcessGroup,
    *,
    owned: Mapping[Node, Contribution],
    nodes: Sequence[Sequence[Node]],
    timeout_s: float,
) -> dict[Node, tuple[Tensor, Tensor]]:
    """Sums and maxima of every node."""
    mine = [torch.cat((owned[node].sums, owned[node].maxima)) for node in nodes[group.rank]]
    num_sums = next(iter(owned.values())).sums.numel()
    most = max(len(theirs) for theirs in nodes)
    padded = mine + [torch.zeros_like(mine[0])] * (most - len(mine))
    everyone = group.all_gather(torch.stack(padded), timeout_s=timeout_s)
    return {
        node: (everyone[rank, position, :num_sums], everyone[rank, position, num_sums:])
        for rank, theirs in enumerate(nodes)
        for position, node in enumerate(theirs)
    }
