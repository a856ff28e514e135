"""Files of the trained samples of a run: `samples.jsonl`, which is written, and parts that were put aside.

    samples.0.jsonl  samples.268435712.jsonl  samples.jsonl        the samples, one line each
    samples.0.index  samples.268435712.index  samples.index        the place of each step in them (`samples_index.py`)

The number in a name is the offset of the first byte of the part. Offsets count from the first sample of the run, so the
place of a sample stays the same when its file is put aside and when older parts are removed. A step is in one part.
Parts that were put aside are never written; a rollback may take the newest one back, and cut it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.jsonl_log import lines_backwards, lines_between

MOST_ATTEMPTS = 10
"""Attempts to open all files between two changes of their names. A change takes as long as writing a part."""


def numbered_path(path: Path, start: int) -> Path:
    """`numbered_path(Path("samples.jsonl"), 64) == Path("samples.64.jsonl")`."""
    return path.with_suffix(f".{start}{path.suffix}")


def numbered_parts(path: Path) -> list[int]:
    """Return the starts of the parts that were put aside, in order."""
    names = [each.name for each in path.parent.glob(f"{path.stem}.*{path.suffix}")]
    starts = [name.removeprefix(f"{path.stem}.").removesuffix(path.suffix) for name in names]
    return sorted(int(start) for start in starts if start.isdecimal())


def start_of_newest(path: Path) -> int:
    """Return the offset of the first byte of the file that is written: where the newest part ends. FileNotFoundError if
    that part was taken back meanwhile."""
    starts = numbered_parts(path)
    return starts[-1] + numbered_path(path, starts[-1]).stat().st_size if starts else 0


class SamplePart(NamedTuple):
    """One opened file; `path` leads to it also after it was renamed or removed."""

    start: int
    size: int
    descriptor: int

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self.descriptor}")


class SampleFiles:
    """The samples of a run as they are now. Its files stay open: what the run does meanwhile changes nothing here."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunFolder(run_dir)
        self._descriptors: list[int] = []
        self.indexes: tuple[SamplePart, ...] = ()
        """Parts of the index; `start` is the number in its name, 0 of the last one."""
        self.parts: tuple[SamplePart, ...] = ()
        try:
            for _ in range(MOST_ATTEMPTS):
                if self._open():
                    break
                self.close()
        except OSError:
            self.close()
            raise

    def _open(self) -> bool:
        """Open all files; return whether their names have not changed meanwhile. An index has no entry for what is not
        in the samples yet, so it is opened first."""
        samples, index = self._folder.samples_file, self._folder.samples_index_file
        before, indexed = numbered_parts(samples), numbered_parts(index)
        indexes = [self._opened(numbered_path(index, start), start) for start in indexed]
        indexes.append(self._opened(index, 0))
        parts = [self._opened(numbered_path(samples, start), start) for start in before]
        newest = self._opened(samples, parts[-1].end if parts and parts[-1] is not None else 0)
        self.indexes = tuple(each for each in indexes if each is not None)
        self.parts = tuple(each for each in (*parts, newest) if each is not None)
        return None not in parts and numbered_parts(samples) == before

    def _opened(self, path: Path, start: int) -> SamplePart | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        self._descriptors.append(descriptor)
        return SamplePart(start, os.fstat(descriptor).st_size, descriptor)

    @property
    def start(self) -> int:
        """Offset of the oldest sample that is kept."""
        return self.parts[0].start if self.parts else 0

    @property
    def end(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def part_at(self, offset: int) -> SamplePart | None:
        """Return the part with this byte; None where there is none."""
        number = bisect_right(self.parts, offset, key=lambda part: part.start) - 1
        if number < 0 or offset >= self.parts[number].end:
            return None
        return self.parts[number]

    def lines_between(self, offset: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of the complete lines from an offset on, which begins a line."""
        limit = self.end if end is None else end
        for part in self.parts:
            begin, until = max(offset, part.start) - part.start, min(limit, part.end) - part.start
            if begin < until:
                for place, line in lines_between(part.path, offset=begin, end=until):
                    yield part.start + place, line

    def lines_backwards(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of the complete lines, the last one first; reads no more than is taken."""
        for part in reversed(self.parts):
            for place, line in lines_backwards(part.path):
                yield part.start + place, line

    def bytes_at(self, offset: int, end: int) -> bytes:
        """Return these bytes; what is no longer kept is left out."""
        part = self.part_at(offset)
        return b"" if part is None else os.pread(part.descriptor, end - offset, offset - part.start)

    def index_lines(self) -> Iterator[bytes]:
        for part in self.indexes:
            for _, line in lines_between(part.path, end=part.size):
                yield line

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.indexes = self.parts = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
