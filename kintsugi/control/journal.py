"""The master's journal: an append-only file of facts that survives its writer and knows a torn tail from damage.

    header   magic (32 bytes), watermark: highest sequence known to be durable + its xxh3-64, padding to 64 bytes
    record   mark, length, sequence, watermark, xxh3-64 of all of this and the payload; then the payload: msgpack of
             the facts of one decision, so that a decision is in the journal whole or not at all
    zeros    space allocated beforehand, so that a full disk is noticed before there is no room left to say so

`append` makes facts survive the process, `sync` makes them survive the machine. What a power cut leaves of unsynced
records is cut off when the journal is opened. A record that was synced once and can not be read is damage, and is
reported with its offset, never skipped: the watermark, which is written after each sync and carried by every later
record, tells the two apart. (Only the watermark of the last sync may itself be lost in a power cut.)

The writer holds `journal.lock`, which names it. A second writer is refused as long as the first lives; on file systems
whose locks do not reach another host, a writer that was overtaken notices at its next `sync` and stops.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from kintsugi.disk import SYSTEM_DISK, Disk, File
from kintsugi.errors import RefusedError, StorageError
from kintsugi.facts import EpochStarted, Fact

_MAGIC = b"kintsugi journal 1\n".ljust(32, b"\0")
_HEADER_SIZE = 64
_WATERMARK = struct.Struct("<QQ")
_MARK = b"\xf1fac"
_RECORD = struct.Struct("<4sIQQ")
_CHECKSUM = struct.Struct("<Q")
_PREFIX_SIZE = _RECORD.size + _CHECKSUM.size

_CHUNK_SIZE = 4 << 20
_SPARE_SIZE = 1 << 20
"""Space that is kept free ahead of the tail. When it can not be had, it is what the last words are written into."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[Fact, ...]] = msgspec.msgpack.Decoder(tuple[Fact, ...])


class Journal:
    """The writing end; there is one at a time.

    journal = Journal.create(run / "journal", owner="master-0 a1b2")
    journal.append([RunStarted(job="j", config_digest="d"), EpochStarted(epoch=1, incarnation="a1b2")])
    journal.sync()
    """

    def __init__(self, path: Path, *, file: File, lock: _Lock, contents: _Contents) -> None:
        self._path = path
        self._file = file
        self._lock = lock
        self._tail = contents.tail
        self._capacity = file.size()
        self._sequence = self._synced = contents.sequence
        self._space_denied = False
        self._failed = False
        self.epoch = max((f.epoch for f in contents.facts if isinstance(f, EpochStarted)), default=0)
        """Of the last `EpochStarted`; the next one must be higher."""

    @classmethod
    def create(cls, path: Path, *, owner: str, disk: Disk = SYSTEM_DISK) -> Journal:
        """A new journal; it appears under its name only when it is whole."""
        unfinished = path.with_name(path.name + ".new")
        with ExitStack() as undo, _storage_errors(f"could not create {path}"):
            lock = _Lock.take(path, owner=owner, disk=disk)
            undo.callback(lock.release)
            if disk.exists(path):
                raise StorageError(f"{path} exists already; a journal is never overwritten")
            file = disk.open(unfinished, create=True)
            undo.callback(file.close)
            file.truncate(0)
            file.preallocate(_CHUNK_SIZE)
            file.pwrite(_header(watermark=0), offset=0)
            file.sync()
            disk.rename(unfinished, path)
            disk.sync_folder(path.parent)
            undo.pop_all()
        return cls(path, file=file, lock=lock, contents=_Contents())

    @classmethod
    def open(cls, path: Path, *, owner: str, disk: Disk = SYSTEM_DISK) -> tuple[Journal, tuple[Fact, ...]]:
        """Take the journal over: cut a torn tail, make what is there durable, and give its facts."""
        with ExitStack() as undo, _storage_errors(f"could not open {path}"):
            lock = _Lock.take(path, owner=owner, disk=disk)
            undo.callback(lock.release)
            contents = _parse(disk.read(path), path=path)
            file = disk.open(path)
            undo.callback(file.close)
            if contents.garbage:
                file.pwrite(bytes(contents.garbage), offset=contents.tail)
            file.sync()
            file.pwrite(_watermark(contents.sequence), offset=len(_MAGIC))
            undo.pop_all()
        return cls(path, file=file, lock=lock, contents=contents), tuple(contents.facts)

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts of one decision; they survive the death of this process.

        The first time that space can not be allocated ahead, StorageError is raised and nothing is written; after
        that the space still left takes records, so that the end of the run can be recorded.
        """
        self._check_usable()
        if not facts:
            return
        for fact in facts:
            if isinstance(fact, EpochStarted):
                assert fact.epoch > self.epoch, f"epoch {fact.epoch} after {self.epoch}"
        record = _record(_encoder.encode(tuple(facts)), sequence=self._sequence + 1, synced=self._synced)
        self._make_room(len(record))
        with _storage_errors(f"could not write to {self._path}"):
            self._file.pwrite(record, offset=self._tail)
        self._tail += len(record)
        self._sequence += 1
        self.epoch = max([self.epoch, *(fact.epoch for fact in facts if isinstance(fact, EpochStarted))])

    def sync(self) -> None:
        """Make everything appended so far survive the machine."""
        self._check_usable()
        if self._synced == self._sequence:
            return
        # After a failed sync the kernel may have dropped the pages, and a second one would falsely succeed.
        self._failed = True
        with _storage_errors(f"could not sync {self._path}"):
            self._lock.check()
            self._file.sync()
            self._file.pwrite(_watermark(self._sequence), offset=len(_MAGIC))
        self._synced = self._sequence
        self._failed = False

    def close(self) -> None:
        """Let go of the journal; does not sync."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._failed:
            raise StorageError(f"{self._path} failed to sync on disk; what it holds is no longer certain")

    def _make_room(self, size: int) -> None:
        """Keep `_SPARE_SIZE` ahead of the record that is about to be written."""
        if self._tail + size + _SPARE_SIZE <= self._capacity:
            return
        wanted = self._tail + size + _CHUNK_SIZE
        try:
            self._file.preallocate(wanted)
        except OSError as error:
            first_time, self._space_denied = not self._space_denied, True
            if first_time or self._tail + size > self._capacity:
                message = (
                    f"could not allocate {wanted - self._capacity} bytes for {self._path} on disk: {error}"
                )
                raise StorageError(message) from error
            return
        self._capacity = wanted
        self._space_denied = False


def read_facts(path: Path, *, disk: Disk = SYSTEM_DISK) -> tuple[Fact, ...]:
    """The facts of a journal that may be in use or abandoned; changes nothing. Damage raises StorageError."""
    with _storage_errors(f"could not read {path}"):
        data = disk.read(path)
    return tuple(_parse(data, path=path).facts)


@contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    """Turn what the disk raises into an error that says what could not be done, and that it is the disk's."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} on disk: {error}") from error


class _Lock:
    """`journal.lock`: held by the living writer, and says who that is."""

    def __init__(self, path: Path, *, file: File, owner: bytes) -> None:
        self._path = path
        self._file = file
        self._owner = owner

    @classmethod
    def take(cls, journal: Path, *, owner: str, disk: Disk) -> _Lock:
        path = journal.with_name(journal.name + ".lock")
        name = owner.encode()
        with ExitStack() as undo:
            file = disk.open(path, create=True)
            undo.callback(file.close)
            try:
                file.lock()
            except BlockingIOError as error:
                holder = file.pread(1024, offset=0).decode(errors="replace")
                raise RefusedError(f"{journal} is in use by {holder or 'another process'}") from error
            file.truncate(0)
            file.pwrite(name, offset=0)
            undo.pop_all()
        return cls(path, file=file, owner=name)

    def check(self) -> None:
        """Refuse to go on when somebody else has taken over."""
        holder = self._file.pread(1024, offset=0)
        if holder != self._owner:
            raise RefusedError(f"{self._path} was taken over by {holder.decode(errors='replace')}")

    def release(self) -> None:
        self._file.close()


class _Contents(msgspec.Struct):
    """What a journal file holds."""

    facts: list[Fact] = []
    sequence: int = 0
    tail: int = _HEADER_SIZE
    """Where the next record goes."""
    garbage: int = 0
    """Bytes from the tail to the last one that is not zero: what is left of records that were never synced."""


def _header(*, watermark: int) -> bytes:
    return (_MAGIC + _watermark(watermark)).ljust(_HEADER_SIZE, b"\0")


def _watermark(sequence: int) -> bytes:
    return _WATERMARK.pack(sequence, xxhash.xxh3_64_intdigest(sequence.to_bytes(8, "little")))


def _record(payload: bytes, *, sequence: int, synced: int) -> bytes:
    head = _RECORD.pack(_MARK, len(payload), sequence, synced)
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + payload)) + payload


def _record_at(data: bytes, offset: int) -> tuple[int, int, bytes] | None:
    """(sequence, watermark, payload) of the record that begins here, or None if none does."""
    if data[offset : offset + len(_MARK)] != _MARK or offset + _PREFIX_SIZE > len(data):
        return None
    head = data[offset : offset + _RECORD.size]
    _, length, sequence, synced = _RECORD.unpack(head)
    payload = data[offset + _PREFIX_SIZE : offset + _PREFIX_SIZE + length]
    (checksum,) = _CHECKSUM.unpack_from(data, offset + _RECORD.size)
    if len(payload) != length or xxhash.xxh3_64_intdigest(head + payload) != checksum:
        return None
    return sequence, synced, payload


def _parse(data: bytes, *, path: Path) -> _Contents:
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER_SIZE:
        raise StorageError(f"{path} is not a journal, or its header is damaged")
    contents = _Contents(facts=[])
    while record := _record_at(data, contents.tail):
        sequence, _, payload = record
        if sequence != contents.sequence + 1:
            raise StorageError(
                f"{path} is damaged at offset {contents.tail}: record {sequence} after {contents.sequence}"
            )
        try:
            contents.facts.extend(_decoder.decode(payload))
        except msgspec.DecodeError as error:
            raise StorageError(
                f"{path} at offset {contents.tail}: unknown kind of record: {error}"
            ) from error
        contents.sequence = sequence
        contents.tail += _PREFIX_SIZE + len(payload)
    contents.garbage = max(0, len(data.rstrip(b"\0")) - contents.tail)
    durable = max(_durable_sequences(data, contents.tail), default=0)
    if durable > contents.sequence:
        raise StorageError(
            f"{path} is damaged at offset {contents.tail}: record {contents.sequence + 1} can not be read, "
            f"but records up to {durable} were on disk"
        )
    return contents


def _durable_sequences(data: bytes, tail: int) -> Iterator[int]:
    """What the header and any records behind the unreadable place say about how much was synced."""
    sequence, _ = _WATERMARK.unpack_from(data, len(_MAGIC))
    if _watermark(sequence) == data[len(_MAGIC) : len(_MAGIC) + _WATERMARK.size]:
        yield sequence
    offset = data.find(_MARK, tail)
    while offset >= 0:
        record = _record_at(data, offset)
        if record is not None:
            yield record[1]
        offset = data.find(_MARK, offset + 1)
