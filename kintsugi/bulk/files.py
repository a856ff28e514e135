"""Files on disk over the bulk channel: offered where they are, and fetched piece by piece.

Neither side maps a file or has a whole one in memory: a disk that fails is an error of the one transfer, and a piece is
all that a thread holds. A connection that ends in the middle of a piece is replaced, and goes on after the last slice
that arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path

from kintsugi.bulk.channel import Channel
from kintsugi.bulk.client import BulkClient, Watch
from kintsugi.bulk.exports import Region, slices
from kintsugi.bulk.pull import num_connections
from kintsugi.errors import DeadlineExceeded, RefusedError, StorageError, WorldError
from kintsugi.protocol.bulk import BulkOffer, BulkRange
from kintsugi.runtime.digests import piece_digest
from kintsugi.runtime.disk import SYSTEM_DISK, storage_errors
from kintsugi.runtime.waits import join, wait

FILE_PIECE_BYTES = 16 << 20
"""Bytes of a file under one digest; part of the protocol."""
MAX_ATTEMPTS = 3
"""Connections that are tried for one piece."""
TRANSFER_S = 24 * 3600.0
"""Bound of the transfer of many files; each request has its own, much shorter one."""
POLL_S = 0.02
STOP_S = 5.0
"""Longest wait for the threads of a transfer that was given up; their connections are ended."""


class DiskExport:
    """Files on disk; the index of a piece is the index of its file."""

    def __init__(
        self, paths: Sequence[Path], *, on_bytes: Callable[[int], object] = lambda size: None
    ) -> None:
        """`on_bytes` is called, by any thread, with the size of every part that is read."""
        self._paths = tuple(paths)
        self._on_bytes = on_bytes
        self.sizes: list[int] = []
        for path in self._paths:
            with storage_errors(str(path)):
                self.sizes.append(path.stat().st_size)

    def size_of(self, index: int) -> int:
        if not 0 <= index < len(self.sizes):
            raise RefusedError(f"there are {len(self.sizes)} files here, not one {index}")
        return self.sizes[index]

    def attempt_region(self, part: BulkRange, remaining_s: float) -> Region | None:
        content = memoryview(bytearray(part.size))
        path = self._paths[part.index]
        with storage_errors(str(path)), closing(SYSTEM_DISK.open_to_read(path)) as file:
            count = file.pread_into(content, offset=part.offset)
        if count != part.size:
            raise StorageError(f"{path}: expected {part.offset + part.size} bytes or more, it ended before")
        self._on_bytes(count)
        return Region(content)

    def reading(self) -> AbstractContextManager[object]:
        return nullcontext()


def file_digests(path: Path, *, offset: int, size: int) -> tuple[str, ...]:
    """Digest of every piece of a part of a file.

    >>> len(file_digests(Path("/dev/null"), offset=0, size=0))
    0
    """
    found = []
    buffer = memoryview(bytearray(min(FILE_PIECE_BYTES, size)))
    with storage_errors(str(path)), closing(SYSTEM_DISK.open_to_read(path)) as file:
        for start in range(offset, offset + size, FILE_PIECE_BYTES):
            piece = buffer[: min(FILE_PIECE_BYTES, offset + size - start)]
            if file.pread_into(piece, offset=start) != len(piece):
                raise StorageError(f"{path}: expected {start + len(piece)} bytes or more, it ended before")
            found.append(piece_digest(piece))
    return tuple(found)


def fetch_piece(
    client: BulkClient,
    offer: BulkOffer,
    *,
    index: int,
    offset: int,
    target: memoryview,
    watch: Watch = lambda channel: None,
) -> None:
    """Fetch bytes of a file from `offset` on. They are not verified beyond what the connection verifies. `watch`
    receives each connection, as in `BulkClient.fetch`."""
    missing = deque(
        (BulkRange(index, offset + part.offset, part.size), target[part.offset : part.offset + part.size])
        for part in slices(index, len(target))
    )
    for attempt in range(MAX_ATTEMPTS):
        try:
            client.fetch(
                offer,
                [part for part, _ in missing],
                [place for _, place in missing],
                watch=watch,
                arrived=lambda part: missing.popleft(),
            )
            return
        except RefusedError:
            raise
        except WorldError:
            if attempt + 1 == MAX_ATTEMPTS:
                raise


class Transfer:
    """Tasks that threads work through, as many at a time as there are connections."""

    def __init__(
        self,
        tasks: Iterator[Callable[[Watch], object]],
        *,
        whom: str,
        what: str,
        check: Callable[[], object] = lambda: None,
        stop: Callable[[], object] = lambda: None,
    ) -> None:
        """A task is given the `watch` of its requests. `check` is called by the waiting thread, and
        raises to give up. `stop` is called after a failure, and ends what else the tasks wait for."""
        self._tasks = tasks
        self._whom, self._what = whom, what
        self._check, self._stop = check, stop
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._channels: dict[int, Channel] = {}
        """Thread → the connection that it uses."""

    def run(self) -> None:
        """Return when all tasks are done; raise the first error."""
        threads = [
            threading.Thread(target=self._work, name="bulk-files", daemon=True)
            for _ in range(num_connections())
        ]

        def attempt(remaining_s: float) -> bool | None:
            self._check()
            if self._error is not None or not any(thread.is_alive() for thread in threads):
                return True
            self._ended.wait(min(POLL_S, remaining_s))
            return None

        try:
            for thread in threads:
                thread.start()
            wait(attempt, whom=self._whom, what=self._what, timeout_s=TRANSFER_S)
            if self._error is not None:
                raise self._error
        except BaseException:
            self._give_up(threads)
            raise

    def _give_up(self, threads: Sequence[threading.Thread]) -> None:
        with self._lock:
            self._ended.set()
            for channel in self._channels.values():
                channel.interrupt()
        self._stop()
        for thread in threads:
            if thread.ident is None:  # The host had no thread left for it.
                continue
            with suppress(DeadlineExceeded):  # It ends with its request, and does nothing more.
                join(thread, whom=self._whom, what="the end of a request", timeout_s=STOP_S)

    def _work(self) -> None:
        """Body of a thread; the waiting thread raises its error."""
        try:
            while (task := self._next()) is not None:
                task(self._watch)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it.
            with self._lock:
                self._error = self._error or error
                self._channels.pop(threading.get_ident(), None)
            self._ended.set()

    def _next(self) -> Callable[[Watch], object] | None:
        with self._lock:
            return None if self._ended.is_set() else next(self._tasks, None)

    def _watch(self, channel: Channel | None) -> None:
        with self._lock:
            if channel is None:
                self._channels.pop(threading.get_ident(), None)
                return
            self._channels[threading.get_ident()] = channel
            if self._ended.is_set():
                channel.interrupt()
