"""Events and logs of all processes in the order of time, read backwards from a cursor: the newest lines come first and
nothing is indexed.

A search for words reads up to a bound and says where it continues. Records of one request (a ticket, a step) are spread
over spans and journal, and are found by the run's search index (`record_search.py`).
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from kintsugi.page.line_files import offset_where
from kintsugi.page.schema import LogLine, LogPage
from kintsugi.page.timeline import processes_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Event, Span, Stamp
from kintsugi.telemetry.format import format_event
from kintsugi.telemetry.jsonl_log import paths_of
from kintsugi.telemetry.readings import time_of

CHUNK_SIZE = 256 << 10
MOST_BYTES = 3 << 20
"""Part of one file that one request reads."""
LONGEST_TEXT = 20_000
MOST_LIMIT = 2000
LOG = "log"
_STAMPED = re.compile(r"\W{0,2}(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)

Place = tuple[float, str, int]
"""Time, file and byte offset: the order of lines."""
_LAST: Place = (float("inf"), "", 0)


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines."""

    text: str = ""
    process: str = ""
    """A process, or all of a role."""
    since: float | None = None
    until: float | None = None
    cursor: str | None = None
    follow: str | None = None
    limit: int = 200


class _Follow(msgspec.Struct, frozen=True, array_like=True):
    """Cursor of a reader that follows: its last line, and the sizes of the logs, whose lines have no times."""

    place: Place
    sizes: dict[str, int]


class _Scan:
    """Lines that one file contributes, the newest first, and how far it was read."""

    def __init__(self) -> None:
        self.lines: list[tuple[Place, LogLine]] = []
        self.floor: float | None = None
        """Time before which the file was not read; None if it was read as far as needed."""


def encoded_place(place: Place) -> str:
    """Return a cursor as text for a URL."""
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode()


def _decoded(text: str, kind: type) -> object | None:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=kind)
    except (ValueError, msgspec.MsgspecError):
        return None


def read_logs(
    run_dir: Path, wanted: LogFilter, *, hosts: Mapping[str, str], offsets: Mapping[str, float]
) -> LogPage:
    """Return the newest lines before the cursor, or, with `follow`, the lines that were added."""
    limit = max(1, min(wanted.limit, MOST_LIMIT))
    processes = _with_logs(run_dir)
    problems: list[str] = []
    before = _LAST
    if wanted.cursor:
        decoded = _decoded(wanted.cursor, tuple[float, str, int])
        if not isinstance(decoded, tuple):
            problems.append("the cursor could not be read; the newest lines are shown")
        else:
            before = decoded
    following = _decoded(wanted.follow, _Follow) if wanted.follow else None
    after = following.place if isinstance(following, _Follow) else None
    sizes = following.sizes if isinstance(following, _Follow) else {}
    scans = []
    for process in processes:
        if wanted.process and wanted.process not in (process, process.rpartition("-")[0]):
            continue
        offset_s = offsets.get(hosts.get(process, ""), 0.0)
        scans += [
            _scanned(
                run_dir, path, wanted, before=before, after=after, sizes=sizes, limit=limit, offset_s=offset_s
            )
            for path in _files(run_dir, process)
        ]
    lines, next_cursor = _joined(scans, limit=limit)
    newest = max((place for place, _ in lines), default=after or (0.0, "", 0))
    if after is not None:
        newest = max(newest, after)
    return LogPage(
        lines=tuple(line for _, line in lines),
        next=next_cursor,
        last=base64.urlsafe_b64encode(msgspec.json.encode(_Follow(newest, _log_sizes(run_dir)))).decode(),
        processes=tuple(processes),
        problems=tuple(problems),
    )


def _with_logs(run_dir: Path) -> list[str]:
    """Return the processes of the run and others that have logs, as the watcher."""
    named = processes_of(run_dir)
    run = RunFolder(run_dir)
    others = {path.name.partition(".")[0] for path in run.logs_folder.glob("*.log")}
    others |= {path.name.partition(".")[0] for path in run.events_folder.glob("*.jsonl")}
    return [*named, *sorted(others - set(named))]


def _files(run_dir: Path, process: str) -> Iterator[Path]:
    run = RunFolder(run_dir)
    yield from paths_of(run.events_file(process))
    yield from paths_of(run.log_file(process))


def _log_sizes(run_dir: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(RunFolder(run_dir).logs_folder.glob("*.log"))}


def _joined(scans: list[_Scan], *, limit: int) -> tuple[list[tuple[Place, LogLine]], str | None]:
    """Merge the files: the newest lines, in the order of time, and the cursor for those before them.

    Where a file was not read far enough back, lines of others before that time are left for the next page.
    """
    floor = max((scan.floor for scan in scans if scan.floor is not None), default=None)
    every = sorted((found for scan in scans for found in scan.lines), key=lambda found: found[0])
    whole = [found for found in every if floor is None or found[0][0] >= floor]
    page = whole[-limit:]
    if len(page) < len(every) and page and len(whole) > len(page):
        return page, encoded_place(page[0][0])
    if floor is not None:
        return page, encoded_place((floor, "", 0))
    return page, None


def _scanned(
    run_dir: Path,
    path: Path,
    wanted: LogFilter,
    *,
    before: Place,
    after: Place | None,
    sizes: Mapping[str, int],
    limit: int,
    offset_s: float,
) -> _Scan:
    """Read one file backwards until it has given `limit` lines or as many bytes as one request may read."""
    scan = _Scan()
    is_log = path.suffix == ".log"
    source = str(path.relative_to(run_dir))
    earliest = max(after[0] if after is not None else 0.0, wanted.since or 0.0)
    try:
        with path.open("rb") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            changed = os.fstat(descriptor).st_mtime
            latest = min(before[0], wanted.until if wanted.until is not None else float("inf")) + offset_s
            end = size
            if not is_log and latest < float("inf"):
                end = min(
                    size, offset_where(descriptor, lambda line: (time_of(line) or 0.0) <= latest) + CHUNK_SIZE
                )
            floor_offset = sizes.get(path.name, 0) if is_log and after is not None else 0
            read = 0
            for start, lines in _backwards(descriptor, end, floor=floor_offset):
                read += CHUNK_SIZE
                oldest = latest
                for offset, raw in reversed(lines):
                    line = _line(
                        raw, offset, source=source, is_log=is_log, changed=changed, offset_s=offset_s
                    )
                    if line is None:
                        continue
                    oldest = min(oldest, line.time)
                    if _fits(line, offset, source, wanted, before=before, after=None if is_log else after):
                        scan.lines.append(((line.time, source, offset), line))
                if len(scan.lines) >= limit or start <= floor_offset:
                    if start > floor_offset:
                        scan.floor = oldest
                    break
                if oldest < earliest:
                    break
                if read >= MOST_BYTES:
                    scan.floor = oldest
                    break
    except OSError:
        return scan
    return scan


def _fits(
    line: LogLine, offset: int, source: str, wanted: LogFilter, *, before: Place, after: Place | None
) -> bool:
    place = (line.time, source, offset)
    if place >= before or (after is not None and place <= after):
        return False
    if (wanted.since is not None and line.time < wanted.since) or (
        wanted.until is not None and line.time > wanted.until
    ):
        return False
    if not wanted.text:
        return True
    haystack = f"{line.kind} {line.text}".lower()
    return all(word in haystack for word in wanted.text.lower().split())


def _backwards(descriptor: int, end: int, *, floor: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """Yield pieces of a file from its end: start of the piece, and its complete lines with their offsets."""
    rest = b""
    while end > floor:
        start = max(floor, end - CHUNK_SIZE)
        content = os.pread(descriptor, end - start, start) + rest
        begin = 0
        if start > floor:
            newline = content.find(b"\n")
            # The part of a line at the beginning belongs to the piece before.
            begin = newline + 1 if newline >= 0 else len(content)
        rest = content[:begin]
        lines, offset = [], start + begin
        for raw in content[begin:].split(b"\n"):
            if raw:
                lines.append((offset, raw))
            offset += len(raw) + 1
        yield start, lines
        end = start


def _line(
    raw: bytes, offset: int, *, source: str, is_log: bool, changed: float, offset_s: float
) -> LogLine | None:
    """Return a line of a log, or an event; None for a span and for a damaged line."""
    process = source.rpartition("/")[2].partition(".")[0]
    if is_log:
        text = raw.decode(errors="replace")[:LONGEST_TEXT]
        stamp = _stamp_in(text)
        time = changed if stamp is None else stamp
        return LogLine(
            time=time - offset_s,
            process=process,
            text=text,
            kind=LOG,
            line=f"{source}:{offset}",
            exact=stamp is not None,
        )
    if b'"kind":"Span"' in raw:
        return None
    try:
        stamp_found, event = _stamp_decoder.decode(raw), _event_decoder.decode(raw.strip(b"\0"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if isinstance(event, Span):
        return None
    return LogLine(
        time=stamp_found.time - offset_s,
        process=process,
        text=format_event(event)[:LONGEST_TEXT],
        kind=type(event).__name__,
        line=f"{source}:{offset}",
    )


def _stamp_in(text: str) -> float | None:
    """Return the time at the beginning of a log line."""
    found = _STAMPED.match(text)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(found[1]).timestamp()
    except ValueError:
        return None
    return moment + float(f"0.{found[2] or 0}")
