"""Evaluation of the reward model in training on held-out pairs: does the chosen completion score higher?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kintsugi.config.schema import Config
from kintsugi.data.columns import CHOSEN, REJECTED
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.data.tokenized import answer_tokens, prompt_tokens
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.model.transformer import Transformer
from kintsugi.samples.sharding import blocks_in_order
from kintsugi.training.batch import BatchSample, pack
from kintsugi.training.objectives import scores
from kintsugi.types import sample_key

BLOCK_PAIRS = 64
"""Pairs are packed within blocks that begin at multiples of this number. The bits of a pair's scores therefore do not
depend on how many ranks share the work."""
BLOCK_TOKENS = 2048
"""Tokens per forward pass."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of the prompt with the chosen completion, and with the rejected one."""


class HeldOutPairs:
    """Held-out pairs of the run by number; the data are opened when the first pair is read."""

    def __init__(self, config: Config, *, tokenizer: Callable[[], Tokenizer], run_dir: Path) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._run_dir = run_dir
        self._data: DataSet | None = None

    def block(self, number: int) -> list[Pair]:
        """Return the pairs of one block, which begins at pair `number` × `BLOCK_PAIRS`."""
        if self._data is None:
            self._data = open_data(self._config, run_dir=self._run_dir)
        first = number * BLOCK_PAIRS
        return [
            self._pair(self._data, position)
            for position in range(first, min(first + BLOCK_PAIRS, self._data.num_held_out))
        ]

    def _pair(self, data: DataSet, position: int) -> Pair:
        row = data.held_out_row(position)
        prompt = prompt_tokens(row, self._tokenizer(), data=self._config.data)
        chosen, rejected = (
            [*prompt, *answer_tokens(row.columns[name], self._tokenizer())] for name in (CHOSEN, REJECTED)
        )
        return chosen, rejected


def score_pairs(
    model: Transformer, block: Callable[[int], Sequence[Pair]], *, first: int, count: int
) -> list[bool]:
    """For pairs `first` to `first + count - 1`, whether the chosen completion scores higher; a tie is wrong."""
    stop = first + count
    ranked: list[bool] = []
    for number in range(first // BLOCK_PAIRS, -(-stop // BLOCK_PAIRS)):
        start = number * BLOCK_PAIRS
        pairs = block(number)
        ranked += _ranked(model, pairs)[max(first - start, 0) : stop - start]
    return ranked


@torch.no_grad()
def _ranked(model: Transformer, pairs: Sequence[Pair]) -> list[bool]:
    lengths = [len(chosen) + len(rejected) for chosen, rejected in pairs]
    ranked: list[bool] = []
    for group in blocks_in_order(lengths, max_tokens=BLOCK_TOKENS):
        samples = [
            _sample(tokens, key=sample_key(str(index), side))
            for index in group
            for side, tokens in enumerate(pairs[index])
        ]
        found = scores(model, pack(samples, device=model.device))
        ranked += (found[0::2] > found[1::2]).tolist()
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
