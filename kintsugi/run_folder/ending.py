"""End of a run that did not finish: by its summary, or by what its processes left if nothing was recorded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from kintsugi.run_folder.incidents import headline
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import RunState, read_status, read_summary, recorded_launcher
from kintsugi.runtime.proc import boot_id
from kintsugi.telemetry.events import ProcessGone, Record, RunAborted, records_in
from kintsugi.telemetry.jsonl_log import lines_backwards
from kintsugi.types import Role, process_id

LAUNCHER = process_id(Role.LAUNCHER, 0)
LAST_EVENTS = 50
"""Events at the end of an agent's file among which the loss of the launcher is found: one of an earlier session is
followed by more than these."""
ABORTED_S = 60.0
"""Time in which a run that was ended at once has ended, and after which its records are of a later session."""


class RunEnd(msgspec.Struct, frozen=True):
    """`RunEnd("interrupted", 1795008605.1, "the launcher and its standby were killed, …")`."""

    state: str
    time: float
    """Wall clock; of an interrupted run, that of its last record. 0 if unknown."""
    what: str


def read_end(folder: Path) -> RunEnd | None:
    """Return what ended a run; None if it runs or has finished."""
    status = read_status(folder)
    if status.state in (RunState.RUNNING, RunState.FINISHED):
        return None
    if status.state is RunState.INTERRUPTED:
        return RunEnd(status.state, last_record_time(folder), _interruption(folder))
    summary = read_summary(folder)
    time = RunFolder(folder).summary_file.stat().st_mtime
    if status.state is RunState.STOPPED:
        saved = f", and saved step {status.step}" if status.step else " before its first step"
        return RunEnd(status.state, time, f"it was asked to stop{saved}")
    faults = summary.faults if summary is not None else ()
    what = f"{faults[0].process}: {headline(faults[0].message)}" if faults else "its cause was not recorded"
    return RunEnd(status.state, time, what)


def last_record_time(folder: Path) -> float:
    """Return when the run last wrote what it writes twice a second, or an event; 0 if it never did."""
    run = RunFolder(folder)
    found = [0.0]
    for path in (run.processes_file, run.launcher_file, *run.events_folder.glob("*.jsonl")):
        with suppress(OSError):
            found.append(path.stat().st_mtime)
    return max(found)


def _interruption(folder: Path) -> str:
    launcher = recorded_launcher(folder)
    if launcher is None and _was_aborted(folder):
        return "a second Ctrl-C or signal ended it at once, without a checkpoint"
    if launcher is not None and launcher.host_name != socket.gethostname():
        return f"host {launcher.host_name} ran it, and nothing has been recorded there since"
    if launcher is not None and launcher.boot_id != boot_id():
        return f"host {launcher.host_name} went down or was restarted while it ran"
    if any(
        isinstance(each.event, ProcessGone) and each.event.of == LAUNCHER
        for path in RunFolder(folder).events_folder.glob(f"{Role.AGENT.value}-*.jsonl")
        for each in islice(_newest_first(path), LAST_EVENTS)
    ):
        return "the launcher and its standby were killed, and the other processes ended without them"
    if last_record_time(folder) == 0.0:
        return "it was killed before any of its processes had begun"
    return "all its processes were killed at the same moment, the launcher and its standby too; none recorded why"


def _was_aborted(folder: Path) -> bool:
    last = next(_newest_first(RunFolder(folder).events_file(LAUNCHER)), None)
    if last is None or not isinstance(last.event, RunAborted):
        return False
    return last_record_time(folder) - last.stamp.time < ABORTED_S


def _newest_first(path: Path) -> Iterator[Record]:
    """Yield the events of a process; none if they cannot be read."""
    with suppress(OSError):
        yield from records_in(line.replace(b"\0", b"") for _, line in lines_backwards(path))
