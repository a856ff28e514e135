"""Rows of JSON-lines files: every line is read and checked once, then read again by its offset. Files stay on disk.

A bad line is left out and reported by file and line. The good ones are numbered from 0: that number is a row's index,
the same in every process that reads the same bytes.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kintsugi.config.schema import SourceSection
from kintsugi.data import cache
from kintsugi.data.columns import RequiredColumns, UnusableRow, row_of
from kintsugi.data.files import LinesFile
from kintsugi.errors import DataError, StorageError, UserError
from kintsugi.types import Row

LONGEST_ROW = 4 << 20
"""Length limit of a line in bytes; no model reads a prompt of that length. A longer line is never loaded completely."""
_WORTH_KEEPING = 32 << 20
"""Size of a source from which on its index is cached; a smaller one is read again in less than half a second."""
_BAD_ROWS_NAMED = 100
_FORMAT = 1
_decoder = msgspec.json.Decoder(dict[str, Any])


class BadRow(msgspec.Struct, frozen=True):
    """`BadRow("train.jsonl, line 7", "expected text in column 'prompt', columns there: question")`."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class IndexedFile(msgspec.Struct, frozen=True):
    """A file as it was when it was indexed."""

    file: LinesFile
    size: int
    modified_ns: int
    digest: str
    num_rows: int


class RowTable(msgspec.Struct, frozen=True):
    """Index of a source: its files, the number of good rows, and the bad rows."""

    files: tuple[IndexedFile, ...]
    num_bad: int
    bad: tuple[BadRow, ...]
    """First bad rows."""

    @property
    def num_rows(self) -> int:
        return sum(each.num_rows for each in self.files)

    @property
    def digest(self) -> str:
        return cache.key_of([each.digest for each in self.files])


Offsets = Sequence[int]
"""Start and end of each good row in its file: two numbers per row."""


def look(
    files: Sequence[LinesFile], section: SourceSection, *, needs: RequiredColumns, cache_dir: str
) -> tuple[RowTable, Offsets]:
    """Index all files by reading every line; the index of a large source is cached."""
    if sum(_status(each).st_size for each in files) < _WORTH_KEEPING:
        return _look(files, section, needs=needs)
    digests = [cache.content_digest([Path(each.path)]) for each in files]
    path = _index_path(files, digests, section, needs=needs, cache_dir=cache_dir)
    kept = _read_index(path)
    if kept is not None and [each.digest for each in kept[0].files] == digests:
        # The same content may have been written again since: use the present modification times.
        table, offsets = kept
        fresh = [_seen(each.file, digest=each.digest, num_rows=each.num_rows) for each in table.files]
        return msgspec.structs.replace(table, files=tuple(fresh)), offsets
    table, offsets = _look(files, section, needs=needs)
    cache.write(path, header=msgspec.json.encode(table), body=[memoryview(offsets).cast("B")])
    return table, offsets


def look_again(
    table: RowTable, section: SourceSection, *, needs: RequiredColumns, cache_dir: str
) -> tuple[RowTable, Offsets]:
    """Index files again that were indexed when the run began; they must be unchanged."""
    for each in table.files:
        _check_unchanged(each, _status(each.file))
    files = [each.file for each in table.files]
    if sum(each.size for each in table.files) >= _WORTH_KEEPING:
        digests = [each.digest for each in table.files]
        kept = _read_index(_index_path(files, digests, section, needs=needs, cache_dir=cache_dir))
        if kept is not None:
            return table, kept[1]
    found, offsets = _look(files, section, needs=needs)
    for before, now in zip(table.files, found.files, strict=True):
        if now.digest != before.digest:
            raise _changed(before)
    return table, offsets


class JsonlRows:
    """Good rows of a table by index; each is read on demand."""

    def __init__(
        self, table: RowTable, offsets: Offsets, section: SourceSection, *, needs: RequiredColumns
    ) -> None:
        self._table = table
        self._offsets = offsets
        self._section = section
        self._needs = needs
        self._ends = list(accumulate(each.num_rows for each in table.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        read = self._table.files[bisect_right(self._ends, index)]
        start, end = self._offsets[2 * index], self._offsets[2 * index + 1]
        try:
            with open(read.file.path, "rb", buffering=0) as file:
                _check_unchanged(read, os.fstat(file.fileno()))
                line = os.pread(file.fileno(), end - start, start)
            return row_of(_decoder.decode(line), self._section, needs=self._needs)
        except OSError as error:
            raise StorageError(f"could not read {read.file.path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, UnusableRow) as error:
            raise _changed(read) from error


def _look(
    files: Sequence[LinesFile], section: SourceSection, *, needs: RequiredColumns
) -> tuple[RowTable, array[int]]:
    offsets: array[int] = array("Q")
    found = _Found()
    ids, places = array("Q"), array("Q")
    read: list[IndexedFile] = []
    for file_number, file in enumerate(files):
        before, digest = len(offsets), xxhash.xxh3_128()
        for number, start, line in numbered_lines(file, digest):
            try:
                record = record_of(line)
                row_of(record, section, needs=needs)
            except UnusableRow as error:
                found.add(file, number, str(error))
                continue
            offsets.extend((start, start + len(line)))
            if "id" in record:
                ids.append(xxhash.xxh3_64_intdigest(msgspec.json.encode(record["id"])))
                places.extend((file_number, number))
        num_rows = (len(offsets) - before) // 2
        read.append(_seen(file, digest=digest.hexdigest(), num_rows=num_rows))
    table = RowTable(tuple(read), found.num_bad, tuple(found.bad))
    # A column `id` that only some rows have does not identify rows.
    if len(ids) == table.num_rows and ids:
        return _without_repeated(table, offsets, ids, places, found)
    return table, offsets


class _Found:
    """Bad rows: all are counted, the first ones described."""

    def __init__(self) -> None:
        self.num_bad = 0
        self.bad: list[BadRow] = []

    def add(self, file: LinesFile, number: int, reason: str) -> None:
        self.num_bad += 1
        if len(self.bad) < _BAD_ROWS_NAMED:
            self.bad.append(BadRow(f"{file.shown}, {file.unit} {number}", reason))


def _without_repeated(
    table: RowTable, offsets: array[int], ids: array[int], places: array[int], found: _Found
) -> tuple[RowTable, array[int]]:
    """Leave out rows that repeat the id of an earlier row."""
    first: dict[int, int] = {}
    kept: array[int] = array("Q")
    num_rows = [0] * len(table.files)
    for index, identity in enumerate(ids):
        file_number, number = places[2 * index : 2 * index + 2]
        earlier = first.setdefault(identity, index)
        if earlier == index:
            kept.extend(offsets[2 * index : 2 * index + 2])
            num_rows[file_number] += 1
            continue
        where, line = places[2 * earlier : 2 * earlier + 2]
        file = table.files[where].file
        reason = f"expected an `id` of its own, got that of {file.shown}, {file.unit} {line}"
        found.add(table.files[file_number].file, number, reason)
    files = [
        msgspec.structs.replace(each, num_rows=count)
        for each, count in zip(table.files, num_rows, strict=True)
    ]
    return RowTable(tuple(files), found.num_bad, tuple(found.bad)), kept


def numbered_lines(file: LinesFile, digest: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), offset and content of each line that is not blank; a too long line is cut."""
    number = offset = 0
    try:
        with open(file.path, "rb", buffering=1 << 20) as lines:
            while line := lines.readline(LONGEST_ROW + 1):
                digest.update(line)
                number += 1
                start, length, rest = offset, len(line), line
                while rest and not rest.endswith(b"\n"):
                    rest = lines.readline(1 << 20)
                    digest.update(rest)
                    length += len(rest)
                offset += length
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    start, line = start + 3, line[3:]
                if line.strip():
                    yield number, start, line
    except OSError as error:
        raise DataError(f"expected a readable file, {file.path}: {error.strerror}") from error


def record_of(line: bytes) -> dict[str, Any]:
    """Decode the JSON object of a line; `UnusableRow` says why it cannot be."""
    if len(line) > LONGEST_ROW:
        raise UnusableRow(
            f"expected at most {LONGEST_ROW >> 20} MiB, got a longer line that begins {line[:40]!r}"
        )
    try:
        record = _decoder.decode(line)
        if repeated := _repeated_column(line, record):
            raise UnusableRow(f"expected every column once, got '{repeated}' twice")
        return record
    except UnicodeDecodeError:
        pass
    except msgspec.DecodeError as error:
        raise UnusableRow(f"expected a JSON object, got {line[:60]!r} ({error})") from error
    except RecursionError as error:
        raise UnusableRow(f"expected values nested less deeply, got {line[:60]!r}") from error
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise UnusableRow(
            f"expected UTF-8, got byte 0x{line[error.start]:02x} after {error.start} bytes"
        ) from error
    raise UnusableRow(f"expected text that UTF-8 can hold, got {line[:60]!r}")


def _repeated_column(line: bytes, record: Mapping[str, Any]) -> str | None:
    """Return a column that the object has twice, of which the decoder kept the last; None as a rule. Only a line in
    which the name of a column appears again is decoded a second time."""
    if all(line.count(f'"{name}"'.encode()) <= 1 for name in record):
        return None

    def names_of(pairs: list[tuple[str, Any]]) -> Any:
        return [name for name, _ in pairs]

    names = json.loads(line, object_pairs_hook=names_of)
    return next((name for number, name in enumerate(names) if name in names[:number]), None)


def _seen(file: LinesFile, *, digest: str, num_rows: int) -> IndexedFile:
    status = os.stat(file.path)
    return IndexedFile(file, status.st_size, status.st_mtime_ns, digest, num_rows)


def _status(file: LinesFile) -> os.stat_result:
    try:
        return os.stat(file.path)
    except OSError as error:
        raise DataError(f"expected a readable file, {file.path}: {error.strerror}") from error


def _check_unchanged(read: IndexedFile, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (read.size, read.modified_ns):
        raise _changed(read)


def _changed(read: IndexedFile) -> UserError:
    """Error for a changed file. Not a `DataError`, which would quarantine single rows: the whole file is affected."""
    return UserError(
        f"{read.file.shown}: expected the file as it was when the run began (a position in it means a row); it was "
        "changed since"
    )


def _index_path(
    files: Sequence[LinesFile],
    digests: Sequence[str],
    section: SourceSection,
    *,
    needs: RequiredColumns,
    cache_dir: str,
) -> Path:
    columns = (section.prompt_column, section.completion_column)
    names = [(each.shown, each.path) for each in files]
    return cache.cache_path(cache_dir, "index", cache.key_of(_FORMAT, names, digests, columns, needs))


def _read_index(path: Path) -> tuple[RowTable, Offsets] | None:
    kept = cache.read(path)
    if kept is None:
        return None
    header, body = kept
    return msgspec.json.decode(header, type=RowTable), body.cast("Q")
