"""What happened, as typed events: one schema for log, dashboard and diagnosis.

Every process appends to its own file, `<run folder>/events/<process>.jsonl`, one JSON line per event (`lines.py`). What
it did for each prompt is in `<process>.spans.jsonl` beside it, which is bounded: of a long run the last part is kept.

A log tells of failures and must not be one. An event that the disk does not take is counted (`events.dropped`), the
next one is tried again, and the first that is taken is preceded by an alert that says how many were lost and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kintsugi.errors import Fault
from kintsugi.observe.lines import LineFile, LineTail, lines_in, paths_of
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


class ProcessGone(_Event, frozen=True):
    """How a process ended, said by the agent that was its parent: one that was killed says nothing itself."""

    of: str
    incarnation: str
    pid: int
    status: int | None
    """Exit code, or minus the signal; None where another was its parent."""
    how: str
    """`killed by SIGKILL`."""
    memory_bytes: float = 0.0
    """Resident, when it was last looked at."""
    oom: bool = False
    """The kernel ended it because there was no memory left: its control group's, or the host's."""
    ordered: bool = False
    """Somebody of the run had asked for its end."""


Event = ProcessBegan | ProcessEnded | ProcessGone | FaultSeen | Transition | Span | Alert | Note


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


_encoder = msgspec.json.Encoder()
_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def events_path(run_dir: str | Path, process: str) -> Path:
    """Where a process of a run writes its events."""
    return Path(run_dir) / "events" / f"{process}.jsonl"


def spans_path(run_dir: str | Path, process: str) -> Path:
    """Where it writes the spans of single prompts and requests."""
    return Path(run_dir) / "events" / f"{process}.spans.jsonl"


class EventLog:
    """Appends the events of one process. Safe to use from several threads: a line is one write."""

    def __init__(self, path: Path, *, process: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._file = LineFile(path)
        self._process = process
        self._clock = clock
        self._num_lost = 0
        self._reason = ""

    def emit(self, event: Event) -> None:
        """Append `{"time": …, "monotonic": …, "process": …, "kind": …, …}` as one line. Never raises OSError."""
        self.try_emit(event)

    def try_emit(self, event: Event) -> bool:
        """The same for who will say it again: False if the disk refused."""
        lines = (self._line(self._loss()) if self._num_lost else b"") + self._line(event)
        try:
            self._file.append(lines)
        except OSError as error:
            COUNTERS.add("events.dropped")
            self._num_lost += 1
            self._reason = error.strerror or str(error)
            return False
        self._num_lost = 0
        return True

    def _line(self, event: Event) -> bytes:
        return stamped(Stamp(self._clock.wall(), self._clock.monotonic(), self._process), event)

    def _loss(self) -> Alert:
        return Alert(f"events before this one were lost: {self._reason}", {"events": self._num_lost})

    def close(self) -> None:
        self._file.close()


def stamped(stamp: Stamp, *contents: msgspec.Struct) -> bytes:
    """The lines of events, or of anything else that has a kind."""
    head = _encoder.encode(stamp)[:-1] + b","
    return b"".join([head + _encoder.encode(content)[1:] + b"\n" for content in contents])


def read_events(run_dir: str | Path, *, process: str | None = None, with_spans: bool = True) -> list[Record]:
    """All events of a run (or of one process) in the order of their wall clocks; torn lines are skipped. Without the
    spans of single prompts, of which there are a hundred times as many as of everything else."""
    folder = Path(run_dir) / "events"
    paths = (
        sorted(folder.glob("*.jsonl"))
        if process is None
        else [events_path(run_dir, process), *paths_of(spans_path(run_dir, process))]
    )
    records = [
        record for path in paths if with_spans or ".spans." not in path.name for record in _read_file(path)
    ]
    return sorted(records, key=lambda record: record.stamp.time)


def _read_file(path: Path) -> Iterator[Record]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    yield from records_in(lines_in(content))


def records_in(lines: Iterable[bytes]) -> Iterator[Record]:
    """The events that these lines hold; torn ones are skipped."""
    for line in filter(None, lines):
        try:
            yield Record(_stamp_decoder.decode(line), _event_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


class Tail:
    """The events that were added to a file since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def records(self) -> Iterator[Record]:
        yield from records_in(self._lines.lines())

    def close(self) -> None:
        self._lines.close()
