"""Summation of gradients over the ranks: in one fixed order, or in the order that the collective library chooses.

In deterministic mode the shards of a batch are the leaves of a binary tree that depends on their number only. A rank
holds a contiguous range of shards and sums the largest subtrees that lie wholly within it. The ranks exchange these
sums and each finishes the same tree, for the elements that it updates. The same pairs are added for any number of
ranks, so the result has the same bits.

For 5 shards on two ranks (0–2 and 3–4), ((0+1)+(2+3))+4: the first rank brings the nodes 0+1 and 2, the second 3
and 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


def nodes_of_ranks(num_shards: int, *, num_ranks: int, blocks: Sequence[int] = ()) -> list[list[Node]]:
    """Subtrees that each rank sums; `blocks` are the shard blocks of the ranks, by default in their order."""
    return [
        owned_nodes(num_shards, owned=shards_of_rank(num_shards, rank=block, world_size=num_ranks))
        for block in blocks or range(num_ranks)
    ]


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


class Cut(NamedTuple):
    """Which elements of a gradient each rank of a group receives. Several ranks may receive the same ones."""

    boxes: tuple[int, ...]
    """Number of the box of each rank, in rank order."""
    pieces: tuple[tuple[range, ...], ...]
    """Elements of each box, of one exchange after the other; together they are the gradient."""

    @classmethod
    def whole(cls, num_elements: int, *, num_ranks: int) -> Cut:
        """Every rank receives everything."""
        everything = range(num_elements)
        starts = range(0, num_elements, PIECE_ELEMENTS)
        return cls((0,) * num_ranks, tuple((everything[start : start + PIECE_ELEMENTS],) for start in starts))

    def holders(self, rank: int) -> list[int]:
        """Ranks that receive the same elements as this one."""
        return [other for other, box in enumerate(self.boxes) if box == self.boxes[rank]]

    def shares(self, piece: Sequence[range]) -> list[range]:
        """Elements that each rank finishes: equal parts of its box among the ranks that receive it."""
        num_holders, before = Counter(self.boxes), Counter[int]()
        found = []
        for box in self.boxes:
            width = -(-len(piece[box]) // num_holders[box])
            start = before[box] * width
            found.append(piece[box][start : start + width])
            before[box] += 1
        return found


def finish_tree(
    group: Group,
    *,
    num_shards: int,
    owned: Mapping[Node, Contribution],
    timeout_s: float,
    blocks: Sequence[int] = (),
    cut: Cut | None = None,
) -> Contribution:
    """Sum over the whole batch, with the same bits for every number of ranks, for every cut of the gradient over them,
    and for every assignment of shard blocks to ranks (`blocks`, by rank; by default block i belongs to rank i).

    Each rank finishes the tree for its share of the elements (addition is elementwise, so a cut changes no bits) and
    receives the shares of the ranks with the same box. With n nodes per rank, D ranks and r ranks per box it sends
    4·n·(1 − 1/D) + 4·(r − 1)/D bytes per element. This is done piece by piece. The sum takes the place of a gradient
    of `owned`, in the elements that this rank receives; the others are left undefined.
    """
    assert num_shards >= group.size, f"{num_shards} shards leave some of {group.size} ranks without any"
    root = Node(0, num_shards)
    if group.size == 1:
        return owned[root]
    nodes = nodes_of_ranks(num_shards, num_ranks=group.size, blocks=blocks)
    statistics = _exchange_statistics(group, owned=owned, nodes=nodes, timeout_s=timeout_s)
    gradient = next(iter(owned.values())).gradient
    found = {node: Contribution(gradient[:0], *each) for node, each in statistics.items()}
    total = sum_node(root, known=found.get)
    cut = cut or Cut.whole(len(gradient), num_ranks=group.size)
    mine = {node: each.gradient for node, each in owned.items()}
    for piece in cut.pieces if len(gradient) > 0 else ():
        shares = cut.shares(piece)
        slices = _exchange_slices(group, owned=mine, nodes=nodes, shares=shares, timeout_s=timeout_s)
        finished = finished_share(num_shards, slices)
        received = piece[cut.boxes[group.rank]]
        gradient[received.start : received.stop] = exchange_shares(
            group, finished, shares=shares, cut=cut, timeout_s=timeout_s
        )
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
    shares: Sequence[range],
    timeout_s: float,
) -> dict[Node, Any]:
    """Exchange gradients: return this rank's share of every node."""
    outgoing, sent, received = slices_to_send(owned, rank=group.rank, nodes=nodes, shares=shares)
    incoming = group.all_to_all(outgoing, sent=sent, received=received, timeout_s=timeout_s)
    return slices_by_node(incoming, nodes=nodes)


def slices_to_send(
    owned: Mapping[Node, Array], *, rank: int, nodes: Sequence[Sequence[Node]], shares: Sequence[range]
) -> tuple[Any, list[int], list[int]]:
    """Shares of this rank's nodes in the order of the ranks that finish them, and the elements that are sent to and
    received from each rank."""
    mine, width = nodes[rank], len(shares[rank])
    used = [share for share in shares if share]
    if len(mine) == 1 and used and all(a.stop == b.start for a, b in pairwise(used)):
        outgoing = owned[mine[0]][used[0].start : used[-1].stop]  # As it lies there, without a copy.
    else:
        slices = [owned[node][share.start : share.stop] for share in shares for node in mine]
        outgoing = namespace(slices[0]).concatenate(slices)
    sent, received = [len(mine) * len(share) for share in shares], [len(theirs) * width for theirs in nodes]
    return outgoing, sent, received


def slices_by_node(incoming: Any, *, nodes: Sequence[Sequence[Node]]) -> dict[Node, Any]:
    """This rank's share of every node, from what all ranks sent."""
    in_order = [node for theirs in nodes for node in theirs]
    return dict(zip(in_order, incoming.reshape(len(in_order), len(incoming) // len(in_order)), strict=True))


def finished_share(num_shards: int, slices: Mapping[Node, Any]) -> Any:
    """Sum of this rank's share of all nodes, in the order of the tree."""
    nothing = next(iter(slices.values()))[:0]
    found = {node: Contribution(each, nothing, nothing) for node, each in slices.items()}
    return sum_node(Node(0, num_shards), known=found.get).gradient


def exchange_shares(
    group: Group, finished: Array, *, shares: Sequence[range], cut: Cut, timeout_s: float
) -> Any:
    """Exchange finished shares between the ranks with the same box: return the box. All ranks of the group make the
    same collective, also one whose box no other rank has."""
    num_boxes = len(set(cut.boxes))
    if num_boxes == group.size:
        return finished
    if num_boxes == 1:
        padded = zeros(max(len(share) for share in shares), like=finished)
        padded[: len(finished)] = finished
        gathered = group.all_gather(padded, timeout_s=timeout_s).reshape(-1)
        return gathered[: sum(len(share) for share in shares)]
    holders = cut.holders(group.rank)
    return group.all_to_all(
        namespace(finished).concatenate([finished] * len(holders)),
        sent=[len(finished) if rank in holders else 0 for rank in range(group.size)],
        received=[len(share) if rank in holders else 0 for rank, share in enumerate(shares)],
        timeout_s=timeout_s,
    )


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
