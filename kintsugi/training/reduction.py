"""Summation of gradients over the ranks: in one fixed order, or in the order that the collective library chooses.

In deterministic mode the shards of a batch are the leaves of a binary tree that depends on their number only. A rank
holds a contiguous range of shards and sums the largest subtrees that lie wholly within it. The ranks exchange these
sums and each finishes the same tree. The same pairs are added for any number of ranks, so the result has the same bits.

For 5 shards on two ranks (0–2 and 3–4), ((0+1)+(2+3))+4: the first rank brings the nodes 0+1 and 2, the second 3
and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kintsugi.model.arrays import Array, copied, namespace, zeros
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.training.group import Group

PIECE_ELEMENTS = 64 << 20
"""Elements of the gradient that are exchanged at once: 256 MB, which bounds the memory that an exchange needs."""


class Node(NamedTuple):
    """The subtree over shards [start, stop)."""

    start: int
    stop: int

    @property
    def children(self) -> tuple[Node, Node]:
        """Left and right subtree; the left one holds the largest power of two that leaves the right one nonempty."""
        middle = self.start + (1 << (self.stop - self.start - 1).bit_length() - 1)
        return Node(self.start, middle), Node(middle, self.stop)


@dataclass
class Contribution:
    """Gradient and statistics of a shard, a subtree or the whole batch."""

    gradient: Any
    """Flat, fp32; empty in calls that learn nothing."""
    sums: Any
    """Float64, one entry per summed statistic."""
    maxima: Any
    """Float64, one entry per maximum."""

    def add(self, other: Contribution) -> Contribution:
        """Add `other`, the right neighbour in the tree, in place."""
        self.gradient += other.gradient
        self.sums += other.sums
        self.maxima = namespace(self.maxima).maximum(self.maxima, other.maxima)
        return self

    def copied(self) -> Contribution:
        """The same contribution with a gradient in memory of its own."""
        return Contribution(copied(self.gradient), self.sums, self.maxima)


def owned_nodes(num_shards: int, *, owned: range) -> list[Node]:
    """Largest subtrees wholly within a rank's shards, from left to right.

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
    """Sum a subtree depth first, so that one value per level is alive; `known` returns sums that exist already."""
    contribution = known(node)
    if contribution is not None:
        return contribution
    left, right = node.children
    return sum_node(left, known=known).add(sum_node(right, known=known))


def sum_owned(
    num_shards: int, *, owned: range, of_shard: Callable[[int], Contribution]
) -> dict[Node, Contribution]:
    """Sum this rank's subtrees.

    `of_shard` may use the same memory for the gradient of every shard: a sum that is still needed when the next shard
    is computed is copied. A rank with one shard copies nothing.
    """

    def total(node: Node, *, is_kept: bool) -> Contribution:
        if node.stop - node.start == 1:
            found = of_shard(node.start)
            return found.copied() if is_kept else found
        left, right = node.children
        return total(left, is_kept=True).add(total(right, is_kept=False))

    nodes = owned_nodes(num_shards, owned=owned)
    return {node: total(node, is_kept=node.stop < owned.stop) for node in nodes}


def finish_tree(
    group: Group,
    *,
    num_shards: int,
    owned: Mapping[Node, Contribution],
    timeout_s: float,
    blocks: Sequence[int] = (),
) -> Contribution:
    """Sum over the whole batch, with the same bits on every rank, for every number of ranks, and for every assignment
    of shard blocks to ranks (`blocks`, by rank; by default block i belongs to rank i).

    Each rank finishes the tree for its own slice of the gradient (addition is elementwise, so slicing changes no bits)
    and the slices are gathered. Each rank transfers as many bytes as in one all-reduce, for any number of ranks. This
    is done piece by piece, and the sum takes the place of a gradient of `owned`.
    """
    assert num_shards >= group.size, f"{num_shards} shards leave some of {group.size} ranks without any"
    root = Node(0, num_shards)
    if group.size == 1:
        return owned[root]
    nodes = [
        owned_nodes(num_shards, owned=shards_of_rank(num_shards, rank=block, world_size=group.size))
        for block in blocks or range(group.size)
    ]
    statistics = _exchange_statistics(group, owned=owned, nodes=nodes, timeout_s=timeout_s)
    gradient = next(iter(owned.values())).gradient
    found = {node: Contribution(gradient[:0], *each) for node, each in statistics.items()}
    total = sum_node(root, known=found.get)
    for start in range(0, len(gradient), PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        mine = {node: each.gradient[piece] for node, each in owned.items()}
        slices = _exchange_slices(group, owned=mine, nodes=nodes, timeout_s=timeout_s)
        nothing = total.sums[:0]
        found = {node: Contribution(each, nothing, nothing) for node, each in slices.items()}
        finished = sum_node(root, known=found.get).gradient
        gathered = group.all_gather(finished, timeout_s=timeout_s).reshape(-1)
        gradient[piece] = gathered[: len(gradient[piece])]
    total.gradient = gradient
    return total


def sum_any_order(group: Group, *, owned: Contribution, timeout_s: float) -> Contribution:
    """Sum over the whole batch by one all-reduce: fastest and equal on every rank, but with unspecified rounding."""
    if group.size == 1:
        return owned
    if len(owned.gradient) > 0:
        group.all_reduce(owned.gradient, timeout_s=timeout_s)
    num_sums, xp = len(owned.sums), namespace(owned.sums)
    gathered = group.all_gather(xp.concatenate((owned.sums, owned.maxima)), timeout_s=timeout_s)
    return Contribution(owned.gradient, gathered[:, :num_sums].sum(0), xp.amax(gathered[:, num_sums:], 0))


def _exchange_slices(
    group: Group,
    *,
    owned: Mapping[Node, Array],
    nodes: Sequence[Sequence[Node]],
    timeout_s: float,
) -> dict[Node, Any]:
    """Exchange gradients: return this rank's slice of every node, zero-padded to equal width."""
    mine = nodes[group.rank]
    first = next(iter(owned.values()))
    (num_elements,) = first.shape
    width = -(-num_elements // group.size)
    outgoing = zeros(group.size, len(mine), width, like=first)
    for position, node in enumerate(mine):
        padded = zeros(group.size * width, like=first)
        padded[:num_elements] = owned[node]
        outgoing[:, position] = padded.reshape(group.size, width)
    incoming = group.all_to_all(
        outgoing.reshape(-1),
        sent=[len(mine) * width] * group.size,
        received=[len(theirs) * width for theirs in nodes],
        timeout_s=timeout_s,
    )
    in_order = [node for theirs in nodes for node in theirs]
    return dict(zip(in_order, incoming.reshape(-1, width), strict=True))


def _exchange_statistics(
    group: Group,
    *,
    owned: Mapping[Node, Contribution],
    nodes: Sequence[Sequence[Node]],
    timeout_s: float,
) -> dict[Node, tuple[Any, Any]]:
    """Exchange statistics: return sums and maxima of every node."""
    first = next(iter(owned.values())).sums
    xp, num_sums = namespace(first), len(first)
    mine = [xp.concatenate((owned[node].sums, owned[node].maxima)) for node in nodes[group.rank]]
    most = max(len(theirs) for theirs in nodes)
    padded = mine + [xp.zeros_like(mine[0])] * (most - len(mine))
    gathered = group.all_gather(xp.stack(padded), timeout_s=timeout_s)
    return {
        node: (gathered[rank, position, :num_sums], gathered[rank, position, num_sums:])
        for rank, theirs in enumerate(nodes)
        for position, node in enumerate(theirs)
    }
