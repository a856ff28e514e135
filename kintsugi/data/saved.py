"""Rollouts that were saved before as a source: a row is a prompt with its answers, already sampled and scored."""

from __future__ import annotations

from pathlib import Path

from kintsugi.errors import DataError
from kintsugi.observe.rollouts import SavedSample, read_groups
from kintsugi.types import Row

SAVED = "saved"
"""The column of such a row that holds its answers."""


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

    @property
    def components(self) -> frozenset[str]:
        """Rewards that every sample has."""
        return frozenset.intersection(
            *(frozenset(sample.rewards) for group in self._groups for sample in group)
        )


def saved_samples(row: Row) -> tuple[SavedSample, ...]:
    """The answers of a row; empty for one that has still to be answered."""
    saved: tuple[SavedSample, ...] = row.columns.get(SAVED, ())
    return saved
