"""Rows that are still being written. A pipe is spooled into the run folder, where they can be read again.

    pipe ─► spool, by the launcher (`Spool`) ─► JSON lines that grow ─► rows by index, in the workers (`Stream`)

What a stream guarantees: rows are met in the order in which they came, each once; a group that is run again after a
fault, and a run that is resumed, get the same rows, because everything that was taken from the pipe lies in the spool.
A stream that has ended begins again from its first row. It is not shuffled: what has not come can not be.
A growing file needs no spool and is read where it is.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kintsugi.config import DataSection, SourceSection
from kintsugi.data.columns import Needs, Unusable, row_of
from kintsugi.data.lines import LONGEST_ROW, record_of
from kintsugi.errors import DataError, StorageError, UserError, WorldError
from kintsugi.types import Row

STREAM = "stream:"
STANDARD_INPUT = "-"
UNKNOWN_LENGTH = 1 << 40
"""Rows of a stream, as far as anybody counts them beforehand."""
_AHEAD = 64 << 20
"""Bytes that are taken from a pipe before anybody has read them; then whoever writes has to wait."""
_MARK_EVERY = 1 << 20
_AT_ONCE = 1 << 20
_FEW = 100
"""Lines of which any number may be bad before their share is looked at."""


class RowNotYet(WorldError):
    """The row has not come out of the stream yet."""


def is_stream(source: str) -> bool:
    return source.startswith(STREAM)


def spool_path(run_dir: Path, source: str) -> Path:
    """Where the rows of a stream lie: in the run folder, or where they are if it is a file."""
    name = source.removeprefix(STREAM)
    if name != STANDARD_INPUT and Path(name).is_file():
        return Path(name)
    if name == STANDARD_INPUT:
        return run_dir / "streams" / "standard-input.jsonl"
    # Two pipes may have the same name in different folders.
    return run_dir / "streams" / f"{Path(name).name}-{xxhash.xxh3_64_hexdigest(name.encode())}.jsonl"


def check_stream(source: str, *, run_dir: Path | None) -> None:
    """That there is something to read from; nothing is taken from it. A run that goes on needs nothing more of a stream
    that has ended."""
    if run_dir is not None and end_of(spool_path(run_dir, source)).exists():
        return
    name = source.removeprefix(STREAM)
    try:
        mode = os.fstat(0).st_mode if name == STANDARD_INPUT else os.stat(name).st_mode
    except OSError as error:
        raise DataError(
            f"expected a named pipe or a file of JSON lines at '{name}': {error.strerror}"
        ) from error
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        how = " (`… | kintsugi train …`)" if name == STANDARD_INPUT else ""
        raise DataError(f"expected a pipe or a file of JSON lines as '{name}'{how}")


@contextmanager
def spools(data: DataSection, run_dir: Path) -> Iterator[Callable[[], None]]:
    """A function that moves on whatever has come out of the pipes among the sources; to be called again and again."""
    named = [data.source, *(each.source for each in data.sources)]
    opened = [Spool(each, run_dir=run_dir) for each in named if is_stream(each)]

    def pump() -> None:
        for spool in opened:
            spool.pump()

    try:
        yield pump
    finally:
        for spool in opened:
            spool.close()


class Spool:
    """Takes what a pipe has and appends it to a file. `pump` never blocks; the launcher calls it at every tick."""

    def __init__(self, source: str, *, run_dir: Path) -> None:
        name = source.removeprefix(STREAM)
        self._path = spool_path(run_dir, source)
        self._end = end_of(self._path)
        self._input = self._output = -1
        if str(self._path) == name or self._end.exists():
            return
        self._path.parent.mkdir(exist_ok=True)
        self._input = (
            0 if name == STANDARD_INPUT else os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        )
        # Not in append mode, which `splice` refuses.
        self._output = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._offset = os.fstat(self._output).st_size
        self._is_pipe = stat.S_ISFIFO(os.fstat(self._input).st_mode)
        self._poller = select.poll()
        self._poller.register(self._input, select.POLLIN)

    def pump(self) -> None:
        """Move what is there, at most as far ahead of the readers as allowed; a full disk is tried again next time."""
        while self._input >= 0 and self._offset < self._furthest_read() + _AHEAD:
            events = dict(self._poller.poll(0)).get(self._input, 0)
            if not events:
                return
            try:
                moved = self._move()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN):
                    return
                raise StorageError(f"could not spool {self._path}: {error.strerror}") from error
            if moved == 0:
                self._end.touch()
                self.close()

    def _move(self) -> int:
        """By `splice`, so that no byte is ever in this process alone: what left the pipe is in the file."""
        if self._is_pipe:
            moved = os.splice(self._input, self._output, _AT_ONCE, offset_dst=self._offset)
        else:
            moved = os.pwrite(self._output, os.pread(self._input, _AT_ONCE, self._offset), self._offset)
        self._offset += moved
        return moved

    def _furthest_read(self) -> int:
        marks = self._path.parent.glob(f"{self._path.name}.read-*")
        return max((int(mark.read_text() or 0) for mark in marks), default=0)

    def close(self) -> None:
        if self._input > 0:
            os.close(self._input)
        if self._output >= 0:
            os.close(self._output)
        self._input = self._output = -1


def end_of(path: Path) -> Path:
    """The file that says that nothing more will come."""
    return path.with_name(f"{path.name}.end")


class Stream:
    """Rows of a file that grows, by index. Lines that are none are left out; `UserError` when they are too many."""

    def __init__(
        self, path: Path, section: SourceSection, *, needs: Needs, max_bad_share: float, spooled: bool
    ) -> None:
        self._path, self._section, self._needs, self._max_bad_share = path, section, needs, max_bad_share
        self._spooled = spooled
        self._offsets: array[int] = array("Q")
        self._next = self._number = self._num_bad = self._marked = 0
        self._first_bad = ""

    def __len__(self) -> int:
        return UNKNOWN_LENGTH

    def row(self, index: int) -> Row:
        """`RowNotYet` while it has not come; after the stream's end, rows come again from the first one on."""
        ended = end_of(self._path).exists()
        self._read_on(until=index, ended=ended)
        count = len(self._offsets) // 2
        if index >= count:
            if not ended:
                raise RowNotYet(f"row {index} has not come out of {self._path} yet, which has {count}")
            if count == 0:
                why = f"; {self._first_bad}" if self._first_bad else ""
                raise UserError(
                    f"{self._path}: expected at least one row before the stream ended, found none{why}"
                )
            index %= count
        start, end = self._offsets[2 * index], self._offsets[2 * index + 1]
        with open(self._path, "rb", buffering=0) as file:
            return row_of(
                record_of(os.pread(file.fileno(), end - start, start)), self._section, needs=self._needs
            )

    def _read_on(self, *, until: int, ended: bool) -> None:
        if until < len(self._offsets) // 2 or not self._path.exists():
            return
        with open(self._path, "rb", buffering=1 << 20) as file:
            file.seek(self._next)
            while len(self._offsets) // 2 <= until:
                line = file.readline(LONGEST_ROW + 1)
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(1 << 20)
                if not line or not (rest or ended):  # The rest of its line has not come.
                    break
                self._take(line, start=self._next)
                self._next = file.tell()
        self._mark()

    def _take(self, line: bytes, *, start: int) -> None:
        self._number += 1
        if not line.strip():
            return
        try:
            row_of(record_of(line), self._section, needs=self._needs)
        except Unusable as error:
            self._num_bad += 1
            self._first_bad = self._first_bad or f"line {self._number}: {error}"
            if self._number >= _FEW and self._num_bad > self._max_bad_share * self._number:
                raise UserError(
                    f"{self._path}: {self._num_bad} of {self._number} lines can not be used, more than "
                    f"`data.max_bad_share`={self._max_bad_share} allows; {self._first_bad}"
                ) from error
            return
        self._offsets.extend((start, start + len(line)))

    def _mark(self) -> None:
        """Say how far was read, so that the spool goes on; a growing file has none, and nothing is put beside it."""
        if self._spooled and self._next - self._marked >= _MARK_EVERY:
            self._marked = self._next
            self._path.with_name(f"{self._path.name}.read-{os.getpid()}").write_text(str(self._marked))
