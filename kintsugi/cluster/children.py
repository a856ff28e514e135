"""The processes an agent answers for: each held by pidfd, each with its log, all of them in a table on disk.

The table is what a successor of the agent, or the launcher after the agent's death, finds them by: pid and start time
together name a process for as long as the host is up.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from kintsugi.cluster.placement import Start, StartReport
from kintsugi.errors import StartFailed, StartKilled
from kintsugi.lease.service import LeaseUser
from kintsugi.runtime import COUNTERS, Child, Processes, describe_status
from kintsugi.supervision import ChipFault, Inspected, StartProcess
from kintsugi.transport import Delivery
from kintsugi.types import ChildReport

_LAST_OUTPUT_CHARACTERS = 2000


TEMPLATE = "template"
"""The line of the process that others are forked from."""


class ChildRecord(msgspec.Struct, frozen=True):
    """One line of the table: `ChildRecord("model-0", "1.4", 4711, 883127, b"…", 0)`."""

    process: str
    incarnation: str
    pid: int
    start_time: int
    """Clock ticks after boot, as of /proc/PID/stat."""
    public_key: bytes = b""
    log_offset: int = 0
    """Where its own words begin in a log that earlier incarnations have written to."""


class ChildrenTable(msgspec.Struct, frozen=True):
    """`<run_dir>/agents/<agent>.json`."""

    boot_id: str
    children: tuple[ChildRecord, ...]
    job: str = ""
    """A table that another session of the run left behind names nobody whom an agent of this one may adopt."""
    leases: tuple[LeaseUser, ...] = ()
    """Who may be using a shared device: a successor lets nobody in before they have given it back."""
    broken_chips: dict[str, ChipFault] = {}
    """Accelerators that are not to be used any more, by their identity: a successor would not see again why."""


class Successor(msgspec.Struct, frozen=True, eq=False):
    """An order for a process of which an earlier incarnation still has to end."""

    delivery: Delivery
    order: StartProcess


class Kept:
    """One child, from the order to start it until its end has been seen.

    `started` becomes true when it reports that its program is imported; a child that ends before has failed to start.
    An *adopted* child was started by an earlier agent: its end is seen, its status is not, as it has another parent.
    """

    def __init__(self, record: ChildRecord, *, log: Path, start: Start | None = None) -> None:
        self.process, self.incarnation = record.process, record.incarnation
        self.public_key = record.public_key
        self.start = start
        """How to bring it to life; None for one that was adopted."""
        self.child: Child | None = None
        """None until it is born: the template may still be importing."""
        self.report = -1
        """Read end of the pipe on which it tells how its start went; -1 once that was read."""
        self.start_request: Delivery | None = None
        """The order to start it, not yet answered; the master has none."""
        self.stop_requests: list[Delivery] = []
        self.successor: Successor | None = None
        """What to start in its place once it has ended."""
        self.started = start is None
        self.failure: StartReport | None = None
        self.stopping = False
        self._terminate_at = self._kill_at = math.inf
        self._log, self._log_offset = log, record.log_offset

    @classmethod
    def ordered(cls, start: Start, *, request: Delivery | None) -> Kept:
        """A child that is still to be born."""
        own = start.bootstrap
        log_offset = start.log.stat().st_size if start.log.exists() else 0
        record = ChildRecord(own.process, own.incarnation, 0, 0, own.public_key, log_offset)
        kept = cls(record, log=start.log, start=start)
        kept.start_request = request
        return kept

    @classmethod
    def adopted(cls, record: ChildRecord, child: Child, *, log: Path) -> Kept:
        """A child of an earlier agent, found by its table."""
        kept = cls(record, log=log)
        kept.child = child
        return kept

    def stop(self, *, terminate_at: float, kill_at: float) -> None:
        """Plan SIGTERM and then SIGKILL, in monotonic time. A later plan can hasten the end, never delay it."""
        self.stopping = True
        self._terminate_at = min(self._terminate_at, terminate_at)
        self._kill_at = min(self._kill_at, kill_at)

    @property
    def signal_at(self) -> float:
        """When the next signal is due; infinite when none is, or nobody is there to get it."""
        return min(self._terminate_at, self._kill_at) if self.child is not None else math.inf

    def send_due_signals(self, now: float) -> None:
        if self.child is None or now < self.signal_at:
            return
        if now >= self._kill_at:
            self.child.send_signal(signal.SIGKILL)
            self._kill_at = math.inf
        else:
            self.child.send_signal(signal.SIGTERM)
        self._terminate_at = math.inf

    def read_report(self) -> bool:
        """Take in how the start went; False while it has not been told. After True the caller closes the pipe."""
        try:
            content = os.read(self.report, 65536)
        except BlockingIOError:
            return False
        self.report = -1
        if content:
            report = msgspec.msgpack.decode(content, type=StartReport)
            self.started = not report.phase
            self.failure = None if self.started else report
        return True

    def start_error(self, status: int | None) -> StartFailed:
        """Why a child that has ended never started."""
        if self.failure is not None:
            return self.failure.error()
        why = f"{describe_status(status)}; its log ends: {self.last_output() or '(empty)'}"
        killed = status is None or status < 0
        error = StartKilled if killed else StartFailed
        return error(process=self.process, phase="starting the interpreter", why=why)

    def record(self) -> ChildRecord | None:
        """Its line of the table; None when it is not born or has ended."""
        record = record_of(self.child, process=self.process, incarnation=self.incarnation)
        if record is None:
            return None
        return msgspec.structs.replace(record, public_key=self.public_key, log_offset=self._log_offset)

    def report_to_master(self) -> ChildReport | None:
        """How a master that takes over is told of it; None when it is not born."""
        if self.child is None:
            return None
        return ChildReport(self.process, self.incarnation, self.child.pid, self.public_key)

    def inspected(self) -> Inspected:
        """As the kernel shows it."""
        stat = process_stat(self.child.pid) if self.child is not None else None
        return Inspected("") if stat is None else Inspected(stat.state, stat.cpu_s)

    def last_output(self) -> str:
        """The end of what this incarnation wrote."""
        return tail(self._log, offset=self._log_offset)


def look_at(kept: Kept | None, *, incarnation: str) -> Inspected:
    """As the kernel shows it; one that is not here, or another incarnation, is not there."""
    return kept.inspected() if kept is not None and kept.incarnation == incarnation else Inspected("")


def tail(log: Path, *, offset: int = 0) -> str:
    """The last characters of a log, none of them before `offset`; none at all where it can not be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - 4 * _LAST_OUTPUT_CHARACTERS))
            return file.read().decode(errors="replace")[-_LAST_OUTPUT_CHARACTERS:]
    except OSError:
        return ""


class ProcessStat(msgspec.Struct, frozen=True):
    """A process as the kernel sees it: `ProcessStat("S", 883127, 1.25)`."""

    state: str
    """R, S, D, T (stopped), t (traced), Z (ended, its remains are still there)."""
    start_time: int
    """Clock ticks after boot."""
    cpu_s: float
    """Processor time of all its threads so far."""


def process_stat(pid: int) -> ProcessStat | None:
    """None when there is no process with this number. Any other OSError says nothing about it, and is the caller's.

    The command name, which may contain anything, stands in the last pair of parentheses.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessStat(fields[0], int(fields[19]), ticks / os.sysconf("SC_CLK_TCK"))


def process_start_time(pid: int) -> int | None:
    """When the process with this number started, in ticks after boot; None when there is none, or only its remains."""
    stat = process_stat(pid)
    return None if stat is None or stat.state in "ZX" else stat.start_time


def boot_id() -> str:
    """Names this boot of this host, without which a start time means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def table_path(run_dir: str | Path, agent: str) -> Path:
    """`table_path("runs/a", "agent-0") == Path("runs/a/agents/agent-0.json")`."""
    return Path(run_dir) / "agents" / f"{agent}.json"


def record_of(child: Child | None, *, process: str, incarnation: str = "") -> ChildRecord | None:
    """The line of a child in the table; None when it is not born or has ended."""
    start_time = process_start_time(child.pid) if child is not None else None
    if child is None or start_time is None:
        return None
    return ChildRecord(process, incarnation, child.pid, start_time)


def write_table(
    path: Path,
    records: Callable[[], Iterable[ChildRecord | None]],
    *,
    job: str,
    leases: tuple[LeaseUser, ...] = (),
    broken_chips: Mapping[str, ChipFault] | None = None,
) -> bool:
    """Replace the table as a whole; a reader sees the old one or the new one. False if that was not possible.

    It is for who comes after an agent that died; a full disk, or a want of descriptors, must not be what kills one.
    """
    new = path.with_suffix(".new")
    try:
        living = tuple(record for record in records() if record is not None)
        table = ChildrenTable(boot_id(), living, job, leases, dict(broken_chips or {}))
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(table))
        new.replace(path)
    except OSError:
        COUNTERS.add("agent.table_not_written")
        return False
    return True


def end_orphans(path: Path, *, processes: Processes, timeout_s: float) -> None:
    """End what an agent that was killed could not, by its table: its children, and what is in their groups."""
    for record, child in find_alive(path, processes=processes):
        # It leads a group unless it was forked a moment ago, when it is still in the template's.
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
        child.send_signal(signal.SIGKILL)
        child.wait_ended(whom=record.process, timeout_s=timeout_s)
        child.close()
    path.unlink(missing_ok=True)


def read_table(path: Path) -> ChildrenTable | None:
    """The table as it was written last; None when there is none that says anything about this boot."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=ChildrenTable)
    except FileNotFoundError:
        return None
    return table if table.boot_id == boot_id() else None


def find_alive(path: Path, *, processes: Processes) -> list[tuple[ChildRecord, Child]]:
    """Those of a table's processes that still run, each held by pidfd so that a reused number is not mistaken."""
    table = read_table(path)
    alive = []
    for record in table.children if table is not None else ():
        try:
            child = processes.adopt(record.pid)
        except ProcessLookupError:
            continue
        if process_start_time(record.pid) == record.start_time:
            alive.append((record, child))
        else:
            child.close()
    return alive
