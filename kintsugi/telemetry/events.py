"""Typed events: one schema for log, dashboard and diagnosis.

Every process appends to its own file, `<run folder>/events/<process>.jsonl`, one JSON line per event (`jsonl_log.py`).
Its spans of single prompts are in `<process>.spans.jsonl`, which is bounded: of a long run the last part is kept.

An `Alert` or a `Note` is a sentence for people. Where another part of the program decides by what is reported (the
diagnosis, the master), the event is a class of its own below `Alert` or `Note`, whose fields carry the content. No
part of the program reads the sentence.

A failing disk must not fail the process. An event that can not be written is counted (`events.dropped`), and the first
event that can be written again is preceded by an alert with the number of lost events and the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from kintsugi.errors import Fault
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.disk_budget import DISK_BUDGET, EVENTS_SIZE
from kintsugi.telemetry.jsonl_log import NUM_OLD, LineFile, LineTail, lines_in, paths_of


class _Event(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    pass


class ProcessBegan(_Event, frozen=True):
    """First event of a process."""

    role: str
    incarnation: str
    pid: int


class ProcessEnded(_Event, frozen=True):
    """Last event of a process that exited; one that was killed has none."""

    code: int
    reason: str


class FaultSeen(_Event, frozen=True):
    """A failure, with the faults that led to it."""

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
    """Something that a person should look at, although the run continues."""

    message: str
    values: dict[str, float] = {}


class FaultHandled(Alert, frozen=True, kw_only=True):
    """An alert about a fault that has a `FaultSeen` of its own: its consequences, or the response to it."""

    of: str
    """Process that the fault is of."""
    fault: str
    """Id of the fault."""


class OperationFailed(Alert, frozen=True, kw_only=True):
    """An operation failed, and the run continues without it."""

    operation: str
    error: str
    """Text of the exception, as the operating system or a library wrote it."""


class JournalPaused(Alert, frozen=True, kw_only=True):
    """The disk does not accept the journal: the run waits until it does."""

    error: str
    """Text of the exception."""


class SlowLink(Alert, frozen=True, kw_only=True):
    """A transfer from one process to another takes far longer than expected."""

    of: str
    """Sender."""
    peer: str
    """Receiver."""


class SlowProcess(Alert, frozen=True, kw_only=True):
    """A process has become far slower than its peers and its own past."""

    of: str


class ProcessBusy(Alert, frozen=True, kw_only=True):
    """One call keeps a process, so that it sends no heartbeats: a reward, a tokenizer or a library that does not
    release the interpreter. The process is neither stopped nor hung, as far as its agent can see, and is left alone."""

    of: str
    computes: bool
    """The call uses the CPU; otherwise it sleeps."""


class LeaseUnanswered(Alert, frozen=True, kw_only=True):
    """A process does not answer a message about its lease of a shared accelerator."""

    of: str
    device: str
    request: str
    """Class name of the message."""
    is_fenced: bool = False
    """Its lease has expired, so the process is ended."""


class AcceleratorWarning(Alert, frozen=True, kw_only=True):
    """An agent found an accelerator of its host to be broken, or with a sign of trouble."""

    of: str
    """The agent."""
    device: str
    """Identity of the accelerator."""
    signal: str
    """Kind of the sign: `xid`, …"""
    is_broken: bool
    """The processes on it are replaced; each loss has a fault of its own."""


class HostLost(Alert, frozen=True, kw_only=True):
    """A machine of the run, or everything of the run on it, is gone: its connection was closed, or its engine says so.
    One that is only silent may be cut off instead, and has a plain alert."""

    of: str
    """The agent of the host."""
    host: str


class UpdateSkipped(Alert, frozen=True):
    """An optimizer update was skipped because its gradient was not finite."""


class Note(_Event, frozen=True):
    """A change that explains later events."""

    message: str


class QuarantineCause(StrEnum):
    """Why no sample of a group could be used."""

    USER_CODE = "user_code"
    """A reward function, an environment or an agent program failed at every attempt."""
    SAMPLE = "sample"
    """The samples themselves: empty completions, too many tokens."""


class SamplesQuarantined(Note, frozen=True, kw_only=True):
    """No sample of a group could be used."""

    ticket: str
    cause: QuarantineCause


class StateCommitted(Note, frozen=True, kw_only=True):
    """The first step that was committed after ranks had computed different states."""

    step: int
    state: str
    """Digest of the state, which shows what ranks were right."""


class WeightsFromFallback(Note, frozen=True, kw_only=True):
    """A server got a version of the weights from another source than the nearest one, because that one failed."""

    version: int
    is_damaged: bool = False
    """The failed source gave other bytes than were published."""
    origin: str = ""
    """Process that the failed source is of, where it is known."""


class BytesDamaged(Note, frozen=True, kw_only=True):
    """Bytes arrived that are not those that were sent; they are requested again or from elsewhere."""

    origin: str = ""
    """Process that they came from, where it is known."""


class RunFinished(Note, frozen=True, kw_only=True):
    """The run has ended."""

    outcome: str
    step: int


class RunAborted(Note, frozen=True):
    """A second request to stop ended the run at once, without a checkpoint."""


class ProcessGone(_Event, frozen=True):
    """How a process ended, as recorded by the agent that was its parent: a killed process records nothing."""

    of: str
    incarnation: str
    pid: int
    status: int | None
    """Exit code, or minus the signal; None where another was its parent."""
    how: str
    """`killed by SIGKILL`."""
    memory_bytes: float = 0.0
    """Resident memory at the last measurement."""
    oom: bool = False
    """The kernel killed it because the memory of its control group or of the host was exhausted."""
    ordered: bool = False
    """A process of the run had requested its end."""


AlertEvent = (
    Alert
    | FaultHandled
    | OperationFailed
    | JournalPaused
    | SlowLink
    | SlowProcess
    | ProcessBusy
    | LeaseUnanswered
    | AcceleratorWarning
    | HostLost
    | UpdateSkipped
)
NoteEvent = (
    Note | SamplesQuarantined | StateCommitted | WeightsFromFallback | BytesDamaged | RunFinished | RunAborted
)
Event = ProcessBegan | ProcessEnded | ProcessGone | FaultSeen | Transition | Span | AlertEvent | NoteEvent


class Stamp(msgspec.Struct, frozen=True):
    """Time and process of an event; the first fields of its line, so no event has fields of these names."""

    time: float
    """Wall clock, for display and for ordering across processes."""
    monotonic: float
    process: str


class Record(msgspec.Struct, frozen=True):
    """An event that was read from a file."""

    stamp: Stamp
    event: Event


LARGEST_SIZE = 64 << 20
"""Size of a file of a small run; three older files are kept."""

_encoder = msgspec.json.Encoder()
_stamp_decoder = msgspec.json.Decoder(Stamp)
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventLog:
    """Appends the events of one process. Safe to use from several threads: a line is one write."""

    def __init__(self, path: Path, *, process: str, clock: Clock = SYSTEM_CLOCK) -> None:
        size = DISK_BUDGET.file_size(EVENTS_SIZE, num_files=NUM_OLD + 1, largest=LARGEST_SIZE)
        self._file = LineFile(path, largest_size=size)
        self._process = process
        self._clock = clock
        self._num_lost = 0
        self._reason = ""

    def emit(self, event: Event) -> None:
        """Append `{"time": …, "monotonic": …, "process": …, "kind": …, …}` as one line. Never raises OSError."""
        self.try_emit(event)

    def try_emit(self, event: Event) -> bool:
        """Append an event as `emit` does; return False if the disk refused, so that the caller can retry."""
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
        return OperationFailed(
            f"events before this one were lost: {self._reason}",
            {"events": self._num_lost},
            operation="events",
            error=self._reason,
        )

    def close(self) -> None:
        self._file.close()


def stamped(stamp: Stamp, *contents: msgspec.Struct) -> bytes:
    """Encode events, or any other tagged structs, as lines with this stamp."""
    head = _encoder.encode(stamp)[:-1] + b","
    return b"".join([head + _encoder.encode(content)[1:] + b"\n" for content in contents])


def read_events(run_dir: str | Path, *, process: str | None = None, with_spans: bool = True) -> list[Record]:
    """Return all events of a run, or of one process, in the order of their wall clocks; torn lines are skipped.

    `with_spans=False` leaves out the spans of single prompts, which outnumber all other events a hundredfold.
    """
    folder = RunFolder(run_dir).events_folder
    paths = (
        sorted(folder.glob("*.jsonl"))
        if process is None
        else [
            *paths_of(RunFolder(run_dir).events_file(process)),
            *paths_of(RunFolder(run_dir).spans_file(process)),
        ]
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
    """Decode the events of these lines; torn lines are skipped."""
    for line in filter(None, lines):
        try:
            yield Record(_stamp_decoder.decode(line), _event_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


class Tail:
    """Follows an event file: each call of `records` yields the events that were added since the last one."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def records(self) -> Iterator[Record]:
        yield from records_in(self._lines.lines())

    def close(self) -> None:
        self._lines.close()


LAST_EVENTS_BYTES = 64 << 10
"""Part of an event file, from its end, in which the last events of a process are looked for."""


def fault_at_end(run_dir: str | Path, process: str) -> Fault | None:
    """Return the fault that a process recorded immediately before its end; None if it ended otherwise."""
    try:
        with RunFolder(run_dir).events_file(process).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_EVENTS_BYTES))
            lines = lines_in(file.read())
    except OSError:
        return None
    match [record.event for record in records_in(lines[-2:])]:
        case [FaultSeen(fault=fault), ProcessEnded()]:
            return fault
        case _:
            return None
