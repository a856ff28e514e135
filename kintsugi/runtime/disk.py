"""The disk as the journal and the checkpoint store use it.

Errors are `OSError`s of the kernel. The content of a file is durable only after `sync`, and a name only after
`sync_folder` (a folder's own name after `mkdir`). `simulation/memory_disk.py` implements the same interface in memory
and loses everything else in a power cut, so that a test finds a forgotten sync.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

from kintsugi.errors import StorageError, StorageFull

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, the quota or a file's size limit is exhausted; the operation succeeds once there is space."""
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_WAIT_BEFORE, _START_WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP})


class File(Protocol):
    """An open file, written at explicit offsets."""

    def pread(self, size: int, *, offset: int) -> bytes: ...

    def pread_into(self, target: memoryview, *, offset: int) -> int: ...

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None: ...

    def start_flush(self, *, offset: int, size: int) -> None: ...

    def finish_flush(self, *, offset: int, size: int) -> None: ...

    def preallocate(self, size: int) -> None: ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def sync(self) -> None: ...

    def lock(self) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Files by path."""

    def open(self, path: Path, *, create: bool = False) -> File: ...

    def open_to_read(self, path: Path, *, uncached: bool = False) -> File: ...

    def read(self, path: Path) -> bytes: ...

    def exists(self, path: Path) -> bool: ...

    def list(self, folder: Path) -> list[str]: ...

    def mkdir(self, folder: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def link(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...


class SystemFile:
    """A file of this machine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pread(self, size: int, *, offset: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""
        parts: list[bytes] = []
        while size > 0:
            part = os.pread(self._descriptor, size, offset)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            offset += len(part)
        return b"".join(parts)

    def pread_into(self, target: memoryview, *, offset: int) -> int:
        """Fill `target` from the file and return the number of bytes; fewer than its size only at the end of the file.

        A file that is read uncached needs memory, offset and size that are multiples of a page.
        """
        end = min(len(target), max(0, self.size() - offset))
        filled = 0
        while filled < end:
            try:
                count = os.preadv(self._descriptor, [target[filled:]], offset + filled)
            except OSError as error:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # The device wants another alignment than a page.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if count == 0:
                break
            filled += count
        return min(filled, end)

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        """Write all of `data`, or raise OSError."""
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest = rest[written:]
            offset += written

    def start_flush(self, *, offset: int, size: int) -> None:
        """Start to write a range to the device, without waiting. Neither this nor `finish_flush` makes it durable."""
        _sync_file_range(self._descriptor, offset, size, _START_WRITE)

    def finish_flush(self, *, offset: int, size: int) -> None:
        """Wait until a range is at the device, and drop it from the page cache."""
        _sync_file_range(self._descriptor, offset, size, _WAIT_BEFORE | _START_WRITE | _WAIT_AFTER)
        os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def preallocate(self, size: int) -> None:
        """Allocate space for the first `size` bytes; raises ENOSPC now instead of in a later write."""
        os.posix_fallocate(self._descriptor, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def lock(self) -> None:
        """Lock the file until it is closed; BlockingIOError if another open file has locked it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        os.close(self._descriptor)


class SystemDisk:
    """The disks of this machine."""

    def open(self, path: Path, *, create: bool = False) -> SystemFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return SystemFile(os.open(path, flags, 0o644))

    def open_to_read(self, path: Path, *, uncached: bool = False) -> SystemFile:
        """Open a file, possibly on a disk that can not be written to. `uncached`: a synced file is read from the
        device: its pages are dropped from memory and, where the file system allows it, reads go past them."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if not uncached:
            return SystemFile(descriptor)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            # A file system without direct reads (some network and overlay ones) refuses the flag.
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        except BaseException:
            os.close(descriptor)
            raise
        return SystemFile(descriptor)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def list(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def mkdir(self, folder: Path) -> None:
        """Create the folder and its missing parents; their names are durable when this returns."""
        if folder.is_dir():
            return
        self.mkdir(folder.parent)
        folder.mkdir(exist_ok=True)
        self.sync_folder(folder.parent)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError if the name is taken."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or an empty folder."""
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
    """Convert an OSError of the disk into a StorageError that names the operation.

    `with storage_errors("could not read run/journal")` → "could not read run/journal on disk: Input/output error"
    """
    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in _NO_SPACE else StorageError
        raise kind(f"{what} on disk: {error.strerror or error}") from error


def _sync_file_range(descriptor: int, offset: int, size: int, flags: int) -> None:
    """Call sync_file_range(2); a file system without it writes when it is synced."""
    call = ctypes.CDLL(None, use_errno=True).sync_file_range
    if call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), flags) != 0:
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))


def reserve(descriptor: int, *, offset: int, size: int) -> None:
    """Allocate space beyond the end of a file without changing its content or size."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def append_whole(file: FileIO, data: bytes) -> None:
    """Append all of `data` or nothing: after a partial write the file is truncated again and the OSError raised."""
    size = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise


def write_atomically(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, durable: bool, mode: int = 0o666
) -> None:
    """Replace a file as a whole: a reader sees the old contents or the new ones, never a part.

    The data is written to a temporary file in the same folder, which is then renamed. With `durable`, contents and name
    survive a power loss once this returns; without, a power loss may bring back the old file or leave an empty one. On
    failure the temporary file is removed and the old file is unchanged. A process that is killed in between leaves a
    hidden file `.NAME.PID.new`. `mode`: permissions of the file, less those that the umask takes away.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            SYSTEM_DISK.sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
