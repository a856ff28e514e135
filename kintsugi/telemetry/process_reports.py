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


class ProcessReports(msgspec.Struct, frozen=True):
    """Contents of the file."""

    time: float
    """Wall clock of the master."""
    processes: tuple[ProcessReport, ...]
    phase: str = ""
    """Phase of the master."""
    recovery: str = ""
    """State of the recovery protocol."""


def write_processes(run_dir: Path, reports: ProcessReports) -> None:
    """Replace the file; raises OSError of the disk."""
    write_atomically(RunFolder(run_dir).processes_file, msgspec.json.encode(reports), durable=False)


def read_processes(run_dir: Path) -> ProcessReports | None:
    """Return the contents of the file; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode(RunFolder(run_dir).processes_file.read_bytes(), type=ProcessReports)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
