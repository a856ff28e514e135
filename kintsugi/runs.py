"""What a run folder says about its run, living or dead. Reads only; starts and changes nothing.

config.yaml     as run                       checkpoints/   Hugging Face folders + trainer state
origins.json    where its values came from   rewards.py     functions that Python gave to the run
journal         the master's facts           summary.json   how it ended
events/         one file per process         logs/          what processes wrote to standard error
metrics.jsonl   figures per step             tensorboard/   the same for TensorBoard
samples.jsonl   what was trained             launcher.json  which process runs it
verdicts.jsonl  held-out answers, right or wrong, evaluation by evaluation
processes.json  what each process does now   inputs         what the master decided on
requests/       what people ask of it        agents/        which processes each agent has
steps           whether the servers of a deterministic run compile theirs
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.cluster.children import boot_id, process_start_time
from kintsugi.config import Config
from kintsugi.errors import ConfigError, Fault, KintsugiError, StorageError, UserError, root_first
from kintsugi.facts import (
    CheckpointSaved,
    Fact,
    ProcessJoined,
    ProcessLost,
    RunEnded,
    ScaleRefused,
    ServersScaled,
)
from kintsugi.incidents import Incident, IncidentBook, IncidentReport, report_of
from kintsugi.observe.events import Alert, FaultSeen, Record, events_path, read_events, records_in
from kintsugi.observe.metrics import METRICS_FILE, SAMPLES_FILE, VERDICTS_FILE, SampleRecord, VerdictRecord
from kintsugi.recipe import load_config
from kintsugi.stages import next_stage, stages
from kintsugi.summaries import FaultLine, Summary
from kintsugi.types import Role, process_id

CONFIG_FILE = "config.yaml"
ORIGINS_FILE = "origins.json"
REWARDS_FILE = "rewards.py"
JOURNAL_FILE = "journal"
SUMMARY_FILE = "summary.json"
LAUNCHER_FILE = "launcher.json"
CHECKPOINTS_FOLDER = "checkpoints"

_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENFILE, errno.EMFILE})
"""What a disk may answer though the path is right."""

MetricLine = dict[str, float | None]


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """By request, with a checkpoint; can be resumed."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Its launcher is gone and it never said how it ended: killed, or the machine went down."""


class Launcher(msgspec.Struct, frozen=True):
    """`launcher.json`: who runs this folder. All four together name one process for ever."""

    pid: int
    start_time: int
    """Clock ticks since boot, as the kernel counts them."""
    host_name: str
    boot_id: str


class RunStatus(msgspec.Struct, frozen=True):
    """Where a run stands."""

    folder: Path
    config: Config
    state: RunState
    step: int
    total_steps: int
    stage: str
    metrics: MetricLine
    """The last figures of each name."""
    evaluations: tuple[MetricLine, ...]
    pid: int | None
    """Of its launcher, while it runs."""


class JournalStatus(msgspec.Struct, frozen=True):
    """What only the journal knows."""

    processes: dict[str, int]
    """Process → pid of those that joined and were not lost."""
    saved_steps: tuple[int, ...]
    incident: Incident | None = None
    """The last one, if it is not over."""
    scaled_to: int | None = None
    """Generation servers that were asked for while it ran."""
    answers: dict[str, str] = {}
    """Request → why it was refused; empty for one that was accepted."""

    def num_servers(self, config: Config) -> int:
        """That the run is to have now."""
        return config.generation.servers if self.scaled_to is None else self.scaled_to


def find_run(name: str, *, folder: Path = Path("runs")) -> Path:
    """The folder of a run given by its path, or by its name inside `runs/`."""
    for candidate in (Path(name), folder / name):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    found = "a folder without config.yaml" if Path(name).is_dir() else "nothing"
    raise UserError(f"{name}: expected a run folder, or the name of one in {folder}/, found {found}")


def next_run_dir(name: str, *, folder: Path = Path("runs")) -> Path:
    """`runs/<name>-<number>`, one above the highest number taken."""
    taken = [path.name.removeprefix(f"{name}-") for path in folder.glob(f"{name}-*")]
    return folder / f"{name}-{1 + max((int(number) for number in taken if number.isdecimal()), default=0)}"


def create_run_dir(folder: Path) -> None:
    """Make the folder, and refuse one that is there: two runs never share one. A full disk is nobody's mistake."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"`run_dir`: expected a folder that does not exist yet, found {folder}") from None
    except OSError as error:
        if error.errno in _DISK_TROUBLE:
            raise StorageError(f"could not make the run folder {folder}: {error.strerror}") from error
        raise ConfigError(f"`run_dir`: expected a place to write, {folder}: {error.strerror}") from error


def remove_unused(folder: Path) -> None:
    """Take away the folder of a run that never started: at most what it was given is in it."""
    from kintsugi.data.record import RECORD_FILE

    given = {CONFIG_FILE, ORIGINS_FILE, REWARDS_FILE, RECORD_FILE}
    if {path.name for path in folder.iterdir()} <= given:
        for name in given:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def read_status(folder: Path) -> RunStatus:
    """From the small files; the journal is not needed."""
    config = load_config(folder / CONFIG_FILE)
    lines, _ = read_metrics(folder)
    steps = [line for line in lines if not is_evaluation(line)]
    step = int(steps[-1]["step"] or 0) if steps else 0
    metrics = {name: value for line in lines for name, value in line.items()}
    launcher = living_launcher(folder)
    pid = launcher.pid if launcher else None
    return RunStatus(
        folder=folder,
        config=config,
        state=_state(folder, pid=pid),
        step=step,
        total_steps=stages(config)[-1].last_step,
        stage=next_stage(config, step=step).name,
        metrics=metrics,
        evaluations=tuple(line for line in lines if is_evaluation(line)),
        pid=pid,
    )


def _state(folder: Path, *, pid: int | None) -> RunState:
    if pid is not None:
        return RunState.RUNNING
    summary = read_summary(folder)
    if summary is None or summary.outcome not in {state.value for state in RunState}:
        return RunState.INTERRUPTED
    return RunState(summary.outcome)


def read_journal(folder: Path) -> JournalStatus:
    """Processes and checkpoints, from the facts."""
    from kintsugi.control.journal import read_facts

    path = folder / JOURNAL_FILE
    return summarize_facts(read_facts(path) if path.exists() else ())


def read_incidents(folder: Path) -> IncidentReport:
    """What broke so far; a run that has no journal yet had no incident."""
    from kintsugi.control.journal import read_facts

    path = folder / JOURNAL_FILE
    return report_of(read_facts(path) if path.exists() else ())


def summarize_facts(facts: Iterable[Fact]) -> JournalStatus:
    processes: dict[str, int] = {}
    saved: list[int] = []
    answers: dict[str, str] = {}
    scaled_to = None
    book = IncidentBook()
    for fact in facts:
        book.take(fact)
        match fact:
            case ProcessJoined():
                processes[fact.peer.process] = fact.pid
            case ProcessLost():
                processes.pop(fact.process, None)
            case CheckpointSaved():
                saved.append(fact.step)
            case ServersScaled():
                scaled_to, answers[fact.request] = fact.servers, ""
            case ScaleRefused():
                answers[fact.request] = fact.reason
            case _:
                pass
    incident = next((each for each in book.report().incidents[-1:] if each.is_open), None)
    return JournalStatus(processes, tuple(saved), incident, scaled_to, answers)


def read_metrics(folder: Path, *, offset: int = 0) -> tuple[list[MetricLine], int]:
    """The whole lines of `metrics.jsonl` from a byte offset on, and the offset to go on from."""
    path = folder / METRICS_FILE
    lines, offset = _whole_lines(path, offset=offset)
    decoder = msgspec.json.Decoder(MetricLine)
    return [_decoded(decoder, line, path=path) for line in lines], offset


def _whole_lines(path: Path, *, offset: int) -> tuple[list[bytes], int]:
    """A file that became shorter is read from its beginning."""
    try:
        with path.open("rb") as file:
            if offset > file.seek(0, 2):
                offset = 0
            file.seek(offset)
            contents = file.read()
    except FileNotFoundError:
        return [], 0
    whole = contents[: contents.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes, *, path: Path) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: expected one JSON object a line, got {line[:60]!r} ({error})") from error


def is_evaluation(line: MetricLine) -> bool:
    return "eval/accuracy" in line


def read_samples(
    folder: Path, *, step: int | None = None, worst: int | None = None, grep: str | None = None
) -> list[SampleRecord]:
    """Trained samples, filtered; `worst` keeps that many of the scored ones, the lowest and latest first."""
    chosen = [
        record
        for record in _samples(folder)
        if (step is None or record.step == step)
        and (grep is None or grep in record.prompt or grep in record.completion)
    ]
    if worst is not None:
        scored = [record for record in chosen if record.reward_components]
        chosen = sorted(scored, key=lambda record: (record.reward, -record.step))[:worst]
    return chosen


def _samples(folder: Path) -> Iterator[SampleRecord]:
    path = folder / SAMPLES_FILE
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(SampleRecord)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield _decoded(decoder, line, path=path)


def read_verdicts(folder: Path) -> list[VerdictRecord]:
    """Which held-out problems were answered right, evaluation by evaluation."""
    path = folder / VERDICTS_FILE
    lines, _ = _whole_lines(path, offset=0)
    decoder = msgspec.json.Decoder(VerdictRecord)
    return [_decoded(decoder, line, path=path) for line in lines]


def read_summary(folder: Path) -> Summary | None:
    """None while there is none."""
    path = folder / SUMMARY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not the summary of a run: {error}") from error


def read_faults(folder: Path, *, since: float) -> tuple[FaultLine, ...]:
    """Why a session that began at this wall time failed, the first cause first; empty if it left no word.

    The summary tells it; on a disk too full for one, the room that the journal keeps for its last words; and of a
    master that broke before it held the journal, its events.
    """
    summary = read_summary(folder)
    if summary is not None:
        return summary.faults
    return tuple(
        FaultLine(kind=fault.kind, process=fault.process, message=fault.message)
        for fault in root_first(
            _journaled_faults(folder, since=since) or _recorded_faults(folder, since=since)
        )
    )


def _journaled_faults(folder: Path, *, since: float) -> list[Fault]:
    from kintsugi.control.journal import read_facts

    path = folder / JOURNAL_FILE
    try:
        last = read_facts(path)[-1:] if path.exists() else ()
    except StorageError:
        return []
    return [
        f.fault for f in last if isinstance(f, RunEnded) and f.fault is not None and f.fault.time >= since
    ]


def _recorded_faults(folder: Path, *, since: float) -> list[Fault]:
    records = read_events(folder, process=process_id(Role.MASTER, 0))
    return [
        record.event.fault
        for record in records
        if isinstance(record.event, FaultSeen) and record.stamp.time >= since
    ]


def read_alerts(folder: Path, *, count: int) -> list[Record]:
    """The last alerts of a run."""
    records = read_events(folder, process=process_id(Role.MASTER, 0))
    return [record for record in records if isinstance(record.event, Alert)][-count:]


def read_new_alerts(folder: Path, *, offset: int) -> tuple[list[Record], int]:
    """The master's alerts from a byte offset of its events on, and the offset to go on from."""
    path = events_path(folder, process_id(Role.MASTER, 0))
    lines, offset = _whole_lines(path, offset=offset)
    return [record for record in records_in(lines) if isinstance(record.event, Alert)], offset


def write_launcher(folder: Path, *, pid: int) -> None:
    """Leave word of who runs this folder."""
    start_time = process_start_time(pid)
    assert start_time is not None, f"process {pid} is not there"
    record = Launcher(pid, start_time, socket.gethostname(), boot_id())
    path = folder / LAUNCHER_FILE
    try:
        path.write_bytes(msgspec.json.encode(record))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def living_launcher(folder: Path) -> Launcher | None:
    """The process that runs this folder now, if one does; a number that was given to another process is not it."""
    path = folder / LAUNCHER_FILE
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Launcher)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    if record.host_name != socket.gethostname():
        raise UserError(
            f"{path}: process {record.pid} of host {record.host_name} runs this folder; go on there, "
            "or remove the file if that host is gone"
        )
    alive = record.boot_id == boot_id() and process_start_time(record.pid) == record.start_time
    return record if alive else None


def list_runs(folder: Path) -> list[tuple[Path, RunStatus | KintsugiError]]:
    """Every run inside a folder, the newest first; one that can not be read says why and hides no other."""
    configs = sorted(
        folder.glob(f"*/{CONFIG_FILE}"),
        key=lambda path: (path.stat().st_mtime, path.parent.name),
        reverse=True,
    )
    return [(path.parent, _status_or_error(path.parent)) for path in configs]


def _status_or_error(folder: Path) -> RunStatus | KintsugiError:
    try:
        return read_status(folder)
    except KintsugiError as error:
        return error


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Step → its checkpoint folder, the lowest step first; of several saves of one step the last."""
    found: dict[int, Path] = {}
    for path in sorted((folder / CHECKPOINTS_FOLDER).glob("step-*")):
        step = path.name.removeprefix("step-").partition(".")[0]
        if step.isdecimal():
            found[int(step)] = path
    return dict(sorted(found.items()))


def chosen_checkpoint(folder: Path, *, step: int | None) -> Path:
    """The newest checkpoint of a run, or that of a step; verified."""
    from kintsugi.checkpoint.store import verify

    checkpoints = checkpoint_folders(folder)
    if not checkpoints:
        raise UserError(f"{folder}: expected a run with a checkpoint, it has none yet")
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        have = ", ".join(map(str, checkpoints))
        raise UserError(f"--step: expected a step with a checkpoint ({have}), got {chosen}")
    verify(checkpoints[chosen])
    return checkpoints[chosen]
