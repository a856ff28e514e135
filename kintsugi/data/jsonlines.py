"""Prompts from a JSON Lines file, one object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.errors import DataError
from kintsugi.types import Row


class JsonLines:
    """Rows of a file; the last `num_eval` lines are held out.

    A row that is not an object, or lacks a column, is refused by file and line.
    """

    def __init__(
        self, path: Path, *, prompt_column: str, completion_column: str | None, split: str, num_eval: int
    ) -> None:
        rows = [
            _row(path, number, line, prompt_column=prompt_column, completion_column=completion_column)
            for number, line in numbered_lines(path)
        ]
        if len(rows) <= num_eval:
            raise DataError(f"{path}: expected more rows than data.num_eval={num_eval}, found {len(rows)}")
        cut = len(rows) - num_eval
        self._rows = rows[cut:] if split == "eval" else rows[:cut]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._rows[index]


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"data.source: expected a readable JSON Lines file, {path}: {error.strerror}"
        ) from error
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _row(path: Path, number: int, line: bytes, *, prompt_column: str, completion_column: str | None) -> Row:
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise DataError(
            f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})"
        ) from error
    for column in filter(None, (prompt_column, completion_column)):
        if not isinstance(record.get(column), str):
            have = ", ".join(sorted(record)) or "none"
            raise DataError(
                f"{path}, line {number}: expected text in column '{column}', columns there: {have}"
            )
    columns = {name: value for name, value in record.items() if name != prompt_column}
    if completion_column is not None:
        columns["completion"] = record[completion_column]
    return Row(prompt=record[prompt_column], columns=columns)
