"""Division of a batch: into logical shards, of shards over workers, of sequences into micro-batches.

All functions depend on keys and lengths only, so the result never depends on the order of arrival or on the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.types import LogicalShard, ShardItem, ticket_of


def balance(lengths: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Distribute items over bins, longest first, each into the least filled bin; ties go to the lower index.

    >>> balance([5, 3, 3, 1], num_bins=2)
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min(range(num_bins), key=lambda b: (filled[b], len(bins[b]), b))
        bins[target].append(index)
        filled[target] += lengths[index]
    return [sorted(items) for items in bins]


def logical_shards(
    items: Sequence[ShardItem], *, num_shards: int, keep_groups: bool = False
) -> tuple[LogicalShard, ...]:
    """Cut a batch into shards balanced by tokens; depends on keys and lengths only, not on the order given.

    `keep_groups` keeps the samples of a ticket in one shard, where a loss compares them with each other.
    """
    ordered = sorted(items, key=lambda item: item.key)
    groups = grouped([item.key for item in ordered]) if keep_groups else [[i] for i in range(len(ordered))]
    bins = balance([sum(ordered[i].num_tokens for i in group) for group in groups], num_bins=num_shards)
    return tuple(
        LogicalShard(index, tuple(ordered[i] for group in bins[index] for i in groups[group]))
        for index in range(num_shards)
    )


def grouped(keys: Sequence[str]) -> list[list[int]]:
    """Indices of the samples of each ticket, in the order in which their first ones come.

    >>> grouped(["dpo:0:1:0/0", "dpo:0:2:0/0", "dpo:0:1:0/1"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(ticket_of(key), []).append(index)
    return list(groups.values())


def shards_of_rank(num_shards: int, *, rank: int, world_size: int) -> range:
    """The contiguous shard indices of one rank; contiguous, so that ranks hold whole subtrees of the gradient sum.

    >>> [list(shards_of_rank(4, rank=r, world_size=3)) for r in range(3)]
    [[0, 1], [2], [3]]
    """
    small, extra = divmod(num_shards, world_size)
    start = rank * small + min(rank, extra)
    return range(start, start + small + (rank < extra))


def blocks_in_order(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Fill blocks in the order given, so that none exceeds `max_tokens`; a longer sequence stands alone.

    >>> blocks_in_order([5, 3, 3, 1], max_tokens=6)
    [[0], [1, 2], [3]]
    """
    blocks: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not blocks or length > room:
            blocks.append([])
            room = max_tokens
        blocks[-1].append(index)
        room -= length
    return blocks


def balanced_blocks(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Distribute sequences over as few blocks as first-fit decreasing needs for `max_tokens`, with the tokens spread
    evenly over them: an accelerator is idle in a small last block. A longer sequence stands alone.

    Blocks are in the order of their first sequences. Where the even spread would exceed `max_tokens`, the blocks of
    first-fit decreasing are used as they are.

    >>> balanced_blocks([5, 3, 3, 1], max_tokens=9)
    [[0, 3], [1, 2]]
    >>> balanced_blocks([6, 4, 4, 3, 3], max_tokens=10)
    [[0, 1], [2, 3, 4]]
    """
    alone = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    rest = [index for index, length in enumerate(lengths) if length <= max_tokens]
    tight = _first_fit([lengths[index] for index in rest], max_tokens=max_tokens)
    even = balance([lengths[index] for index in rest], num_bins=len(tight))
    fits = all(sum(lengths[rest[i]] for i in block) <= max_tokens for block in even)
    return sorted(alone + [[rest[i] for i in block] for block in (even if fits else tight)])


def _first_fit(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: the longest first, each into the first block with room."""
    blocks: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = next((block for block, free in enumerate(room) if lengths[index] <= free), len(blocks))
        if target == len(blocks):
            blocks.append([])
            room.append(max_tokens)
        blocks[target].append(index)
        room[target] -= lengths[index]
    return [sorted(block) for block in blocks]
