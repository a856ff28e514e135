"""State of the decoding rows of the CPU runners: host arrays, updated in place for all rows together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.generation.engine.rng import uniforms
from kintsugi.generation.engine.runner import DecodeRow
from kintsugi.generation.engine.sampler import LogitsEditing, Sampled, sample
from kintsugi.generation.engine.validation import MAX_STOP_TOKENS

RowNumbers = slice | NDArray[np.int64]
_NO_TOKEN = -1


class CpuRows:
    """A row without a request feeds token 0 at position 0 again and again."""

    def __init__(self, num_rows: int, *, max_length: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.tokens = np.zeros(num_rows, np.int64)
        """Token that the next step feeds at `positions`."""
        self.positions = np.zeros(num_rows, np.int64)
        self.has_ended = np.ones(num_rows, np.bool_)
        self.is_broken = np.zeros(num_rows, np.bool_)
        """Whether its KV cache may hold non-finite numbers."""
        self.num_top = np.zeros(num_rows, np.int64)
        self._num_known = np.zeros(num_rows, np.int64)
        self._max_lengths = np.zeros(num_rows, np.int64)
        self.rng_keys = np.zeros(num_rows, np.int64)
        self._sequences = np.zeros((num_rows, max_length + 1), np.int64)
        self._end_tokens = np.full((num_rows, MAX_STOP_TOKENS), _NO_TOKEN, np.int64)
        self.temperatures = np.ones(num_rows, np.float32)
        self.is_processed = np.zeros(num_rows, np.bool_)
        self._penalties = np.ones(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int64)
        self._top_ps = np.ones(num_rows, np.float32)
        self._min_ps = np.zeros(num_rows, np.float32)
        self._seen: Tensor | None = None
        """Like `_biases`, allocated when the first row needs it: as large as the logits."""
        self._biases: Tensor | None = None
        self._row_numbers = np.arange(num_rows)

    def start(self, row: int, new: DecodeRow) -> None:
        sampling = new.request.sampling
        self.tokens[row] = new.tokens[new.start]
        self.positions[row] = new.start
        self.has_ended[row] = False
        self.is_broken[row] = False
        self.num_top[row] = sampling.top_logprobs
        self._num_known[row] = len(new.tokens)
        self._max_lengths[row] = new.request.max_length
        self.rng_keys[row] = new.request.rng_key
        self._sequences[row, : len(new.tokens)] = new.tokens
        self._end_tokens[row] = _NO_TOKEN
        self._end_tokens[row, : len(new.end_token_ids)] = new.end_token_ids
        self.temperatures[row] = sampling.temperature
        self._penalties[row] = sampling.repetition_penalty
        self._top_ks[row] = sampling.top_k
        self._top_ps[row] = sampling.top_p
        self._min_ps[row] = sampling.min_p
        self.is_processed[row] = (
            sampling.repetition_penalty != 1
            or sampling.top_k != 0
            or sampling.top_p != 1
            or sampling.min_p != 0
            or bool(sampling.logit_bias)
        )
        # Also for a row without processors: in a batch with processed rows, leftovers of its previous request would
        # apply.
        if self.is_processed[row] or self._seen is not None:
            self._set_processors(row, new)

    def _set_processors(self, row: int, new: DecodeRow) -> None:
        if self._seen is None or self._biases is None:
            shape = (len(self.tokens), self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool)
            self._biases = torch.zeros(shape)
        # Tokens from `start` on are marked as seen when they are fed.
        self._seen[row].zero_()[torch.from_numpy(new.tokens[: new.start].astype(np.int64))] = True
        self._biases[row].zero_()
        for token, bias in new.request.sampling.logit_bias:
            self._biases[row, token] += bias

    def stop(self, row: int) -> None:
        self.tokens[row] = 0
        self.positions[row] = 0
        self.has_ended[row] = True
        self.num_top[row] = 0
        self._num_known[row] = 0
        self.temperatures[row] = 1
        self.is_processed[row] = False

    def move(self, source: int, *, to: int) -> None:
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        for array in arrays:
            if array is not self._row_numbers:
                array[to] = array[source]
        for tensor in (self._seen, self._biases):
            if tensor is not None:
                tensor[to] = tensor[source]

    def sample(self, logits: Tensor, *, rows: RowNumbers) -> Sampled:
        """Sample a token for each of these rows from `logits`."""
        return sample(
            logits,
            temperatures=torch.from_numpy(self.temperatures[rows]),
            uniforms=uniforms(
                torch.from_numpy(self.rng_keys[rows]), counters=torch.from_numpy(self.positions[rows] + 1)
            ),
            logits_processors=self.logits_processors(rows) if self.is_processed[rows].any() else None,
            num_top=int(self.num_top[rows].max()),
        )

    def logits_processors(self, rows: RowNumbers) -> LogitsEditing:
        """Logits processors of these rows, after marking the tokens that have just been fed as seen."""
        assert self._seen is not None and self._biases is not None
        numbers = torch.from_numpy(self._row_numbers[rows])
        self._seen[numbers, torch.from_numpy(self.tokens[rows])] = True
        return LogitsEditing(
            penalties=torch.from_numpy(self._penalties[rows]),
            seen=self._seen[numbers],
            biases=self._biases[numbers],
            top_ks=torch.from_numpy(self._top_ks[rows]),
            top_ps=torch.from_numpy(self._top_ps[rows]),
            min_ps=torch.from_numpy(self._min_ps[rows]),
        )

    def advance(
        self,
        sampled: NDArray[np.int64],
        *,
        logprobs: NDArray[np.float32],
        rows: RowNumbers,
        is_fed: NDArray[np.bool_],
    ) -> None:
        """Advance to the next token: the known one, or the sampled one, unless the row ends with it."""
        positions = self.positions[rows]
        following = positions + 1
        is_known = following < self._num_known[rows]
        known = self._sequences[self._row_numbers[rows], following]
        is_end = (self._end_tokens[rows] == sampled[:, None]).any(axis=1)
        is_last = following + 1 >= self._max_lengths[rows]
        has_ended = ~is_known & (is_end | is_last)
        self.has_ended[rows] |= is_fed & has_ended
        self.is_broken[rows] |= ~np.isfinite(logprobs)
        goes_on = is_fed & ~has_ended
        self.tokens[rows] = np.where(goes_on, np.where(is_known, known, sampled), self.tokens[rows])
        self.positions[rows] = np.where(goes_on, following, positions)
