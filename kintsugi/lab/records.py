"""What an experiment came to, as it is written to `runs.json` and read by the report. Times are wall clock seconds."""

from __future__ import annotations

import os
import platform
import secrets
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
    port: int | None = None
    """Of a network fault that hit only this port of the peer."""
    host: str = ""
    phase: str = ""
    step: int = 0
    """The one that was hit: the one that is worked on, or, after its commit, the one that is saved or evaluated."""
    culprit: bool = False
    """What the diagnosis is to name. Its start is the origin of every time of the run."""


class Surfaced(msgspec.Struct, frozen=True):
    """The error that a person sees."""

    stage: str
    process: str
    message: str
    t: float
    step: int | None = None
    """Of the master, counted as that of a fault; None where it was not recorded."""


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
    """From the cause to where the error showed: one less than there are names in `way`."""
    diagnosed: Diagnosed | None
    """The first verdict. Ours: of the diagnosis; others have none: what the last error in the controller's log says."""
    correct: bool
    first_effect: float | None
    recovered: bool
    steps_lost: int
    """Committed steps that were undone, or are lost with a run that ended."""
    log_files: int | None
    """That a person would have read; None where no error was seen, and nobody would have begun to read."""
    log_lines: int | None
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
    """From the first effect; negative: the verdict was there before anything that was measured had left its band."""
    verdicts: tuple[Diagnosed, ...] = ()
    """Every change of it, the first included."""
    readings: dict[str, Diagnosed | None] = {}
    """What the last error in the master's log, and the first error in any log, would have made somebody believe."""
    kinds: tuple[str, ...] = ()
    """What a right diagnosis may call it: any of them."""
    way: tuple[str, ...] = ()
    """The processes that the fault went through, the cause first; in a system that tells no path one for each part."""
    contrast_of: str = ""
    """The experiment that this is the fine-tuning counterpart of."""
    ended: float | None = None
    """When the run ended, or was no longer followed."""
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


def injected_record(
    injected: Injected, *, host: str = "", step: int | None = None, culprit: bool = False
) -> InjectedRecord:
    """`host`, `step`: as the run counts them, where that is known."""
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


def check_writable(path: Path) -> None:
    """UserError where a result could not be written in the end; for before a run that takes long."""
    if path.is_dir():
        raise UserError(f"{path}: expected a file to write the results to, got a folder")
    try:
        _replace(path, None)
    except OSError as error:
        raise UserError(f"{path}: the results can not be written there: {error.strerror or error}") from error


def write_json(content: Any, path: Path) -> None:
    """All of it or nothing: whoever reads meanwhile finds what was there before."""
    try:
        _replace(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def _replace(path: Path, content: bytes | None) -> None:
    """None: only try whether it could be done."""
    if path.exists() and not path.is_file():
        # A pipe or a device, as /dev/stdout, is written to as it is.
        if content is not None:
            path.write_bytes(content)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        new.write_bytes(content or b"")
        if content is not None:
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


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
