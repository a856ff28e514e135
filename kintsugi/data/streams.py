"""Streams: sources that are still being written. A pipe is spooled into the run folder, so that it can be read again.

    pipe ─► spool, by the launcher (`Spool`) ─► growing file of JSON lines ─► rows by index, in workers (`RowStream`)

Guarantees: rows are used in the order of arrival, each once. A group that is run again after a fault, and a resumed
run, get the same rows, because everything read from the pipe is in the spool. A stream that has ended is repeated from
its first row. A stream is not shuffled. A growing file needs no spool and is read in place.
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

from kintsugi.config.schema import DataSection, SourceSection
from kintsugi.data.columns import RequiredColumns, UnusableRow, row_of
from kintsugi.data.jsonl_rows import LONGEST_ROW, record_of
from kintsugi.errors import DataError, StorageError, UserError, WorldError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.types import Row

STREAM = "stream:"
STANDARD_INPUT = "-"
UNKNOWN_LENGTH = 1 << 40
"""Assumed number of rows of a stream."""
_AHEAD = 64 << 20
"""Limit of spooled bytes that no worker has read yet; beyond it the pipe is not read, and its writer blocks."""
_MARK_EVERY = 1 << 20
_AT_ONCE = 1 << 20
_FEW = 100
"""Number of lines from which on the share of bad lines is checked."""


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
        return RunFolder(run_dir).streams_folder / "standard-input.jsonl"
    # Two pipes may have the same name in different folders.
    return (
        RunFolder(run_dir).streams_folder
        / f"{Path(name).name}-{xxhash.xxh3_64_hexdigest(name.encode())}.jsonl"
    )


def check_stream(source: str, *, run_dir: Path | None) -> None:
    """Check that a stream can be read, without reading from it. A resumed run does not need a stream that has ended."""
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
    """Open the spools of all pipes among the sources; yield a function that moves their data, to be called often."""
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
    """Appends the data of a pipe to a file. `pump` never blocks; the launcher calls it at every tick."""

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
        """Move the available data, at most `_AHEAD` bytes ahead of the readers; after ENOSPC the next call retries."""
        if self._output >= 0:
            self._offset = os.fstat(
                self._output
            ).st_size  # A launcher that died may have moved more than this one.
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
        """Move data by `splice`, so that no byte is only in this process: what left the pipe is in the file."""
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
    """Path of the marker file of a stream that has ended."""
    return path.with_name(f"{path.name}.end")


class RowStream:
    """Rows of a growing file by index. Bad lines are left out; `UserError` if there are too many."""

    def __init__(
        self,
        path: Path,
        section: SourceSection,
        *,
        needs: RequiredColumns,
        max_bad_share: float,
        spooled: bool,
    ) -> None:
        self._path = path
        self._section = section
        self._needs = needs
        self._max_bad_share = max_bad_share
        self._spooled = spooled
        self._offsets: array[int] = array("Q")
        self._next = self._number = self._num_bad = self._marked = 0
        self._first_bad = ""

    def __len__(self) -> int:
        return UNKNOWN_LENGTH

    def row(self, index: int) -> Row:
        """Return a row; `RowNotYet` if it has not arrived. After the end of the stream, rows repeat from the first."""
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
                if not line or not (rest or ended):  # The rest of the line has not arrived.
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
        except UnusableRow as error:
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
        """Write how far this process has read, so that the spool continues; only for spooled streams."""
        if self._spooled and self._next - self._marked >= _MARK_EVERY:
            self._marked = self._next
            self._path.with_name(f"{self._path.name}.read-{os.getpid()}").write_text(str(self._marked))
