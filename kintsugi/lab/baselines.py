"""What people do today: read the last error in the master's log, or look for the first error in any log.

Both are read generously: whichever process the message names is taken as the culprit, and any word for a kind of fault
as that kind. What the diagnosis itself has written is not read. Pure but for reading files.
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
from kintsugi.lab.scoring import processes_in
from kintsugi.observe.events import Alert, FaultSeen, Record, read_events
from kintsugi.types import Role, process_id, role_of

MASTER = process_id(Role.MASTER, 0)
LAST_ERROR = "last_error"
FIRST_ERROR = "first_error"

_BY_NAME = tuple(
    (rf"\b{kind.value.replace('_', '[_ -]')}\b", kind) for kind in FaultKind if "_" in kind.value
)
"""Who says `network_delay` or `disk full` means it."""
_BY_A_WORD = tuple((rf"\b{kind.value}\b", kind) for kind in FaultKind if "_" not in kind.value)
"""`memory`, `cpu`: in a sentence about something else, too, so that they count where nothing else does."""
_WORDS: tuple[tuple[str, FaultKind], ...] = (
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
    *_BY_A_WORD,
)
"""What a word in a message makes people think of; the first that fits."""
_KINDS = tuple((re.compile(words, re.IGNORECASE), kind) for words, kind in _WORDS)
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^[\w.]*(?:Error|Exception|Timeout)\b|^Traceback|^Killed")
_TRACEBACK = re.compile(r"^Traceback")
_STAMP = re.compile(r"^\W?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,]?(\d*)")


class ErrorLine(msgspec.Struct, frozen=True):
    """An error as it stands in a log."""

    t: float
    process: str
    """Whose log it is."""
    message: str
    source: str


LogSizes = Mapping[str, int]
"""Name of a log → bytes that it had at some moment."""


def log_sizes(run_dir: Path) -> dict[str, int]:
    """Of now. Most lines of a log carry no time and successors append to it: what is older than a moment is known by
    where it stands, and by nothing else."""
    return {path.name: path.stat().st_size for path in (run_dir / "logs").glob("*.log")}


def errors_in(
    run_dir: Path, *, since: float = 0.0, until: float = float("inf"), beyond: LogSizes | None = None
) -> list[ErrorLine]:
    """Every error that the run's processes have told, by time; of logs only what stands beyond those sizes."""
    records = read_events(run_dir, with_spans=False)
    ours = said_by_the_diagnosis(records)
    told = [*_from_events(records), *_from_logs(run_dir / "logs", beyond or {})]
    return sorted(
        (each for each in told if since <= each.t <= until and not quotes(each.message, ours)),
        key=lambda each: each.t,
    )


def said_by_the_diagnosis(records: Iterable[Record]) -> frozenset[str]:
    """What recovery has told of who was replaced because of a verdict: the verdict, and the end that it brought about.
    Both are the answer, and no part of what it is compared with."""
    chains = [_chain(record.event.fault) for record in records if isinstance(record.event, FaultSeen)]
    return frozenset(
        fault.message
        for chain in chains
        if any(fault.kind == DIAGNOSED for fault in chain)
        for fault in chain
        if fault.message
    )


def _chain(fault: Fault) -> list[Fault]:
    """A fault and what led to it."""
    return [fault, *(_chain(fault.cause) if fault.cause is not None else [])]


def quotes(text: str, messages: Iterable[str]) -> bool:
    return any(message in text for message in messages)


def _from_events(records: Iterable[Record]) -> Iterator[ErrorLine]:
    for record in records:
        process, source = record.stamp.process, f"events/{record.stamp.process}.jsonl"
        if not _is_of_the_run(process):
            continue
        match record.event:
            case FaultSeen(fault=fault):
                message = f"{fault.kind}: {fault.process}: {fault.message}"
                yield ErrorLine(record.stamp.time, process, message, source)
            case Alert(message=message):
                yield ErrorLine(record.stamp.time, process, message, source)
            case _:
                pass


def _is_of_the_run(process: str) -> bool:
    """The watcher's words are the diagnosis, and not what it is compared with."""
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
                yield ErrorLine(t, path.stem, line.strip()[:500], f"logs/{path.name}")


def _new_in(path: Path, beyond: LogSizes) -> bytes:
    return path.read_bytes()[beyond.get(path.name, 0) :]


def stamp_of(line: str) -> float | None:
    """Wall clock of a log line that begins with one, as of this machine: `[2026-11-16 08:38:52.123] ERROR: …`."""
    if (match := _STAMP.match(line)) is None:
        return None
    day, clock, fraction = match.groups()
    return datetime.fromisoformat(f"{day}T{clock}").timestamp() + float(f"0.{fraction or 0}")


def kind_of(message: str) -> FaultKind:
    """What a person takes it for."""
    return next((kind for words, kind in _KINDS if words.search(message)), FaultKind.CRASHED)


def reading(error: ErrorLine, *, others: Iterable[str] = ()) -> Cause:
    """The error as a verdict: whoever it names first did it, else whose log it is."""
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
    """What the last error in the master's log makes one believe."""
    of_the_master = [error for error in errors if error.process == log]
    return reading(of_the_master[-1]) if of_the_master else None


def first_error(errors: Iterable[ErrorLine]) -> Cause | None:
    """What the first error in any log makes one believe."""
    first = next(iter(errors), None)
    return reading(first) if first is not None else None


# How much a person would have read.


class Reading(msgspec.Struct, frozen=True):
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
) -> Reading:
    """Without a diagnosis: the master's log, and, since nobody says which one it was, those of every process of the
    culprit's role; of each what was written between the cause and the error that was seen."""
    role = target.rsplit("-", 1)[0]
    files = lines = 0
    for name in sorted({path.stem for folder in ("events", "logs") for path in (run_dir / folder).glob("*")}):
        if name != log and name.rsplit("-", 1)[0] != role:
            continue
        count = sum(
            sum(since <= t <= until for t in _times(path, beyond or {}))
            for path in (run_dir / "events" / f"{name}.jsonl", run_dir / "logs" / f"{name}.log")
            if path.is_file() and path.stat().st_size
        )
        files += 1
        lines += count
    return Reading(files, lines)


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
