"""How a batch is cut: into logical shards, shards onto workers, sequences into micro-batches.

All pure functions of keys and lengths, so the cut never depends on arrival order or on who is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.types import LogicalShard, ShardItem, ticket_of

DETERMINISTIC_BLOCK_TOKENS = 2048
"""Tokens per forward pass in deterministic mode. A constant, because another value gives other bits."""


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


def micro_batches(lengths: Sequence[int], *, max_tokens: int, keep_order: bool) -> list[list[int]]:
    """Group sequences so that no group exceeds `max_tokens` (a longer sequence stands alone).

    `keep_order` fills groups in the order given (deterministic mode); otherwise first-fit decreasing packs tighter.

    >>> micro_batches([5, 3, 3, 1], max_tokens=6, keep_order=True)
    [[0], [1, 2], [3]]
    >>> micro_batches([5, 3, 3, 1], max_tokens=6, keep_order=False)
    [[0, 3], [1, 2]]
    """
    groups: list[list[int]] = []
    filled: list[int] = []
    order = range(len(lengths)) if keep_order else sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for index in order:
        candidates = range(len(groups) - 1, len(groups)) if keep_order and groups else range(len(groups))
        for group in candidates:
            if filled[group] + lengths[index] <= max_tokens:
                groups[group].append(index)
                filled[group] += lengths[index]
                break
        else:
            groups.append([index])
            filled.append(lengths[index])
    return groups
