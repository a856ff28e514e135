"""Audit logs: one line per action, each with the hash of the line before. One per run, one per host.

    {"entry":{"number":2,"time":1.7e9,"name":"ada","origin":"10.0.0.7","action":"stop",…},"previous":"…","hash":"…"}

`hash` is the SHA-256 of `previous` and the bytes of `entry`. A changed, removed, inserted or reordered line breaks the
chain at that line. What the chain of one file cannot show, the other file does: the host's log repeats the hash of
every entry of a run's log, so lines that were cut off its end, and a log that was replaced as a whole, are found as
long as the host's log stands.

A log is never restarted silently. An entry that follows damage, or a log that is missing, is preceded by an entry that
says so (`DAMAGE_FOUND`, `LOG_MISSING`), and the problem stays part of every later verification.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kintsugi.access.gate import Caller
from kintsugi.access.roles import Action
from kintsugi.access.tokens import access_folder, lock_file
from kintsugi.errors import DeadlineExceeded, StorageError, UntrustedFile
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.owned_files import open_owned

GENESIS = "0" * 64
"""Hash before the first line."""
DAMAGE_FOUND = "damage found"
LOG_MISSING = "log missing"
ACCEPTED = "accepted"
LONGEST_TEXT = 1000
"""Longest field of an entry; more is cut off."""
LONGEST_PATH = 4096
LONGEST_LINE = 64 << 10
_SYSTEM = "kintsugi"


class AuditEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One action: `AuditEntry(7, 1.7e9, "ada", "10.0.0.7", "stop", "accepted", run="/data/runs/grpo-1")`."""

    number: int
    """Position in the log, from 1."""
    time: float
    """Wall clock."""
    name: str
    """Name of the token, or login name."""
    origin: str
    """Network address, or `local, process 4711`."""
    action: str
    answer: str
    """`accepted`, or the reason of the refusal."""
    run: str = ""
    """Run folder, as an absolute path."""
    role: str = ""
    uid: int | None = None
    token: str = ""
    """Public id of the token."""
    detail: str = ""
    """Arguments of the action: `servers=4`."""
    chained: str = ""
    """In the host's log: hash of the same entry in the run's log."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entry: msgspec.Raw
    previous: str
    hash: str


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """Something that does not fit: `AuditProblem(3, "its hash is wrong: the line was changed")`."""

    line: int
    """Line number; 0 for the log as a whole."""
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


@dataclass(slots=True)
class AuditReport:
    """Entries of a log and everything that is wrong with it."""

    path: Path
    entries: list[AuditEntry] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """Hash of every entry, as far as lines could be read."""
    problems: list[AuditProblem] = field(default_factory=list)

    @property
    def is_intact(self) -> bool:
        return not self.problems


def host_log() -> Path:
    """Path of the host's audit log."""
    return RunFolder(access_folder()).audit_file


def record(
    run_dir: Path | None,
    caller: Caller,
    action: str,
    *,
    answer: str = ACCEPTED,
    detail: str = "",
    begins: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> list[str]:
    """Record an action in the log of the run, if there is one, and in the host's log. Both are on disk afterwards.
    Returns the damage that was found at the ends of the logs, a sentence each.

    `begins`: the action creates the run, so its log does not exist yet. Raises StorageError or UntrustedFile; an action
    over the network is refused then, a local one is not.
    """
    entry = AuditEntry(
        number=0,
        time=clock.wall(),
        name=_text(caller.name),
        origin=_text(caller.origin),
        action=_text(action),
        answer=_text(answer),
        run="" if run_dir is None else _text(str(run_dir.resolve()), longest=LONGEST_PATH),
        role=caller.role.title,
        uid=caller.uid,
        token=caller.token,
        detail=_text(detail),
    )
    damage = []
    if run_dir is not None:
        entry, found = append(RunFolder(run_dir).audit_file, entry, begins=begins)
        damage += found
    path = host_log()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _, found = append(path, entry, begins=not path.with_suffix(".begun").exists())
    # The mark tells a host without a log from one whose log was removed.
    path.with_suffix(".begun").touch(mode=0o600)
    return damage + found


def _text(value: str, *, longest: int = LONGEST_TEXT) -> str:
    """Return a field that can be encoded; file names may hold bytes that are no characters."""
    return value.encode("utf-8", "backslashreplace").decode()[:longest]


def append(path: Path, entry: AuditEntry, *, begins: bool) -> tuple[AuditEntry, list[str]]:
    """Append an entry behind the last one. Returns it with its hash as `chained`, and the damage that was found, if
    any. See the module for what happens after damage."""
    try:
        owner = os.stat(path.parent).st_uid
        descriptor = open_owned(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, owners=frozenset({owner}))
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    try:
        lock_file(descriptor, what=f"the lock of {path}")
        if os.geteuid() == 0 and os.fstat(descriptor).st_uid != owner:
            # The owner of the run goes on writing the log that root began.
            os.fchown(descriptor, owner, -1)
        return _append_locked(descriptor, path, entry, begins=begins)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error
    except DeadlineExceeded as error:
        raise StorageError(f"could not write {path}: {error}") from error
    finally:
        os.close(descriptor)


def _append_locked(
    descriptor: int, path: Path, entry: AuditEntry, *, begins: bool
) -> tuple[AuditEntry, list[str]]:
    end = os.fstat(descriptor).st_size
    data, previous, number = b"", GENESIS, 0
    damage = []
    if end == 0:
        if not begins:
            data, previous, number = _remark(entry, LOG_MISSING, "the log had no entries", GENESIS, 0)
            damage = [f"{path} had no entries: it was removed or emptied"]
    else:
        tail = os.pread(descriptor, LONGEST_LINE, max(0, end - LONGEST_LINE))
        last = tail.removesuffix(b"\n").rpartition(b"\n")[2]
        read = _read_line(last)
        if isinstance(read, str) or not tail.endswith(b"\n"):
            what = read if isinstance(read, str) else "it is incomplete"
            lines = _count_lines(descriptor, end)
            joint = b"" if tail.endswith(b"\n") else b"\n"
            remark, previous, number = _remark(
                entry, DAMAGE_FOUND, f"line {lines}: {what}", _digest(last), lines
            )
            data = joint + remark
            damage = [f"{path}: line {lines}: {what}"]
        else:
            number, previous = read[0].number, read[1]
    line, chained = _line(msgspec.structs.replace(entry, number=number + 1), previous)
    _write_all(descriptor, data + line, end=end)
    os.fsync(descriptor)
    if end == 0:
        _sync_folder(path.parent)
    return msgspec.structs.replace(entry, chained=chained), damage


def _remark(
    entry: AuditEntry, action: str, answer: str, previous: str, number: int
) -> tuple[bytes, str, int]:
    """Build the line about damage that stands before an entry; returns it with its hash and number."""
    remark = AuditEntry(number + 1, entry.time, _SYSTEM, entry.origin, action, answer, run=entry.run)
    line, chained = _line(remark, previous)
    return line, chained, remark.number


def _line(entry: AuditEntry, previous: str) -> tuple[bytes, str]:
    raw = msgspec.json.encode(entry)
    chained = _chain(previous, raw)
    return msgspec.json.encode(_Line(msgspec.Raw(raw), previous, chained)) + b"\n", chained


def _chain(previous: str, raw: bytes) -> str:
    return _digest(previous.encode() + b"\n" + raw)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_all(descriptor: int, data: bytes, *, end: int) -> None:
    """Append all bytes or none."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _count_lines(descriptor: int, end: int) -> int:
    count = 0
    last = b"\n"
    for offset in range(0, end, 1 << 20):
        last = os.pread(descriptor, 1 << 20, offset)
        count += last.count(b"\n")
    return count + (not last.endswith(b"\n"))


def _read_line(line: bytes) -> tuple[AuditEntry, str, str] | str:
    """Return entry, hash and previous hash of a line, or what is wrong with the line by itself."""
    try:
        read = msgspec.json.decode(line, type=_Line)
        entry = msgspec.json.decode(read.entry, type=AuditEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "it cannot be decoded: the line was changed or is damaged"
    raw = bytes(read.entry)
    if _chain(read.previous, raw) != read.hash or msgspec.json.encode(read) != line:
        return "its hash is wrong: the line was changed"
    return entry, read.hash, read.previous


def verify(path: Path, *, owner: int | None = None) -> AuditReport:
    """Read a log from its beginning and report every break of the chain, line by line.

    A log that does not exist is reported as a problem. UntrustedFile if others may write it.
    """
    report = AuditReport(path)
    owners = frozenset() if owner is None else frozenset({owner})
    try:
        descriptor = open_owned(path, os.O_RDONLY, owners=owners)
    except FileNotFoundError:
        report.problems.append(AuditProblem(0, "it does not exist"))
        return report
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror or error}") from error
    expected, number = GENESIS, 0
    with os.fdopen(descriptor, "rb") as file:
        for position, raw in enumerate(_lines(file.fileno()), 1):
            line = raw.removesuffix(b"\n")
            if not raw.endswith(b"\n"):
                report.problems.append(AuditProblem(position, "it is incomplete (no end of line)"))
            read = _read_line(line)
            if isinstance(read, str):
                report.problems.append(AuditProblem(position, read))
                expected, number = _digest(line), position
                continue
            entry, chained, previous = read
            if previous != expected:
                report.problems.append(
                    AuditProblem(
                        position, "it does not follow the line before: lines were removed, inserted or moved"
                    )
                )
            elif entry.number != number + 1:
                report.problems.append(
                    AuditProblem(position, f"expected number {number + 1}, found {entry.number}")
                )
            if entry.action in (DAMAGE_FOUND, LOG_MISSING) and entry.name == _SYSTEM:
                report.problems.append(
                    AuditProblem(position, f"{entry.action} when it was written: {entry.answer}")
                )
            report.entries.append(entry)
            report.hashes.append(chained)
            expected, number = chained, entry.number
    return report


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; of a line that is too long to be an entry, a part."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        while line := file.readline(LONGEST_LINE):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE)):
                pass
            yield line if line.endswith(b"\n") or not rest else line + b"\n"


def verify_run(run_dir: Path) -> AuditReport:
    """Verify the log of a run, also against the host's log: entries that only the latter has were removed."""
    path = RunFolder(run_dir).audit_file
    report = verify(path, owner=os.stat(run_dir).st_uid)
    try:
        host = verify(host_log())
    except (StorageError, UntrustedFile) as error:
        report.problems.append(AuditProblem(0, f"the host's log cannot be read: {error}"))
        return report
    known = set(report.hashes)
    for entry in _entries_of(host, _text(str(run_dir.resolve()), longest=LONGEST_PATH)):
        if entry.chained not in known:
            text = f"the host's log has an entry that is missing here: {entry.action} by {entry.name}"
            report.problems.append(AuditProblem(0, text))
    return report


def started_by(run_dir: Path) -> str:
    """Name of the user that started a run, by its log; empty if the log does not say, or can not be trusted."""
    try:
        report = verify(RunFolder(run_dir).audit_file, owner=os.stat(run_dir).st_uid)
    except (StorageError, UntrustedFile, OSError):
        return ""
    return next((entry.name for entry in report.entries if entry.action == Action.START), "")


def _entries_of(host: AuditReport, run: str) -> list[AuditEntry]:
    """Entries of the host's log about a run, since its start: an earlier run may have had the same folder."""
    found: list[AuditEntry] = []
    for entry in host.entries:
        if entry.run == run and entry.chained:
            found = [entry] if entry.action == Action.START else [*found, entry]
    return found
