"""Evaluation of the reward model in training on held-out pairs: does the chosen completion score higher?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kintsugi.model.transformer import Transformer
from kintsugi.samples.sharding import blocks_in_order
from kintsugi.training.batch import MicroBatch, pack
from kintsugi.training.framework import Pair
from kintsugi.training.group import Column, Groups
from kintsugi.training.held_out_pairs import BLOCK_PAIRS
from kintsugi.training.objectives import scores
from kintsugi.training.packing import BatchSample
from kintsugi.training.pipeline import forward_pass
from kintsugi.training.unit_pass import UnitPass
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
    unit_pass: UnitPass | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[bool]:
    """For pairs `first` to `first + count - 1`, whether the chosen completion scores higher; a tie is wrong. Only the
    last stage of a model that is cut over the ranks of `groups` knows; the others return nothing. With a `unit_pass`
    all ranks make one pass, also one without pairs."""
    stop = first + count
    numbers = range(first // BLOCK_PAIRS, -(-stop // BLOCK_PAIRS)) if count else range(0)
    blocks = [block(number) for number in numbers]
    batches = [_packed(pairs, model=model) for pairs in blocks]
    found: list[bool] = []

    def look(batch: MicroBatch) -> None:
        scored = scores(model, batch)
        found.extend((scored[0::2] > scored[1::2]).tolist())

    together = [batch for each in batches for batch in each]
    if unit_pass is not None:
        assert groups is not None, "weights are gathered from the ranks of a group"
        unit_pass.look(together, look=look, group=cast(Column, groups.data), check=check)
    else:
        for _ in forward_pass(model, together, groups=groups, look=look, check=check):
            pass
    if not found:
        return []
    skipped = first - numbers.start * BLOCK_PAIRS
    return found[skipped : skipped + count]


def _packed(pairs: Sequence[Pair], *, model: Transformer) -> list[MicroBatch]:
    """Micro-batches of a block of pairs."""
    lengths = [len(chosen) + len(rejected) for chosen, rejected in pairs]
    batches = []
    for group in blocks_in_order(lengths, max_tokens=BLOCK_TOKENS):
        samples = [
            _sample(tokens, key=sample_key(str(index), side))
            for index in group
            for side, tokens in enumerate(pairs[index])
        ]
        batches.append(pack(samples, device=model.device))
    return batches


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
