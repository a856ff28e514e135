"""Bytes that a process offers over the bulk channel.

A piece of an export may still be arriving from elsewhere: it becomes available slice by slice, so that a chain of hosts
passes a large piece on while it arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from kintsugi.errors import RefusedError
from kintsugi.protocol.bulk import BulkRange

SLICE_BYTES = 2 << 20
"""Unit in which an arriving piece becomes available, and the largest part that one range names. Every host of a chain
is one unit behind the host before it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one range: in this process's memory, and where known in a file in memory, which the kernel sends."""

    view: memoryview
    descriptor: int = -1
    offset: int = 0
    """Offset of the first byte in the file."""


class Export(Protocol):
    """Named bytes; its methods are called by the threads of the server."""

    def size_of(self, index: int) -> int:
        """Size of a piece; RefusedError if there is no such piece."""
        ...

    def attempt_region(self, part: BulkRange, remaining_s: float) -> Region | None:
        """Return a part; None if it has not arrived after this time. RefusedError if it will not arrive."""
        ...

    def reading(self) -> AbstractContextManager[object]:
        """Lock that is held while parts are sent: their bytes do not change meanwhile. RefusedError if they have."""
        ...


class ViewExport:
    """Bytes that are all there."""

    def __init__(self, sizes: Mapping[int, int], view_of: Callable[[int], memoryview]) -> None:
        """`view_of` returns the bytes of a piece, from any thread."""
        self._sizes = sizes
        self._view_of = view_of

    def size_of(self, index: int) -> int:
        if index not in self._sizes:
            raise RefusedError(f"there are {len(self._sizes)} pieces here, not one {index}")
        return self._sizes[index]

    def attempt_region(self, part: BulkRange, remaining_s: float) -> Region | None:
        return Region(self._view_of(part.index)[part.offset : part.offset + part.size])

    def reading(self) -> AbstractContextManager[object]:
        return nullcontext()


class FileExport:
    """Pieces in one file in memory, each at its offset; slices of it may still be arriving."""

    def __init__(
        self,
        places: Mapping[int, tuple[int, int]],
        buffer: memoryview,
        *,
        descriptor: int = -1,
        reading: Callable[[], AbstractContextManager[object]] = nullcontext,
        is_whole: bool = False,
    ) -> None:
        """`places`: index → offset and size in the buffer. `descriptor` is a file with the same bytes; the owner keeps
        it open as long as the export is offered."""
        self._places = dict(places)
        self._buffer = buffer
        self._descriptor = descriptor
        self._reading = reading
        self._changed = threading.Condition()
        self._slices: set[tuple[int, int]] = set()
        self._is_whole = is_whole
        self._ended = ""

    def size_of(self, index: int) -> int:
        if index not in self._places:
            raise RefusedError(f"there are {len(self._places)} pieces here, not one {index}")
        return self._places[index][1]

    def add(self, places: Mapping[int, tuple[int, int]]) -> None:
        """Announce further pieces."""
        with self._changed:
            self._places |= places

    def arrived(self, part: BulkRange) -> None:
        """Make a slice available."""
        with self._changed:
            self._slices.add((part.index, part.offset))
            self._changed.notify_all()

    def complete(self) -> None:
        """Make everything available."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def move(
        self,
        buffer: memoryview,
        *,
        descriptor: int,
        reading: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Serve the same pieces, all of them, from other memory from now on."""
        with self._changed:
            self._buffer, self._descriptor, self._reading = buffer, descriptor, reading
            self._is_whole = True
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Refuse what has not been sent yet."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def attempt_region(self, part: BulkRange, remaining_s: float) -> Region | None:
        with self._changed:
            if not self._is_available(part):
                self._changed.wait(remaining_s)
            if not self._is_available(part):
                return None
            start = self._places[part.index][0] + part.offset
            return Region(self._buffer[start : start + part.size], self._descriptor, start)

    def _is_available(self, part: BulkRange) -> bool:
        if self._ended:
            raise RefusedError(self._ended)
        if self._is_whole:
            return True
        first = part.offset // SLICE_BYTES * SLICE_BYTES
        starts = range(first, max(first + 1, part.offset + part.size), SLICE_BYTES)
        return all((part.index, start) in self._slices for start in starts)

    def reading(self) -> AbstractContextManager[object]:
        return self._reading()


def slices(index: int, size: int) -> list[BulkRange]:
    """Ranges of one piece; an empty piece has one, so that it is asked for too.

    >>> [part.size for part in slices(0, SLICE_BYTES + 1)], slices(3, 0)
    ([2097152, 1], [BulkRange(index=3, offset=0, size=0)])
    """
    starts = range(0, max(1, size), SLICE_BYTES)
    return [BulkRange(index, start, min(SLICE_BYTES, size - start)) for start in starts]
