"""`<run>/processes.json`: the last heartbeat of every process of a running job, as received by the master.

Replaced as a whole twice a second, so a reader sees one moment. It is for display, and no part of the state of the run.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.types import Wait


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a process, and the content of its last heartbeat."""

    process: str
    role: str
    host: str
    pid: int
    incarnation: str
    status: str
    """`requested`, `live`, `leaving` or `lost`."""
    load: float = 0.0
    silent_s: float | None = None
    """Seconds since its last heartbeat; None before the first."""
    counters: dict[str, int] = {}
    """Progress counters; a stuck process has none that grows."""
    gauges: dict[str, float] = {}
    """Other values of its heartbeat, as the KV blocks of a server."""
    waits: tuple[Wait, ...] = ()
    """Its declared waits; times are of its own monotonic clock."""


class Activity(msgspec.Struct, frozen=True):
    """Progress inside the current phase: `Activity(since=1794885580.2, done=300, total=1000, unit="groups")`."""

    since: float
    """Wall clock of its begin."""
    done: int = 0
    total: int = 0
    """0 where nothing is counted."""
    unit: str = ""
    awaits: tuple[str, ...] = ()
    """Processes whose answers are pending."""
    is_stopping: bool = False
    """Whether a stop was requested: the run ends after this step."""
    saving_step: int = 0
    """Step whose checkpoint is being written, in whatever phase; 0 if none is."""


class ProcessReports(msgspec.Struct, frozen=True):
    """Contents of the file."""

    time: float
    """Wall clock of the master."""
    processes: tuple[ProcessReport, ...]
    phase: str = ""
    """Phase of the master."""
    recovery: str = ""
    """State of the recovery protocol."""
    activity: Activity | None = None


def write_processes(run_dir: Path, reports: ProcessReports) -> None:
    """Replace the file; raises OSError of the disk."""
    write_atomically(RunFolder(run_dir).processes_file, msgspec.json.encode(reports), durable=False)


def read_processes(run_dir: Path) -> ProcessReports | None:
    """Return the contents of the file; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode(RunFolder(run_dir).processes_file.read_bytes(), type=ProcessReports)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
