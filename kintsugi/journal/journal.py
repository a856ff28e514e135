"""Journal of the master: an append-only file of facts that survives its writer and tells a torn tail from damage.

`append` makes facts survive the process, `sync` makes them survive the machine. Each succeeds completely, or raises and
can be repeated. Unsynced records that a power cut leaves incomplete are cut off when the journal is opened. A synced
record that cannot be read is damage: it is reported with its offset, never skipped. The watermark tells the two apart;
it is written after each sync and contained in every later record. (Only the watermark of the last sync may itself be
lost in a power cut.) `format.py` describes the bytes.

There is one writer. It holds a lock on the file that ends with its process, so the successor of a dead writer continues
immediately. The successor of a live one (stopped, or unreachable for its agent) writes its name into the header and
continues in a copy under the same name: later writes of the old writer go to a file without a name, and it finds itself
fenced. `append` checks the header after its write, so the successor has everything that an `append` has confirmed.

`compact` replaces the file by one that begins with the folded state, so that its length does not grow with the run:

    journal.fold   written and synced; then, under the lock that also every opening holds:
    journal.N      second name of the old file, N the sequence of its first record: for people, bounded in size
    journal        the new file, by a rename; until the folder is synced, `sync` reports nothing as durable
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from kintsugi.errors import FencedError, RefusedError, StorageError
from kintsugi.journal.facts import Fact, StateFolded, TermStarted
from kintsugi.journal.format import (
    HEADER_SIZE,
    MAGIC,
    OWNER,
    OWNER_OFFSET,
    Contents,
    JournalRecord,
    Window,
    encode_record,
    owner_name,
    scan,
    watermark,
)
from kintsugi.journal.format import owner as owner_header
from kintsugi.runtime.disk import SYSTEM_DISK, Disk, File, storage_errors

_CHUNK_SIZE = 4 << 20
_SPARE_SIZE = 1 << 20
"""Space that is kept free ahead of the tail, for use while the disk is full."""
ARCHIVE_SIZE = 256 << 20
"""Largest total size of the files that were replaced by compacted ones; the oldest are removed first."""
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""The file system has no second names: the old file is not kept."""


class Journal:
    """The writing end; there is one at a time.

    journal = Journal.create(run / "journal", owner="master-0 a1b2")
    journal.append([RunStarted(job="j", config_digest="d"), TermStarted(term=1, incarnation="a1b2")])
    journal.sync()
    """

    def __init__(self, path: Path, *, file: File, owner: bytes, contents: Contents, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._file = file
        self._owner = owner
        self._tail = self._synced_tail = contents.tail
        self._first, self._fold_end = contents.first, contents.fold_end
        self._capacity = file.size()
        self._sequence = self._synced = contents.sequence
        self._unsynced: list[bytes] = []
        self._sync_failed = False
        self._name_is_durable = True
        self.term = contents.term
        """Number of the last `TermStarted`; the next one must be higher."""

    @classmethod
    def create(cls, path: Path, *, owner: str, disk: Disk = SYSTEM_DISK) -> Journal:
        """Create a journal; it appears under its name only when it is complete."""
        header = owner_header(1, owner)
        with ExitStack() as undo, storage_errors(f"could not create {path}"), _opening(path, disk=disk):
            if disk.exists(path):
                raise StorageError(f"{path} exists already; a journal is never overwritten")
            file = _open_unfinished(_unfinished(path), size=_CHUNK_SIZE, disk=disk)
            undo.callback(file.close)
            file.pwrite(MAGIC + watermark(0) + header, offset=0)
            _put_in_place(file, path, disk=disk)
            undo.pop_all()
        return cls(path, file=file, owner=header, contents=Contents(), disk=disk)

    @classmethod
    def open(
        cls, path: Path, *, owner: str, take_over: bool = False, disk: Disk = SYSTEM_DISK
    ) -> tuple[Journal, tuple[Fact, ...]]:
        """Cut a torn tail, make the rest durable, and return its facts; of a compacted journal, a `StateFolded` first.

        While another process has it open, RefusedError names that process; with `take_over` it is fenced instead.
        """
        facts: list[Fact] = []
        journal = cls.restore(path, owner=owner, take=facts.append, take_over=take_over, disk=disk)
        return journal, tuple(facts)

    @classmethod
    def restore(
        cls,
        path: Path,
        *,
        owner: str,
        take: Callable[[Fact], None],
        take_over: bool = False,
        disk: Disk = SYSTEM_DISK,
    ) -> Journal:
        """Open a journal as `open` does, and pass its facts to `take` one by one, while they are read.

        What was built of them counts only if this returns: damage may be found behind any fact.
        """

        def take_all(record: JournalRecord) -> None:
            for fact in record.facts:
                take(fact)

        with ExitStack() as undo, storage_errors(f"could not open {path}"), _opening(path, disk=disk):
            file = disk.open(path)
            undo.callback(file.close)
            number, holder = OWNER.unpack(file.pread(OWNER.size, offset=OWNER_OFFSET).ljust(OWNER.size))
            header = owner_header(number + 1, owner)
            try:
                file.lock()
            except BlockingIOError as error:
                if not take_over:
                    raise RefusedError(f"{path} is in use by {owner_name(holder)}") from error
                copy, contents = _fence_and_copy(file, path, owner=header, take=take_all, disk=disk)
                file.close()
                file = copy
            else:
                contents = _continue_in(file, path, owner=header, take=take_all)
            undo.pop_all()
        return cls(path, file=file, owner=header, contents=contents, disk=disk)

    @property
    def sequence(self) -> int:
        """Number of the last record."""
        return self._sequence

    def is_compaction_due(self, *, min_size: int) -> bool:
        """Return whether at least so many bytes, and as many as the folded state has, follow the folded state: so the
        cost of all compactions stays proportional to what was appended."""
        return self._tail - self._fold_end >= max(min_size, self._fold_end - HEADER_SIZE)

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts of one decision; they survive the death of this process.

        If this raises StorageError (StorageFull when even the space kept for this is used up), the journal is as it
        was, and the same facts may be appended again. FencedError is final.
        """
        if not facts:
            return
        term = max((fact.term for fact in facts if isinstance(fact, TermStarted)), default=None)
        assert term is None or term > self.term, f"term {term} after {self.term}"
        record = encode_record(tuple(facts), sequence=self._sequence + 1, synced=self._synced)
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
        if not self._unsynced and self._name_is_durable:
            return
        with storage_errors(f"could not sync {self._path}"):
            self._check_owner()
            if not self._name_is_durable:
                self._disk.sync_folder(self._path.parent)
                self._name_is_durable = True
            if self._sync_failed:
                # The kernel may have dropped what it could not write; without this a second sync would falsely succeed.
                self._file.pwrite(b"".join(self._unsynced), offset=self._synced_tail)
            self._sync_failed = True
            self._file.sync()
            self._file.pwrite(watermark(self._sequence), offset=len(MAGIC))
        self._sync_failed = False
        self._unsynced.clear()
        self._synced, self._synced_tail = self._sequence, self._tail

    def compact(self, folded: StateFolded) -> None:
        """Continue in a file that begins with the state that all facts so far lead to; the old one is kept for people.

        If this raises StorageError (a full disk) or RefusedError (a successor is opening the journal), nothing has
        changed, and it may be called again later. FencedError is final.
        """
        assert folded.term == self.term and self._sequence > 0
        self.sync()
        with ExitStack() as undo, storage_errors(f"could not compact {self._path}"):
            record = encode_record((folded,), sequence=self._sequence, synced=self._sequence)
            unfinished, end = self._path.with_name(self._path.name + ".fold"), HEADER_SIZE + len(record)
            if self._disk.exists(unfinished):
                self._disk.remove(unfinished)
            file = _open_unfinished(unfinished, size=end + _CHUNK_SIZE, disk=self._disk)
            undo.callback(file.close)
            file.pwrite(MAGIC + watermark(self._sequence) + self._owner + record, offset=0)
            file.sync()
            with _opening(self._path, disk=self._disk):
                self._check_owner()
                self._keep_for_people()
                self._disk.rename(unfinished, self._path)
                undo.pop_all()
                old, self._file, self._name_is_durable = self._file, file, False
                old_tail, self._tail = self._tail, end
                self._synced_tail = self._fold_end = end
                self._first, self._capacity = self._sequence, end + _CHUNK_SIZE
                # Its failure is reported by the next `sync`, which repeats it: nothing counts as durable before.
                with suppress(StorageError):
                    self.sync()
            with suppress(OSError):
                if self._name_is_durable:
                    old.truncate(old_tail)
            old.close()
        with suppress(OSError):
            _remove_oldest(self._path, disk=self._disk)

    def _keep_for_people(self) -> None:
        """Give the file a second name. A crash of an earlier attempt may have left that name."""
        kept = _kept_name(self._path, self._first)
        if self._disk.exists(kept):
            self._disk.remove(kept)
        try:
            self._disk.link(self._path, kept)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise

    def close(self) -> None:
        """Close the journal without a sync."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        found = self._file.pread(len(self._owner), offset=OWNER_OFFSET)
        if found != self._owner:
            _, holder = OWNER.unpack(found)
            raise FencedError(f"{self._path} was taken over by {owner_name(holder)}")

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


def scan_facts(path: Path, take: Callable[[Fact], None], *, disk: Disk = SYSTEM_DISK) -> None:
    """Pass the facts of a journal, in use or abandoned, to `take`; of a compacted one, a `StateFolded` first. Damage
    raises StorageError, possibly after some facts."""

    def take_all(record: JournalRecord) -> None:
        for fact in record.facts:
            take(fact)

    with storage_errors(f"could not read {path}"):
        file = disk.open_to_read(path)
        try:
            scan(file, path=path, take=take_all)
        finally:
            file.close()


def read_facts(path: Path, *, disk: Disk = SYSTEM_DISK) -> tuple[Fact, ...]:
    """Return all facts of a journal and of the files that it replaced, as far as they are kept, without changing it. If
    the oldest are not kept, a `StateFolded` is the first. Damage of the journal raises StorageError.

    The whole history of a run may be long: `scan_facts` has the same result folded.
    """
    with storage_errors(f"could not read {path}"):
        records, first = _records_of(path, disk=disk)
        for number in sorted(
            (number for number in kept_files(path, disk=disk) if number < first), reverse=True
        ):
            try:
                earlier, _ = _records_of(_kept_name(path, number), disk=disk)
            except (StorageError, FileNotFoundError):
                break
            earlier = [record for record in earlier if record.sequence <= first]
            if not earlier or earlier[-1].sequence < first:
                break
            records, first = earlier + records[1:], number
    return tuple(fact for record in records for fact in record.facts)


def _records_of(path: Path, *, disk: Disk) -> tuple[list[JournalRecord], int]:
    """Return the records of one file, and the sequence of the first."""
    records: list[JournalRecord] = []
    file = disk.open_to_read(path)
    try:
        return records, scan(file, path=path, take=records.append).first
    finally:
        file.close()


class JournalPayload(msgspec.Struct, frozen=True):
    """Encoded facts of one decision, and their position."""

    sequence: int
    offset: int
    end: int
    content: bytes


def read_records(path: Path, *, offset: int = 0, most: int = 1000) -> list[JournalRecord]:
    """Read records of a journal that may be in use, from the end of a record on; 0 for the first.

    It stops where no record begins, whether nothing was written there yet or something cannot be read: `read_facts`
    distinguishes the two.
    """
    records: list[JournalRecord] = []
    offset = max(offset, HEADER_SIZE)
    with storage_errors(f"could not read {path}"):
        file = SYSTEM_DISK.open_to_read(path)
        try:
            window = Window(file)
            while len(records) < most and (record := window.record(offset, path=path)) is not None:
                records.append(record)
                offset = record.end
        finally:
            file.close()
    return records


def read_payloads(path: Path, *, offset: int = 0, most: int = 1000) -> list[JournalPayload]:
    """Read records as `read_records` does, and leave their facts encoded, for a reader that needs few of them."""
    payloads: list[JournalPayload] = []
    offset = max(offset, HEADER_SIZE)
    with storage_errors(f"could not read {path}"):
        file = SYSTEM_DISK.open_to_read(path)
        try:
            window = Window(file)
            while len(payloads) < most and (raw := window.raw_record(offset)) is not None:
                payloads.append(JournalPayload(raw.sequence, offset, raw.end(offset), bytes(raw.payload)))
                offset = raw.end(offset)
        finally:
            file.close()
    return payloads


def kept_files(path: Path, *, disk: Disk = SYSTEM_DISK) -> dict[int, Path]:
    """Return the files that compacted ones replaced: sequence of the first record → path, oldest first."""
    prefix = path.name + "."
    suffixes = [name.removeprefix(prefix) for name in disk.list(path.parent) if name.startswith(prefix)]
    return {number: _kept_name(path, number) for number in sorted(int(s) for s in suffixes if s.isdecimal())}


def _kept_name(path: Path, first: int) -> Path:
    return path.with_name(f"{path.name}.{first}")


def _remove_oldest(path: Path, *, disk: Disk) -> None:
    """Remove the oldest kept files, until the others fit into `ARCHIVE_SIZE`."""
    total = 0
    for kept in reversed(kept_files(path, disk=disk).values()):
        file = disk.open_to_read(kept)
        total += file.size()
        file.close()
        if total > ARCHIVE_SIZE:
            disk.remove(kept)


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


def _continue_in(file: File, path: Path, *, owner: bytes, take: Callable[[JournalRecord], None]) -> Contents:
    """Take over a journal without a live writer."""
    contents = scan(file, path=path, take=take)
    file.pwrite(owner, offset=OWNER_OFFSET)
    if contents.garbage:
        file.pwrite(bytes(contents.garbage), offset=contents.tail)
    file.sync()
    file.pwrite(watermark(contents.sequence), offset=len(MAGIC))
    return contents


def _fence_and_copy(
    file: File, path: Path, *, owner: bytes, take: Callable[[JournalRecord], None], disk: Disk
) -> tuple[File, Contents]:
    """Take a journal from a live writer: it will find that its later appends do not count.

    The copy follows the fence, so that it has everything that the old writer could report as written. The copy is what
    is read, so that both agree, whatever the old writer does meanwhile.
    """
    with ExitStack() as undo:
        copy = _open_unfinished(_unfinished(path), size=file.size() + _CHUNK_SIZE, disk=disk)
        undo.callback(copy.close)
        file.pwrite(owner, offset=OWNER_OFFSET)
        offset = 0
        while chunk := file.pread(_CHUNK_SIZE, offset=offset):
            if used := chunk.rstrip(b"\0"):
                copy.pwrite(used, offset=offset)
            offset += len(chunk)
        contents = scan(copy, path=path, take=take)
        if contents.garbage:
            copy.pwrite(bytes(contents.garbage), offset=contents.tail)
        copy.pwrite(MAGIC + watermark(contents.sequence) + owner, offset=0)
        _put_in_place(copy, path, disk=disk)
        undo.pop_all()
    return copy, contents


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _open_unfinished(path: Path, *, size: int, disk: Disk) -> File:
    """Create an empty file, already locked by this process, that is to become the journal."""
    with ExitStack() as undo:
        file = disk.open(path, create=True)
        undo.callback(file.close)
        file.lock()
        file.truncate(0)
        file.preallocate(size)
        undo.pop_all()
    return file


def _put_in_place(file: File, path: Path, *, disk: Disk) -> None:
    file.sync()
    disk.rename(_unfinished(path), path)
    disk.sync_folder(path.parent)
