"""Line files that one process appends to and others follow: events, readings.

A line is one write: a process that is killed leaves at most a torn last line, which readers skip and the next
incarnation terminates. Space is allocated ahead of the end, so that a full disk can still be reported.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import reserve
from kintsugi.runtime.waits import WaitTable, join, wait

CHUNK_SIZE = 256 << 10
SPARE_SIZE = 64 << 10
"""Space that is allocated ahead of the end: room for some hundred events."""
NUM_OLD = 3
"""Rotated files that are kept of a bounded log."""
MOST_READ = 1 << 20
BLOCK_SIZE = 1 << 16
LONGEST_LINE = 64 << 20
"""Longest line of a file that is read: a crash of the host may leave a file with gigabytes of zeros."""
MOST_WAITING = 4096
"""Longest queue for a disk that hangs; later pieces are counted and dropped."""
IDLE_S = 3600.0
CLOSE_S = 0.2

T = TypeVar("T")


class LineFile:
    """Appends to one file. Safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        largest_size: int | None = None,
        kept_s: float = 0.0,
        most_size: int | None = None,
        reserved_size: int = CHUNK_SIZE,
    ) -> None:
        """Open a log.

        `largest_size`: a file of this size is rotated to `<name>.1<suffix>`, and so on up to `NUM_OLD`. `kept_s`: a
        file grows further, up to `most_size`, until the rotated ones hold this much time. `reserved_size`: bytes to
        allocate ahead; with none, nothing can be written on a full disk.
        """
        self._path = path
        self._largest_size = largest_size
        self._kept_s, self._most_size = kept_s, most_size
        self._reserved_size = reserved_size
        self._descriptor = -1
        self._allocated = 0
        """End of the allocated space."""
        self._torn = False
        """The file ends in the middle of a line, so the next write has to begin a new one."""
        self._lock = threading.Lock()

    def append(self, lines: bytes) -> None:
        """Append whole lines; raises OSError if the disk does not accept all of them."""
        with self._lock:
            self._append(lines)

    def _append(self, lines: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        if not self._is_in_place():
            # The file was removed, or put aside by another writer of this log.
            self.close()
            self._open()
        if self._torn:
            lines = b"\n" + lines
        end = os.fstat(self._descriptor).st_size + len(lines)
        if self._largest_size is not None and end > self._largest_size and self._is_full(end):
            self._rotate()
            end = len(lines)
        self._allocate(end, len(lines))
        written = os.write(self._descriptor, lines)
        self._torn = written < len(lines)
        if self._torn:
            raise OSError("only a part of a line was taken")

    def _is_in_place(self) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def _is_full(self, end: int) -> bool:
        """Return whether a large file is above its limit, or holds its part of the time to be kept."""
        if not self._kept_s or (self._most_size is not None and end > self._most_size):
            return True
        try:
            begun = old_path(self._path, 1).stat().st_mtime
        except OSError:
            return True
        return os.fstat(self._descriptor).st_mtime - begun >= self._kept_s / NUM_OLD

    def _allocate(self, end: int, size: int) -> None:
        """Keep `SPARE_SIZE` allocated ahead of the next write; use it up when the disk is full."""
        if not self._reserved_size or end + SPARE_SIZE <= self._allocated:
            return
        with suppress(OSError):
            reserve(self._descriptor, offset=end - size, size=size + self._reserved_size)
            self._allocated = end + self._reserved_size

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        self._torn = bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self._allocated = 0

    def _rotate(self) -> None:
        # Release what was allocated ahead: the rotated file is not written again.
        with suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size)
        self.close()
        paths = [self._path, *(old_path(self._path, number) for number in range(1, NUM_OLD + 1))]
        for newer, older in reversed(list(itertools.pairwise(paths))):
            with suppress(FileNotFoundError):
                newer.replace(older)
        self._open()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LineWriter(Generic[T]):
    """Appends to a file in a thread of its own, so that a hanging disk does not block the caller; never raises.

    The thread consumes a bounded queue, encodes its pieces to whole lines with `encode`, waits for more and for the
    disk, and ends at `close` or with the process. Pieces that do not fit, or that the disk refuses, are counted under
    `lost`.
    """

    def __init__(
        self, file: LineFile, *, lost: str, encode: Callable[[list[T]], bytes], gather_s: float = 0.0
    ) -> None:
        """`gather_s`: pieces of this time are one write, since waking a thread costs more than a line."""
        self._file, self._lost, self._encode, self._gather_s = file, lost, encode, gather_s
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Event()

    def put(self, piece: T) -> None:
        """Queue a piece, from any thread; it must not be changed afterwards."""
        if self._closing.is_set():
            return
        if self._waiting.qsize() >= MOST_WAITING:
            COUNTERS.add(self._lost, self._encode([piece]).count(b"\n"))
            return
        self._waiting.put(piece)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        # The waits of this thread say nothing about the progress of the process, so they are not declared.
        waits = WaitTable()
        while True:
            try:
                (piece,) = wait(
                    self._attempt_take, whom="itself", what="lines", timeout_s=IDLE_S, waits=waits
                )
            except DeadlineExceeded:
                continue
            if self._gather_s:
                with suppress(DeadlineExceeded):
                    timeout_s = self._gather_s
                    wait(self._attempt_gather, whom="itself", what="more", timeout_s=timeout_s, waits=waits)
            gathered = []
            while piece is not None:
                gathered.append(piece)
                if self._waiting.empty():
                    break
                piece = self._waiting.get(block=False)
            self._append(self._encode(gathered))
            if piece is None:
                return

    def _append(self, lines: bytes) -> None:
        if not lines:
            return
        try:
            self._file.append(lines)
        except OSError:
            COUNTERS.add(self._lost, lines.count(b"\n"))

    def _attempt_gather(self, remaining_s: float) -> bool | None:
        return self._closing.wait(remaining_s) or None

    def _attempt_take(self, remaining_s: float) -> tuple[T | None] | None:
        try:
            return (self._waiting.get(timeout=remaining_s),)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Write queued pieces for a short time; a hanging disk does not delay the end of the process."""
        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        self._waiting.put(None)
        with suppress(DeadlineExceeded):
            join(self._thread, whom="writing thread", what="its end", timeout_s=CLOSE_S)
            self._file.close()


def old_path(path: Path, number: int) -> Path:
    """`old_path(Path("figures/agent-0.jsonl"), 1) == Path("figures/agent-0.1.jsonl")`, older the higher."""
    return path.with_suffix(f".{number}{path.suffix}")


def paths_of(path: Path) -> list[Path]:
    """Return the existing files of a bounded log, the oldest first."""
    numbered = [old_path(path, number) for number in range(NUM_OLD, 0, -1)]
    return [each for each in (*numbered, path) if each.exists()]


def lines_in(content: bytes) -> list[bytes]:
    """Return the complete lines, without the zeros that a crash of the host may leave in a file."""
    return content[: content.rfind(b"\n") + 1].replace(b"\0", b"").split(b"\n")[:-1]


class LineTail:
    """Follows a line file: each call of `lines` returns lines that were added since; an incomplete line waits.

    When the file was put aside for a new one, its end is read first and then the new one. A file that became shorter is
    read from its start.
    """

    def __init__(self, path: Path, *, offset: int = 0, most_read: int = MOST_READ) -> None:
        """`most_read`: bytes that one call reads."""
        self._path, self._most_read = path, most_read
        self._descriptor = -1
        self.offset = offset
        """Byte offset of the next line."""

    def lines(self) -> list[bytes]:
        """Return some new lines; call until there are none."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        content = os.pread(self._descriptor, self._most_read, self.offset)
        if not content and os.fstat(self._descriptor).st_size < self.offset:
            self.offset = 0
            content = os.pread(self._descriptor, self._most_read, 0)
        while len(content) == self._most_read and b"\n" not in content:
            # The line is too long to be read; its rest is yielded as a torn line.
            self.offset += len(content)
            content = os.pread(self._descriptor, self._most_read, self.offset)
        lines = lines_in(content)
        if not lines and self._was_put_aside():
            self.close()
            self.offset = 0
            return self.lines()
        self.offset += content.rfind(b"\n") + 1
        return lines

    def _was_put_aside(self) -> bool:
        try:
            return os.stat(self._path).st_ino != os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lines_between(path: Path, *, offset: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the complete lines from a byte offset on, which begins a line. A line that is longer than
    `LONGEST_LINE` is left out."""
    with path.open("rb") as file:
        file.seek(offset)
        while end is None or offset < end:
            line = file.readline(LONGEST_LINE)
            begin, offset = offset, offset + len(line)
            if line.endswith(b"\n"):
                yield begin, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
                offset += len(line)
            if not line:
                return


def lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the complete lines, the last one first; reads no more than is taken. The end of a line
    that is longer than `LONGEST_LINE` is left out."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""  # End of a line whose beginning is not read yet.
        is_whole = False  # The end of the file may be a line that is being written.
        while start > 0:
            size = min(max(BLOCK_SIZE, len(rest)), start)
            start -= size
            parts = (os.pread(file.fileno(), size, start) + rest).split(b"\n")
            end = start + sum(map(len, parts)) + len(parts) - 1
            for part in reversed(parts[1:]):
                if is_whole:
                    yield end - len(part), part
                is_whole = True
                end -= len(part) + 1
            rest = parts[0] if len(parts[0]) <= LONGEST_LINE else b""
        if is_whole:
            yield 0, rest
