"""Files that the processes of a run write, and their entries, read piece by piece: no file is read as a whole.

events/<process>.jsonl, logs/<process>.log   a line is an entry
journal, journal.N                           a fact is an entry; its time is that of the input that led to it
figures/<process>.jsonl                      of agents only, for the measured offsets of their hosts' clocks
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from kintsugi.errors import KintsugiError
from kintsugi.journal.facts import Fact, StateFolded
from kintsugi.journal.format import HEADER_SIZE
from kintsugi.journal.journal import kept_files, read_records
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Event, Span, Stamp
from kintsugi.telemetry.format import format_event, format_fact, ids_in, ids_of, ids_of_fact
from kintsugi.types import Role, kind_of, process_id

CHUNK = 1 << 20
LONGEST_LINE = 64 << 10
"""Longest line; the rest of a longer one is another line, as of a process that prints without line breaks."""
HEAD = 64
"""Bytes at the beginning of a file that identify it after it was renamed or copied."""
LOG = "log"
"""Kind of the lines that a process printed."""
MASTER = process_id(Role.MASTER, 0)

_STAMPED = re.compile(r"\W{0,2}(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")

_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class SourceKind(StrEnum):
    EVENTS = "events"
    LOGS = "logs"
    JOURNAL = "journal"
    FIGURES = "figures"


class SourceFile(msgspec.Struct, frozen=True):
    """Current state of a file of a run folder."""

    path: str
    """Path inside the run folder."""
    family: SourceKind
    process: str
    inode: int
    size: int
    changed: float
    head: bytes


class SourceEntry(msgspec.Struct, frozen=True):
    """One searchable entry: its place, its text and its ids."""

    time: float
    is_exact: bool
    """False where a line has no time of its own: it was written at this time at the latest."""
    kind: str
    offset: int
    length: int
    text: str
    ids: frozenset[str] = frozenset()
    part: int = 0
    """Number of the fact within its decision, since several share one place."""
    begun: float | None = None
    """Start of something that took time."""
    record: int = 0
    """Sequence number of the journal record."""


def files_of(run_dir: Path) -> list[SourceFile]:
    """Return all files that entries are read from; a file that vanishes meanwhile is left out."""
    run = RunFolder(run_dir)
    patterns = {
        SourceKind.EVENTS: run.events_file("*"),
        SourceKind.LOGS: run.log_file("*"),
        SourceKind.FIGURES: run.readings_file("*"),
    }
    files = [_file(path, run_dir, family=SourceKind.JOURNAL, process=MASTER) for path in _journals(run)]
    files += [
        _file(path, run_dir, family=family, process=path.name.partition(".")[0])
        for family, pattern in patterns.items()
        for path in sorted(pattern.parent.glob(pattern.name))
    ]
    return [file for file in files if file is not None]


def _journals(run: RunFolder) -> list[Path]:
    """Return the journal and the files that it replaced when it was compacted, oldest first."""
    if not run.journal_file.exists():
        return []
    kept = kept_files(run.journal_file).values()
    # A compaction that was interrupted leaves a second name of the journal itself.
    return [*(path for path in kept if not path.samefile(run.journal_file)), run.journal_file]


def _file(path: Path, run_dir: Path, *, family: SourceKind, process: str) -> SourceFile | None:
    try:
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # A journal's header changes all the time, and its first record when it is compacted.
            opened.seek(HEADER_SIZE if family is SourceKind.JOURNAL else 0)
            head = opened.read(HEAD).rstrip(b"\0")
    except (FileNotFoundError, PermissionError):
        return None
    name = str(path.relative_to(run_dir))
    return SourceFile(name, family, process, status.st_ino, status.st_size, status.st_mtime, head)


def read_entries(run_dir: Path, file: SourceFile, *, offset: int) -> tuple[list[SourceEntry], int]:
    """Return some entries from a byte offset on, and the offset to continue from: the same while there are no more."""
    path = run_dir / file.path
    if file.family is SourceKind.JOURNAL:
        return _facts(path, offset=offset)
    lines, offset = whole_lines(path, offset=offset)
    if file.family is SourceKind.EVENTS:
        return list(_events(lines)), offset
    return list(_printed(lines, until=file.changed)), offset


Line = tuple[int, bytes]
"""Byte offset of a line, and the line."""


def whole_lines(path: Path, *, offset: int) -> tuple[list[Line], int]:
    """Return complete lines, without the zeros that a crash of the host may leave in a file."""
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


def _events(lines: list[Line]) -> Iterator[SourceEntry]:
    for offset, line in lines:
        try:
            stamp, event = _stamp_decoder.decode(line), _event_decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # A killed process may leave part of a line.
            continue
        begun = stamp.time - (stamp.monotonic - event.start) if isinstance(event, Span) else None
        kind = kind_of(event)
        ids = frozenset(ids_of(event))
        yield SourceEntry(stamp.time, True, kind, offset, len(line), format_event(event), ids, begun=begun)


def _printed(lines: list[Line], *, until: float) -> Iterator[SourceEntry]:
    """Yield printed lines; lines without a time, as of a traceback, get that of the line before."""
    time, is_exact = until, False
    for offset, line in lines:
        text = line.decode(errors="replace")
        if not text.strip():
            continue
        if (stamped := _time_of(text)) is not None:
            time, is_exact = stamped, True
        yield SourceEntry(time, is_exact, LOG, offset, len(line), text, frozenset(ids_in(text)))


def _time_of(text: str) -> float | None:
    """Return the time at the beginning of a line, in the usual formats of logging and of this host's time zone."""
    if (match := _STAMPED.match(text)) is None:
        return None
    try:
        seconds = datetime.fromisoformat(match[1]).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds + (float(f"0.{match[2]}") if match[2] else 0.0)


def _facts(path: Path, *, offset: int) -> tuple[list[SourceEntry], int]:
    records = read_records(path, offset=offset)
    entries = [
        SourceEntry(
            0.0,
            False,
            kind_of(fact),
            record.offset,
            record.end - record.offset,
            format_fact(fact),
            frozenset(ids_of_fact(fact)),
            part=part,
            record=record.sequence,
        )
        for record in records
        for part, fact in enumerate(record.facts)
        if not isinstance(fact, StateFolded)
    ]
    return entries, records[-1].end if records else offset


class SourceReader:
    """Reads entries from their places. Files stay open until `close`; after that they may have other names."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._descriptors: dict[str, int] = {}

    def line(self, path: str, *, offset: int, length: int) -> bytes:
        """Read one line; empty if the file is gone."""
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

    def fact(self, path: str, *, offset: int, part: int) -> Fact | None:
        try:
            records = read_records(self._run_dir / path, offset=offset, most=1)
        except (KintsugiError, FileNotFoundError):
            return None
        return records[0].facts[part] if records and part < len(records[0].facts) else None

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
