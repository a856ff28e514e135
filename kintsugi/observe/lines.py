"""Files of lines that one process appends to and others follow: events, figures.

A line is one write: a process that is killed leaves at most a torn last line, which readers skip and the next
incarnation ends. Space is allocated ahead of the end, so that on a full disk there is still room to say so.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kintsugi.disk import reserve
from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime import COUNTERS, WaitTable, wait

CHUNK_SIZE = 256 << 10
SPARE_SIZE = 64 << 10
"""Space that is kept free ahead of the end: some hundred events."""
NUM_OLD = 3
"""Files that are kept of a bounded log beside the one that is written."""
MOST_READ = 1 << 20
MOST_WAITING = 4096
"""So many pieces may wait for a disk that does not answer; what comes then is counted and dropped."""
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
        """With `largest_size`, a file that has grown to it becomes `<name>.1<suffix>`, and so on up to `NUM_OLD`. With
        `kept_s` it grows on, up to `most_size`, until the old ones hold so much time. `reserved_size` is what is
        allocated at once; with none, nothing can be written on a full disk."""
        self._path = path
        self._largest_size = largest_size
        self._kept_s, self._most_size = kept_s, most_size
        self._reserved_size = reserved_size
        self._descriptor = -1
        self._allocated = 0
        """Where the space that is known to be ours ends."""
        self._torn = False
        """The file ends in the middle of a line, of which the next one must not become a part."""
        self._lock = threading.Lock()

    def append(self, lines: bytes) -> None:
        """Raises OSError where the disk does not take all of it."""
        with self._lock:
            self._append(lines)

    def _append(self, lines: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        if os.fstat(self._descriptor).st_nlink == 0:
            # Somebody removed it: what is written there is read by nobody.
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

    def _is_full(self, end: int) -> bool:
        """Of a file that is large enough: whether it is too large, or holds its part of the time that is to be kept."""
        if not self._kept_s or (self._most_size is not None and end > self._most_size):
            return True
        try:
            begun = old_path(self._path, 1).stat().st_mtime
        except OSError:
            return True
        return os.fstat(self._descriptor).st_mtime - begun >= self._kept_s / NUM_OLD

    def _allocate(self, end: int, size: int) -> None:
        """Keep `SPARE_SIZE` ahead of what is about to be written; live on it while there is no more."""
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
        # What was allocated ahead of the end is given back; the old file is never written again.
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
    """Appends to a file in a thread of its own, so that a disk that hangs delays nobody; never raises.

    The thread consumes what waits in a bounded queue, makes whole lines of it by `encode`, waits for more and for the
    disk, and ends at `close`, or with the process. What does not fit, or is not taken, is counted under `lost`.
    """

    def __init__(
        self, file: LineFile, *, lost: str, encode: Callable[[list[T]], bytes], gather_s: float = 0.0
    ) -> None:
        """With `gather_s` what comes in that time is one write: waking a thread costs more than a line."""
        self._file, self._lost, self._encode, self._gather_s = file, lost, encode, gather_s
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Event()

    def put(self, piece: T) -> None:
        """From any thread; nobody changes it any more."""
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
        # What this thread waits for is nothing that the process does: nobody is to take it for a reason to stand still.
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
        """Write what waits, for a moment; a disk that hangs keeps nobody from ending."""
        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        self._waiting.put(None)
        with suppress(DeadlineExceeded):
            wait(self._attempt_join, whom="writing thread", what="its end", timeout_s=CLOSE_S)
            self._file.close()

    def _attempt_join(self, remaining_s: float) -> bool | None:
        assert self._thread is not None
        self._thread.join(remaining_s)
        return None if self._thread.is_alive() else True


def old_path(path: Path, number: int) -> Path:
    """`old_path(Path("figures/agent-0.jsonl"), 1) == Path("figures/agent-0.1.jsonl")`, older the higher."""
    return path.with_suffix(f".{number}{path.suffix}")


def paths_of(path: Path) -> list[Path]:
    """Of a bounded log those that are there, the oldest first."""
    numbered = [old_path(path, number) for number in range(NUM_OLD, 0, -1)]
    return [each for each in (*numbered, path) if each.exists()]


def lines_in(content: bytes) -> list[bytes]:
    """Those that are written to their end, without the zeros that a host's crash may leave in a file."""
    return content[: content.rfind(b"\n") + 1].replace(b"\0", b"").split(b"\n")[:-1]


class LineTail:
    """The lines that were added to a file since it was last asked; a line that is being written is left for later.

    When the file was put aside for a new one, its end is read first and then the new one.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._descriptor = -1
        self.offset = offset
        """Where the next line begins."""

    def lines(self) -> list[bytes]:
        """At most a megabyte of them at once: ask until there are none."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        content = os.pread(self._descriptor, MOST_READ, self.offset)
        while len(content) == MOST_READ and b"\n" not in content:
            # Part of a line that is too long for anybody; what is left of it is told as a torn one.
            self.offset += len(content)
            content = os.pread(self._descriptor, MOST_READ, self.offset)
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
