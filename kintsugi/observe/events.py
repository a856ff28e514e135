"""What happened, as typed events: one schema for log, dashboard and diagnosis.

Every process appends to its own file, `<run folder>/events/<process>.jsonl`, one JSON line per event, each line in one
write: a process that is killed leaves at most a torn last line, which the reader skips and the next incarnation ends.

A log tells of failures and must not be one. Space is allocated ahead of the end of the file, so that on a full disk
there is room to say so. An event that the disk does not take all the same is counted (`events.dropped`), the next one
is tried again, and the first that is taken is preceded by an alert that says how many were lost and why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.disk import reserve
from kintsugi.errors import Fault
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock


class _Event(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    pass


class ProcessBegan(_Event, frozen=True):
    """First event of a process."""

    role: str
    incarnation: str
    pid: int


class ProcessEnded(_Event, frozen=True):
    """Last event of a process that ended by itself; one that was killed has none."""

    code: int
    reason: str


class FaultSeen(_Event, frozen=True):
    """A failure, with the fault that it follows from."""

    fault: Fault


class Transition(_Event, frozen=True):
    """A state machine moved: `Transition("membership", "model-0", "joined", "lost", "pidfd: exit -9")`."""

    machine: str
    key: str
    before: str
    after: str
    reason: str


class Span(_Event, frozen=True):
    """Something that took time: `Span("actor_train", start=12.5, duration_s=0.8, attributes={"step": "3"})`."""

    name: str
    start: float
    """Monotonic seconds of this process."""
    duration_s: float
    attributes: dict[str, str] = {}


class Alert(_Event, frozen=True):
    """Something a person should look at, though the run goes on."""

    message: str
    values: dict[str, float] = {}


class Note(_Event, frozen=True):
    """A change worth a line."""

    message: str


Event = ProcessBegan | ProcessEnded | FaultSeen | Transition | Span | Alert | Note


class Stamp(msgspec.Struct, frozen=True):
    """When and where an event happened; the first fields of its line."""

    time: float
    """Wall clock, for people and for ordering across processes."""
    monotonic: float
    process: str


class Record(msgspec.Struct, frozen=True):
    """An event as it was read back."""

    stamp: Stamp
    event: Event


_CHUNK_SIZE = 256 << 10
_SPARE_SIZE = 64 << 10
"""Space that is kept free ahead of the end: some hundred events."""

_encoder = msgspec.json.Encoder()
_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def events_path(run_dir: str | Path, process: str) -> Path:
    """Where a process of a run writes its events."""
    return Path(run_dir) / "events" / f"{process}.jsonl"


class EventLog:
    """Appends the events of one process. Safe to use from several threads: a line is one write."""

    def __init__(self, path: Path, *, process: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._process = process
        self._clock = clock
        self._descriptor = -1
        self._allocated = 0
        """Where the space that is known to be ours ends."""
        self._num_lost = 0
        self._reason = ""
        self._torn = False
        """The file ends in the middle of a line, of which the next one must not become a part."""

    def emit(self, event: Event) -> None:
        """Append `{"time": …, "monotonic": …, "process": …, "kind": …, …}` as one line. Never raises OSError."""
        self.try_emit(event)

    def try_emit(self, event: Event) -> bool:
        """The same for who will say it again: False if the disk refused."""
        lines = (self._line(self._loss()) if self._num_lost else b"") + self._line(event)
        try:
            if self._descriptor < 0:
                self._open()
            if self._torn:
                lines = b"\n" + lines
            self._allocate(len(lines))
            written = os.write(self._descriptor, lines)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return False
        self._torn = written < len(lines)
        if self._torn:
            self._lose("only a part of a line was taken")
            return False
        self._num_lost = 0
        return True

    def _line(self, event: Event) -> bytes:
        stamp = _encoder.encode(Stamp(self._clock.wall(), self._clock.monotonic(), self._process))
        return stamp[:-1] + b"," + _encoder.encode(event)[1:] + b"\n"

    def _lose(self, reason: str) -> None:
        COUNTERS.add("events.dropped")
        self._num_lost += 1
        self._reason = reason

    def _loss(self) -> Alert:
        return Alert(f"events before this one were lost: {self._reason}", {"events": self._num_lost})

    def _allocate(self, size: int) -> None:
        """Keep `_SPARE_SIZE` ahead of what is about to be written; live on it while there is no more."""
        end = os.fstat(self._descriptor).st_size + size
        if end + _SPARE_SIZE <= self._allocated:
            return
        with suppress(OSError):
            reserve(self._descriptor, offset=end - size, size=size + _CHUNK_SIZE)
            self._allocated = end + _CHUNK_SIZE

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        self._torn = bool(size) and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self._allocated = 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_events(run_dir: str | Path, *, process: str | None = None) -> list[Record]:
    """All events of a run (or of one process) in the order of their wall clocks; torn lines are skipped."""
    folder = Path(run_dir) / "events"
    paths = sorted(folder.glob("*.jsonl")) if process is None else [events_path(run_dir, process)]
    records = [record for path in paths for record in _read_file(path)]
    return sorted(records, key=lambda record: record.stamp.time)


def _read_file(path: Path) -> Iterator[Record]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    yield from records_in(lines)


def records_in(lines: Iterable[bytes]) -> Iterator[Record]:
    """The events that these lines hold; torn ones are skipped."""
    for line in filter(None, lines):
        try:
            yield Record(_stamp_decoder.decode(line), _event_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
