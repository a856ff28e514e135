"""Rollouts that were saved before as a source: a row is a prompt with its answers, already sampled and scored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kintsugi.errors import DataError
from kintsugi.observe.rollouts import SavedSample, read_groups
from kintsugi.types import Finish, Row

if TYPE_CHECKING:  # The master opens the data too, and needs no tokenizer.
    from kintsugi.model.tokenizer import Tokenizer

SAVED = "saved"
"""The column of such a row that holds its answers."""
_READ_AGAIN = 100
"""Samples that are compared with what they read when they were sampled; another tokenizer shows in the first ones."""


class SavedRollouts:
    """All groups of a folder, in the order in which they were sampled."""

    def __init__(self, folder: Path) -> None:
        self._groups = read_groups(folder)
        if not self._groups:
            raise DataError(f"expected saved rollouts in {folder}, found no step with all of its shards")

    def __len__(self) -> int:
        return len(self._groups)

    def row(self, index: int) -> Row:
        group = self._groups[index]
        return Row(prompt=group[0].prompt, columns={SAVED: group})

    @property
    def largest_group(self) -> int:
        return max(map(len, self._groups))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.tokens) for group in self._groups for sample in group)

    def was_written_with(self, tokenizer: Tokenizer) -> bool:
        """Whether tokens mean here what they meant when they were sampled."""
        every = [sample for group in self._groups for sample in group]
        in_vocabulary = all(max(sample.tokens) < tokenizer.vocab_size for sample in every)
        return in_vocabulary and all(_reads_the_same(sample, tokenizer) for sample in every[:_READ_AGAIN])

    @property
    def components(self) -> frozenset[str]:
        """Rewards that every sample has."""
        return frozenset.intersection(
            *(frozenset(sample.rewards) for group in self._groups for sample in group)
        )


def _reads_the_same(sample: SavedSample, tokenizer: Tokenizer) -> bool:
    written = [token for token, learned in zip(sample.tokens, sample.loss_mask, strict=True) if learned]
    ended = sample.finish is Finish.EOS
    return tokenizer.text_of_completion(written, ended=ended) == sample.completion


def saved_samples(row: Row) -> tuple[SavedSample, ...]:
    """The answers of a row; empty for one that has still to be answered."""
    saved = row.columns.get(SAVED)
    # A column of that name in somebody's own data holds what JSON has, which is never a tuple.
    return saved if isinstance(saved, tuple) else ()
