"""Human study: a package with the master's log of every run and an answer sheet, to time engineers on.

Participants get `kit/`. The answers are next to it in a file that they do not get; the kit contains that file's
checksum, which proves that the answers were not changed afterwards. Filled sheets are put into `sheets/`, one file per
participant, and `kintsugi lab report` scores them.
"""

from __future__ import annotations

import csv
import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import StorageError, UserError
from kintsugi.lab.campaign.log_readers import MASTER, messages_of_the_diagnosis, quotes, stamp_of
from kintsugi.lab.campaign.scoring import expected_cause, is_right
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios.experiments import Profile
from kintsugi.lab.scenarios.records import RunRecord, read_runs
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import (
    Alert,
    FaultSeen,
    Note,
    ProcessBegan,
    ProcessEnded,
    Record,
    Span,
    Transition,
    read_events,
)

KIT_FOLDER = "kit"
SHEETS_FOLDER = "sheets"
ANSWERS_FILE = "kit_answers.json"
SHEET_FILE = "sheet.csv"
LOG_FILE = "master.log"
QUESTIONS_FILE = "README.md"
RUN_FOLDER = "run"
COLUMNS = ("folder", "began", "sure", "process", "kind")
OF_THE_DIAGNOSIS = re.compile(r"\bdiagnos|\bwatcher-\d", re.IGNORECASE)
"""Lines that stem from the diagnosis, which the master receives: they are the answer, not part of the question."""

QUESTIONS = """# Find the fault

Each folder contains `master.log`: everything that the controller of one run wrote. A fault was injected into one
process of that run (`model-N`: train workers, `rollout-N` and `server-N`: rollout, `agent-N`: a host, `master-0`: the
controller). Name the process and the fault. Please

1. take the folders in their order and open nothing but the log;
2. write into `sheet.csv` when you opened it (`began`) and when you were sure (`sure`), as hh:mm:ss;
3. write the process (`model-1`) and one word of the list below; leave both empty if you can not tell;
4. do not go back to a folder, and do not discuss it with participants that have not finished.

Give the filled sheet back under a name of your own (`anna.csv`).

| word | meaning |
|---|---|
{kinds}

The answers were fixed before: SHA-256 of their file `{answers}` is `{seal}`.
"""

MEANINGS: dict[FaultKind, str] = {
    FaultKind.KILLED: "it was killed",
    FaultKind.CRASHED: "it ended with an error of its own",
    FaultKind.STOPPED: "it exists but does not run",
    FaultKind.CPU: "it did not get the CPU",
    FaultKind.MEMORY: "its host's memory ran out",
    FaultKind.DEVICE_MEMORY: "its accelerator's memory ran out",
    FaultKind.DEVICE: "its accelerator was slow or broken",
    FaultKind.DISK_FULL: "the disk was full",
    FaultKind.DISK_SLOW: "the disk was slow",
    FaultKind.DISK_ERROR: "the disk returned errors",
    FaultKind.NETWORK_DELAY: "its network was slow",
    FaultKind.NETWORK_LOSS: "its network lost packets",
    FaultKind.NETWORK_CUT: "its network was cut",
    FaultKind.DNS: "names could not be resolved",
    FaultKind.CORRUPTION: "its bytes were changed",
    FaultKind.NUMERIC: "it computed something wrong",
    FaultKind.HOST_LOST: "its machine was gone",
    FaultKind.HANDOVER: "a notification about a shared device did not arrive",
}


class StudyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Right answer for one folder of the kit."""

    folder: str
    scenario: str
    profile: str
    target: str
    kinds: tuple[str, ...]
    """Fault types injected into the target; any of them is right."""


class StudyAnswers(msgspec.Struct, frozen=True):
    nonce: str
    """Random value that prevents finding the answers by trying all of them against the checksum."""
    answers: tuple[StudyAnswer, ...]


def write_kit(folder: Path) -> Path:
    """Write the kit for the folder of a `kintsugi lab run`, in random order of the runs."""
    records = [record for record in read_runs(folder).runs if record.injected and not record.problem]
    if not records:
        raise UserError(f"{folder}: no experiment in it has an injected fault; there is nothing to diagnose")
    for record in records:
        if not _run_dir(record, folder).is_dir():
            raise UserError(
                f"{record.scenario} ({record.profile}): its run folder {_run_dir(record, folder)} is gone"
            )
    kit = folder / KIT_FOLDER
    if kit.exists():
        raise UserError(f"{kit} is there already; remove it to make another")
    secrets.SystemRandom().shuffle(records)
    names = [f"{number:02d}" for number in range(1, len(records) + 1)]
    sealed = StudyAnswers(secrets.token_hex(16), tuple(map(_answer, names, records)))
    content = msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n"
    try:
        (folder / ANSWERS_FILE).write_bytes(content)
        for name, record in zip(names, records, strict=True):
            (kit / name).mkdir(parents=True)
            (kit / name / LOG_FILE).write_text(_log_of(record, folder), encoding="utf-8")
        _write_sheet(kit / SHEET_FILE, names)
        (kit / QUESTIONS_FILE).write_text(_questions(content), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write the kit into {folder}: {error.strerror or error}") from error
    return kit


def _run_dir(record: RunRecord, folder: Path) -> Path:
    """Return the run folder: next to the results, or where the record says."""
    sibling = folder / f"{record.scenario}-{record.profile}" / RUN_FOLDER
    return sibling if sibling.is_dir() or not record.folder else Path(record.folder) / RUN_FOLDER


def _answer(name: str, record: RunRecord) -> StudyAnswer:
    """Return the faults of the process that has to be named; faults elsewhere only hide them."""
    target = next((fault for fault in record.injected if fault.culprit), record.injected[0]).target
    kinds = tuple(fault.kind for fault in record.injected if fault.target == target)
    return StudyAnswer(
        folder=name, scenario=record.scenario, profile=record.profile, target=target, kinds=kinds
    )


def _log_of(record: RunRecord, folder: Path) -> str:
    """Return the log with neutral paths: folders are named after the experiment."""
    lines = master_log(_run_dir(record, folder), has_events=record.profile != Profile.FRAGILE.value)
    return "\n".join([*lines, ""]).replace(record.folder or str(folder), "/run")


def _write_sheet(path: Path, names: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([name, *[""] * (len(COLUMNS) - 1)] for name in names)


def _questions(answers: bytes) -> str:
    kinds = "\n".join(f"| `{kind}` | {meaning} |" for kind, meaning in MEANINGS.items())
    return QUESTIONS.format(kinds=kinds, answers=ANSWERS_FILE, seal=hashlib.sha256(answers).hexdigest())


# Log of the master.


def master_log(run_dir: Path, *, has_events: bool = True) -> list[str]:
    """Return what the master wrote, by time: its events, one line each, and its log."""
    records = read_events(run_dir, process=MASTER) if has_events else []
    ours = messages_of_the_diagnosis(records)
    events = [(record.stamp.time, line) for record in records if (line := _line(record)) is not None]
    lines = [(t, f"{_clock(t)} {line}") for t, line in events]
    lines += _log_lines(RunFolder(run_dir).log_file(MASTER))
    ordered = sorted(lines, key=lambda each: each[0])
    return [line for _, line in ordered if not OF_THE_DIAGNOSIS.search(line) and not quotes(line, ours)]


def _clock(t: float) -> str:
    return datetime.fromtimestamp(t, tz=UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _log_lines(path: Path) -> Iterator[tuple[float, str]]:
    """Yield lines with their times; a line without a timestamp belongs to the line before it."""
    if not path.is_file():
        return
    t = 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        t = stamp_of(line) or t
        yield t, line


def _line(record: Record) -> str | None:
    match record.event:
        case ProcessBegan(pid=pid):
            return f"INFO began as process {pid}"
        case ProcessEnded(code=code, reason=reason):
            return f"INFO ended with {code}: {reason}"
        case Transition(machine=machine, key=key, before=before, after=after, reason=reason):
            return f"INFO {machine} {key}: {before} -> {after}: {reason}"
        case FaultSeen(fault=fault):
            return f"ERROR {fault.kind}: {fault.process}: {fault.message}"
        case Alert(message=message):
            return f"WARNING {message}"
        case Note(message=message):
            return f"INFO {message}"
        case Span(name="step", duration_s=duration_s, attributes=attributes):
            return f"INFO step {attributes.get('step')} took {duration_s:.3f} s"
        case _:
            return None


# Answers of the participants.


class StudyAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one participant to one folder."""

    person: str
    scenario: str
    profile: str
    seconds: float | None
    """None where a time is missing or invalid."""
    said: bool
    correct: bool


def attempts_in(folder: Path) -> list[StudyAttempt]:
    """Read all filled sheets; empty where there are none."""
    sheets = sorted((folder / SHEETS_FOLDER).glob("*.csv"))
    if not sheets:
        return []
    path = folder / ANSWERS_FILE
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=StudyAnswers)
    except FileNotFoundError:
        raise UserError(
            f"{folder / SHEETS_FOLDER}: there are sheets and no answers: expected {path}"
        ) from None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not what `kintsugi lab kit` writes: {error}") from error
    answers = {answer.folder: answer for answer in sealed.answers}
    return [attempt for sheet in sheets for attempt in _attempts(sheet, answers)]


def _attempts(sheet: Path, answers: dict[str, StudyAnswer]) -> Iterator[StudyAttempt]:
    with sheet.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := sorted(set(COLUMNS) - set(reader.fieldnames or ())):
            raise UserError(
                f"{sheet}: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}"
            )
        for row in reader:
            name = (row["folder"] or "").strip()
            # Spreadsheet programs remove leading zeros.
            answer = answers.get(name.zfill(2))
            if answer is None:
                raise UserError(f"{sheet}: the kit has no folder {name!r}")
            process, kind = ((row[column] or "").strip() for column in ("process", "kind"))
            if not any((process, kind, (row["began"] or "").strip())):
                continue
            truths = [
                expected_cause(Ability(each), target=answer.target, start=0.0, host_of={})
                for each in answer.kinds
            ]
            yield StudyAttempt(
                person=sheet.stem,
                scenario=answer.scenario,
                profile=answer.profile,
                seconds=_between(row["began"] or "", row["sure"] or ""),
                said=bool(process or kind),
                correct=is_right(process, kind, truths),
            )


def _between(began: str, sure: str) -> float | None:
    """
    >>> _between("23:59:50", "00:00:20")
    30.0
    """
    try:
        first, second = (datetime.strptime(text.strip(), "%H:%M:%S") for text in (began, sure))
    except ValueError:
        return None
    return ((second - first) % timedelta(days=1)).total_seconds()
