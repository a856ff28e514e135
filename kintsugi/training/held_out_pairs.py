"""Held-out pairs of a chosen and a rejected completion, by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kintsugi.config.schema import Config
from kintsugi.data.columns import CHOSEN, REJECTED
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.data.tokenized import answer_tokens, prompt_tokens
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.training.framework import Pair

BLOCK_PAIRS = 64
"""Pairs are packed within blocks that begin at multiples of this number. The bits of a pair's scores therefore do not
depend on how many ranks share the work."""


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
