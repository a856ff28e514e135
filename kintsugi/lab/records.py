"""What an experiment came to, as it is written to `runs.json` and read by the report. Times are wall clock seconds."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.diagnosis.verdict import Cause, Diagnosis
from kintsugi.errors import StorageError, UserError
from kintsugi.lab.injection import Injected
from kintsugi.runtime import SYSTEM_CLOCK

RUNS_FILE = "runs.json"
CAMPAIGN_FILE = "campaign.json"


class InjectedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault that really struck."""

    target: str
    kind: str
    """The ability: `network_delay`."""
    mechanism: str
    start: float
    end: float | None
    amount: dict[str, float]
    peer: str | None = None
    host: str = ""
    phase: str = ""
    step: int = 0


class Surfaced(msgspec.Struct, frozen=True):
    """The error that a person sees."""

    stage: str
    process: str
    message: str
    t: float


class Moment(msgspec.Struct, frozen=True):
    """A station of a path, or of the timeline."""

    process: str
    what: str
    t: float


class Diagnosed(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict."""

    process: str
    kind: str
    path: tuple[Moment, ...]
    t: float
    """When it was there."""
    confidence: float
    onset: float
    by: str
    summary: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Of a figure in the steps before the first fault."""

    mean: float
    sigma: float

    def holds(self, value: float) -> bool:
        """Within mean ± 2σ."""
        return abs(value - self.mean) <= 2 * self.sigma


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    profile: str
    workload: str
    challenges: tuple[str, ...]
    injected: tuple[InjectedRecord, ...]
    surfaced: Surfaced | None
    hops: int
    """From the cause to where the error showed."""
    diagnosed: Diagnosed | None
    """The first verdict. Ours: of the diagnosis; others have none: what the last error in the controller's log says."""
    correct: bool
    first_effect: float | None
    recovered: bool
    steps_lost: int
    """Committed steps that were undone, or are lost with a run that ended."""
    log_files: int
    log_lines: int
    seconds: float
    expected_stage: str
    """Where the experiment's file says that a fragile system shows it."""
    as_expected: bool
    """Ours: right, in time, nothing lost. Fragile: showed it where and how the file says."""
    baseline: dict[str, Spread]
    timeline: tuple[Moment, ...]
    series: dict[str, list[tuple[float, float]]]
    folder: str
    diagnosed_after_s: float | None = None
    """From the first effect."""
    verdicts: tuple[Diagnosed, ...] = ()
    """Every change of it, the first included."""
    readings: dict[str, Diagnosed | None] = {}
    """What the last error in the master's log, and the first error in any log, would have made somebody believe."""
    problem: str = ""
    """Why the experiment says nothing: a fault that could not be done, a target that died by itself. Never correct."""


class RunsFile(msgspec.Struct, frozen=True, kw_only=True):
    host: dict[str, str]
    date: str
    scale: float
    """A second of the fragile system stands for so many."""
    runs: tuple[RunRecord, ...]


def host_facts() -> dict[str, str]:
    """The machine, for the head of a report."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processors": str(os.cpu_count()),
        "memory_gib": f"{memory / 2**30:.0f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def now_as_text() -> str:
    return datetime.fromtimestamp(SYSTEM_CLOCK.wall(), tz=UTC).isoformat(timespec="seconds")


def injected_record(injected: Injected) -> InjectedRecord:
    injection = injected.injection
    return InjectedRecord(
        target=injected.process,
        kind=injection.ability.value,
        mechanism=injected.mechanism,
        start=injected.start,
        end=injected.end,
        amount=injection.amount,
        peer=injection.peer,
        host=injected.host,
        phase=injected.phase,
        step=injected.step,
    )


def diagnosed(cause: Cause, *, t: float, by: str) -> Diagnosed:
    return Diagnosed(
        process=cause.process,
        kind=cause.kind.value,
        path=tuple(Moment(hop.process, hop.what, hop.time) for hop in cause.path),
        t=t,
        confidence=cause.confidence,
        onset=cause.onset,
        by=by,
        summary=cause.summary,
    )


def first_cause(diagnosis: Diagnosis) -> Cause | None:
    return diagnosis.causes[0] if diagnosis.causes else None


def write_json(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def read_runs(folder: Path) -> RunsFile:
    """What `kintsugi lab run` left in its folder."""
    path = folder / RUNS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunsFile)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: expected the folder of a `kintsugi lab run`, with {RUNS_FILE} in it"
        ) from None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not what `kintsugi lab run` writes: {error}") from error
