from __future__ import annotations

import random

import pytest

from kintsugi.buffer.packing import logical_shards
from kintsugi.types import ShardItem


def items(num_pairs: int) -> list[ShardItem]:
    return [
        ShardItem(f"dpo:0:{pair}:0/{side}", "rollout-0", "", 1 + (pair * 7 + side * 3) % 11, 1)
        for pair in range(num_pairs)
        for side in (0, 1)
    ]


@pytest.mark.parametrize("num_shards", [1, 3, 4, 8])
def test_pairs_stay_in_one_shard_next_to_each_other_whatever_the_order(num_shards: int) -> None:
    given = items(13)
    shards = logical_shards(given, num_shards=num_shards, keep_groups=True)
    for shard in shards:
        keys = [item.key for item in shard.items]
        assert all(
            first.replace("/0", "/1") == second for first, second in zip(keys[0::2], keys[1::2], strict=True)
        )
    assert sorted(item.key for shard in shards for item in shard.items) == sorted(i.key for i in given)
    random.Random(1).shuffle(given)
    assert logical_shards(given, num_shards=num_shards, keep_groups=True) == shards


def test_kept_groups_are_still_balanced_by_tokens() -> None:
    shards = logical_shards(items(40), num_shards=4, keep_groups=True)
    tokens = [sum(item.num_tokens for item in shard.items) for shard in shards]
    assert max(tokens) - min(tokens) <= 22, "one pair at most"
