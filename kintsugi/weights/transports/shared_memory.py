"""Shared memory that is reused for one version after the other: touching fresh memory costs more than the copy.

A reader of a version holds a lock on its memory, which the kernel releases when the reader dies. The publisher writes
only to memory without readers, and replaces memory that is still read; so verified bytes can not change.
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
"""The current version, and the previous one for servers that are still loading it."""

_HUGE_BYTES = 4 << 20
"""From this size on, huge pages are requested, which are much cheaper to touch first."""


def segment_name(process: str, version: int) -> str:
    """Return the name of the segment that a process writes this version to: `weights/model-0/1`."""
    return f"weights/{process}/{version % VERSIONS_KEPT}"


def segment_owner(name: str) -> str:
    """Return the process that a segment's name is of.

    >>> segment_owner(segment_name("model-0", 7))
    'model-0'
    """
    return name.split("/")[1]


class WeightSegments(Protocol):
    """Shared memory of this host (`cluster.shared_memory.SegmentClient`)."""

    def create(self, name: str, size: int) -> int: ...

    def open(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    inode: int
    buffer: memoryview


class WritableSegments:
    """The publisher's mappings: a segment is mapped once, for as long as it exists."""

    def __init__(self, segments: WeightSegments) -> None:
        self._segments = segments
        self._mapped: dict[str, _Mapped] = {}

    def begin(self, name: str, *, size: int) -> tuple[memoryview, int]:
        """Memory to write to, and the descriptor to `unlock` when all is written: until then readers are refused."""
        descriptor = self._locked(name, size=size)
        if descriptor is None:
            # Its readers keep the old memory; the name gets new memory.
            self._segments.remove(name)
            descriptor = self._locked(name, size=size)
        if descriptor is None:
            raise RefusedError(f"segment {name} was opened by a late reader as soon as it was made")
        inode = os.fstat(descriptor).st_ino
        mapped = self._mapped.get(name)
        if mapped is None or mapped.inode != inode:
            mapped = self._mapped[name] = _Mapped(inode, _with_huge_pages(mmap.mmap(descriptor, size)))
        return mapped.buffer, descriptor

    def _locked(self, name: str, *, size: int) -> int | None:
        held = self._segments.create(name, size)
        try:
            descriptor = reopened(held)
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
    """The server's mappings. They are kept, because mapping the pages of a version again takes longer than verifying
    it; only the latest ones, because the publishers of the others may be gone."""

    def __init__(self) -> None:
        self._mapped: dict[str, _Mapped] = {}

    def read(self, name: str, *, segments: WeightSegments) -> tuple[memoryview, int]:
        """Bytes of a segment, and the descriptor to `unlock` when they are not needed any more: until then they do not
        change. RefusedError while they are being written."""
        held = segments.open(name)
        try:
            descriptor = reopened(held)
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
            # A private mapping: pages are shared until they are written, and a write would stay in this process.
            memory = mmap.mmap(descriptor, status.st_size, flags=mmap.MAP_PRIVATE)
            mapped = _Mapped(status.st_ino, _with_huge_pages(memory))
            self._keep(name, mapped)
        return mapped.buffer, descriptor

    def _keep(self, name: str, mapped: _Mapped) -> None:
        self._mapped.pop(name, None)
        while len(self._mapped) >= VERSIONS_KEPT:
            del self._mapped[next(iter(self._mapped))]
        self._mapped[name] = mapped


def _with_huge_pages(memory: mmap.mmap) -> memoryview:
    """Map with huge pages where the system supports them for this kind of memory."""
    if len(memory) >= _HUGE_BYTES:
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def unlock(descriptor: int) -> None:
    """Release the lock. Closing the descriptor is not enough: a mapping keeps its open file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def reopened(descriptor: int) -> int:
    """The same memory through a separate open file description, which alone has the lock: passed descriptors share
    one."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class SpareMemory:
    """Private memory that is reused for one version after the other."""

    def __init__(self) -> None:
        self._spare: memoryview | None = None

    def take(self, size: int) -> memoryview:
        """Memory of this size, with undefined contents."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == max(1, size):
            return spare
        return _with_huge_pages(mmap.mmap(-1, max(1, size)))

    def give_back(self, buffer: memoryview) -> None:
        """Return memory that is not read any more."""
        self._spare = buffer
