"""Tokens of rows, and their cache for rows of files.

Tokens depend on the bytes of the files, the tokenizer and a few settings; the cache key is a digest of all of these.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.schema import DataSection
from kintsugi.data import cache
from kintsugi.data.columns import CHOSEN, COMPLETION, REJECTED, RequiredColumns
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.types import Row

_FORMAT = 2


class TokenizedRow(msgspec.Struct, frozen=True):
    """Tokens of a row: `TokenizedRow(prompt=[3, 12, 4], answers={"completion": [7, 1]})`."""

    prompt: list[int]
    answers: dict[str, list[int]]
    """Completions to learn by column, each with its end token."""

    @property
    def longest(self) -> int:
        """Number of tokens of the prompt with its longest answer."""
        return len(self.prompt) + max(map(len, self.answers.values()), default=0)


def prompt_tokens(row: Row, tokenizer: Tokenizer, *, data: DataSection) -> list[int]:
    """Tokens of a prompt: a conversation, or text as a user's turn, in the model's chat template; or plain text."""
    if not _is_conversation(row, data):
        return tokenizer.encode_prompt(row.prompt)
    return tokenizer.encode_conversation(conversation(row, data=data))


def conversation(row: Row, *, data: DataSection) -> list[dict[str, Any]]:
    """Messages of a row, or its text as a user's turn, with the system prompt of the run."""
    messages = list(row.messages) or [{"role": "user", "content": row.prompt}]
    if data.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system})
    return messages


def _is_conversation(row: Row, data: DataSection) -> bool:
    return bool(row.messages or data.chat_template)


def answer_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of an answer, with the end token."""
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


class RowTokenizer(msgspec.Struct, frozen=True):
    """Tokenizer of rows with the settings of a run."""

    tokenizer: Tokenizer
    data: DataSection
    needs: RequiredColumns

    @property
    def columns(self) -> tuple[str, ...]:
        return (COMPLETION,) * self.needs.completion + (CHOSEN, REJECTED) * self.needs.pair

    def tokenize(self, row: Row) -> TokenizedRow:
        answers = {name: answer_tokens(row.columns[name], self.tokenizer) for name in self.columns}
        return TokenizedRow(prompt_tokens(row, self.tokenizer, data=self.data), answers)

    def tokenize_each(self, rows: Sequence[Row]) -> list[TokenizedRow]:
        """As `tokenize` does; conversations, which most prompts are, are encoded by all cores."""
        if self.columns or not all(_is_conversation(row, self.data) for row in rows):
            return [self.tokenize(row) for row in rows]
        texts = [self.tokenizer.apply_chat_template(conversation(row, data=self.data)) for row in rows]
        return [TokenizedRow(tokens, {}) for tokens in self.tokenizer.encode_each(texts)]

    def path(self, source_digest: str) -> Path:
        """Path of the cached tokens of these rows."""
        settings = (self.data.chat_template, self.data.system, self.needs)
        key = cache.key_of(_FORMAT, source_digest, self.tokenizer.digest, settings)
        return cache.cache_path(self.data.cache_dir, "tokens", key)


class TokenCache:
    """Tokens of the first rows of a source, mapped from the cache."""

    def __init__(self, body: memoryview, *, columns: tuple[str, ...], num_rows: int) -> None:
        self._columns = columns
        self._num_rows = num_rows
        num_offsets = num_rows * (1 + len(columns)) + 1
        self._offsets = body[: 8 * num_offsets].cast("Q")
        self._tokens = body[8 * num_offsets :].cast("i")

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> TokenizedRow:
        first = index * (1 + len(self._columns))
        prompt, *answers = (self._piece(first + each) for each in range(1 + len(self._columns)))
        return TokenizedRow(prompt, dict(zip(self._columns, answers, strict=True)))

    def _piece(self, number: int) -> list[int]:
        return self._tokens[self._offsets[number] : self._offsets[number + 1]].tolist()


def write_tokens(path: Path, rows: Iterable[TokenizedRow], *, columns: tuple[str, ...]) -> None:
    """Cache the tokens of rows."""
    offsets, tokens, num_rows = array("Q", [0]), array("i"), 0
    for row in rows:
        num_rows += 1
        for piece in (row.prompt, *(row.answers[name] for name in columns)):
            tokens.extend(piece)
            offsets.append(len(tokens))
    header = msgspec.json.encode(num_rows)
    cache.write(path, header=header, body=[memoryview(offsets).cast("B"), memoryview(tokens).cast("B")])


def read_tokens(path: Path, *, columns: tuple[str, ...]) -> TokenCache | None:
    """Open cached tokens; None if they are missing or damaged."""
    found = cache.read(path)
    if found is None:
        return None
    header, body = found
    return TokenCache(body, columns=columns, num_rows=msgspec.json.decode(header, type=int))
