"""The disk as the journal and the checkpoint store use it: the machine's, and one in memory that fails on demand.

Both raise `OSError` as the kernel does. What a file holds is durable only after `sync`, and a name only after
`sync_folder` (a folder's own name after `mkdir`): `MemoryDisk` loses everything else in a power cut, so a forgotten
sync is found by a test.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

from kintsugi.errors import StorageError, StorageFull

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, our share of it, or a file's size limit is used up: what failed works again once there is room."""
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of linux/falloc.h."""


class File(Protocol):
    """An open file, written at explicit offsets."""

    def pread(self, size: int, *, offset: int) -> bytes: ...

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None: ...

    def preallocate(self, size: int) -> None: ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def sync(self) -> None: ...

    def lock(self) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by path."""

    def open(self, path: Path, *, create: bool = False) -> File: ...

    def read(self, path: Path) -> bytes: ...

    def exists(self, path: Path) -> bool: ...

    def list(self, folder: Path) -> list[str]: ...

    def mkdir(self, folder: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...


class SystemFile:
    """A file of this machine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pread(self, size: int, *, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        parts: list[bytes] = []
        while size > 0:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return b"".join(parts)

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        """All of `data`, or an OSError."""
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest = rest[written:]
            offset += written

    def preallocate(self, size: int) -> None:
        """Make sure that the first `size` bytes have room; raises ENOSPC now instead of in a later write."""
        os.posix_fallocate(self._descriptor, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def lock(self) -> None:
        """Hold the file alone until it is closed; BlockingIOError if another open file has it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        os.close(self._descriptor)


class SystemDisk:
    """The disks of this machine."""

    def open(self, path: Path, *, create: bool = False) -> SystemFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return SystemFile(os.open(path, flags, 0o644))

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def list(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def mkdir(self, folder: Path) -> None:
        """Make the folder and those above it that are missing; their names are durable when this returns."""
        if folder.is_dir():
            return
        self.mkdir(folder.parent)
        folder.mkdir(exist_ok=True)
        self.sync_folder(folder.parent)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """A file, or an empty folder."""
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


SYSTEM_DISK = SystemDisk()


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn what the disk raises into an error that says what could not be done, and that it is the disk's.

    `with storage_errors("could not read run/journal")` → "could not read run/journal on disk: Input/output error"
    """
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in _NO_SPACE else StorageError
        raise kind(f"{what} on disk: {error.strerror or error}") from error


def reserve(descriptor: int, *, offset: int, size: int) -> None:
    """Allocate room for bytes beyond the end of a file without changing what it holds or how long it is."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def append_whole(file: FileIO, data: bytes) -> None:
    """Append all of `data` or nothing: what a full disk took of it is cut off again, and its OSError raised."""
    size = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


class Crashed(Exception):
    """The simulated machine went down in the middle of an operation; the disk is unusable until `restarted`."""


class _Inode:
    """A file's bytes as written and as durable, and the writes between the two, the last of which may be torn.

    Room that was allocated and never written is not stored: it reads as zeros up to `size`.
    """

    def __init__(self, data: bytes | bytearray = b"", *, size: int = 0) -> None:
        self.data = bytearray(data)
        self.size = max(size, len(data))
        self.unsynced: list[tuple[int, bytes]] = []
        self._durable, self._durable_size = bytearray(data), self.size
        self.locked_by: MemoryFile | None = None

    def read(self, size: int, offset: int) -> bytes:
        stored = bytes(self.data[offset : offset + size])
        return stored.ljust(min(size, max(0, self.size - offset)), b"\0")

    def write(self, data: bytes, offset: int) -> None:
        _place(data, offset, into=self.data)
        self.size = max(self.size, len(self.data))
        self.unsynced.append((offset, data))

    def resize(self, size: int) -> None:
        if size < len(self.data):
            self.unsynced = [(0, bytes(self.data[:size]))]
            del self.data[size:]
        self.size = size

    def sync(self) -> None:
        del self._durable[len(self.data) :]
        for offset, data in self.unsynced:
            _place(data, offset, into=self._durable)
        self._durable_size = self.size
        self.unsynced.clear()

    def after_exit(self) -> _Inode:
        """Nobody holds it any more; what was not durable still is not."""
        survivor = _Inode(self.data, size=self.size)
        survivor.unsynced = list(self.unsynced)
        survivor._durable, survivor._durable_size = bytearray(self._durable), self._durable_size
        return survivor

    def after_power_cut(self, torn_bytes: int) -> _Inode:
        survivor = bytearray(self._durable)
        for offset, data in self.unsynced[-1:]:
            _place(data[:torn_bytes], offset, into=survivor)
        return _Inode(survivor, size=self._durable_size)


def _place(data: bytes, offset: int, *, into: bytearray) -> None:
    if len(into) < offset:
        into.extend(bytes(offset - len(into)))
    into[offset : offset + len(data)] = data


class _Folder:
    """Names as they are and as they are durable."""

    def __init__(self) -> None:
        self.entries: dict[str, _Inode | _Folder] = {}
        self.durable: dict[str, _Inode | _Folder] = {}

    def sync(self) -> None:
        self.durable = dict(self.entries)


class MemoryFile:
    """A file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode

    def pread(self, size: int, *, offset: int) -> bytes:
        self._disk.count("pread")
        return self._inode.read(size, offset)

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        written = bytes(data)
        room = max(0, self.size() - offset)
        if self._disk.full and room < len(written):
            self._disk.count("pwrite", write=(self._inode, written[:room], offset))
            self._inode.write(written[:room], offset)
            raise _error(errno.ENOSPC)
        self._disk.count("pwrite", write=(self._inode, written, offset))
        self._inode.write(written, offset)

    def preallocate(self, size: int) -> None:
        self._disk.count("preallocate")
        if size > self.size():
            self._disk.check_space()
            self._inode.resize(size)

    def truncate(self, size: int) -> None:
        self._disk.count("truncate")
        self._inode.resize(size)

    def size(self) -> int:
        return self._inode.size

    def sync(self) -> None:
        self._disk.count("sync")
        self._inode.sync()

    def lock(self) -> None:
        self._disk.count("lock")
        if self._inode.locked_by not in (None, self):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._inode.locked_by = self

    def close(self) -> None:
        if self._inode.locked_by is self:
            self._inode.locked_by = None


class MemoryDisk:
    """A disk in memory. Operations are counted from 1; `fail_at` makes one of them fail, `crash_at` is the end there.

    `disk.crash_at(12, keep=0.5)` lets the power go when the 12th operation is half done (it raises `Crashed`);
    `disk.restarted(power_cut=True)` then holds only what was synced, plus the torn half.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        """Every operation so far, by name."""
        self.full = False
        """Whether everything that needs more room than is allocated fails; writes within a file's size do not."""
        self._root = _Folder()
        self._errors: dict[int, tuple[int, float]] = {}
        self._crash_at = 0
        self._crash_keep = 0.0
        self._crashed = False

    def fail_at(self, operation: int, *, code: int = errno.EIO, keep: float = 0.0) -> None:
        """Let the operation with this number raise OSError(code); a write has then stored the share `keep`."""
        self._errors[operation] = (code, keep)

    def crash_at(self, operation: int, *, keep: float = 0.0) -> None:
        """Go down in the operation with this number; a write has then stored the share `keep` of its bytes."""
        self._crash_at = operation
        self._crash_keep = keep

    def restarted(
        self,
        *,
        power_cut: bool = False,
        torn_bytes: int = 1 << 62,
        keep_names: Callable[[Path], bool] = lambda folder: False,
    ) -> MemoryDisk:
        """The disk after a restart: everything (the process died), or what was durable (the power went).

        After a power cut the first `torn_bytes` of each file's last unsynced write are there, earlier ones are not;
        unsynced names are gone, except in folders of which `keep_names` says that theirs came ahead of the bytes.
        """
        disk = MemoryDisk()

        def survivor(node: _Inode | _Folder, path: Path) -> _Inode | _Folder:
            if isinstance(node, _Inode):
                return node.after_power_cut(torn_bytes) if power_cut else node.after_exit()
            folder = _Folder()
            names = node.durable if power_cut and not keep_names(path) else node.entries
            folder.entries = {name: survivor(entry, path / name) for name, entry in names.items()}
            folder.sync()
            return folder

        root = survivor(self._root, Path("/"))
        assert isinstance(root, _Folder)
        disk._root = root
        return disk

    def count(self, operation: str, *, write: tuple[_Inode, bytes, int] | None = None) -> None:
        """Account for an operation that is about to happen; raises if it is to fail."""
        if self._crashed:
            raise Crashed(f"the disk went down at operation {self._crash_at}")
        self.operations.append(operation)
        number = len(self.operations)
        self._crashed = number == self._crash_at
        if not self._crashed and number not in self._errors:
            return
        code, keep = (0, self._crash_keep) if self._crashed else self._errors[number]
        if write is not None:
            inode, data, offset = write
            inode.write(data[: int(len(data) * keep)], offset)
        if self._crashed:
            raise Crashed(f"the disk went down at operation {number} ({operation})")
        raise _error(code)

    def check_space(self) -> None:
        if self.full:
            raise _error(errno.ENOSPC)

    def find(self, path: Path) -> _Inode | _Folder | None:
        node: _Inode | _Folder | None = self._root
        for name in path.parts[1:]:
            node = node.entries.get(name) if isinstance(node, _Folder) else None
        return node

    def open(self, path: Path, *, create: bool = False) -> MemoryFile:
        self.count("open")
        inode = self.find(path)
        if inode is None and create:
            folder = self._folder(path.parent)
            self.check_space()
            inode = folder.entries[path.name] = _Inode()
        if not isinstance(inode, _Inode):
            raise _error(errno.ENOENT if inode is None else errno.EISDIR, path)
        return MemoryFile(self, inode)

    def read(self, path: Path) -> bytes:
        self.count("read")
        inode = self.find(path)
        if not isinstance(inode, _Inode):
            raise _error(errno.ENOENT, path)
        return inode.read(inode.size, 0)

    def exists(self, path: Path) -> bool:
        return self.find(path) is not None

    def list(self, folder: Path) -> list[str]:
        self.count("list")
        return sorted(self._folder(folder).entries)

    def mkdir(self, folder: Path) -> None:
        self.count("mkdir")
        node = self._root
        for name in folder.parts[1:]:
            if name not in node.entries:
                self.check_space()
                node.entries[name] = node.durable[name] = _Folder()
            entry = node.entries[name]
            if not isinstance(entry, _Folder):
                raise _error(errno.EEXIST, folder)
            node = entry

    def rename(self, source: Path, target: Path) -> None:
        """A file, or a folder with everything in it."""
        self.count("rename")
        node, there = self.find(source), self.find(target)
        if node is None:
            raise _error(errno.ENOENT, source)
        if isinstance(there, _Folder) and there.entries:
            raise _error(errno.ENOTEMPTY, target)
        self._folder(target.parent).entries[target.name] = node
        del self._folder(source.parent).entries[source.name]

    def remove(self, path: Path) -> None:
        self.count("remove")
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, _Folder) and node.entries:
            raise _error(errno.ENOTEMPTY, path)
        del self._folder(path.parent).entries[path.name]

    def sync_folder(self, folder: Path) -> None:
        self.count("sync_folder")
        self._folder(folder).sync()

    def _folder(self, path: Path) -> _Folder:
        node = self.find(path)
        if not isinstance(node, _Folder):
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node


def _error(code: int, path: Path | None = None) -> OSError:
    """As the kernel raises it; Python gives it the class that belongs to the code."""
    return OSError(code, os.strerror(code), str(path)) if path else OSError(code, os.strerror(code))
