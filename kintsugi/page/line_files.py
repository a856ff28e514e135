"""Reading of large line files in parts: a window of time, the last lines, complete lines from an offset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kintsugi.telemetry.jsonl_log import lines_in, paths_of
from kintsugi.telemetry.readings import time_of

SEARCHED_SIZE = 32 << 10
"""Length at which a binary search ends; the rest is read line by line."""
CHUNK_SIZE = 1 << 20
LONGEST_LINE = 16 << 20
"""A longer line is not read; it is one problem."""

FileId = tuple[int, int, int]
"""Inode, size and time of the last change: a file with the same id is unchanged."""


def file_id(path: Path) -> FileId | None:
    """Return the id of a file; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def last_lines(path: Path, *, size: int = 64 << 10) -> list[bytes]:
    """Return the complete lines within the last bytes of a file; none if it is missing."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            content = file.read(size)
    except OSError:
        return []
    lines = lines_in(content)
    return lines[1:] if end > size else lines


def window(path: Path, *, since: float, until: float, most_bytes: int) -> tuple[list[bytes], bool]:
    """Return the lines of a bounded log (`{"time":…`) with times in [since, until], and whether some were left out.

    Older files of the log are included where they reach into the window.
    """
    found: list[bytes] = []
    left = most_bytes
    for each in reversed(paths_of(path)):
        lines, first = _window_of(each, since=since, until=until, most_bytes=left)
        found[:0] = lines
        left -= sum(map(len, lines))
        if left <= 0:
            return found, True
        if first is not None and first < since:
            break
    return found, False


def _window_of(
    path: Path, *, since: float, until: float, most_bytes: int
) -> tuple[list[bytes], float | None]:
    """Return the lines of one file, and the time of its first line."""
    try:
        with path.open("rb") as file:
            first = time_of(file.readline(CHUNK_SIZE))
            if first is not None and first > until:
                return [], first
            begin = offset_where(file.fileno(), lambda line: _is_before(line, since))
            end = offset_where(file.fileno(), lambda line: _is_before(line, until))
            size = min(end - begin + 2 * SEARCHED_SIZE, most_bytes)
            lines = lines_in(os.pread(file.fileno(), size, begin))
    except OSError:
        return [], None
    return [line for line in lines if _is_within(line, since, until)], first


def _is_before(line: bytes, moment: float) -> bool:
    time = time_of(line)
    return time is not None and time < moment


def _is_within(line: bytes, since: float, until: float) -> bool:
    time = time_of(line)
    return time is not None and since <= time <= until


def offset_where(descriptor: int, is_before: Callable[[bytes], bool]) -> int:
    """Return about where lines that are not `is_before` begin, in a file that is ordered so: the start of a line."""
    low, high = 0, os.fstat(descriptor).st_size
    while high - low > SEARCHED_SIZE:
        middle = (low + high) // 2
        start, line = line_after(descriptor, middle)
        if line and is_before(line):
            low = start
        else:
            high = middle
    return low


def line_after(descriptor: int, offset: int) -> tuple[int, bytes]:
    """Return start and content of the first line that begins after an offset; an empty one at the end of the file."""
    start = _next_line(descriptor, offset)
    return start, line_at(descriptor, start)


def _next_line(descriptor: int, offset: int) -> int:
    while chunk := os.pread(descriptor, CHUNK_SIZE, offset):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return offset + newline + 1
        offset += len(chunk)
    return offset


def line_at(descriptor: int, offset: int) -> bytes:
    """Return the complete line that begins at an offset, with its end; empty where there is none."""
    size = 16 << 10
    while True:
        content = os.pread(descriptor, size, offset)
        newline = content.find(b"\n")
        if newline >= 0:
            return content[: newline + 1]
        if len(content) < size or size >= LONGEST_LINE:
            return b""
        size *= 8


def line_before(descriptor: int, offset: int) -> int | None:
    """Return the start of the line that ends at an offset; None for the first line."""
    if offset <= 0:
        return None
    end = offset - 1
    while end > 0:
        start = max(0, end - (64 << 10))
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def lines_from(descriptor: int, offset: int, *, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of the complete lines from an offset on, without their ends; a line that is too long is
    yielded as an empty one."""
    read, rest, skipping = 0, b"", False
    start = offset
    while read < most_bytes and (chunk := os.pread(descriptor, CHUNK_SIZE, offset)):
        offset += len(chunk)
        read += len(chunk)
        parts = (rest + chunk).split(b"\n")
        rest = parts.pop()
        for part in parts:
            yield start, b"" if skipping else part
            skipping = False
            start += len(part) + 1
        if len(rest) > LONGEST_LINE:
            start, rest, skipping = start + len(rest), b"", True
