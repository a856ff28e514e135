"""Journal of the master: an append-only file of facts that survives its writer and tells a torn tail from damage.

    header   magic (32 bytes), watermark: highest sequence known to be durable + its xxh3-64,
             owner: number of takeovers + name of the last writer, padded to 128 bytes
    record   mark, xxh3-64 of all that follows, length, sequence, watermark; then the payload: msgpack of
             the facts of one decision, so that a decision is in the journal completely or not at all
    zeros    space allocated beforehand, so that a full disk affects all other files first

`append` makes facts survive the process, `sync` makes them survive the machine. Each succeeds completely, or raises and
can be repeated. Unsynced records that a power cut leaves incomplete are cut off when the journal is opened. A synced
record that cannot be read is damage: it is reported with its offset, never skipped. The watermark tells the two apart;
it is written after each sync and contained in every later record. (Only the watermark of the last sync may itself be
lost in a power cut.)

There is one writer. It holds a lock on the file that ends with its process, so the successor of a dead writer continues
immediately. The successor of a live one (stopped, or unreachable for its agent) writes its name into the header and
continues in a copy under the same name: later writes of the old writer go to a file without a name, and it finds itself
fenced. `append` checks the header after its write, so the successor has everything that an `append` has confirmed.
"""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from kintsugi.errors import DataDamaged, FencedError, RefusedError, StorageError
from kintsugi.journal.facts import Fact, TermStarted
from kintsugi.runtime.disk import SYSTEM_DISK, Disk, File, storage_errors

_MAGIC = b"kintsugi journal 2\n".ljust(32, b"\0")
_WATERMARK = struct.Struct("<QQ")
_OWNER = struct.Struct("<Q72s")
_OWNER_OFFSET = len(_MAGIC) + _WATERMARK.size
_HEADER_SIZE = _OWNER_OFFSET + _OWNER.size
_MARK = b"\xf1fac"
_RECORD = struct.Struct("<4sQIQQ")
_SUMMED_FROM = 12
"""Offset in a record of the part that its checksum covers."""

_CHUNK_SIZE = 4 << 20
_SPARE_SIZE = 1 << 20
"""Space that is kept free ahead of the tail, for use while the disk is full."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Fact, ...]] = msgspec.msgpack.Decoder(tuple[Fact, ...])


class Journal:
    """The writing end; there is one at a time.

    journal = Journal.create(run / "journal", owner="master-0 a1b2")
    journal.append([RunStarted(job="j", config_digest="d"), TermStarted(term=1, incarnation="a1b2")])
    journal.sync()
    """

    def __init__(self, path: Path, *, file: File, owner: bytes, contents: _Contents) -> None:
        self._path = path
        self._file = file
        self._owner = owner
        self._tail = self._synced_tail = contents.tail
        self._capacity = file.size()
        self._sequence = self._synced = contents.sequence
        self._unsynced: list[bytes] = []
        self._sync_failed = False
        self.term = max((f.term for f in contents.facts if isinstance(f, TermStarted)), default=0)
        """Number of the last `TermStarted`; the next one must be higher."""

    @classmethod
    def create(cls, path: Path, *, owner: str, disk: Disk = SYSTEM_DISK) -> Journal:
        """Create a journal; it appears under its name only when it is complete."""
        header = _owner(1, owner)
        with ExitStack() as undo, storage_errors(f"could not create {path}"), _opening(path, disk=disk):
            if disk.exists(path):
                raise StorageError(f"{path} exists already; a journal is never overwritten")
            file = _open_unfinished(path, size=_CHUNK_SIZE, disk=disk)
            undo.callback(file.close)
            file.pwrite(_MAGIC + _watermark(0) + header, offset=0)
            _put_in_place(file, path, disk=disk)
            undo.pop_all()
        return cls(path, file=file, owner=header, contents=_Contents())

    @classmethod
    def open(
        cls, path: Path, *, owner: str, take_over: bool = False, disk: Disk = SYSTEM_DISK
    ) -> tuple[Journal, tuple[Fact, ...]]:
        """Cut a torn tail, make the rest durable, and return its facts.

        While another process has it open, RefusedError names that process; with `take_over` it is fenced instead.
        """
        with ExitStack() as undo, storage_errors(f"could not open {path}"), _opening(path, disk=disk):
            file = disk.open(path)
            undo.callback(file.close)
            number, holder = _OWNER.unpack(file.pread(_OWNER.size, offset=_OWNER_OFFSET).ljust(_OWNER.size))
            header = _owner(number + 1, owner)
            try:
                file.lock()
            except BlockingIOError as error:
                if not take_over:
                    raise RefusedError(f"{path} is in use by {_name(holder)}") from error
                copy, contents = _fence_and_copy(file, path, owner=header, disk=disk)
                file.close()
                file = copy
            else:
                contents = _continue_in(file, path, owner=header)
            undo.pop_all()
        return cls(path, file=file, owner=header, contents=contents), tuple(contents.facts)

    @property
    def sequence(self) -> int:
        """Number of the last record."""
        return self._sequence

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts of one decision; they survive the death of this process.

        If this raises StorageError (StorageFull when even the space kept for this is used up), the journal is as it
        was, and the same facts may be appended again. FencedError is final.
        """
        if not facts:
            return
        term = max((fact.term for fact in facts if isinstance(fact, TermStarted)), default=None)
        assert term is None or term > self.term, f"term {term} after {self.term}"
        record = _record(_encoder.encode(tuple(facts)), sequence=self._sequence + 1, synced=self._synced)
        with storage_errors(f"could not write to {self._path}"):
            self._check_owner()
            self._make_room(len(record))
            try:
                self._file.pwrite(record, offset=self._tail)
                self._check_owner()
            except OSError:
                with suppress(OSError):
                    self._file.pwrite(bytes(len(record)), offset=self._tail)
                raise
        self._unsynced.append(record)
        self._tail += len(record)
        self._sequence += 1
        self.term = self.term if term is None else term

    def sync(self) -> None:
        """Make everything appended so far survive the machine. If this raises StorageError, it may be called again."""
        if not self._unsynced:
            return
        with storage_errors(f"could not sync {self._path}"):
            self._check_owner()
            if self._sync_failed:
                # The kernel may have dropped what it could not write; without this a second sync would falsely succeed.
                self._file.pwrite(b"".join(self._unsynced), offset=self._synced_tail)
            self._sync_failed = True
            self._file.sync()
            self._file.pwrite(_watermark(self._sequence), offset=len(_MAGIC))
        self._sync_failed = False
        self._unsynced.clear()
        self._synced, self._synced_tail = self._sequence, self._tail

    def close(self) -> None:
        """Close the journal without a sync."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        found = self._file.pread(len(self._owner), offset=_OWNER_OFFSET)
        if found != self._owner:
            _, holder = _OWNER.unpack(found)
            raise FencedError(f"{self._path} was taken over by {_name(holder)}")

    def _make_room(self, size: int) -> None:
        """Keep `_SPARE_SIZE` ahead of the next record; use it up while the disk is full."""
        needed = self._tail + size
        if needed + _SPARE_SIZE <= self._capacity:
            return
        try:
            self._file.preallocate(needed + _CHUNK_SIZE)
            self._capacity = needed + _CHUNK_SIZE
        except OSError:
            if needed > self._capacity:
                self._file.preallocate(needed)
                self._capacity = needed


def is_disk_error(error: StorageError) -> bool:
    """Return whether the kernel refused or failed (full, read-only, broken, not permitted): a retry may succeed."""
    return isinstance(error.__cause__, OSError)


def read_facts(path: Path, *, disk: Disk = SYSTEM_DISK) -> tuple[Fact, ...]:
    """Return the facts of a journal, in use or abandoned, without changing it. Damage raises StorageError."""
    with storage_errors(f"could not read {path}"):
        data = disk.read(path)
    return tuple(_parse(data, path=path).facts)


class JournalRecord(msgspec.Struct, frozen=True):
    """Facts of one decision, and their position."""

    sequence: int
    offset: int
    end: int
    facts: tuple[Fact, ...]


class JournalPayload(msgspec.Struct, frozen=True):
    """Encoded facts of one decision, and their position."""

    sequence: int
    offset: int
    end: int
    content: bytes


def read_records(path: Path, *, offset: int = 0, most: int = 1000) -> list[JournalRecord]:
    """Read records of a journal that may be in use, from the end of a record on; 0 for the first. Reads no more than it
    returns.

    It stops where no record begins, whether nothing was written there yet or something cannot be read: `read_facts`
    distinguishes the two.
    """
    records: list[JournalRecord] = []
    for each in read_payloads(path, offset=offset, most=most):
        try:
            facts = _decoder.decode(each.content)
        except msgspec.DecodeError as error:
            raise StorageError(f"{path} at offset {each.offset}: unknown kind of record: {error}") from error
        records.append(JournalRecord(each.sequence, each.offset, each.end, facts))
    return records


def read_payloads(path: Path, *, offset: int = 0, most: int = 1000) -> list[JournalPayload]:
    """Read records as `read_records` does, and leave their facts encoded, for a reader that needs few of them."""
    payloads: list[JournalPayload] = []
    offset = max(offset, _HEADER_SIZE)
    with storage_errors(f"could not read {path}"), path.open("rb") as file:
        while len(payloads) < most:
            head = os.pread(file.fileno(), _RECORD.size, offset)
            if len(head) < _RECORD.size:
                break
            mark, _, length, _, _ = _RECORD.unpack(head)
            if mark != _MARK:
                break
            found = _record_at(memoryview(os.pread(file.fileno(), _RECORD.size + length, offset)), 0)
            if found is None:
                break
            sequence, _, payload = found
            end = offset + _RECORD.size + length
            payloads.append(JournalPayload(sequence, offset, end, bytes(payload)))
            offset = end
    return payloads


@contextmanager
def _opening(path: Path, *, disk: Disk) -> Iterator[None]:
    """Hold `journal.lock`, so that one process at a time opens the journal."""
    file = disk.open(path.with_name(path.name + ".lock"), create=True)
    try:
        try:
            file.lock()
        except BlockingIOError as error:
            raise RefusedError(f"{path} is being opened by another process") from error
        yield
    finally:
        file.close()


def _continue_in(file: File, path: Path, *, owner: bytes) -> _Contents:
    """Take over a journal without a live writer."""
    contents = _parse(file.pread(file.size(), offset=0), path=path)
    file.pwrite(owner, offset=_OWNER_OFFSET)
    if contents.garbage:
        file.pwrite(bytes(contents.garbage), offset=contents.tail)
    file.sync()
    file.pwrite(_watermark(contents.sequence), offset=len(_MAGIC))
    return contents


def _fence_and_copy(file: File, path: Path, *, owner: bytes, disk: Disk) -> tuple[File, _Contents]:
    """Take a journal from a live writer: it will find that its later appends do not count.

    The copy follows the fence, so that it has everything that the old writer could report as written.
    """
    with ExitStack() as undo:
        copy = _open_unfinished(path, size=file.size() + _CHUNK_SIZE, disk=disk)
        undo.callback(copy.close)
        file.pwrite(owner, offset=_OWNER_OFFSET)
        data = file.pread(file.size(), offset=0)
        contents = _parse(data, path=path)
        copy.pwrite(_MAGIC + _watermark(contents.sequence) + owner, offset=0)
        copy.pwrite(memoryview(data)[_HEADER_SIZE : contents.tail], offset=_HEADER_SIZE)
        _put_in_place(copy, path, disk=disk)
        undo.pop_all()
    return copy, contents


def _open_unfinished(path: Path, *, size: int, disk: Disk) -> File:
    """Create an empty file, already locked by this process, that is to become the journal."""
    with ExitStack() as undo:
        file = disk.open(path.with_name(path.name + ".new"), create=True)
        undo.callback(file.close)
        file.lock()
        file.truncate(0)
        file.preallocate(size)
        undo.pop_all()
    return file


def _put_in_place(file: File, path: Path, *, disk: Disk) -> None:
    file.sync()
    disk.rename(path.with_name(path.name + ".new"), path)
    disk.sync_folder(path.parent)


class _Contents(msgspec.Struct):
    """Contents of a journal file."""

    facts: list[Fact] = []
    sequence: int = 0
    tail: int = _HEADER_SIZE
    """Position of the next record."""
    garbage: int = 0
    """Bytes from the tail to the last non-zero one: remains of records that were never synced."""


def _watermark(sequence: int) -> bytes:
    return _WATERMARK.pack(sequence, xxhash.xxh3_64_intdigest(sequence.to_bytes(8, "little")))


def _owner(number: int, name: str) -> bytes:
    return _OWNER.pack(number % (1 << 64), name.encode()[:72])


def _name(holder: bytes) -> str:
    return holder.rstrip(b"\0").decode(errors="replace")


def _record(payload: bytes, *, sequence: int, synced: int) -> bytes:
    record = bytearray(_RECORD.pack(_MARK, 0, len(payload), sequence, synced))
    record += payload
    checksum = xxhash.xxh3_64_intdigest(memoryview(record)[_SUMMED_FROM:])
    record[len(_MARK) : _SUMMED_FROM] = checksum.to_bytes(8, "little")
    return bytes(record)


def _record_at(data: memoryview, offset: int) -> tuple[int, int, memoryview] | None:
    """Return (sequence, watermark, payload) of the record that begins here, or None if none does."""
    start = offset + _RECORD.size
    if start > len(data):
        return None
    mark, checksum, length, sequence, synced = _RECORD.unpack_from(data, offset)
    if mark != _MARK or start + length > len(data):
        return None
    if xxhash.xxh3_64_intdigest(data[offset + _SUMMED_FROM : start + length]) != checksum:
        return None
    return sequence, synced, data[start : start + length]


def _parse(data: bytes, *, path: Path) -> _Contents:
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER_SIZE:
        raise StorageError(
            f"{path} is not a journal, or its header is damaged", detail=DataDamaged(path=str(path))
        )
    with _without_collections():
        contents = _read_records(memoryview(data), path=path)
    rest = data[contents.tail :]
    if rest != bytes(len(rest)):  # Mostly it is allocated space that was never written, and much of it.
        contents.garbage = len(rest.rstrip(b"\0"))
    durable = max(_durable_sequences(data[: contents.tail + contents.garbage], contents.tail), default=0)
    if durable > contents.sequence:
        raise StorageError(
            f"{path} is damaged at offset {contents.tail}: record {contents.sequence + 1} can not be read, "
            f"but records up to {durable} were on disk",
            detail=DataDamaged(path=str(path)),
        )
    return contents


def _read_records(data: memoryview, *, path: Path) -> _Contents:
    """Read every record up to the first place where none begins."""
    facts: list[Fact] = []
    last, tail = 0, _HEADER_SIZE
    while record := _record_at(data, tail):
        sequence, _, payload = record
        if sequence != last + 1:
            raise StorageError(
                f"{path} is damaged at offset {tail}: record {sequence} after {last}",
                detail=DataDamaged(path=str(path)),
            )
        try:
            facts.extend(_decoder.decode(payload))
        except msgspec.DecodeError as error:
            raise StorageError(f"{path} at offset {tail}: unknown kind of record: {error}") from error
        last = sequence
        tail += _RECORD.size + len(payload)
    return _Contents(facts, last, tail)


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


def _durable_sequences(data: bytes, tail: int) -> Iterator[int]:
    """Return the synced sequences that the header and any records behind the unreadable place mention."""
    sequence, _ = _WATERMARK.unpack_from(data, len(_MAGIC))
    if _watermark(sequence) == data[len(_MAGIC) : _OWNER_OFFSET]:
        yield sequence
    offset = data.find(_MARK, tail)
    while offset >= 0:
        record = _record_at(memoryview(data), offset)
        if record is not None:
            yield record[1]
        offset = data.find(_MARK, offset + 1)
