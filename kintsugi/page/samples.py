"""Samples of a run: an index of byte offsets that is built in the background, and pages of samples by filter and order.

    samples.jsonl ─► SampleIndex (offset, reward, length, …, 29 bytes a sample) ─► page of rows, read by offset

The number of a sample is the byte offset of its line (`telemetry/sample_files.py`), so a single sample, and the samples
of a step (which are in order), are found without the index.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kintsugi.page.line_files import line_at, line_before, lines_from, offset_where
from kintsugi.page.schema import GroupRow, Histogram, SampleRow
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.telemetry.sample_files import SampleFiles, SamplePart
from kintsugi.telemetry.step_metrics import SampleRecord

PIECE_BYTES = 4 << 20
"""Part of the file that is indexed between two looks at whether to go on."""
MOST_SAMPLES = 4_000_000
"""Samples that the index of one run holds."""
SHOWN_LENGTH = 600
"""Characters of a text in a list."""
SEARCHED_BYTES = 24 << 20
"""Part of the file that one request for words reads."""
SEARCHED_LINES = 10_000
"""Lines that one request for words reads in another order than that of the file."""
STEP_BYTES = 64 << 20
"""Part of the file that is read for one step."""
BINS = 20
MOST_LIMIT = 500
_NAME = RELATIVE.samples_file
_decoder = msgspec.json.Decoder(SampleRecord)


class _Indexed(msgspec.Struct, gc=False):
    """Fields of a sample that are in the index."""

    step: int
    ticket: str
    completion: str
    reward: float
    finish: str
    advantage: float | None = None


class _Step(msgspec.Struct, gc=False):
    step: int


_indexed_decoder = msgspec.json.Decoder(_Indexed)
_step_decoder = msgspec.json.Decoder(_Step)


class _Column:
    """A growing array. Parts that were returned stay valid and unchanged while it grows."""

    def __init__(self, kind: type[np.generic]) -> None:
        self._values = np.empty(1024, dtype=kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: list[Any]) -> None:
        end = self._count + len(values)
        if end > len(self._values):
            grown = np.empty(max(end, len(self._values) * 5 // 4), dtype=self._values.dtype)
            grown[: self._count] = self._values[: self._count]
            self._values = grown
        self._values[self._count : end] = values
        self._count = end

    def part(self) -> np.ndarray:
        return self._values[: self._count]

    def forget(self, count: int) -> None:
        """Remove the first values."""
        self._values = self._values[count:].copy()
        self._count -= count


def _group(ticket: str) -> int:
    """Return a number for a group; few groups share one, so the ticket itself is compared when a sample is read."""
    return hash(ticket) & 0x7FFF_FFFF


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples, in which order."""

    step: int | None = None
    group: str | None = None
    sort: str = "order"
    text: str = ""
    min: float | None = None
    max: float | None = None
    outcome: str | None = None
    cursor: str | None = None
    limit: int = 50


class FoundSamples(NamedTuple):
    items: list[SampleRow]
    next: str | None
    total: int
    histogram: Histogram
    groups: list[GroupRow]
    outcomes: dict[str, int]
    searched: float


class SampleIndex:
    """Index of the samples of one run. One thread at a time calls `extend`; readers take the part that exists."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._inode, self._end, self._size = 0, 0, 0
        """Inode of the file that was read last, the end of what was read of it, and the end of the samples."""
        self._begin = 0
        self._offsets = _Column(np.int64)
        self._groups = _Column(np.int32)
        self._lengths = _Column(np.int32)
        self._rewards = _Column(np.float64)
        self._advantages = _Column(np.float32)
        self._outcomes = _Column(np.uint8)
        self._columns = (
            self._offsets,
            self._groups,
            self._lengths,
            self._rewards,
            self._advantages,
            self._outcomes,
        )
        self._outcome_names: list[str] = []
        self.num_damaged = 0
        self.first_damaged = ""
        self.is_full = False

    @property
    def share(self) -> float:
        """Indexed part of the samples that are kept."""
        size = self._size - self._begin
        return min(1.0, max(0, self._end - self._begin) / size) if size > 0 else 1.0

    def __len__(self) -> int:
        return len(self._offsets)

    def problems(self) -> tuple[str, ...]:
        found = []
        if self.num_damaged:
            found.append(
                f"{_NAME}: {self.num_damaged} lines could not be read; the first is {self.first_damaged}"
            )
        if self.is_full:
            found.append(
                f"{_NAME}: only the first {MOST_SAMPLES:,} samples are sorted; choose a step to see others"
            )
        return tuple(found)

    def extend(self) -> bool:
        """Index the next piece of the samples; return whether there is more."""
        try:
            files = SampleFiles(self.run_dir)
        except OSError:
            files = None
        if files is None or not files.parts:
            with self._lock:
                self._reset()
            return False
        with files:
            if not self._is_continued(files):
                with self._lock:
                    self._reset()
            self._forget_before(files.start)
            self._begin, self._size = files.start, files.end
            part = files.part_at(max(self._end, files.start))
            if part is None or self.is_full:
                return False
            begin = max(self._end, part.start)
            lines = lines_from(part.descriptor, begin - part.start, most_bytes=PIECE_BYTES)
            self._inode = os.fstat(part.descriptor).st_ino
            return self._take([(part.start + offset, line) for offset, line in lines])

    def _is_continued(self, files: SampleFiles) -> bool:
        """Return whether what was read is still there, or was removed because it was old: whether the file that was
        read last is one of these, under whatever name, and has not been cut."""
        if self._end <= files.start or not self._inode:
            return self._end <= files.end
        last = files.part_at(self._end - 1)
        return last is not None and os.fstat(last.descriptor).st_ino == self._inode

    def _forget_before(self, offset: int) -> None:
        """Remove samples from the index that are no longer kept."""
        with self._lock:
            count = int(np.searchsorted(self._offsets.part(), offset))
            if count:
                for column in self._columns:
                    column.forget(count)
                self.is_full = False

    def _take(self, lines: list[tuple[int, bytes]]) -> bool:
        """Index these lines."""
        known = {name: number for number, name in enumerate(self._outcome_names)}
        decode, end = _indexed_decoder.decode, self._end
        rows: list[tuple[int, _Indexed]] = []
        for start, line in lines:
            end = start + len(line) + 1
            try:
                rows.append((start, decode(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.num_damaged += 1
                self.first_damaged = (
                    self.first_damaged or f"at byte {start}: {line[:40].decode(errors='replace')!r}"
                )
        names = list(self._outcome_names)
        for name in {row.finish for _, row in rows}:
            if name not in known and len(names) < 256:
                known[name] = len(names)
                names.append(name)
        nan = float("nan")
        with self._lock:
            self._outcome_names = names
            self._offsets.extend([start for start, _ in rows])
            self._groups.extend([_group(row.ticket) for _, row in rows])
            self._lengths.extend([len(row.completion) for _, row in rows])
            self._rewards.extend([row.reward for _, row in rows])
            self._advantages.extend([nan if row.advantage is None else row.advantage for _, row in rows])
            self._outcomes.extend([known.get(row.finish, 255) for _, row in rows])
            self.is_full = len(self._offsets) >= MOST_SAMPLES
            grew, self._end = end > self._end, end
        return grew and end < self._size and not self.is_full

    def columns(self) -> Columns:
        """Return the columns, as far as they are indexed."""
        with self._lock:
            return Columns(
                self._offsets.part(),
                self._groups.part(),
                self._lengths.part(),
                self._rewards.part(),
                self._advantages.part(),
                self._outcomes.part(),
                list(self._outcome_names),
            )


class Columns(NamedTuple):
    """Columns of the index: one entry per sample."""

    offsets: np.ndarray
    groups: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    outcomes: np.ndarray
    outcome_names: list[str]


def find(index: SampleIndex, wanted: SampleFilter) -> FoundSamples:
    """Return a page of samples. The samples of one step are read from the file, others by the index."""
    with SampleFiles(index.run_dir) as files:
        if not files.parts:
            return FoundSamples([], None, 0, histogram(np.empty(0)), [], {}, 1.0)
        columns = _columns_of_step(files, wanted.step) if wanted.step is not None else index.columns()
        chosen = _chosen(columns, wanted)
        scored = columns.rewards[_chosen(columns, msgspec.structs.replace(wanted, min=None, max=None))]
        items, following, searched = _page(files, columns, chosen, wanted)
        groups = _groups(files, columns) if wanted.step is not None else []
    numbers, counts = np.unique(columns.outcomes, return_counts=True)
    outcomes = {
        columns.outcome_names[number]: count
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        if number < len(columns.outcome_names)
    }
    return FoundSamples(items, following, len(chosen), histogram(scored), groups, outcomes, searched)


def _line_at(files: SampleFiles, offset: int) -> bytes:
    """Return the complete line that begins at an offset; empty where there is none, or none any more."""
    part = files.part_at(offset)
    return b"" if part is None else line_at(part.descriptor, offset - part.start)


def _columns_of_step(files: SampleFiles, step: int) -> Columns:
    """Read the samples of one step, which are together in one part: steps are written in order."""

    def is_before(line: bytes) -> bool:
        found = _step_in(line)
        return found is not None and found < step

    part = files.parts[0]
    for each in files.parts[1:]:
        first = _step_in(line_at(each.descriptor, 0))
        if first is not None and first > step:
            break
        part = each
    names: list[str] = []
    rows: list[tuple[int, _Indexed]] = []
    begin = offset_where(part.descriptor, is_before)
    for start, line in lines_from(part.descriptor, begin, most_bytes=STEP_BYTES):
        try:
            row = _indexed_decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if row.step > step:
            break
        if row.step == step:
            rows.append((part.start + start, row))
            if row.finish not in names:
                names.append(row.finish)
    return Columns(
        np.array([start for start, _ in rows], dtype=np.int64),
        np.array([_group(row.ticket) for _, row in rows], dtype=np.int64),
        np.array([len(row.completion) for _, row in rows], dtype=np.int64),
        np.array([row.reward for _, row in rows], dtype=np.float64),
        np.array([np.nan if row.advantage is None else row.advantage for _, row in rows], dtype=np.float64),
        np.array([names.index(row.finish) for _, row in rows], dtype=np.int64),
        names,
    )


def _step_in(line: bytes) -> int | None:
    try:
        return _step_decoder.decode(line).step
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _chosen(columns: Columns, wanted: SampleFilter) -> np.ndarray:
    """Return the numbers of the rows that fit, without the words."""
    fits = np.ones(len(columns.offsets), dtype=bool)
    if wanted.group is not None:
        fits &= columns.groups == _group(wanted.group)
    if wanted.min is not None:
        fits &= columns.rewards >= wanted.min
    if wanted.max is not None:
        fits &= columns.rewards <= wanted.max
    if wanted.outcome is not None:
        names = columns.outcome_names
        fits &= columns.outcomes == (names.index(wanted.outcome) if wanted.outcome in names else -1)
    return np.flatnonzero(fits)


def _sort_keys(columns: Columns, chosen: np.ndarray, sort: str) -> np.ndarray:
    """Return the key of each chosen row, the smallest first."""
    keys: np.ndarray
    match sort:
        case "worst":
            keys = columns.rewards[chosen]
        case "longest":
            keys = -columns.lengths[chosen].astype(np.float64)
        case "surprising":
            surprise = np.abs(columns.advantages[chosen])
            keys = -np.where(np.isfinite(surprise), surprise, -1.0)
        case _:
            keys = chosen.astype(np.float64)
    return keys


def _page(
    files: SampleFiles, columns: Columns, chosen: np.ndarray, wanted: SampleFilter
) -> tuple[list[SampleRow], str | None, float]:
    """Return the rows from the cursor on, the next cursor, and the part that was searched for words."""
    first = int(wanted.cursor) if wanted.cursor and wanted.cursor.isdecimal() else 0
    limit = max(1, min(wanted.limit, MOST_LIMIT))
    accepts = _acceptance(wanted)
    total, window = len(chosen), SEARCHED_LINES if wanted.text else limit
    if wanted.sort != "order":
        # Of equal ones the latest comes first.
        chosen = _smallest(chosen[::-1], _sort_keys(columns, chosen[::-1], wanted.sort), first + window)
    items: list[SampleRow] = []
    read, num_bytes = min(first, total), 0
    for row in chosen[first : first + window].tolist():
        offset = int(columns.offsets[row])
        line = _line_at(files, offset)
        read += 1
        num_bytes += len(line)
        if (found := accepts(offset, line)) is not None:
            items.append(found)
        if len(items) >= limit or num_bytes > SEARCHED_BYTES:
            break
    return items, str(read) if read < total else None, read / total if total else 1.0


def _smallest(chosen: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` rows with the smallest keys, in order; rows with equal keys stay in their order."""
    if count < len(chosen):
        limit = np.partition(keys, count - 1)[count - 1]
        below, equal = np.flatnonzero(keys < limit), np.flatnonzero(keys == limit)
        kept = np.concatenate([below, equal[: count - len(below)]])
        chosen, keys = chosen[kept], keys[kept]
    return chosen[np.argsort(keys, kind="stable")]


def _acceptance(wanted: SampleFilter) -> Callable[[int, bytes], SampleRow | None]:
    """Return a function from a line to its row; None where the group or the words are others."""
    text, group = wanted.text, wanted.group
    needle = msgspec.json.encode(text)[1:-1].lower() if text.isascii() else b""
    lowered = text.lower()

    def accepts(offset: int, line: bytes) -> SampleRow | None:
        if needle and needle not in line.lower():
            return None
        record = decoded(line)
        if record is None or (group is not None and record.ticket != group):
            return None
        if lowered and lowered not in record.prompt.lower() and lowered not in record.completion.lower():
            return None
        return row_of(record, offset)

    return accepts


def decoded(line: bytes) -> SampleRecord | None:
    """Decode a line; None for a damaged one."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def row_of(record: SampleRecord, offset: int) -> SampleRow:
    """Return a sample for a list; long texts are cut."""
    is_cut = max(len(record.prompt), len(record.completion)) > SHOWN_LENGTH
    return SampleRow(
        n=offset,
        step=record.step,
        group=record.ticket,
        sample=record.sample,
        version=record.version,
        reward=record.reward,
        rewards=record.reward_components,
        advantage=record.advantage,
        outcome=record.finish,
        length=len(record.completion),
        prompt=record.prompt[:SHOWN_LENGTH],
        completion=record.completion[:SHOWN_LENGTH],
        cut=is_cut,
    )


def _groups(files: SampleFiles, columns: Columns) -> list[GroupRow]:
    """Return the groups of a step, in the order of the file."""
    order: dict[int, list[int]] = {}
    for row, group in enumerate(columns.groups.tolist()):
        order.setdefault(group, []).append(row)
    groups = []
    for rows in order.values():
        offset = int(columns.offsets[rows[0]])
        record = decoded(_line_at(files, offset))
        rewards = columns.rewards[rows]
        if record is not None:
            groups.append(
                GroupRow(
                    group=record.ticket,
                    samples=len(rows),
                    mean=float(rewards.mean()),
                    low=float(rewards.min()),
                    high=float(rewards.max()),
                    first=offset,
                    prompt=record.prompt[:SHOWN_LENGTH],
                )
            )
    return groups


def histogram(rewards: np.ndarray) -> Histogram:
    """Return the rewards in equal bins; a single value is one bin.

    >>> histogram(np.array([0.0, 1.0, 1.0])).counts[-1]
    2
    """
    rewards = rewards[np.isfinite(rewards)]
    if not len(rewards):
        return Histogram(edges=(), counts=())
    low, high = float(rewards.min()), float(rewards.max())
    if low == high:
        return Histogram(edges=(low, high), counts=(len(rewards),))
    counts, edges = np.histogram(rewards, bins=BINS, range=(low, high))
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


class SampleAt(NamedTuple):
    """One sample with its neighbours in the file."""

    record: SampleRecord
    previous: int | None
    next: int | None


def sample_at(run_dir: Path, offset: int) -> SampleAt | None:
    """Return the sample at a byte offset; None where no line begins or the line is damaged."""
    try:
        with SampleFiles(run_dir) as files:
            part = files.part_at(offset)
            if part is None or not _begins_line(part, offset):
                return None
            line = line_at(part.descriptor, offset - part.start)
            record = decoded(line) if line else None
            if record is None:
                return None
            following = offset + len(line)
            has_next = bool(_line_at(files, following))
            return SampleAt(record, _line_before(files, offset), following if has_next else None)
    except OSError:
        return None


def _begins_line(part: SamplePart, offset: int) -> bool:
    place = offset - part.start
    return place == 0 or os.pread(part.descriptor, 1, place - 1) == b"\n"


def _line_before(files: SampleFiles, offset: int) -> int | None:
    """Return the start of the line that ends at an offset; None for the first line that is kept."""
    part = files.part_at(offset - 1)
    if part is None:
        return None
    start = line_before(part.descriptor, offset - part.start)
    return None if start is None else part.start + start


def step_range(run_dir: Path) -> tuple[int, ...]:
    """Return the first and last step that has samples; empty if there are none."""
    try:
        with SampleFiles(run_dir) as files:
            first = _line_at(files, files.start)
            end, last = files.end, b""
            for _ in range(4):
                start = _line_before(files, end)
                if start is None:
                    break
                last = _line_at(files, start)
                if last:
                    break
                end = start
            found = [_step_decoder.decode(line).step for line in (first, last) if line]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    return tuple(found)
