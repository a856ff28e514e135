"""Order of rows: pure functions of seed, stage, epoch and position, so that a position in the data is one number."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from math import ceil

from kintsugi.runtime.clock import random_stream

_LARGEST_TABLE = 1 << 20
"""Up to this number of rows, the order of an epoch is a shuffled table; beyond, each position is computed."""
_WEIGHT_STEPS = 1000
SMALLEST_SHARE = 1 / _WEIGHT_STEPS
"""Smallest share of a source in a mixture; a smaller one would need a longer table of the mixture's period."""


class RowOrder:
    """The rows of one source in the order of an epoch."""

    def __init__(self, *, num_rows: int, seed: int, stage: str, shuffle: bool) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._stage = stage
        self._shuffle = shuffle
        self._epoch = -1
        self._indices: array[int] = array("Q")

    def index(self, *, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._num_rows > _LARGEST_TABLE:
            key = random_stream(self._seed, "order", self._stage, epoch).randbytes(16)
            return scattered(position, num_rows=self._num_rows, key=key)
        if epoch != self._epoch:
            self._indices = array("Q", range(self._num_rows))
            random_stream(self._seed, "order", self._stage, epoch).shuffle(self._indices)
            self._epoch = epoch
        return self._indices[position]


def scattered(position: int, *, num_rows: int, key: bytes) -> int:
    """Apply a keyed permutation of the numbers below `num_rows` to one of them, without a table.

    A Feistel network permutes the numbers below the next power of four; it is repeated until the result is in range.
    """
    half = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for round in range(4):
            text = right.to_bytes(8, "little") + bytes([round])
            digest = hashlib.blake2b(text, key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        position = left << half | right
        if position < num_rows:
            return position


class SourceMixing:
    """Weighted interleaving: the source at the n-th place, and how often it occurred before.

    Integers in the proportion of the weights form a period; within it, sources are spread as evenly as possible.

    >>> mixing = SourceMixing([2.0, 1.0])
    >>> [mixing.place(number) for number in range(6)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        smallest = min(weights)
        self._quotas = [round(weight / smallest) for weight in weights]
        if any(
            abs(weight / smallest - quota) > 1e-9 for weight, quota in zip(weights, self._quotas, strict=True)
        ):
            steps = max(_WEIGHT_STEPS, len(weights))
            self._quotas = [max(1, round(steps * weight / sum(weights))) for weight in weights]
        self.period = sum(self._quotas)
        self._pattern: list[tuple[int, int]] = []
        credit, met = [0] * len(weights), [0] * len(weights)
        for _ in range(self.period):
            credit = [each + quota for each, quota in zip(credit, self._quotas, strict=True)]
            source = credit.index(max(credit))
            credit[source] -= self.period
            self._pattern.append((source, met[source]))
            met[source] += 1

    def place(self, number: int) -> tuple[int, int]:
        """Source at this place, and the number of its rows before."""
        period, offset = divmod(number, self.period)
        source, before = self._pattern[offset]
        return source, period * self._quotas[source] + before

    def epoch_length(self, num_rows: Sequence[int]) -> int:
        """Number of places after which every row of every source has occurred at least once."""
        periods = max(ceil(count / quota) for count, quota in zip(num_rows, self._quotas, strict=True))
        return periods * self.period
