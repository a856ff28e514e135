"""Shared memory that versions are laid out in again and again: fresh memory, page after page, costs more than the copy.

Who reads a version holds a lock on its memory, which the kernel takes back when the reader dies. Who publishes writes
only where nobody reads, and leaves memory that is still read to its readers; so what was verified can not change.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kintsugi.errors import RefusedError

VERSIONS_KEPT = 2
"""The current one, and the one before it for whoever is still loading that."""

_HUGE_BYTES = 4 << 20
"""From here on large pages are asked for, which cost far less to touch first."""


class Segments(Protocol):
    """Shared memory of this host (`cluster.segments.SegmentClient`)."""

    def create(self, name: str, size: int) -> int: ...

    def open(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    inode: int
    buffer: memoryview


class WritableSegments:
    """The publisher's: mapped once, for as long as the segment is the same."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._mapped: dict[str, _Mapped] = {}

    def begin(self, name: str, *, size: int) -> tuple[memoryview, int]:
        """Memory to write to, and the descriptor to `unlock` when all is written: until then nobody begins to read."""
        descriptor = self._locked(name, size=size)
        if descriptor is None:
            # Its readers keep the memory; the name gets other memory.
            self._segments.remove(name)
            descriptor = self._locked(name, size=size)
        if descriptor is None:
            raise RefusedError(f"segment {name} was opened by a late reader as soon as it was made")
        inode = os.fstat(descriptor).st_ino
        mapped = self._mapped.get(name)
        if mapped is None or mapped.inode != inode:
            mapped = self._mapped[name] = _Mapped(inode, _in_large_pages(mmap.mmap(descriptor, size)))
        return mapped.buffer, descriptor

    def _locked(self, name: str, *, size: int) -> int | None:
        held = self._segments.create(name, size)
        try:
            descriptor = _reopened(held)
        finally:
            os.close(held)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def remove(self, name: str) -> None:
        self._mapped.pop(name, None)
        self._segments.remove(name)


class ReadableSegments:
    """The server's: a mapping is kept, because to map the pages of a version anew takes longer than to verify it. Only
    the latest are, as who published the others may be gone."""

    def __init__(self) -> None:
        self._mapped: dict[str, _Mapped] = {}

    def read(self, name: str, *, segments: Segments) -> tuple[memoryview, int]:
        """The segment's bytes, and the descriptor to `unlock` when they are not needed any more: until then nobody
        changes them. RefusedError while they are being written."""
        held = segments.open(name)
        try:
            descriptor = _reopened(held)
        finally:
            os.close(held)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RefusedError(f"segment {name} is being written") from error
        status = os.fstat(descriptor)
        mapped = self._mapped.get(name)
        if mapped is None or mapped.inode != status.st_ino:
            # Privately: pages are shared until somebody writes, and nobody else sees what we would write.
            memory = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            mapped = _Mapped(status.st_ino, _in_large_pages(memory))
            self._keep(name, mapped)
        return mapped.buffer, descriptor

    def _keep(self, name: str, mapped: _Mapped) -> None:
        self._mapped.pop(name, None)
        while len(self._mapped) >= VERSIONS_KEPT:
            del self._mapped[next(iter(self._mapped))]
        self._mapped[name] = mapped


def _in_large_pages(memory: mmap.mmap) -> memoryview:
    """As far as the system has them for this kind of memory; where it has none, nothing is lost."""
    if len(memory) >= _HUGE_BYTES:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def unlock(descriptor: int) -> None:
    """Let others write, or read. To close the descriptor is not enough: a mapping keeps what it was made from."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _reopened(descriptor: int) -> int:
    """The same memory through a description of its own, which alone has the lock: descriptors that are passed around
    share one."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class SpareMemory:
    """Private memory that is used for one version after the other."""

    def __init__(self) -> None:
        self._spare: memoryview | None = None

    def take(self, size: int) -> memoryview:
        """So many bytes, with whatever they hold."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == max(1, size):
            return spare
        return _in_large_pages(mmap.mmap(-1, max(1, size)))

    def give_back(self, buffer: memoryview) -> None:
        """Nobody reads it any more."""
        self._spare = buffer
