"""Reader of tokenized rows for a rollout worker; in idle time the next rows are prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kintsugi.config.schema import Config
from kintsugi.data.columns import held_out_needs_of, needs_of
from kintsugi.data.dataset import RowPlace, Source, open_data
from kintsugi.data.saved_rollouts import saved_samples
from kintsugi.data.streams import RowNotYet
from kintsugi.data.tokenized import RowTokenizer, TokenCache, TokenizedRow, read_tokens, write_tokens
from kintsugi.errors import DataError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.types import Row

AHEAD = 64
"""Number of rows to prefetch. Any worker may get any of the next rows, so every worker prefetches all of them; with a
larger number most would be wasted."""
ROWS_MEASURED = 10_000
"""Number of rows of a file that are tokenized before a run starts, in a few seconds; their tokens are cached."""
ROWS_GENERATED = 1000
"""The same of rows that are generated: all are made by one rule, and at every start again."""
_WORTH_KEEPING = 1000
"""Number of rows from which on tokens are cached; fewer are tokenized again in no noticeable time."""
_ROWS_AT_ONCE = 512
"""Number of rows whose prompts are encoded together."""

RowRequest = tuple[str, int, int, int]
"""Stage, seed, epoch, position."""


class PrefetchingReader:
    """Tokenized rows of a run."""

    def __init__(self, config: Config, tokenizer: Tokenizer, *, run_dir: Path) -> None:
        self._data_set = open_data(config, run_dir=run_dir)
        self._training = RowTokenizer(tokenizer, config.data, needs_of(config))
        self._held_out = RowTokenizer(tokenizer, config.data, held_out_needs_of(config))
        parts = self._data_set.parts
        self._cached = [cached_tokens(part.train_digest, self._training) for part in parts]
        self._cached_held_out = [cached_tokens(part.held_out_digest, self._held_out) for part in parts]
        self._ready: dict[RowRequest, tuple[Row, TokenizedRow]] = {}
        self._latest: RowRequest | None = None

    def training(self, *, stage: str, seed: int, epoch: int, position: int) -> tuple[Row, TokenizedRow]:
        """Return a training row; `RowNotYet` if it has not arrived in its stream."""
        request = (stage, seed, epoch, position)
        if self._latest is None or self._latest < request or self._latest[0] != stage:
            self._latest = request
        ready = self._ready.pop(request, None)
        return ready if ready is not None else self._read(request)

    def held_out(self, position: int) -> tuple[Row, TokenizedRow]:
        row, place = self._data_set.held_out_row(position), self._data_set.held_out_place(position)
        return row, _tokenized(row, place, self._held_out, cached=self._cached_held_out)

    def make_ready(self, *, within_s: float) -> None:
        """Prefetch the rows after the latest requested one; starts no row after `within_s` seconds."""
        if self._latest is None:
            return
        stage, seed, epoch, position = self._latest
        last = min(position + 1 + AHEAD, self._data_set.num_positions)
        following = [(stage, seed, epoch, each) for each in range(position + 1, last)]
        self._ready = {request: ready for request, ready in self._ready.items() if request in following}
        until = SYSTEM_CLOCK.monotonic() + within_s
        try:
            for request in following:
                if SYSTEM_CLOCK.monotonic() >= until:
                    return
                if request not in self._ready:
                    self._ready[request] = self._read(request)
        except (DataError, RowNotYet):
            return  # Raised again when the row is requested.

    def _read(self, request: RowRequest) -> tuple[Row, TokenizedRow]:
        stage, seed, epoch, position = request
        place = self._data_set.place(stage=stage, seed=seed, epoch=epoch, position=position)
        row = self._data_set.row_at(place)
        if saved_samples(row):
            return row, TokenizedRow([], {})  # Saved samples have their tokens already.
        return row, _tokenized(row, place, self._training, cached=self._cached)


def _tokenized(
    row: Row, place: RowPlace, tokenizer: RowTokenizer, *, cached: Sequence[TokenCache | None]
) -> TokenizedRow:
    tokens = cached[place.part]
    if tokens is not None and place.index < len(tokens):
        return tokens[place.index]
    return tokenizer.tokenize(row)


def cached_tokens(digest: str | None, tokenizer: RowTokenizer) -> TokenCache | None:
    """Cached tokens of the rows of a source with this digest, if any."""
    return None if digest is None else read_tokens(tokenizer.path(digest), columns=tokenizer.columns)


def measured_tokens(
    source: Source, digest: str | None, tokenizer: RowTokenizer, *, most: int | None = None
) -> TokenCache | list[TokenizedRow]:
    """Tokens of a source's first rows: from the cache, else tokenized now and cached if they are many."""
    if most is None:
        most = ROWS_GENERATED if digest is None else ROWS_MEASURED
    count = min(len(source), most)
    found = cached_tokens(digest, tokenizer)
    if found is not None and len(found) >= count:
        return found
    made: list[TokenizedRow] = []
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = [source.row(index) for index in range(start, min(count, start + _ROWS_AT_ONCE))]
        made += tokenizer.tokenize_each(rows)
    if digest is not None and count >= _WORTH_KEEPING:
        write_tokens(tokenizer.path(digest), made, columns=tokenizer.columns)
    return made
