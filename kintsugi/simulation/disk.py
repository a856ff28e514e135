"""The disk of a simulated run: one that tells what is written from what is durable, at the cost of what is written.

`disk.MemoryDisk` copies whole files when they are synced, which is exact and slow; a run syncs its journal dozens of
times and there are many runs. Here a file remembers what its unsynced writes have replaced; a power cut puts it back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class _Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.size = 0
        """Preallocated space beyond the data reads as zeros and is not stored."""
        self.replaced: list[tuple[int, bytes, bytes]] = []
        """(offset, old, new) of every write since the last sync."""
        self.locked_by: JournalFile | None = None

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if len(self.data) < end:
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = data
        self.size = max(self.size, end)


class JournalFile:
    """An open file of a `JournalDisk`."""

    def __init__(self, disk: JournalDisk, inode: _Inode) -> None:
        self._disk, self._inode = disk, inode

    def pread(self, size: int, *, offset: int) -> bytes:
        """What was never written reads as zeros; trailing ones are left out, as nobody needs megabytes of them."""
        return bytes(self._inode.data[offset : offset + size])

    def pwrite(self, data: bytes | memoryview, *, offset: int) -> None:
        new, inode = bytes(data), self._inode
        old = bytes(inode.data[offset : offset + len(new)])
        inode.replaced.append((offset, old + bytes(len(new) - len(old)), new))
        inode.write(offset, new)

    def preallocate(self, size: int) -> None:
        self._inode.size = max(self._inode.size, size)

    def truncate(self, size: int) -> None:
        assert size == 0, "journals are only ever emptied"
        self._inode.data.clear()
        self._inode.size = 0

    def size(self) -> int:
        return self._inode.size

    def sync(self) -> None:
        self._inode.replaced.clear()

    def lock(self) -> None:
        if self._inode.locked_by not in (None, self):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._inode.locked_by = self

    def is_at(self, path: Path) -> bool:
        return self._disk.files.get(path) is self._inode

    def close(self) -> None:
        if self._inode.locked_by is self:
            self._inode.locked_by = None


class JournalDisk:
    """Files by path; enough of `disk.Disk` for a journal. Names are durable at once: `MemoryDisk` tests the rest."""

    def __init__(self) -> None:
        self.files: dict[Path, _Inode] = {}

    def open(self, path: Path, *, create: bool = False) -> JournalFile:
        if path not in self.files and not create:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return JournalFile(self, self.files.setdefault(path, _Inode()))

    def read(self, path: Path) -> bytes:
        return bytes(self.files[path].data)

    def exists(self, path: Path) -> bool:
        return path in self.files

    def list(self, folder: Path) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == folder)

    def mkdir(self, folder: Path) -> None:
        """There is one folder."""

    def rename(self, source: Path, target: Path) -> None:
        self.files[target] = self.files.pop(source)

    def remove(self, path: Path) -> None:
        del self.files[path]

    def sync_folder(self, folder: Path) -> None:
        """Names are durable."""

    def writer_died(self) -> None:
        """The kernel closes what a dead process had open."""
        for inode in self.files.values():
            inode.locked_by = None

    def power_cut(self, *, torn: float) -> int:
        """Lose what was not synced, but for this share of the last write; gives how many writes were lost."""
        self.writer_died()
        lost = 0
        for inode in self.files.values():
            lost += len(inode.replaced)
            last = inode.replaced[-1] if inode.replaced else None
            for offset, old, _ in reversed(inode.replaced):
                inode.write(offset, old)
            inode.replaced.clear()
            if last is not None:
                offset, _, new = last
                inode.write(offset, new[: int(len(new) * torn)])
        return lost
