"""The files that a run's processes write, and what stands in them, piece by piece: no file is ever read as a whole.

events/<process>.jsonl, logs/<process>.log   a line is an entry
journal                                      a fact is an entry; its time is that of the input it follows from
figures/<process>.jsonl                      of agents only, for what they measured of their hosts' clocks
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from kintsugi.control.journal import read_records
from kintsugi.errors import KintsugiError
from kintsugi.facts import Fact
from kintsugi.observe.events import Event, Span, Stamp
from kintsugi.observe.telling import ids_in, ids_of, ids_of_fact, told, told_fact
from kintsugi.types import Role, process_id

CHUNK = 1 << 20
LONGEST_LINE = 64 << 10
"""The rest of a longer one is another line: somebody prints without end."""
HEAD = 64
"""Bytes at the beginning of a file by which it is known again after it was renamed or copied."""
LOG = "log"
"""The kind of what a process printed."""
MASTER = process_id(Role.MASTER, 0)
JOURNAL = "journal"

_STAMPED = re.compile(r"\W{0,2}(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")

_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Family(StrEnum):
    EVENTS = "events"
    LOGS = "logs"
    JOURNAL = "journal"
    FIGURES = "figures"


class File(msgspec.Struct, frozen=True):
    """A file of a run folder as it is now."""

    path: str
    """Inside the run folder."""
    family: Family
    process: str
    inode: int
    size: int
    changed: float
    head: bytes


class Entry(msgspec.Struct, frozen=True):
    """Something that can be found: where it stands, what it says, what it is about."""

    time: float
    is_exact: bool
    """False where a line has no time of its own, and was written at this time at the latest."""
    kind: str
    offset: int
    length: int
    text: str
    ids: frozenset[str] = frozenset()
    part: int = 0
    """Of several in one place: which of a decision's facts."""
    begun: float | None = None
    """Of something that took time."""
    record: int = 0
    """Of the journal."""


def files_of(run_dir: Path) -> list[File]:
    """Everything of a run that entries are read from; what vanishes meanwhile is left out."""
    patterns = {Family.EVENTS: "*.jsonl", Family.LOGS: "*.log", Family.FIGURES: "*.jsonl"}
    files = [_file(run_dir / JOURNAL, run_dir, family=Family.JOURNAL, process=MASTER)]
    files += [
        _file(path, run_dir, family=family, process=path.name.partition(".")[0])
        for family, pattern in patterns.items()
        for path in sorted((run_dir / family.value).glob(pattern))
    ]
    return [file for file in files if file is not None]


def _file(path: Path, run_dir: Path, *, family: Family, process: str) -> File | None:
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # A journal's header changes all the time.
            head = b"" if family is Family.JOURNAL else opened.read(HEAD).rstrip(b"\0")
    except (FileNotFoundError, PermissionError):
        return None
    name = str(path.relative_to(run_dir))
    return File(name, family, process, status.st_ino, status.st_size, status.st_mtime, head)


def read_entries(run_dir: Path, file: File, *, offset: int) -> tuple[list[Entry], int]:
    """Some entries from a byte offset on, and the offset to go on from: the same where there are no more yet."""
    path = run_dir / file.path
    if file.family is Family.JOURNAL:
        return _facts(path, offset=offset)
    lines, offset = whole_lines(path, offset=offset)
    if file.family is Family.EVENTS:
        return list(_events(lines)), offset
    return list(_printed(lines, until=file.changed)), offset


Line = tuple[int, bytes]
"""Where it begins, and the line."""


def whole_lines(path: Path, *, offset: int) -> tuple[list[Line], int]:
    """Lines that are written to their end, without the zeros that a host's crash may leave in a file."""
    try:
        with path.open("rb") as file:
            content = os.pread(file.fileno(), CHUNK, offset)
    except FileNotFoundError:
        return [], offset
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and (len(content.rstrip(b"\0")) >= LONGEST_LINE or len(content) == CHUNK):
        whole = content[:LONGEST_LINE]
    lines: list[Line] = []
    start = offset
    for line in whole.splitlines(keepends=True):
        zeros = len(line) - len(line.lstrip(b"\0"))
        lines.append((start + zeros, line.strip(b"\0\r\n")))
        start += len(line)
    return lines, start


def _events(lines: list[Line]) -> Iterator[Entry]:
    for offset, line in lines:
        try:
            stamp, event = _stamp_decoder.decode(line), _event_decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # What a killed process left of a line.
            continue
        begun = stamp.time - (stamp.monotonic - event.start) if isinstance(event, Span) else None
        kind = type(event).__name__
        ids = frozenset(ids_of(event))
        yield Entry(stamp.time, True, kind, offset, len(line), told(event), ids, begun=begun)


def _printed(lines: list[Line], *, until: float) -> Iterator[Entry]:
    """What follows a line with a time of its own, a traceback, has the same."""
    time, is_exact = until, False
    for offset, line in lines:
        text = line.decode(errors="replace")
        if not text.strip():
            continue
        if (stamped := _time_of(text)) is not None:
            time, is_exact = stamped, True
        yield Entry(time, is_exact, LOG, offset, len(line), text, frozenset(ids_in(text)))


def _time_of(text: str) -> float | None:
    """Of a line that begins with a time of this host, as the usual formats of logging do."""
    if (match := _STAMPED.match(text)) is None:
        return None
    try:
        seconds = datetime.fromisoformat(match[1]).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{match[2]}") if match[2] else 0.0)


def _facts(path: Path, *, offset: int) -> tuple[list[Entry], int]:
    records = read_records(path, offset=offset)
    entries = [
        Entry(
            0.0,
            False,
            type(fact).__name__,
            record.offset,
            record.end - record.offset,
            told_fact(fact),
            frozenset(ids_of_fact(fact)),
            part=part,
            record=record.sequence,
        )
        for record in records
        for part, fact in enumerate(record.facts)
    ]
    return entries, records[-1].end if records else offset


class Reader:
    """Reads entries back from where they stand. Files stay open until `close`: then they may have other names."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptors: dict[str, int] = {}

    def line(self, path: str, *, offset: int, length: int) -> bytes:
        """Empty where the file is gone."""
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(self._run_dir / path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        return os.pread(self._descriptors[path], length, offset)

    def event(self, path: str, *, offset: int, length: int) -> Event | None:
        try:
            return _event_decoder.decode(self.line(path, offset=offset, length=length))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def fact(self, *, offset: int, part: int) -> Fact | None:
        try:
            records = read_records(self._run_dir / JOURNAL, offset=offset, most=1)
        except (KintsugiError, FileNotFoundError):
            return None
        return records[0].facts[part] if records and part < len(records[0].facts) else None

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
