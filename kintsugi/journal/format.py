"""Bytes of a journal file, and one pass over them that tells a torn tail from damage. `journal.py` writes them.

    header   magic (32 bytes), watermark: highest sequence known to be durable + its xxh3-64,
             owner: number of takeovers + name of the last writer, padded to 128 bytes
    record   mark, xxh3-64 of all that follows, length, sequence, watermark; then the payload: msgpack of
             the facts of one decision, so that a decision is in the journal completely or not at all
    zeros    space allocated beforehand, so that a full disk affects all other files first

The first record has sequence 1, or is a `StateFolded` alone, with the sequence of the last record that it stands for.
A file is read through a window, so that reading needs no more memory than its largest record.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from kintsugi.errors import DataDamaged, StorageError
from kintsugi.journal.facts import Fact, StateFolded, TermStarted
from kintsugi.runtime.disk import File

MAGIC = b"kintsugi journal 2\n".ljust(32, b"\0")
_WATERMARK = struct.Struct("<QQ")
OWNER = struct.Struct("<Q72s")
OWNER_OFFSET = len(MAGIC) + _WATERMARK.size
HEADER_SIZE = OWNER_OFFSET + OWNER.size
_MARK = b"\xf1fac"
_RECORD = struct.Struct("<4sQIQQ")
_SUMMED_FROM = 12
"""Offset in a record of the part that its checksum covers."""
_WINDOW_SIZE = 1 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Fact, ...]] = msgspec.msgpack.Decoder(tuple[Fact, ...])

Take = Callable[["JournalRecord"], None]


class JournalRecord(msgspec.Struct, frozen=True):
    """Facts of one decision, and their position."""

    sequence: int
    offset: int
    end: int
    facts: tuple[Fact, ...]


class Contents(msgspec.Struct):
    """Result of one pass over a journal file."""

    sequence: int = 0
    tail: int = HEADER_SIZE
    """Position of the next record."""
    garbage: int = 0
    """Bytes from the tail to the last non-zero one: remains of records that were never synced."""
    first: int = 1
    """Sequence of the first record: 1, or that of a folded state."""
    fold_end: int = HEADER_SIZE
    """End of the folded state, if the file begins with one."""
    term: int = 0
    """Last term that began."""


def watermark(sequence: int) -> bytes:
    return _WATERMARK.pack(sequence, xxhash.xxh3_64_intdigest(sequence.to_bytes(8, "little")))


def owner(number: int, name: str) -> bytes:
    return OWNER.pack(number % (1 << 64), name.encode()[:72])


def owner_name(holder: bytes) -> str:
    return holder.rstrip(b"\0").decode(errors="replace")


def encode_record(facts: tuple[Fact, ...], *, sequence: int, synced: int) -> bytes:
    payload = _encoder.encode(facts)
    record = bytearray(_RECORD.pack(_MARK, 0, len(payload), sequence, synced))
    record += payload
    checksum = xxhash.xxh3_64_intdigest(memoryview(record)[_SUMMED_FROM:])
    record[len(_MARK) : _SUMMED_FROM] = checksum.to_bytes(8, "little")
    return bytes(record)


class _RawRecord(msgspec.Struct, frozen=True):
    sequence: int
    synced: int
    payload: memoryview

    def end(self, offset: int) -> int:
        """Return the end of this record, if it begins at an offset."""
        return offset + _RECORD.size + len(self.payload)


class Window:
    """Part of a file in memory that moves along with the reader."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._start, self._data = 0, memoryview(b"")

    def at(self, offset: int, size: int) -> memoryview:
        """Return bytes of the file; fewer only at its end."""
        if offset < self._start or offset + size > self._start + len(self._data):
            self._start = offset
            self._data = memoryview(self._file.pread(max(size, _WINDOW_SIZE), offset=offset))
        return self._data[offset - self._start : offset - self._start + size]

    def forget(self) -> None:
        """Read again what may have changed meanwhile."""
        self._start, self._data = 0, memoryview(b"")

    def raw_record(self, offset: int) -> _RawRecord | None:
        """Return the record that begins here, or None if none does."""
        head = self.at(offset, _RECORD.size)
        if len(head) < _RECORD.size:
            return None
        mark, checksum, length, sequence, synced = _RECORD.unpack(head)
        if mark != _MARK:
            return None
        data = self.at(offset, _RECORD.size + length)
        if len(data) < _RECORD.size + length or xxhash.xxh3_64_intdigest(data[_SUMMED_FROM:]) != checksum:
            return None
        return _RawRecord(sequence, synced, data[_RECORD.size :])

    def record(self, offset: int, *, path: Path) -> JournalRecord | None:
        """Return the record that begins here with its facts, or None if none does."""
        raw = self.raw_record(offset)
        if raw is None:
            return None
        try:
            facts = _decoder.decode(raw.payload)
        except msgspec.DecodeError as error:
            raise StorageError(f"{path} at offset {offset}: unknown kind of record: {error}") from error
        return JournalRecord(raw.sequence, offset, raw.end(offset), facts)


def scan(file: File, *, path: Path, take: Take) -> Contents:
    """Pass every record to `take`, in order, and check that nothing behind them was durable.

    Damage raises StorageError with its place. A writer may append meanwhile: what it adds is taken too, or left out.
    """
    window = Window(file)
    header = bytes(window.at(0, HEADER_SIZE))
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER_SIZE:
        raise StorageError(
            f"{path} is not a journal, or its header is damaged", detail=DataDamaged(path=str(path))
        )
    contents = Contents()
    with _without_collections():
        while True:
            while (record := window.record(contents.tail, path=path)) is not None:
                _advance(contents, record, path=path)
                take(record)
            contents.garbage = _garbage_length(file, contents.tail)
            durable = max(_durable_sequences(file, header, contents), default=0)
            if durable <= contents.sequence:
                return contents
            window.forget()
            if window.raw_record(contents.tail) is None:
                break
    raise StorageError(
        f"{path} is damaged at offset {contents.tail}: record {contents.sequence + 1} can not be read, "
        f"but records up to {durable} were on disk",
        detail=DataDamaged(path=str(path)),
    )


def _advance(contents: Contents, record: JournalRecord, *, path: Path) -> None:
    """Move past a record that must be the next one."""
    folded = any(isinstance(fact, StateFolded) for fact in record.facts)
    is_first = contents.tail == HEADER_SIZE
    expected = contents.sequence + 1
    if folded and is_first and len(record.facts) == 1:
        contents.first, contents.fold_end, expected = record.sequence, record.end, record.sequence
    elif folded:
        expected = -1
    if record.sequence != expected:
        raise StorageError(
            f"{path} is damaged at offset {contents.tail}: record {record.sequence} after {contents.sequence}",
            detail=DataDamaged(path=str(path)),
        )
    contents.sequence, contents.tail = record.sequence, record.end
    terms = (fact.term for fact in record.facts if isinstance(fact, TermStarted | StateFolded))
    contents.term = max(terms, default=contents.term)


def _garbage_length(file: File, tail: int) -> int:
    """Mostly it is allocated space that was never written, and much of it."""
    length, offset = 0, tail
    while chunk := file.pread(_WINDOW_SIZE, offset=offset):
        if chunk != bytes(len(chunk)):
            length = offset - tail + len(chunk.rstrip(b"\0"))
        offset += len(chunk)
    return length


def _durable_sequences(file: File, header: bytes, contents: Contents) -> Iterator[int]:
    """Return the synced sequences that the header and any records behind the unreadable place mention."""
    sequence, _ = _WATERMARK.unpack_from(header, len(MAGIC))
    if watermark(sequence) == header[len(MAGIC) : OWNER_OFFSET]:
        yield sequence
    window, offset, end = Window(file), contents.tail, contents.tail + contents.garbage
    while offset < end:
        chunk = file.pread(min(_WINDOW_SIZE, end - offset), offset=offset)
        if not chunk:
            return
        found = chunk.find(_MARK)
        while found >= 0:
            raw = window.raw_record(offset + found)
            if raw is not None:
                yield raw.synced
            found = chunk.find(_MARK, found + 1)
        # A mark may lie across the boundary of two chunks.
        offset += len(chunk) if offset + len(chunk) >= end else len(chunk) - len(_MARK) + 1


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: it would scan a million new facts, all of which stay, for a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
