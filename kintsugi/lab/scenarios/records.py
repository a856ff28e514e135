"""Result of experiments, written to `runs.json` and read by the report. Times are wall clock seconds."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.errors import StorageError, UserError
from kintsugi.lab.injector.injection import Injected
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically

RUNS_FILE = "runs.json"
CAMPAIGN_FILE = "campaign.json"


class InjectedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault."""

    target: str
    kind: str
    """Fault type: `network_delay`."""
    mechanism: str
    start: float
    end: float | None
    amount: dict[str, float]
    peer: str | None = None
    port: int | None = None
    """Set for a network fault that is restricted to this port of the peer."""
    host: str = ""
    phase: str = ""
    step: int = 0
    """Step that was affected: the current one or, after its commit, the one being saved or evaluated."""
    culprit: bool = False
    """Whether the diagnosis has to name this fault. Its start is the origin of all times of the run."""


class SurfacedError(msgspec.Struct, frozen=True):
    """Error that is visible to the user."""

    stage: str
    process: str
    message: str
    t: float
    step: int | None = None
    """Step of the master, counted like that of a fault; None when it was not recorded."""


class TimedEvent(msgspec.Struct, frozen=True):
    """Event of a path or of the timeline."""

    process: str
    what: str
    t: float


class DiagnosisRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict."""

    process: str
    kind: str
    path: tuple[TimedEvent, ...]
    t: float
    """Time of the verdict."""
    confidence: float
    onset: float
    by: str
    summary: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Mean and deviation of a metric in the steps before the first fault."""

    mean: float
    sigma: float

    def holds(self, value: float) -> bool:
        """Whether a value is within mean ± 2σ."""
        return abs(value - self.mean) <= 2 * self.sigma


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    profile: str
    workload: str
    challenges: tuple[str, ...]
    injected: tuple[InjectedRecord, ...]
    surfaced: SurfacedError | None
    hops: int
    """Hops from the cause to the visible error: one less than the names in `way`."""
    diagnosed: DiagnosisRecord | None
    """First verdict. Ours: of the diagnosis. Others have no diagnosis: the last error in the controller's log."""
    correct: bool
    first_effect: float | None
    recovered: bool
    steps_lost: int
    """Committed steps that were undone, or lost with a run that ended."""
    log_files: int | None
    """Log files that would have to be read; None when no error was visible."""
    log_lines: int | None
    seconds: float
    expected_stage: str
    """Stage in which the fragile system shows the fault, according to the experiment's file."""
    as_expected: bool
    """Ours: right, in time, no step lost. Fragile: visible in the stage and with the message of the file."""
    baseline: dict[str, Spread]
    timeline: tuple[TimedEvent, ...]
    series: dict[str, list[tuple[float, float]]]
    folder: str
    diagnosed_after_s: float | None = None
    """Seconds from the first effect to the verdict; negative when the verdict came before any metric left its band."""
    verdicts: tuple[DiagnosisRecord, ...] = ()
    """All verdicts, including the first."""
    readings: dict[str, DiagnosisRecord | None] = {}
    """Verdicts suggested by the last error in the master's log and by the first error in any log."""
    kinds: tuple[str, ...] = ()
    """Fault kinds that a right diagnosis may name."""
    way: tuple[str, ...] = ()
    """Processes that the fault propagated through, the cause first; one per part in a system without a diagnosed
    path."""
    contrast_of: str = ""
    """Experiment that this is the fine-tuning counterpart of."""
    ended: float | None = None
    """Time at which the run, or its observation, ended."""
    problem: str = ""
    """Reason why the experiment is void: a fault that could not be injected, a target that died before. Never
    correct."""


class RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    host: dict[str, str]
    date: str
    scale: float
    """Seconds that one second of the fragile system stands for."""
    runs: tuple[RunRecord, ...]


def host_facts() -> dict[str, str]:
    """Describe the machine for the head of a report."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processors": str(os.cpu_count()),
        "memory_gib": f"{memory / 2**30:.0f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def now_as_text() -> str:
    return datetime.fromtimestamp(SYSTEM_CLOCK.wall(), tz=UTC).isoformat(timespec="seconds")


def injected_record(
    injected: Injected, *, host: str = "", step: int | None = None, culprit: bool = False
) -> InjectedRecord:
    """Convert a marker; `host` and `step` as the run counts them, where known."""
    injection = injected.injection
    return InjectedRecord(
        target=injected.process,
        kind=injection.ability.value,
        mechanism=injected.mechanism,
        start=injected.start,
        end=injected.end,
        amount=injection.amount,
        peer=injection.peer,
        port=injection.port,
        host=host or injected.host,
        phase=injected.phase,
        step=injected.step if step is None else step,
        culprit=culprit,
    )


def diagnosed(cause: Cause, *, t: float, by: str) -> DiagnosisRecord:
    return DiagnosisRecord(
        process=cause.process,
        kind=cause.kind.value,
        path=tuple(TimedEvent(hop.process, hop.what, hop.time) for hop in cause.path),
        t=t,
        confidence=cause.confidence,
        onset=cause.onset,
        by=by,
        summary=cause.summary,
    )


def first_cause(diagnosis: Diagnosis) -> Cause | None:
    return diagnosis.causes[0] if diagnosis.causes else None


def check_writable(path: Path) -> None:
    """Raise UserError when a result could not be written at the end; called before a long run."""
    if path.is_dir():
        raise UserError(f"{path}: expected a file to write the results to, got a folder")
    try:
        _replace(path, None)
    except OSError as error:
        raise UserError(f"{path}: the results can not be written there: {error.strerror or error}") from error


def write_json(content: Any, path: Path) -> None:
    """Write a file atomically: a concurrent reader finds the old or the new content."""
    try:
        _replace(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def _replace(path: Path, content: bytes | None) -> None:
    """Replace a file; with `content` None, only check that it is possible."""
    if path.exists() and not path.is_file():
        # A pipe or device such as /dev/stdout is written to directly.
        if content is not None:
            path.write_bytes(content)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        tempfile.TemporaryFile(dir=path.parent).close()
    else:
        write_atomically(path, content, durable=False)


def read_runs(folder: Path) -> RunsFile:
    """Read the result of `kintsugi lab run` from its folder."""
    path = folder / RUNS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunsFile)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: expected the folder of a `kintsugi lab run`, with {RUNS_FILE} in it"
        ) from None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not what `kintsugi lab run` writes: {error}") from error
