"""Evaluation of the reward model in training on held-out pairs: does the chosen completion score higher?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kintsugi.model.transformer import Transformer
from kintsugi.samples.sharding import blocks_in_order
from kintsugi.training.batch import MicroBatch, pack
from kintsugi.training.framework import Pair
from kintsugi.training.group import Groups
from kintsugi.training.held_out_pairs import BLOCK_PAIRS
from kintsugi.training.objectives import scores
from kintsugi.training.packing import BatchSample
from kintsugi.training.pipeline import forward_pass
from kintsugi.types import sample_key

BLOCK_TOKENS = 2048
"""Tokens per forward pass."""


def score_pairs(
    model: Transformer,
    block: Callable[[int], Sequence[Pair]],
    *,
    first: int,
    count: int,
    groups: Groups | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[bool]:
    """For pairs `first` to `first + count - 1`, whether the chosen completion scores higher; a tie is wrong. Only the
    last stage of a model that is cut over the ranks of `groups` knows; the others return nothing."""
    stop = first + count
    ranked: list[bool] = []
    for number in range(first // BLOCK_PAIRS, -(-stop // BLOCK_PAIRS)):
        start = number * BLOCK_PAIRS
        pairs = block(number)
        found = _ranked(model, pairs, groups=groups, check=check)
        ranked += found[max(first - start, 0) : stop - start]
    return ranked


def _ranked(
    model: Transformer, pairs: Sequence[Pair], *, groups: Groups | None, check: Callable[[], None]
) -> list[bool]:
    lengths = [len(chosen) + len(rejected) for chosen, rejected in pairs]
    ranked: list[bool] = []
    batches = []
    for group in blocks_in_order(lengths, max_tokens=BLOCK_TOKENS):
        samples = [
            _sample(tokens, key=sample_key(str(index), side))
            for index in group
            for side, tokens in enumerate(pairs[index])
        ]
        batches.append(pack(samples, device=model.device))

    def look(batch: MicroBatch) -> None:
        found = scores(model, batch)
        ranked.extend((found[0::2] > found[1::2]).tolist())

    for _ in forward_pass(model, batches, groups=groups, look=look, check=check):
        pass
    return ranked


def _sample(tokens: Sequence[int], *, key: str) -> BatchSample:
    """Build a sample without loss tokens."""
    nothing = np.zeros(0, dtype=np.int64)
    return BatchSample(
        key,
        np.array(tokens, dtype=np.int32),
        loss_positions=nothing,
        logprobs=nothing.astype(np.float32),
        versions=nothing.astype(np.int32),
        values={},
    )
