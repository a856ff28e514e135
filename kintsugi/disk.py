"""The disk as the journal and the checkpoint store use it: the machine's, and one in memory that fails on demand.

Both raise `OSError` as the kernel does. What a file holds is durable only after `sync`, and a name only after
`sync_folder`: `MemoryDisk` loses everything else in a power cut, so a forgotten sync is found by a test.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Protocol


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
        folder.mkdir(parents=True, exist_ok=True)

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
    """A file's bytes as written and as durable, and the one write that a power cut may tear."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytes(data)
        self.last_write: tuple[int, bytes] | None = None
        self.locked_by: MemoryFile | None = None

    def write(self, data: bytes, offset: int) -> None:
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.last_write = None

    def after_power_cut(self, torn_bytes: int) -> _Inode:
        survivor = _Inode(self.durable)
        if self.last_write is not None:
            offset, data = self.last_write
            survivor.write(data[:torn_bytes], offset)
            survivor.sync()
        return survivor


class MemoryFile:
    """A file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, inode: _Inode) -> None:
        self._disk = disk
        self._inode = inode

    def pread(self, size: int, *, offset: int) -> bytes:
        self._disk.count("pread")
        return bytes(self._inode.data[offset : offset + size])

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        written = bytes(data)

        def tear(part: bytes) -> None:
            self._inode.write(part, offset)
            self._inode.last_write = (offset, part)

        self._disk.count("pwrite", tear=tear, data=written)
        tear(written)

    def preallocate(self, size: int) -> None:
        self._disk.count("preallocate")
        if size > len(self._inode.data):
            self._inode.data.extend(bytes(size - len(self._inode.data)))

    def truncate(self, size: int) -> None:
        self._disk.count("truncate")
        del self._inode.data[size:]
        self._inode.data.extend(bytes(size - len(self._inode.data)))

    def size(self) -> int:
        return len(self._inode.data)

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
        self._names: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, _Inode] = {}
        self._folders: set[Path] = set()
        self._errors: dict[int, int] = {}
        self._crash_at = 0
        self._crash_keep = 0.0
        self._crashed = False

    def fail_at(self, operation: int, *, code: int = errno.EIO) -> None:
        """Let the operation with this number raise OSError(code) and have no effect."""
        self._errors[operation] = code

    def crash_at(self, operation: int, *, keep: float = 0.0) -> None:
        """Go down in the operation with this number; a write has then stored the share `keep` of its bytes."""
        self._crash_at = operation
        self._crash_keep = keep

    def restarted(self, *, power_cut: bool = False, torn_bytes: int = 1 << 62) -> MemoryDisk:
        """The disk after a restart: everything (the process died), or what was durable (the power went).

        After a power cut the first `torn_bytes` of each file's last unsynced write are there, earlier ones are not:
        the worst a file system may do.
        """
        disk = MemoryDisk()
        names = self._durable_names if power_cut else self._names
        disk._folders = {folder for path in names for folder in path.parents}
        disk._folders |= {f for f in self._folders if not any(path.is_relative_to(f) for path in self._names)}
        for path, inode in names.items():
            survivor = inode.after_power_cut(torn_bytes) if power_cut else _Inode(bytes(inode.data))
            disk._names[path] = survivor
        disk._durable_names = dict(disk._names)
        return disk

    def count(
        self, operation: str, *, tear: Callable[[bytes], None] | None = None, data: bytes = b""
    ) -> None:
        """Account for an operation that is about to happen; raises if it is to fail."""
        if self._crashed:
            raise Crashed(f"the disk went down at operation {self._crash_at}")
        self.operations.append(operation)
        number = len(self.operations)
        if number == self._crash_at:
            self._crashed = True
            if tear is not None:
                tear(data[: int(len(data) * self._crash_keep)])
            raise Crashed(f"the disk went down at operation {number} ({operation})")
        if number in self._errors:
            code = self._errors[number]
            raise OSError(code, os.strerror(code))

    def open(self, path: Path, *, create: bool = False) -> MemoryFile:
        self.count("open")
        inode = self._names.get(path)
        if inode is None:
            if not create or path.parent not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            inode = self._names[path] = _Inode()
        return MemoryFile(self, inode)

    def read(self, path: Path) -> bytes:
        self.count("read")
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return bytes(self._names[path].data)

    def exists(self, path: Path) -> bool:
        return path in self._names or path in self._folders

    def list(self, folder: Path) -> list[str]:
        self.count("list")
        if folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return sorted(path.name for path in [*self._names, *self._folders] if path.parent == folder)

    def mkdir(self, folder: Path) -> None:
        self.count("mkdir")
        self._folders.update((folder, *folder.parents))

    def rename(self, source: Path, target: Path) -> None:
        """A file, or a folder with everything in it."""
        self.count("rename")
        if source in self._names:
            self._names[target] = self._names.pop(source)
            return
        if source not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        if any(path.is_relative_to(target) for path in self._names):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))

        def moved(path: Path) -> Path:
            return target / path.relative_to(source) if path.is_relative_to(source) else path

        self._names = {moved(path): inode for path, inode in self._names.items()}
        self._folders = {moved(path) for path in self._folders}

    def remove(self, path: Path) -> None:
        self.count("remove")
        if path in self._names:
            del self._names[path]
        elif path in self._folders:
            if any(other.parent == path for other in [*self._names, *self._folders]):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
            self._folders.remove(path)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def sync_folder(self, folder: Path) -> None:
        """Make the names in this folder durable (and in the folders below it, which were moved with it)."""
        self.count("sync_folder")
        kept = {path: inode for path, inode in self._durable_names.items() if not path.is_relative_to(folder)}
        added = {path: inode for path, inode in self._names.items() if path.is_relative_to(folder)}
        self._durable_names = kept | added
