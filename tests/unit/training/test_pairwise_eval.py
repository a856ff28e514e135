"""Held-out pairs are ranked alike, however many share the work."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kintsugi.model.transformer import Transformer, initialize
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.training.framework import Pair
from kintsugi.training.held_out_pairs import BLOCK_PAIRS
from kintsugi.training.pairwise_eval import score_pairs
from tests.unit.training.world import TINY

NUM_PAIRS = 150


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = Transformer(TINY, with_value_head=True)
    initialize(made, seed=1)
    assert made.value_head is not None
    made.value_head.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    return made


def block(number: int) -> Sequence[Pair]:
    def tokens(index: int, side: int) -> list[int]:
        drawn = random.Random(f"{index}/{side}")
        return [drawn.randrange(TINY.vocab_size) for _ in range(drawn.randrange(2, 20))]

    first = number * BLOCK_PAIRS
    return [(tokens(i, 0), tokens(i, 1)) for i in range(first, min(first + BLOCK_PAIRS, NUM_PAIRS))]


def test_any_number_of_ranks_ranks_every_pair_alike(model: Transformer) -> None:
    alone = score_pairs(model, block, first=0, count=NUM_PAIRS)
    assert len(alone) == NUM_PAIRS and 0 < sum(alone) < NUM_PAIRS
    for world_size in (2, 4):
        together: list[bool] = []
        for rank in range(world_size):
            share = shards_of_rank(NUM_PAIRS, rank=rank, world_size=world_size)
            together += score_pairs(model, block, first=share.start, count=len(share))
        assert together == alone


def test_a_tie_is_not_ranked_right() -> None:
    """A head of zeros knows no difference; by any other, rows of one matrix may differ in their last bit."""
    undecided = Transformer(TINY, with_value_head=True)
    initialize(undecided, seed=1)
    assert score_pairs(undecided, lambda number: [([1, 2], [1, 2])], first=0, count=1) == [False]
