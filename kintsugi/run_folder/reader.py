"""Status, metrics, samples and faults of a run, read from its folder (`layout.py`) while it runs or after its end."""

from __future__ import annotations

import heapq
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.config.stages import next_stage, stages
from kintsugi.errors import Fault, KintsugiError, StorageError, UserError, root_first
from kintsugi.journal.facts import (
    CheckpointSaved,
    Fact,
    ProcessJoined,
    ProcessLost,
    RunEnded,
    ScaleRefused,
    ServersScaled,
    StateFolded,
)
from kintsugi.run_folder.incidents import EarlierIncidents, IncidentHistory, IncidentIndex, IncidentReport
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import FaultLine, Summary
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.owned_files import read_owned
from kintsugi.runtime.proc import boot_id, process_start_time
from kintsugi.telemetry.events import Alert, FaultSeen, Record, records_in
from kintsugi.telemetry.jsonl_log import lines_backwards, lines_between, old_path, paths_of
from kintsugi.telemetry.sample_files import SampleFiles
from kintsugi.telemetry.samples_index import SamplesIndex, WorstKey
from kintsugi.telemetry.step_metrics import EvalAnswerRecord, SampleRecord
from kintsugi.types import Role, process_id

MetricLine = dict[str, float | None]
T = TypeVar("T")

TRACEBACK = "Traceback (most recent call last):"
LOG_END_BYTES = 1 << 16
ELSEWHERE_S = 60.0
"""Time without a sign of life after which a run of another host may be taken over: a master that pauses for a full disk
does not write either, but then its host can be asked."""
LATEST_METRICS = 100
"""Lines at the end of `metrics.jsonl` that show the latest value of every metric."""
_EVALUATION_MARK = b'"eval/accuracy"'
_metrics_decoder: msgspec.json.Decoder[MetricLine] = msgspec.json.Decoder(MetricLine)


class RunState(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped on request, with a checkpoint; can be resumed."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The launcher is gone and no outcome was recorded: it was killed, or the machine went down."""


class Launcher(msgspec.Struct, frozen=True):
    """`launcher.json`: the process that runs this folder. The four fields identify it uniquely."""

    pid: int
    start_time: int
    """Start time in clock ticks since boot (`/proc/PID/stat`)."""
    host_name: str
    boot_id: str
    standby_pid: int = 0
    """Process that takes over when that one dies; 0 if there is none."""
    standby_start_time: int = 0


class RunStatus(msgspec.Struct, frozen=True):
    """Current status of a run."""

    folder: Path
    config: Config
    state: RunState
    step: int
    total_steps: int
    stage: str
    metrics: MetricLine
    """Latest value of each metric."""
    evaluations: tuple[MetricLine, ...]
    pid: int | None
    """PID of the launcher while it runs on this host."""
    host: str = ""
    """Other host on which it runs."""


class JournalStatus(msgspec.Struct, frozen=True):
    """Status that only the journal contains."""

    processes: dict[str, int]
    """PIDs of the registered processes."""
    saved_steps: tuple[int, ...]
    incident: IncidentHistory | None = None
    """Last incident if it is open."""
    scaled_to: int | None = None
    """Number of generation servers after `kintsugi scale`; None if it was not used."""
    answers: dict[str, str] = {}
    """Reason for the refusal of each request of `kintsugi scale`; empty for an accepted one."""

    def num_servers(self, config: Config) -> int:
        """Current target number of generation servers."""
        return config.generation.servers if self.scaled_to is None else self.scaled_to


def find_run(name: str, *, folder: Path = Path("runs")) -> Path:
    """Find the folder of a run by its path, or by its name in `runs/`."""
    for candidate in (Path(name), folder / name):
        if RunFolder(candidate).config_file.is_file():
            return candidate
    found = "a folder without config.yaml" if Path(name).is_dir() else "nothing"
    raise UserError(f"{name}: expected a run folder, or the name of one in {folder}/, found {found}")


def read_status(folder: Path) -> RunStatus:
    """Read the status from the small files, without the journal."""
    config = load_config(RunFolder(folder).config_file)
    evaluations, latest = _latest_metrics(folder)
    steps = [line.get("step") for line in latest if not is_evaluation(line)]
    step = int(next((each for each in reversed(steps) if each is not None), 0))
    metrics = {name: value for line in (*evaluations, *latest) for name, value in line.items()}
    running = is_running(folder)
    launcher = recorded_launcher(folder)
    is_here = launcher is not None and launcher.host_name == socket.gethostname()
    living = living_launcher(folder) if running and is_here else None
    return RunStatus(
        folder=folder,
        config=config,
        state=RunState.RUNNING if running else _state(folder),
        step=step,
        total_steps=stages(config)[-1].last_step,
        stage=next_stage(config, step=step).name,
        metrics=metrics,
        evaluations=tuple(evaluations),
        pid=living.pid if living is not None else None,
        host=launcher.host_name if running and launcher is not None and not is_here else "",
    )


def _state(folder: Path) -> RunState:
    """Return the state of a run that does not run. A summary that cannot be read, as after a crash of the host, is
    none."""
    try:
        summary = read_summary(folder)
    except StorageError:
        summary = None
    if summary is None or summary.outcome not in {state.value for state in RunState}:
        return RunState.INTERRUPTED
    return RunState(summary.outcome)


def read_journal(folder: Path) -> JournalStatus:
    """Read processes, checkpoints and requests from the journal."""
    fold = _StatusFold()
    _fold_journal(folder, fold.take)
    return fold.status()


def read_incidents(folder: Path) -> IncidentReport:
    """Read the incidents so far; none if there is no journal yet."""
    index = IncidentIndex()
    _fold_journal(folder, index.take)
    report = index.report()
    if not report.earlier.count:
        return report
    # A master that was killed may not have written what it dropped last, and its successor writes that again.
    earlier = {each.incident: each for each in (*_recorded_incidents(folder), *index.take_dropped())}
    kept = {each.incident: each for each in report.incidents}
    incidents = tuple(each for _, each in sorted({**earlier, **kept}.items()))
    return msgspec.structs.replace(report, incidents=incidents, earlier=EarlierIncidents())


def _recorded_incidents(folder: Path) -> Iterator[IncidentHistory]:
    """Yield the incidents that the master's state does not keep."""
    decoder = msgspec.json.Decoder(IncidentHistory)
    for path in paths_of(RunFolder(folder).incidents_file):
        yield from _decoded(decoder, (line for _, line in lines_between(path)))


def _fold_journal(folder: Path, take: Callable[[Fact], None]) -> None:
    """Pass the facts of the journal to `take`, a folded state first if there is one; nothing without a journal."""
    from kintsugi.journal.journal import scan_facts

    path = RunFolder(folder).journal_file
    if path.exists():
        scan_facts(path, take)


def summarize_facts(facts: Iterable[Fact]) -> JournalStatus:
    fold = _StatusFold()
    for fact in facts:
        fold.take(fact)
    return fold.status()


class _StatusFold:
    """Fold of the facts that `JournalStatus` needs."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._saved: list[int] = []
        self._answers: dict[str, str] = {}
        self._scaled_to: int | None = None
        self._index = IncidentIndex()

    def take(self, fact: Fact) -> None:
        self._index.take(fact)
        match fact:
            case StateFolded():
                self._processes, self._answers = dict(fact.processes), dict(fact.answers)
                self._saved, self._scaled_to = list(fact.saved_steps), fact.servers
            case ProcessJoined():
                self._processes[fact.peer.process] = fact.pid
            case ProcessLost():
                self._processes.pop(fact.process, None)
            case CheckpointSaved():
                self._saved.append(fact.step)
            case ServersScaled():
                self._scaled_to, self._answers[fact.request] = fact.servers, ""
            case ScaleRefused():
                self._answers[fact.request] = fact.reason
            case _:
                pass

    def status(self) -> JournalStatus:
        incident = next((each for each in self._index.report().incidents[-1:] if each.is_open), None)
        return JournalStatus(self._processes, tuple(self._saved), incident, self._scaled_to, self._answers)


def read_metrics(folder: Path, *, offset: int = 0) -> tuple[list[MetricLine], int]:
    """Read the complete lines of `metrics.jsonl` from a byte offset on; returns the next offset too."""
    path = RunFolder(folder).metrics_file
    lines, offset = _whole_lines(path, offset=offset)
    return list(_decoded(_metrics_decoder, lines)), offset


def _latest_metrics(folder: Path) -> tuple[list[MetricLine], list[MetricLine]]:
    """Return all evaluations, and the last lines of `metrics.jsonl`, at least one of which is a step's, if any is. The
    file is searched in pieces, and of its steps only the last ones are decoded."""
    path = RunFolder(folder).metrics_file
    evaluations: list[MetricLine] = []
    latest: deque[MetricLine] = deque()
    if not path.exists():
        return [], []
    for _, line in lines_between(path):
        if _EVALUATION_MARK in line:
            evaluations.extend(_decoded(_metrics_decoder, [line]))
    for _, line in lines_backwards(path):
        latest.extendleft(_decoded(_metrics_decoder, [line]))
        if len(latest) >= LATEST_METRICS and not all(map(is_evaluation, latest)):
            break
    return [each for each in evaluations if is_evaluation(each)], list(latest)


def _whole_lines(path: Path, *, offset: int) -> tuple[list[bytes], int]:
    """Read complete lines from an offset; a file that became shorter is read from its start."""
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


def _decoded(decoder: msgspec.json.Decoder[T], lines: Iterable[bytes]) -> Iterator[T]:
    """Decode lines; one that cannot be decoded, as after a crash of the host, costs that line only."""
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def is_evaluation(line: MetricLine) -> bool:
    return "eval/accuracy" in line


def read_samples(
    folder: Path,
    *,
    step: int | None = None,
    worst: int | None = None,
    grep: str | None = None,
    last: int | None = None,
) -> list[SampleRecord]:
    """Read trained samples that are kept, filtered, in their order; `last` selects that many of the latest, `worst`
    that many scored ones, by lowest reward, then latest step. Only what is returned is kept in memory."""

    def is_wanted(record: SampleRecord) -> bool:
        return (step is None or record.step == step) and (
            grep is None or grep in record.prompt or grep in record.completion
        )

    with SampleFiles(folder) as files:
        if worst is not None and step is None and grep is None:
            return _worst_samples(files, worst)
        if last is not None and step is None:
            found = (record for _, record in _decoded_samples(files.lines_backwards()) if is_wanted(record))
            return list(islice(found, last))[::-1]
        parts = [(files.start, files.end)] if step is None else SamplesIndex(files).of_step(step)
        chosen = (
            record
            for offset, end in parts
            for _, record in _decoded_samples(files.lines_between(offset, end))
            if is_wanted(record)
        )
        if worst is not None:
            scored = (record for record in chosen if record.reward_components)
            return heapq.nsmallest(worst, scored, key=lambda record: (record.reward, -record.step))
        return list(chosen if last is None else deque(chosen, maxlen=last))


def each_sample(folder: Path) -> Iterator[SampleRecord]:
    """Yield the trained samples that are kept, in their order."""
    with SampleFiles(folder) as files:
        yield from (record for _, record in _decoded_samples(files.lines_between()))


def _worst_samples(files: SampleFiles, count: int) -> list[SampleRecord]:
    """Return the samples with the lowest rewards by the index, and by reading what it does not describe."""
    index = SamplesIndex(files)

    def keys_in(parts: Iterable[tuple[int, int]]) -> Iterator[WorstKey]:
        for begin, end in parts:
            for (offset, line), record in _decoded_samples(files.lines_between(begin, end)):
                if record.reward_components:
                    yield record.reward, -record.step, offset, offset + len(line)

    keys, hidden = index.worst(count, keys_in(index.rest))
    if hidden:
        keys = heapq.nsmallest(count, set(keys).union(keys_in(hidden)))
    lines = ((offset, files.bytes_at(offset, end)) for _, _, offset, end in keys)
    return [record for _, record in _decoded_samples(lines)]


def _decoded_samples(
    lines: Iterable[tuple[int, bytes]],
) -> Iterator[tuple[tuple[int, bytes], SampleRecord]]:
    """Decode lines; one that cannot be decoded costs that line only."""
    decoder = msgspec.json.Decoder(SampleRecord)
    for place in lines:
        try:
            yield place, decoder.decode(place[1])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def read_verdicts(folder: Path) -> list[EvalAnswerRecord]:
    """Read which held-out problems were answered correctly, for each evaluation."""
    path = RunFolder(folder).eval_answers_file
    lines, _ = _whole_lines(path, offset=0)
    return list(_decoded(msgspec.json.Decoder(EvalAnswerRecord), lines))


def read_summary(folder: Path) -> Summary | None:
    """Read `summary.json`; None if it does not exist yet."""
    path = RunFolder(folder).summary_file
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not the summary of a run: {error}") from error


def read_faults(folder: Path, *, since: float) -> tuple[FaultLine, ...]:
    """Read the faults of a session that started at this wall time, the first cause first; empty if none were recorded.

    They are in the summary; if the disk was too full for one, in the space that the journal reserves for its end; if
    the master failed before it opened the journal, in its events.
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
    last: deque[Fact] = deque(maxlen=1)
    try:
        _fold_journal(folder, last.append)
    except StorageError:
        return []
    return [
        f.fault for f in last if isinstance(f, RunEnded) and f.fault is not None and f.fault.time >= since
    ]


def _recorded_faults(folder: Path, *, since: float) -> list[Fault]:
    records = takewhile(lambda record: record.stamp.time >= since, _latest_events(folder))
    return [record.event.fault for record in records if isinstance(record.event, FaultSeen)][::-1]


def read_alerts(folder: Path, *, count: int) -> list[Record]:
    """Read the last alerts of the master."""
    alerts = (record for record in _latest_events(folder) if isinstance(record.event, Alert))
    return list(islice(alerts, count))[::-1]


def _latest_events(folder: Path) -> Iterator[Record]:
    """Yield the events of the master, the last one first."""
    for path in reversed(paths_of(RunFolder(folder).events_file(process_id(Role.MASTER, 0)))):
        yield from records_in(line.replace(b"\0", b"") for _, line in lines_backwards(path))


def read_new_alerts(folder: Path, *, offset: int) -> tuple[list[Record], int]:
    """Read the master's alerts from a byte offset of its events on; returns the next offset too."""
    path = RunFolder(folder).events_file(process_id(Role.MASTER, 0))
    lines: list[bytes] = []
    if path.exists() and path.stat().st_size < offset:
        # The file was put aside for a new one: its end comes first.
        lines, _ = _whole_lines(old_path(path, 1), offset=offset)
        offset = 0
    new, offset = _whole_lines(path, offset=offset)
    return [record for record in records_in([*lines, *new]) if isinstance(record.event, Alert)], offset


def write_launcher(folder: Path, *, pid: int, standby: int = 0) -> None:
    """Record the process that runs this folder, and its standby, if it has one."""
    start_time = process_start_time(pid)
    assert start_time is not None, f"process {pid} does not exist"
    standby_start_time = (process_start_time(standby) if standby else None) or 0
    record = Launcher(pid, start_time, socket.gethostname(), boot_id(), standby, standby_start_time)
    path = RunFolder(folder).launcher_file
    try:
        write_atomically(path, msgspec.json.encode(record), durable=False)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def living_launcher(folder: Path) -> Launcher | None:
    """Return the running launcher of this folder, or the standby that is taking over from it; None if neither runs.

    A reused PID does not count.
    """
    record = recorded_launcher(folder)
    if record is None:
        return None
    if record.host_name != socket.gethostname():
        raise UserError(
            f"{RunFolder(folder).launcher_file}: process {record.pid} of host {record.host_name} runs this folder; "
            "continue there, or, if that host is gone, with `kintsugi resume --take-over`"
        )
    if record.boot_id != boot_id():
        return None
    if _runs(record.pid, record.start_time):
        return record
    if record.standby_pid and _runs(record.standby_pid, record.standby_start_time):
        return Launcher(record.standby_pid, record.standby_start_time, record.host_name, record.boot_id)
    return None


def recorded_launcher(folder: Path) -> Launcher | None:
    """Return the last launcher of this folder that has not ended in order, whether it runs or not."""
    try:
        data = read_owned(RunFolder(folder).launcher_file, owners=frozenset({os.stat(folder).st_uid}))
        return msgspec.json.decode(data, type=Launcher)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def is_running(folder: Path) -> bool:
    """Return whether a run runs; on another host, whether it was seen to within the last `ELSEWHERE_S` seconds."""
    record = recorded_launcher(folder)
    if record is None or record.host_name == socket.gethostname():
        return living_launcher(folder) is not None
    return unseen_s(folder) < ELSEWHERE_S


def unseen_s(folder: Path) -> float:
    """Return how long ago the master last wrote what it writes twice a second, by the clock of the folder's disk, which
    hosts may share; infinite if it never did."""
    run = RunFolder(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as now:
            return os.fstat(now.fileno()).st_mtime - run.processes_file.stat().st_mtime
    except OSError:
        pass
    try:
        return SYSTEM_CLOCK.wall() - run.processes_file.stat().st_mtime
    except OSError:
        return inf


def _runs(pid: int, start_time: int) -> bool:
    return process_start_time(pid) == start_time


def list_runs(folder: Path) -> list[tuple[Path, RunStatus | KintsugiError]]:
    """List the runs in a folder, newest first; an unreadable run is listed with its error."""
    configs = sorted(
        folder.glob(str(RunFolder("*").config_file)),
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
    """Checkpoint folders by step, in ascending order; the last one if a step was saved repeatedly."""
    found: dict[int, Path] = {}
    for path in sorted(RunFolder(folder).checkpoints_folder.glob("step-*")):
        step = path.name.removeprefix("step-").partition(".")[0]
        if step.isdecimal():
            found[int(step)] = path
    return dict(sorted(found.items()))


def chosen_checkpoint(folder: Path, *, step: int | None) -> Path:
    """Find and verify the checkpoint of a step, or the newest one."""
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


def best_step(folder: Path) -> int:
    """Return the step of the checkpoint with the highest held-out accuracy; the latest one of equals."""
    checkpoints = checkpoint_folders(folder)
    measured = {
        int(line["step"] or 0): line["eval/accuracy"] or 0.0
        for line in read_status(folder).evaluations
        if int(line["step"] or 0) in checkpoints
    }
    if not measured:
        have = ", ".join(map(str, checkpoints)) or "none"
        raise UserError(
            f"--best: expected a checkpoint of a step that was evaluated, found none (checkpoints of steps: {have}); "
            "`eval.every` as a multiple of `checkpoint.every` evaluates every checkpoint"
        )
    return max(measured, key=lambda step: (measured[step], step))


def last_user_traceback(folder: Path) -> str | None:
    """Return the last traceback of a reward, an environment or an agent in the logs of the rollout workers, with the
    file; None if there is none."""
    paths = sorted(
        RunFolder(folder).logs_folder.glob(f"{Role.ROLLOUT}-*.log"), key=lambda path: path.stat().st_mtime
    )
    for path in reversed(paths):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_END_BYTES))
            text = file.read().decode(errors="replace")
        start = text.rfind(TRACEBACK)
        if start >= 0:
            return f"{path}:\n{text[start:].rstrip()}"
    return None
