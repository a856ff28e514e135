"""Baselines for the diagnosis: reading the last error in the master's log, or the first error in any log.

Both are interpreted generously: the process that a message names is taken as the cause, and any word for a fault kind
as that kind. Messages written by the diagnosis itself are ignored. Pure except for reading files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from kintsugi.control.suspicion import DIAGNOSED
from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.errors import Fault
from kintsugi.lab.campaign.scoring import processes_in
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.events import Alert, FaultSeen, Record, read_events
from kintsugi.types import Role, process_id, role_of

MASTER = process_id(Role.MASTER, 0)
LAST_ERROR = "last_error"
FIRST_ERROR = "first_error"

_BY_NAME = tuple(
    (rf"\b{kind.value.replace('_', '[_ -]')}\b", kind) for kind in FaultKind if "_" in kind.value
)
"""Full names such as `network_delay` or `disk full`, which are unambiguous."""
_BY_WORD = tuple((rf"\b{kind.value}\b", kind) for kind in FaultKind if "_" not in kind.value)
"""Single words such as `memory` or `cpu`, which occur in other messages too; they count when nothing else matches."""
_PATTERNS: tuple[tuple[str, FaultKind], ...] = (
    *_BY_NAME,
    (r"cuda out of memory|device.{0,20}out of memory|DeviceOutOfMemory", FaultKind.DEVICE_MEMORY),
    (
        r"out of memory|\boom\b|can.?not allocate memory|can.t allocate memory|\bMemoryError",
        FaultKind.MEMORY,
    ),
    (r"no space left|StorageFull|disk (?:is )?full", FaultKind.DISK_FULL),
    (r"input/output error|read-only file system|StorageError", FaultKind.DISK_ERROR),
    (r"checksum|corrupt|invalid checkpoint|IntegrityError|EOFError", FaultKind.CORRUPTION),
    (r"\bnan\b|not finite|digests? (?:differ|disagree)", FaultKind.NUMERIC),
    (r"resolve|name or service not known|gaierror", FaultKind.DNS),
    (r"connection re(?:fused|set)|unreachable|broken pipe|GroupBroken", FaultKind.NETWORK_CUT),
    (r"Lease(?:Recalled|Granted|Fenced)|hand-?over|notify_event", FaultKind.HANDOVER),
    (r"killed by|signal 9|SIGKILL", FaultKind.KILLED),
    (r"is stopped|state T\b|SIGSTOP", FaultKind.STOPPED),
    (r"exited with code|traceback|DistributedBatch|mismatch", FaultKind.CRASHED),
    (r"time[d]?[ -]?out|deadline|waited|silent|heartbeat", FaultKind.NETWORK_DELAY),
    (r"\blink\b.{0,80}\bslow\b|\bslow link\b|\bslow to come\b", FaultKind.NETWORK_DELAY),
    (r"slow", FaultKind.SLOW),
    *_BY_WORD,
)
"""Pattern in a message → fault kind that an engineer would suspect; the first match counts."""
_KINDS = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in _PATTERNS)
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]*(?:Error|Exception|Timeout)\b|^Traceback|^Killed")
_TRACEBACK = re.compile(r"^Traceback")
_STAMP = re.compile(r"^\W?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,]?(\d*)")


class ErrorLine(msgspec.Struct, frozen=True):
    """Error in a log."""

    t: float
    process: str
    """Process that wrote the log."""
    message: str
    source: str


LogSizes = Mapping[str, int]
"""Log name → its size in bytes at some time."""


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Return the current sizes. Most log lines have no timestamp and successors append to the same file, so the age of
    a line is known only by its position."""
    return {path.name: path.stat().st_size for path in RunFolder(run_dir).logs_folder.glob("*.log")}


def errors_in(
    run_dir: Path, *, since: float = 0.0, until: float = float("inf"), beyond: LogSizes | None = None
) -> list[ErrorLine]:
    """Return all errors that the run's processes reported, by time; logs are read from these sizes on."""
    records = read_events(run_dir, with_spans=False)
    ours = messages_of_the_diagnosis(records)
    found = [*_from_events(records), *_from_logs(RunFolder(run_dir).logs_folder, beyond or {})]
    return sorted(
        (each for each in found if since <= each.t <= until and not quotes(each.message, ours)),
        key=lambda each: each.t,
    )


def messages_of_the_diagnosis(records: Iterable[Record]) -> frozenset[str]:
    """Return messages that stem from the diagnosis: the verdict that a process was replaced for, and the end that this
    caused. They are the answer, not part of the evidence."""
    chains = [_chain(record.event.fault) for record in records if isinstance(record.event, FaultSeen)]
    return frozenset(
        fault.message
        for chain in chains
        if any(fault.kind == DIAGNOSED for fault in chain)
        for fault in chain
        if fault.message
    )


def _chain(fault: Fault) -> list[Fault]:
    """Return a fault and its chain of causes."""
    return [fault, *(_chain(fault.cause) if fault.cause is not None else [])]


def quotes(text: str, messages: Iterable[str]) -> bool:
    return any(message in text for message in messages)


def _from_events(records: Iterable[Record]) -> Iterator[ErrorLine]:
    for record in records:
        process, source = record.stamp.process, str(RELATIVE.events_file(record.stamp.process))
        if not _belongs_to_run(process):
            continue
        match record.event:
            case FaultSeen(fault=fault):
                message = f"{fault.kind}: {fault.process}: {fault.message}"
                yield ErrorLine(record.stamp.time, process, message, source)
            case Alert(message=message):
                yield ErrorLine(record.stamp.time, process, message, source)
            case _:
                pass


def _belongs_to_run(process: str) -> bool:
    """Whether a process belongs to the run; the watcher's messages are the diagnosis itself."""
    try:
        return role_of(process) in Role
    except ValueError:
        return False


def _from_logs(folder: Path, beyond: LogSizes) -> Iterator[ErrorLine]:
    for path in sorted(folder.glob("*.log")):
        t = path.stat().st_mtime
        for line in _new_in(path, beyond).decode(errors="replace").splitlines():
            t = stamp_of(line) or t
            if _ERROR.search(line) and not _TRACEBACK.match(line):
                yield ErrorLine(t, path.stem, line.strip()[:500], str(RELATIVE.log_file(path.stem)))


def _new_in(path: Path, beyond: LogSizes) -> bytes:
    return path.read_bytes()[beyond.get(path.name, 0) :]


def stamp_of(line: str) -> float | None:
    """Return the local wall clock time of a log line that begins with a timestamp: `[2026-11-16 08:38:52.123] ERROR:
    …`."""
    if (match := _STAMP.match(line)) is None:
        return None
    day, clock, fraction = match.groups()
    return datetime.fromisoformat(f"{day}T{clock}").timestamp() + float(f"0.{fraction or 0}")


def kind_of(message: str) -> FaultKind:
    """Return the fault kind that an engineer would suspect."""
    return next((kind for pattern, kind in _KINDS if pattern.search(message)), FaultKind.CRASHED)


def interpret(error: ErrorLine, *, others: Iterable[str] = ()) -> Cause:
    """Interpret an error as a verdict: the first process that it names, else the process that wrote it."""
    named = [process for process in processes_in(error.message) if process != error.process]
    process = next(iter(named), next(iter(others), error.process))
    return Cause(
        process=process,
        host="",
        kind=kind_of(error.message),
        onset=error.t,
        confidence=1.0,
        summary=error.message,
        path=(Hop(process, error.message, error.t),)
        + ((Hop(error.process, error.message, error.t),) if process != error.process else ()),
        evidence=(),
    )


def last_error(errors: Iterable[ErrorLine], *, log: str = MASTER) -> Cause | None:
    """Return the verdict of the last error in the master's log."""
    in_log = [error for error in errors if error.process == log]
    return interpret(in_log[-1]) if in_log else None


def first_error(errors: Iterable[ErrorLine]) -> Cause | None:
    """Return the verdict of the first error in any log."""
    first = next(iter(errors), None)
    return interpret(first) if first is not None else None


# Amount of log text that an engineer would have to read.


class LogReading(msgspec.Struct, frozen=True):
    files: int
    lines: int


def to_read(
    run_dir: Path,
    *,
    target: str,
    since: float,
    until: float,
    log: str = MASTER,
    beyond: LogSizes | None = None,
) -> LogReading:
    """Count what has to be read without a diagnosis: the master's log and, since the process is unknown, the logs of
    all processes of the target's role, between the fault and the visible error."""
    role = target.rsplit("-", 1)[0]
    files = lines = 0
    run = RunFolder(run_dir)
    for name in sorted(
        {path.stem for folder in (run.events_folder, run.logs_folder) for path in folder.glob("*")}
    ):
        if name != log and name.rsplit("-", 1)[0] != role:
            continue
        count = sum(
            sum(since <= t <= until for t in _times(path, beyond or {}))
            for path in (run.events_file(name), run.log_file(name))
            if path.is_file() and path.stat().st_size
        )
        files += 1
        lines += count
    return LogReading(files, lines)


class _Stamped(msgspec.Struct):
    time: float


def _times(path: Path, beyond: LogSizes) -> Iterator[float]:
    t = path.stat().st_mtime
    decoder = msgspec.json.Decoder(_Stamped)
    for line in _new_in(path, beyond).partition(b"\0")[0].splitlines():
        if path.suffix == ".jsonl":
            try:
                yield decoder.decode(line).time
            except msgspec.DecodeError:
                continue
        else:
            t = stamp_of(line.decode(errors="replace")) or t
            yield t
