"""`<run>/processes.json`: what every process of a living run does, as the master last heard it.

Replaced as a whole twice a second; a reader sees one moment. It is for people, and no part of the run's state.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kintsugi.types import Wait

PROCESSES_FILE = "processes.json"


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process: who it is, and what it said in its last heartbeat."""

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
    """Its progress; which of them move tells slow from stuck."""
    gauges: dict[str, float] = {}
    """What else it said of itself: the pages of a server."""
    waits: tuple[Wait, ...] = ()
    """What it said it waits for; the times are seconds of its own clock."""


class ProcessReports(msgspec.Struct, frozen=True):
    """The file's contents."""

    time: float
    """Wall clock of the master."""
    processes: tuple[ProcessReport, ...]
    phase: str = ""
    """Of the master."""
    recovery: str = ""
    """How far the ranks are on their way back to normal running, in the protocol's words."""


def write_processes(run_dir: Path, reports: ProcessReports) -> None:
    """Raises OSError where the disk does."""
    path = run_dir / PROCESSES_FILE
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(reports))
    os.replace(new, path)


def read_processes(run_dir: Path) -> ProcessReports | None:
    """None where there is none that can be read."""
    try:
        return msgspec.json.decode((run_dir / PROCESSES_FILE).read_bytes(), type=ProcessReports)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
