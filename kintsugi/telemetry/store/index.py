"""`<run>/store.db`: a searchable index of everything that the processes of a run recorded.

Indexed entries stay in their files. The store has the time, process, kind, place, words and ids of each entry. Nothing
depends on it: if it is deleted, it is built again.

Each refresh continues where the last one ended, piece by piece; a piece and its new position are one transaction. So
the index may be filled while the run is active, by several processes, and by one that is killed halfway. Where the run
folder can not be written (another user's, or a full disk), the index is built in a temporary file.

Times are the master's: the measured offset of a host's clock (`ClockSample`) is subtracted from the times of the
processes that were on that host.
"""

from __future__ import annotations

import math
import re
import sqlite3
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Self

import msgspec

from kintsugi.errors import StorageError
from kintsugi.journal.facts import ProcessJoined, ProcessRequested
from kintsugi.journal.inputs import read_moments
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.readings import ClockOffsetReading, samples_in
from kintsugi.telemetry.store.sources import (
    SourceEntry,
    SourceFile,
    SourceKind,
    SourceReader,
    files_of,
    read_entries,
    whole_lines,
)
from kintsugi.types import Role, kind_of

LAYOUT = 2
"""Version of the tables and their contents; a store of another version is built again."""
MOST_FORGOTTEN = 1_000_000
"""Entries of deleted files, on top of twice the remaining ones, above which the index is built again."""
BUSY_S = 30.0
"""Longest wait for another process that fills the index."""
_CLOCK_MARK = b'"ClockSample"'

_TABLES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL);
CREATE TABLE sources (id INTEGER PRIMARY KEY, path TEXT, family TEXT, process TEXT, inode INTEGER, head BLOB,
                      offset INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, exact INTEGER, process INTEGER, kind INTEGER,
                      source INTEGER, offset INTEGER, length INTEGER, part INTEGER, begun REAL);
CREATE INDEX records_by_time ON records (time, id);
CREATE INDEX records_by_process ON records (process, time, id);
CREATE TABLE mentions (subject TEXT, record INTEGER, PRIMARY KEY (subject, record)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5 (text, content='', columnsize=0);
CREATE TABLE clocks (host TEXT, time REAL, offset_s REAL, error_s REAL, PRIMARY KEY (host, time)) WITHOUT ROWID;
CREATE TABLE places (process TEXT, since REAL, host TEXT, PRIMARY KEY (process, since)) WITHOUT ROWID;
CREATE TABLE moments (record INTEGER PRIMARY KEY, time REAL);
CREATE TABLE inputs (id INTEGER PRIMARY KEY CHECK (id = 0), offset INTEGER);
INSERT INTO inputs VALUES (0, 0);
"""


class ClockState(msgspec.Struct, frozen=True):
    """Offset of a host's clock against the master's, from a time of that clock on."""

    time: float
    offset_s: float
    error_s: float

    @property
    def correction_s(self) -> float:
        """Seconds to subtract: none where the offset is within its error, as on the master's own host."""
        return self.offset_s if abs(self.offset_s) > self.error_s else 0.0


class RunStore:
    """The index of one run. `refresh` adds new entries; search and tracing query it by SQL.

    with RunStore(run_dir) as store:
        store.refresh()
        for line in search(store, Query(keyword="mismatch")): …
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.reader = SourceReader(run_dir)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self.database = _opened(RunFolder(run_dir).index_file)
        except sqlite3.DatabaseError:
            self.database = self._opened_elsewhere()
        self._names: dict[str, int] = {}

    def _opened_elsewhere(self) -> sqlite3.Connection:
        self._temporary = tempfile.TemporaryDirectory(prefix="kintsugi-store-")
        return _opened(RunFolder(self._temporary.name).index_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.database.close()
        self.reader.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def refresh(self, *, progress: Callable[[int, int], None] = lambda done, size: None) -> None:
        """Add what was recorded since the last refresh. `progress` receives (bytes read, bytes in all)."""
        try:
            self._refresh(progress)
        except sqlite3.DatabaseError as error:
            if self._temporary is not None:
                raise StorageError(f"{self.run_dir}: can not be indexed: {error}") from error
            with suppress(sqlite3.Error):
                self.database.close()
            self.database = self._opened_elsewhere()
            self._names = {}
            self.refresh(progress=progress)

    def _refresh(self, progress: Callable[[int, int], None]) -> None:
        # Open files may have been renamed.
        self.reader.close()
        files = files_of(self.run_dir)
        with self._writing():
            numbers = self._recognised(files)
        # The journal has the hosts of processes, and agents the offsets of clocks: both are needed for the other files.
        order = [SourceKind.JOURNAL, SourceKind.FIGURES, SourceKind.EVENTS, SourceKind.LOGS]
        size, before = sum(file.size for file in files), 0
        for file in sorted(files, key=lambda file: order.index(file.family)):
            while end := self._take_piece(file, numbers[file.path]):
                progress(min(before + end, size), size)
            before += file.size

    def _recognised(self, files: list[SourceFile]) -> dict[str, int]:
        """Return path → number of the source that a file is, under any earlier name; drop sources whose files are
        gone."""
        known = self.database.execute("SELECT id, path, inode, head, offset FROM sources").fetchall()
        numbers: dict[str, int] = {}
        left = {number: (path, inode, head, offset) for number, path, inode, head, offset in known}
        for same in (_is_same_file, _is_copied_file):
            for file in files:
                for number, (path, inode, head, offset) in left.items():
                    if file.path in numbers or offset > file.size or not file.head.startswith(head):
                        continue
                    if same(file, path=path, inode=inode):
                        numbers[file.path] = number
                        del left[number]
                        break
        for number in left:
            self._forget(number)
        if left and self._is_mostly_forgotten():
            self._empty()
            numbers = {}
        for file in files:
            number = numbers.get(file.path)
            row = (file.path, file.family.value, file.process, file.inode, file.head)
            if number is None:
                columns = "(path, family, process, inode, head) VALUES (?, ?, ?, ?, ?)"
                number = self.database.execute(f"INSERT INTO sources {columns}", row).lastrowid
                assert number is not None
                numbers[file.path] = number
            else:
                assign = "path = ?, family = ?, process = ?, inode = ?, head = ?"
                self.database.execute(f"UPDATE sources SET {assign} WHERE id = ?", (*row, number))
        return numbers

    def _forget(self, source: int) -> None:
        """Delete the entries of a source. Their words stay in the full-text index, under numbers that are not
        reused."""
        inner = "SELECT id FROM records WHERE source = ?"
        self.database.execute(f"DELETE FROM mentions WHERE record IN ({inner})", (source,))
        self.database.execute("DELETE FROM records WHERE source = ?", (source,))
        self.database.execute("DELETE FROM sources WHERE id = ?", (source,))

    def _is_mostly_forgotten(self) -> bool:
        (count,) = self.database.execute("SELECT count(*) FROM records").fetchone()
        row = self.database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
        return row is not None and row[0] > MOST_FORGOTTEN + 2 * count

    def _empty(self) -> None:
        """Delete all entries: words can only be deleted together."""
        for table in ("records", "mentions", "sources"):
            self.database.execute(f"DELETE FROM {table}")
        self.database.execute("DELETE FROM sqlite_sequence WHERE name = 'records'")
        self.database.execute("INSERT INTO words (words) VALUES ('delete-all')")

    def _take_piece(self, file: SourceFile, source: int) -> int:
        """Index one piece of a file, from where any process last read to. Return its end; 0 if nothing is new."""
        with self._writing():
            row = self.database.execute("SELECT offset FROM sources WHERE id = ?", (source,)).fetchone()
            if row is None:  # Another process found that the file is gone.
                return 0
            (offset,) = row
            if file.family is SourceKind.FIGURES:
                end = self._take_clocks(file, offset)
            else:
                entries, end = read_entries(self.run_dir, file, offset=offset)
                if file.family is SourceKind.JOURNAL:
                    entries = list(self._timed(entries))
                    self._take_places(entries, path=file.path)
                self._insert(entries, process=file.process, source=source)
            self.database.execute("UPDATE sources SET offset = ? WHERE id = ?", (end, source))
        return end if end > offset else 0

    def _take_clocks(self, file: SourceFile, offset: int) -> int:
        """Index the clock offsets of a readings file; other readings are found by time in the file itself."""
        if not file.process.startswith(Role.AGENT.value):
            return file.size
        lines, end = whole_lines(self.run_dir / file.path, offset=offset)
        for record in samples_in(line for _, line in lines if _CLOCK_MARK in line):
            if isinstance(record.sample, ClockOffsetReading):
                self._take_clock(record.sample, record.stamp.time)
        return end

    def _take_clock(self, sample: ClockOffsetReading, time: float) -> None:
        """Keep an offset that adds information. Earlier entries of the host are corrected by its first offset."""
        query = "SELECT time, offset_s, error_s FROM clocks WHERE host = ? ORDER BY time DESC LIMIT 1"
        row = self.database.execute(query, (sample.host,)).fetchone()
        last = None if row is None else ClockState(*row)
        new = ClockState(time, sample.offset_s, sample.error_s)
        if last is not None and abs(last.offset_s - new.offset_s) <= last.error_s <= new.error_s:
            return
        self.database.execute(
            "INSERT OR REPLACE INTO clocks VALUES (?, ?, ?, ?)",
            (sample.host, time, sample.offset_s, sample.error_s),
        )
        if last is None and new.correction_s:
            self._correct(sample.host, new.correction_s)

    def _correct(self, host: str, offset_s: float) -> None:
        """Subtract an offset from the times of entries that processes wrote while they were on a host."""
        for (process,) in self.database.execute(
            "SELECT DISTINCT process FROM places WHERE host = ?", (host,)
        ).fetchall():
            stays, number = self._stays(process), self._name(process)
            bounds = [-math.inf, *(since for since, _ in stays[1:]), math.inf]
            for (_, place), since, end in zip(stays, bounds, bounds[1:], strict=False):
                if place == host:
                    self.database.execute(
                        "UPDATE records SET time = time - ?, begun = begun - ? "
                        "WHERE exact AND process = ? AND time >= ? AND time < ?",
                        (offset_s, offset_s, number, since, end),
                    )

    def clocks(self, host: str) -> list[ClockState]:
        """Return the known offsets of a host's clock, in the order of time."""
        query = "SELECT time, offset_s, error_s FROM clocks WHERE host = ? ORDER BY time"
        return [ClockState(*row) for row in self.database.execute(query, (host,))]

    def host_of(self, process: str) -> str | None:
        """Return the current or last host of a process."""
        stays = self._stays(process)
        return stays[-1][1] if stays else None

    def _stays(self, process: str) -> list[tuple[float, str]]:
        """Return (since, host) of a process in the order of time; it was on the first host from the beginning."""
        query = "SELECT since, host FROM places WHERE process = ? ORDER BY since"
        return self.database.execute(query, (process,)).fetchall()

    def _take_places(self, facts: Iterable[SourceEntry], *, path: str) -> None:
        for entry in facts:
            if entry.kind not in (kind_of(ProcessRequested), kind_of(ProcessJoined)):
                continue
            match self.reader.fact(path, offset=entry.offset, part=entry.part):
                case ProcessRequested(process=process, host=host):
                    self._place(process, host, since=entry.time)
                case ProcessJoined(peer=peer):
                    self._place(peer.process, peer.host, since=entry.time)
                case _:
                    pass

    def _place(self, process: str, host: str, *, since: float) -> None:
        query = "SELECT host FROM places WHERE process = ? AND since <= ? ORDER BY since DESC LIMIT 1"
        before = self.database.execute(query, (process, since)).fetchone()
        if before is None or before[0] != host:
            row = (process, since, host)
            self.database.execute("INSERT OR REPLACE INTO places VALUES (?, ?, ?)", row)

    def _timed(self, facts: list[SourceEntry]) -> Iterator[SourceEntry]:
        """Yield facts with the times of the inputs that led to them; inputs are recorded first."""
        if facts:
            self._take_moments()
        last, query = 0.0, "SELECT max(time) FROM moments WHERE record <= ?"
        for entry in facts:
            found = self.database.execute(
                "SELECT time FROM moments WHERE record = ?", (entry.record,)
            ).fetchone()
            if found is None and not last:
                (last,) = self.database.execute(query, (entry.record,)).fetchone()
                last = last or 0.0
            last = found[0] if found is not None else last
            yield msgspec.structs.replace(entry, time=last, is_exact=found is not None)

    def _take_moments(self) -> None:
        path = RunFolder(self.run_dir).inputs_file
        while path.exists():
            (offset,) = self.database.execute("SELECT offset FROM inputs").fetchone()
            moments, end = read_moments(path, offset=offset)
            if not moments:
                return
            timed = {moment.after + 1: moment.wall for moment in moments if moment.wall}
            self.database.executemany("INSERT OR REPLACE INTO moments VALUES (?, ?)", timed.items())
            self.database.execute("UPDATE inputs SET offset = ?", (end,))

    def _insert(self, entries: list[SourceEntry], *, process: str, source: int) -> None:
        row = self.database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
        numbered = list(zip(count(row[0] + 1 if row else 1), entries, strict=False))
        corrected = self.correction(process)
        process_id = self._name(process)
        self.database.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    number,
                    corrected(entry.time) if entry.is_exact else entry.time,
                    entry.is_exact,
                    process_id,
                    self._name(entry.kind),
                    source,
                    entry.offset,
                    entry.length,
                    entry.part,
                    None if entry.begun is None else entry.begun - (entry.time - corrected(entry.time)),
                )
                for number, entry in numbered
            ),
        )
        self.database.executemany(
            "INSERT INTO words (rowid, text) VALUES (?, ?)",
            ((number, f"{_words_of(entry.kind)} {entry.text}") for number, entry in numbered),
        )
        self.database.executemany(
            "INSERT OR IGNORE INTO mentions VALUES (?, ?)",
            ((subject, number) for number, entry in numbered for subject in entry.ids),
        )

    def correction(self, process: str) -> Callable[[float], float]:
        """Return a function from times of a process to times of the master."""
        stays = self._stays(process)
        begins, known = [since for since, _ in stays], {host: self.clocks(host) for _, host in stays}
        if not any(known.values()):
            return lambda time: time
        clocks = [([state.time for state in known[host]], known[host]) for _, host in stays]

        def corrected(time: float) -> float:
            times, states = clocks[max(0, bisect_right(begins, time) - 1)]
            return time - states[max(0, bisect_right(times, time) - 1)].correction_s if states else time

        return corrected

    def _name(self, name: str) -> int:
        if name not in self._names:
            self.database.execute("INSERT OR IGNORE INTO names (name) VALUES (?)", (name,))
            (self._names[name],) = self.database.execute(
                "SELECT id FROM names WHERE name = ?", (name,)
            ).fetchone()
        return self._names[name]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run one exclusive transaction: other processes that fill the store wait."""
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._names = {}
            self.database.rollback()
            raise
        self.database.commit()


@lru_cache(maxsize=1024)
def _words_of(kind: str) -> str:
    """`_words_of("StepCommitted") == "StepCommitted Step Committed"`, so that each of its words is found."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", kind)
    return kind if words == kind else f"{kind} {words}"


def _is_same_file(file: SourceFile, *, path: str, inode: int) -> bool:
    """Return whether a file is the known one, perhaps renamed: bounded logs are rotated."""
    return file.inode == inode


def _is_copied_file(file: SourceFile, *, path: str, inode: int) -> bool:
    """Return whether a file is a copy of the known one. A journal that another master continued is another file."""
    return file.path == path and file.inode != inode and file.family is not SourceKind.JOURNAL


def _opened(path: Path) -> sqlite3.Connection:
    """Open the store at this path; build it again if it is damaged or of another layout."""
    database = _connected(path)
    try:
        (layout,) = database.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        database.close()
        raise
    except sqlite3.DatabaseError:  # Damaged, or no database at all.
        layout = None
    if layout == LAYOUT:
        return database
    if layout != 0:
        database.close()
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            path.with_name(name).unlink(missing_ok=True)
        database = _connected(path)
    try:
        _lay_out(database)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _lay_out(database: sqlite3.Connection) -> None:
    with suppress(
        sqlite3.OperationalError
    ):  # Another process has it open, or the file system does not support it.
        database.execute("PRAGMA journal_mode = WAL")
    database.execute("BEGIN IMMEDIATE")
    (layout,) = database.execute("PRAGMA user_version").fetchone()
    if layout != LAYOUT:  # Otherwise another process has just created the tables.
        for statement in filter(str.strip, _TABLES.split(";")):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {LAYOUT}")
    database.commit()


def _connected(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    # A power failure may damage the index, which can be built again; a killed process can not.
    database.execute("PRAGMA synchronous = OFF")
    return database
