"""Where prompts come from, and in which order they are met.

The order of an epoch is a pure function of (seed, stage, epoch), so a position is a number, not a saved iterator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kintsugi.config import DataSection
from kintsugi.data.arithmetic import Arithmetic
from kintsugi.data.jsonlines import JsonLines
from kintsugi.errors import DataError
from kintsugi.runtime import random_stream
from kintsugi.types import Row


class Source(Protocol):
    """A data set of known length with random access."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...


def open_source(data: DataSection, *, split: str) -> Source:
    """The rows to train on, or the held-out ones (`split="eval"`)."""
    source: Source
    if data.source == "arithmetic":
        source = Arithmetic(num_digits=data.max_digits, split=split, num_eval=data.num_eval)
    else:
        source = JsonLines(
            Path(data.source),
            prompt_column=data.prompt_column,
            completion_column=data.completion_column,
            split=split,
            num_eval=data.num_eval,
        )
    if len(source) == 0 and split == "train":
        raise DataError(f"data.source: expected at least one row to train on, '{data.source}' has none")
    return source


class Order:
    """Which row stands at a position of an epoch."""

    def __init__(self, *, num_rows: int, seed: int, stage: str, shuffle: bool) -> None:
        self._num_rows, self._seed, self._stage, self._shuffle = num_rows, seed, stage, shuffle
        self._epoch = -1
        self._indices: list[int] = []

    def index(self, *, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            self._indices = list(range(self._num_rows))
            random_stream(self._seed, "order", self._stage, epoch).shuffle(self._indices)
            self._epoch = epoch
        return self._indices[position]
