"""Rows as a rollout worker takes them: found, and in tokens. In idle time the next ones are made ready."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kintsugi.config import Config
from kintsugi.data.columns import held_out_needs_of, needs_of
from kintsugi.data.saved import saved_samples
from kintsugi.data.source import Place, Source, open_data
from kintsugi.data.streams import RowNotYet
from kintsugi.data.tokens import Fed, Feeding, KeptTokens, keep, kept
from kintsugi.errors import DataError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.types import Row

AHEAD = 64
"""Rows that are made ready before they are asked for. Rows are dealt to whoever is free, so every worker makes all of
the next ones ready; more would be work for others."""
ROWS_MEASURED = 10_000
"""Rows of a source whose tokens are counted before a run starts, a few seconds' work; those of files are kept."""
_WORTH_KEEPING = 1000
"""Rows; fewer are turned into tokens again in less time than a person notices."""

Ask = tuple[str, int, int, int]
"""Stage, seed, epoch, position."""


class Feed:
    """The data of a run in the tokens of its model."""

    def __init__(self, config: Config, tokenizer: Tokenizer, *, run_dir: Path) -> None:
        self._data_set = open_data(config, run_dir=run_dir)
        self._feeding = Feeding(tokenizer, config.data, needs_of(config))
        self._held_out = Feeding(tokenizer, config.data, held_out_needs_of(config))
        parts = self._data_set.parts
        self._kept = [kept_tokens(part.train_digest, self._feeding) for part in parts]
        self._kept_held_out = [kept_tokens(part.held_out_digest, self._held_out) for part in parts]
        self._ready: dict[Ask, tuple[Row, Fed]] = {}
        self._latest: Ask | None = None

    def training(self, *, stage: str, seed: int, epoch: int, position: int) -> tuple[Row, Fed]:
        """`RowNotYet` while a stream has not brought it."""
        ask = (stage, seed, epoch, position)
        if self._latest is None or self._latest < ask or self._latest[0] != stage:
            self._latest = ask
        ready = self._ready.pop(ask, None)
        return ready if ready is not None else self._make(ask)

    def held_out(self, position: int) -> tuple[Row, Fed]:
        row, place = self._data_set.held_out_row(position), self._data_set.held_out_place(position)
        return row, _fed(row, place, self._held_out, kept=self._kept_held_out)

    def make_ready(self, *, within_s: float) -> None:
        """Make the next rows ready, those after the latest that was asked for; none is begun when the time is up."""
        if self._latest is None:
            return
        stage, seed, epoch, position = self._latest
        last = min(position + 1 + AHEAD, self._data_set.num_positions)
        following = [(stage, seed, epoch, each) for each in range(position + 1, last)]
        self._ready = {ask: ready for ask, ready in self._ready.items() if ask in following}
        until = SYSTEM_CLOCK.monotonic() + within_s
        try:
            for ask in following:
                if SYSTEM_CLOCK.monotonic() >= until:
                    return
                if ask not in self._ready:
                    self._ready[ask] = self._make(ask)
        except (DataError, RowNotYet):
            return  # Whoever asks for it will be told.

    def _make(self, ask: Ask) -> tuple[Row, Fed]:
        stage, seed, epoch, position = ask
        place = self._data_set.place(stage=stage, seed=seed, epoch=epoch, position=position)
        row = self._data_set.row_at(place)
        if saved_samples(row):
            return row, Fed([], {})  # It is fed as it was when it was sampled.
        return row, _fed(row, place, self._feeding, kept=self._kept)


def _fed(row: Row, place: Place, feeding: Feeding, *, kept: Sequence[KeptTokens | None]) -> Fed:
    tokens = kept[place.part]
    if tokens is not None and place.index < len(tokens):
        return tokens[place.index]
    return feeding.feed(row)


def kept_tokens(digest: str | None, feeding: Feeding) -> KeptTokens | None:
    """The tokens of rows that follow from what has this digest, if they were kept."""
    return None if digest is None else kept(feeding.path(digest), columns=feeding.columns)


def measured_tokens(
    source: Source, digest: str | None, feeding: Feeding, *, most: int = ROWS_MEASURED
) -> KeptTokens | list[Fed]:
    """The tokens of a source's first rows: as they were kept, else made now and, where it pays, kept."""
    count = min(len(source), most)
    found = kept_tokens(digest, feeding)
    if found is not None and len(found) >= count:
        return found
    made = [feeding.feed(source.row(index)) for index in range(count)]
    if digest is not None and count >= _WORTH_KEEPING:
        keep(feeding.path(digest), made, columns=feeding.columns)
    return made
