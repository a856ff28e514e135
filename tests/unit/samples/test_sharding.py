from __future__ import annotations

import random

import pytest
from hypothesis import given as given_that
from hypothesis import strategies as st

from kintsugi.samples.sharding import balanced_blocks, blocks_in_order, logical_shards
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


LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given_that(LENGTHS, st.integers(1, 64))
def test_every_sequence_is_in_one_block_and_no_block_of_several_exceeds_the_maximum(
    lengths: list[int], most: int
) -> None:
    for blocks in (balanced_blocks(lengths, max_tokens=most), blocks_in_order(lengths, max_tokens=most)):
        assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
        assert all(len(block) == 1 or sum(lengths[i] for i in block) <= most for block in blocks)


def test_tokens_are_spread_evenly_over_as_few_blocks_as_needed() -> None:
    """Filled one after another, the last block would have 320 of 16,384 tokens."""
    lengths = [320] * 308
    blocks = balanced_blocks(lengths, max_tokens=16384)
    tokens = [sum(lengths[index] for index in block) for block in blocks]
    assert len(tokens) == 7
    assert max(tokens) - min(tokens) <= 320
    in_order = blocks_in_order(lengths, max_tokens=16384)
    assert sum(lengths[index] for index in in_order[-1]) == 320 * 2


def test_a_sequence_above_the_maximum_takes_no_room_from_the_others() -> None:
    blocks = balanced_blocks([50, 5, 5, 5, 5], max_tokens=10)
    assert blocks == [[0], [1, 3], [2, 4]]


def test_first_fit_is_used_where_an_even_spread_would_exceed_the_maximum() -> None:
    assert balanced_blocks([6, 4, 4, 3, 3], max_tokens=10) == [[0, 1], [2, 3, 4]]
