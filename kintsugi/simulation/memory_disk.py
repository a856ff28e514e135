"""A disk in memory that fails on demand: for the simulator, and for tests of the journal and the checkpoint store.

It implements `runtime.disk.Disk` and raises `OSError`s as the kernel does. A power cut loses everything that was not
made durable by `sync` and `sync_folder`, so that a test finds a forgotten sync.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


class Crashed(Exception):
    """The simulated machine crashed during an operation; the disk is unusable until `restarted`."""


class _Inode:
    """Bytes of a file as written and as durable, and the writes between the two, the last of which may be torn.

    Allocated space that was never written is not stored: it reads as zeros up to `size`.
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
        """State after the end of the process: the lock is released; unsynced writes are still not durable."""
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
    """Names as written and as durable."""

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

    def pread_into(self, target: memoryview, *, offset: int) -> int:
        self._disk.count("pread")
        found = self._inode.read(len(target), offset)
        target[: len(found)] = found
        return len(found)

    def start_flush(self, *, offset: int, size: int) -> None:
        self._disk.count("start_flush")

    def finish_flush(self, *, offset: int, size: int) -> None:
        """Nothing is durable by this: as on a real disk, only `sync` promises that."""
        self._disk.count("finish_flush")

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
    """A disk in memory. Operations are counted from 1; `fail_at` makes one of them fail, `crash_at` crashes the machine
    there.

    `disk.crash_at(12, keep=0.5)` cuts the power when the 12th operation is half done (it raises `Crashed`);
    `disk.restarted(power_cut=True)` then has only what was synced, plus the torn half.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []
        """Names of all operations so far."""
        self.full = False
        """Whether every operation that needs new space fails; writes within the size of a file succeed."""
        self._root = _Folder()
        self._errors: dict[int, tuple[int, float]] = {}
        self._crash_at = 0
        self._crash_keep = 0.0
        self._crashed = False

    def fail_at(self, operation: int, *, code: int = errno.EIO, keep: float = 0.0) -> None:
        """Let the operation with this number raise OSError(code); a write has then stored the share `keep`."""
        self._errors[operation] = (code, keep)

    def crash_at(self, operation: int, *, keep: float = 0.0) -> None:
        """Crash in the operation with this number; a write has then stored the share `keep` of its bytes."""
        self._crash_at = operation
        self._crash_keep = keep

    def restarted(
        self,
        *,
        power_cut: bool = False,
        torn_bytes: int = 1 << 62,
        keep_names: Callable[[Path], bool] = lambda folder: False,
    ) -> MemoryDisk:
        """Return the disk after a restart: complete (the process died), or only what was durable (power cut).

        After a power cut the first `torn_bytes` of each file's last unsynced write are there, earlier ones are not;
        unsynced names are gone, except in folders that `keep_names` lists.
        """
        disk = MemoryDisk()
        files: dict[int, _Inode] = {}  # A file may have several names.

        def survivor(node: _Inode | _Folder, path: Path) -> _Inode | _Folder:
            if isinstance(node, _Inode):
                if id(node) not in files:
                    files[id(node)] = node.after_power_cut(torn_bytes) if power_cut else node.after_exit()
                return files[id(node)]
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
        """Count an operation that is about to happen; raise if it is to fail."""
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

    def open_to_read(self, path: Path, *, uncached: bool = False) -> MemoryFile:
        return self.open(path)

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
        """Rename a file, or a folder with its contents."""
        self.count("rename")
        node, there = self.find(source), self.find(target)
        if node is None:
            raise _error(errno.ENOENT, source)
        if isinstance(there, _Folder) and there.entries:
            raise _error(errno.ENOTEMPTY, target)
        self._folder(target.parent).entries[target.name] = node
        del self._folder(source.parent).entries[source.name]

    def link(self, source: Path, target: Path) -> None:
        self.count("link")
        node = self.find(source)
        if not isinstance(node, _Inode):
            raise _error(errno.ENOENT, source)
        if self.find(target) is not None:
            raise _error(errno.EEXIST, target)
        self._folder(target.parent).entries[target.name] = node

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
    """Build an error as the kernel raises it; Python chooses the class that belongs to the code."""
    return OSError(code, os.strerror(code), str(path)) if path else OSError(code, os.strerror(code))
