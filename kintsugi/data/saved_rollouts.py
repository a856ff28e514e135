"""Saved rollouts as a source: a row is a prompt with completions that were sampled and scored in an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kintsugi.errors import DataError
from kintsugi.telemetry.saved_rollouts import SavedSample, read_groups
from kintsugi.types import FinishReason, Row

if TYPE_CHECKING:  # The master opens the data too, and needs no tokenizer.
    from kintsugi.model.tokenizer import Tokenizer

SAVED = "saved"
"""Column of such a row with its samples."""
_SAMPLES_CHECKED = 100
"""Number of samples that are decoded and compared with their saved text; another tokenizer differs early."""


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
        return Row(prompt=group[0].prompt, columns={**group[0].columns, SAVED: group})

    @property
    def largest_group(self) -> int:
        return max(map(len, self._groups))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.tokens) for group in self._groups for sample in group)

    def was_written_with(self, tokenizer: Tokenizer) -> bool:
        """Whether this tokenizer decodes the saved tokens to their saved text."""
        every = [sample for group in self._groups for sample in group]
        in_vocabulary = all(max(sample.tokens) < tokenizer.vocab_size for sample in every)
        return in_vocabulary and all(
            _reads_the_same(sample, tokenizer) for sample in every[:_SAMPLES_CHECKED]
        )

    @property
    def components(self) -> frozenset[str]:
        """Names of the rewards that every sample has."""
        return frozenset.intersection(
            *(frozenset(sample.rewards) for group in self._groups for sample in group)
        )


def _reads_the_same(sample: SavedSample, tokenizer: Tokenizer) -> bool:
    written = [token for token, learned in zip(sample.tokens, sample.loss_mask, strict=True) if learned]
    ended = sample.finish is FinishReason.EOS
    return tokenizer.text_of_completion(written, ended=ended) == sample.completion


def plain_columns(row: Row) -> dict[str, Any]:
    """Columns of a row as its source has them, without the samples that were saved with it."""
    return {
        name: value for name, value in row.columns.items() if name != SAVED or not isinstance(value, tuple)
    }


def saved_samples(row: Row) -> tuple[SavedSample, ...]:
    """Saved samples of a row; empty for a row that has to be sampled."""
    saved = row.columns.get(SAVED)
    # A column of the same name in a user's data is a JSON value, which is never a tuple.
    return saved if isinstance(saved, tuple) else ()
