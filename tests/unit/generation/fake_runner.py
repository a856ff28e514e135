"""A runner without a model, whose memory remembers who wrote what: every step checks all that it reads.

A sampled token is a hash of all tokens before it, read from the pages, and of the request's noise; so a page that was
lost, mixed up or written by another shows in the tokens, if a check has not already failed. `expected` says what a
request must become, without any engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.runner import DecodedTokens, DecodeRow, PrefillChunk, RunnerDone, RunnerShape
from kintsugi.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 24
END = 23
NUM_TOP = 3
PIECES = [
    *(bytes([letter]) for letter in b"abcdefghij"),
    *(
        b"ab",
        b" a",
        b"stop",
        b"",
        b"",
        b"\xe2",
        b"\x82",
        b"\xac",
        b"\xc3",
        b"\xa9",
        b"x\xe2",
        b"\xacy",
        b"op",
        b"",
    ),
]
"""What tokens read as: some are parts of a character, some are nothing."""


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def make_shape(**changes: int) -> RunnerShape:
    fields = {
        "num_slots": 4,
        "max_length": 40,
        "page_size": 4,
        "num_pages": 40,
        "chunk_size": 8,
        "max_chunks": 2,
        "vocab_size": VOCAB_SIZE,
    }
    return RunnerShape(**{**fields, **changes})


def make_request(
    number: int, sample: int = 0, *, prompt: Sequence[int], **sampling: object
) -> GenerationRequest:
    return GenerationRequest(
        (number, sample),
        prompt=np.array(prompt, np.int32),
        rng_key=number * 1000 + sample,
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),  # type: ignore[arg-type]
    )


def draw(tokens: NDArray[np.int32], rng_key: int) -> tuple[int, np.float32]:
    """The token after these, and its log-probability."""
    number = crc32(tokens.tobytes(), rng_key & 0xFFFFFFFF)
    return number % VOCAB_SIZE, np.float32(-(number >> 8) / 2**24)


def expected(
    request: GenerationRequest, *, end_token_ids: Sequence[int] = (END,)
) -> tuple[list[int], list[float], FinishReason]:
    """Tokens, log-probabilities and end of a request that nothing disturbs."""
    sampling = request.sampling
    ends = {*(() if sampling.ignore_end else end_token_ids), *sampling.stop_token_ids}
    tokens = request.prompt
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token, logprob = draw(tokens, request.rng_key)
        ids.append(token)
        logprobs.append(float(logprob))
        tokens = np.append(tokens, np.int32(token))
        if token in ends:
            return ids, logprobs, FinishReason.EOS
        if any(text in text_of(ids) for text in sampling.stop):
            return ids, logprobs, FinishReason.STOP
        if len(ids) == sampling.max_new_tokens:
            return ids, logprobs, FinishReason.LENGTH


@dataclass(eq=False)
class _Live:
    row: DecodeRow
    position: int
    tokens: NDArray[np.int32]
    pages: list[int] = field(default_factory=list)
    ended: bool = False


class FakeRunner:
    """`kinds` says by what a place was written: nothing, a prefill or a decode step."""

    def __init__(self, shape: RunnerShape, *, deterministic: bool = True) -> None:
        self._shape = shape
        self._deterministic = deterministic
        places = (shape.num_pages + 1, shape.page_size)
        self._tokens = np.full(places, -1, np.int32)
        self._positions = np.full(places, -1, np.int64)
        self._versions = np.full(places, -1, np.int64)
        self._kinds = np.full(places, " ", "U1")
        self._poisoned = np.zeros(places, bool)
        self._live: dict[int, _Live] = {}
        self.version = 0
        self.poison: dict[int, int] = {}
        """From which position on the logits of a noise key are not finite."""
        self.prefilled: list[tuple[int, int]] = []
        """(start, number of tokens) of every chunk, in order."""
        self.copied: list[tuple[int, int]] = []
        self.started: list[DecodeRow] = []
        self.num_sampled = 0

    @property
    def shape(self) -> RunnerShape:
        return self._shape

    @property
    def num_live(self) -> int:
        return len(self._live)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        assert 0 < len(chunks) <= self._shape.max_chunks
        for chunk in chunks:
            end = chunk.start + len(chunk.tokens)
            assert chunk.start % self._shape.chunk_size == 0
            assert chunk.num_known < len(chunk.tokens) <= self._shape.chunk_size
            assert len(chunk.pages) == -(-end // self._shape.page_size)
            page, place = self._where(chunk.pages, end)
            written = chunk.start + chunk.num_known
            assert (self._positions[page[:written], place[:written]] == np.arange(written)).all()
            assert (self._tokens[page, place][chunk.start : written] == chunk.tokens[: chunk.num_known]).all()
            if self._deterministic:
                assert (self._kinds[page[:written], place[:written]] == "p").all()
            new = (page[written:], place[written:])
            self._tokens[new] = chunk.tokens[chunk.num_known :]
            self._positions[new] = np.arange(written, end)
            self._versions[new] = self.version
            self._kinds[new] = "p"
            self._poisoned[new] = False
            self.prefilled.append((chunk.start, len(chunk.tokens)))

    def _where(self, pages: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(length)
        return np.array(pages, np.int64)[
            positions // self._shape.page_size
        ], positions % self._shape.page_size

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            assert target not in {page for live in self._live.values() for page in live.pages}
            for memory in (self._tokens, self._positions, self._versions, self._kinds, self._poisoned):
                memory[target] = memory[source]
        self.copied += pairs

    def start(self, rows: Sequence[DecodeRow]) -> None:
        for row in rows:
            assert row.slot not in self._live
            assert len(row.tokens) == row.request.num_forced
            assert row.start == (len(row.request.prompt) if self._deterministic else len(row.tokens)) - 1
            self._live[row.slot] = _Live(row, row.start, row.tokens.copy())
        self.started += rows

    def set_pages(self, tables: Mapping[int, Sequence[int]]) -> None:
        for slot, pages in tables.items():
            live = self._live[slot]
            if not live.pages and live.row.start > 0:
                page, place = self._where(pages, live.row.start)
                assert (self._versions[page, place] == self.version).all(), "keys of old weights were found"
            assert pages[: len(live.pages)] == live.pages
            live.pages = list(pages)

    def stop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._live[slot]

    def decode(self, slots: Sequence[int], *, num_steps: int) -> RunnerDone:
        assert len(slots) > 0 and sorted(set(slots)) == list(slots) and num_steps > 0
        shape = (num_steps, len(slots))
        tokens, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for step in range(num_steps):
            for column, slot in enumerate(slots):
                live = self._live[slot]
                if not live.ended:
                    tokens[step, column], logprobs[step, column] = self._feed(live)
        tops = np.arange(NUM_TOP) + tokens[:, :, None]
        return RunnerDone(DecodedTokens(tokens, logprobs, tops.astype(np.int32), -tops.astype(np.float32)))

    def _feed(self, live: _Live) -> tuple[int, np.float32]:
        position, request = live.position, live.row.request
        page, place = self._where(live.pages, position + 1)
        self._tokens[page[-1], place[-1]] = live.tokens[position]
        self._positions[page[-1], place[-1]] = position
        self._versions[page[-1], place[-1]] = self.version
        self._kinds[page[-1], place[-1]] = "d"
        read = self._tokens[page, place]
        assert (read == live.tokens[: position + 1]).all(), "another's tokens are in its pages"
        assert (self._positions[page, place] == np.arange(position + 1)).all()
        if self._deterministic:
            assert (self._kinds[page[:-1], place[:-1]] == "p")[: len(request.prompt) - 1].all()
            assert (self._kinds[page, place] == "d")[len(request.prompt) - 1 :].all()
        is_poisoned = position >= self.poison.get(request.rng_key, self._shape.max_length)
        self._poisoned[page[-1], place[-1]] = is_poisoned
        token, logprob = draw(read, request.rng_key)
        if self._poisoned[page, place].any():
            logprob = np.float32("nan")
        live.position += 1
        if live.position == len(live.tokens):
            self.num_sampled += 1
            live.tokens = np.append(live.tokens, np.int32(token))
            ends = token in live.row.end_token_ids
            live.ended = ends or live.position == request.max_length - 1
        return token, logprob

    def damage(self) -> None:
        """Write into a page that somebody reads."""
        live = next(iter(self._live.values()))
        self._tokens[live.pages[0]] += 1

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.version += 1
