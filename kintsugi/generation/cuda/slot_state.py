"""Device-side state of each slot's request: one row of int64 per slot, advanced by the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kintsugi.generation.engine.runner import DecodeRow
from kintsugi.generation.engine.validation import MAX_STOP_TOKENS

TOKEN = 0
"""Token to feed next."""
POSITION = 1
"""Position of that token."""
ALIVE = 2
LIMIT = 3
"""Length of prompt and completion at which the row ends."""
NUM_KNOWN = 4
"""Number of tokens that are known before the first is sampled."""
RNG_KEY = 5
TEMPERATURE = 6
"""Bits of a float64."""
END_TOKENS = 8
"""From here on, MAX_STOP_TOKENS entries, padded with -1."""
NUM_FIELDS = END_TOKENS + MAX_STOP_TOKENS


def packed_rows(rows: Sequence[DecodeRow]) -> NDArray[np.int64]:
    """[rows, NUM_FIELDS]: initial state of each row."""
    packed = np.zeros((len(rows), NUM_FIELDS), np.int64)
    packed[:, END_TOKENS:] = -1
    for fields, row in zip(packed, rows, strict=True):
        fields[TOKEN] = row.tokens[row.start]
        fields[POSITION] = row.start
        fields[ALIVE] = 1
        fields[LIMIT] = row.request.max_length
        fields[NUM_KNOWN] = len(row.tokens)
        fields[RNG_KEY] = row.request.rng_key
        fields[TEMPERATURE] = struct.unpack("<q", struct.pack("<d", row.request.sampling.temperature))[0]
        fields[END_TOKENS : END_TOKENS + len(row.end_token_ids)] = row.end_token_ids
    return packed
