"""The child processes of an agent: each held by pidfd, each with its log, all of them in a table on disk.

A successor of the agent, or the launcher after the agent's death, finds them by the table: pid and start time together
name a process for as long as the host is up.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kintsugi.cluster.orphans import remove_counter_files
from kintsugi.cluster.spawn import StartOrder, StartReport
from kintsugi.device_lease.service import LeaseUser
from kintsugi.errors import StartFailed, StartKilled
from kintsugi.protocol.agents import ChipFault, Inspected, StartProcess
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.owned_files import read_owned
from kintsugi.runtime.proc import (
    boot_id,
    context_switches,
    ending_status,
    is_exiting,
    process_start_time,
    process_stat,
)
from kintsugi.runtime.processes import Child, Processes, describe_status
from kintsugi.runtime.stacks import STACK_SIGNAL, can_dump_stacks
from kintsugi.telemetry import stack_dump
from kintsugi.telemetry.collect.cgroups import ControlGroups
from kintsugi.transport import Delivery
from kintsugi.types import ChildReport

_LAST_OUTPUT_CHARACTERS = 2000
_LAST_OUTPUT_BYTES = 64 << 10
"""Read to find them: stack dumps are left out."""
STACK_DUMP_S = 0.1
"""Time that a process has to write its stacks before it is killed."""

FORK_SERVER = "template"
"""Name of the fork server in the table."""


class ChildRecord(msgspec.Struct, frozen=True):
    """One entry of the table: `ChildRecord("model-0", "1.4", 4711, 883127, b"…", 0)`."""

    process: str
    incarnation: str
    pid: int
    start_time: int
    """Clock ticks after boot, as of /proc/PID/stat."""
    public_key: bytes = b""
    log_offset: int = 0
    """Where its output begins in a log that earlier incarnations have written to."""


class ChildrenTable(msgspec.Struct, frozen=True):
    """`<run_dir>/agents/<agent>.json`."""

    boot_id: str
    children: tuple[ChildRecord, ...]
    job: str = ""
    """Session of the run; an agent does not adopt processes of another session."""
    leases: tuple[LeaseUser, ...] = ()
    """Holders of leases: a successor grants a shared device only after they have released it."""
    broken_chips: dict[str, ChipFault] = {}
    """Identity → fault of broken accelerators; a successor may not observe the error again."""


class Successor(msgspec.Struct, frozen=True, eq=False):
    """Request to start a process of which an earlier incarnation still has to end."""

    delivery: Delivery
    order: StartProcess


class ChildProcess:
    """One child, from the request to start it until its end.

    `started` becomes true when it reports that its program is imported; a child that ends before has failed to start.
    An *adopted* child was started by an earlier agent: its end is observed, but its status is not, because it has
    another parent.
    """

    def __init__(self, record: ChildRecord, *, log: Path, start: StartOrder | None = None) -> None:
        self.process, self.incarnation = record.process, record.incarnation
        self.public_key = record.public_key
        self.start = start
        """Order by which it is started; None for an adopted child."""
        cgroup = None if start is None else start.placement.cgroup
        self.placed_group = None if cgroup is None else Path(cgroup)
        """Control group that it joins at its start; None for that of this agent, and where it is not known."""
        self.handle: Child | None = None
        """None until the process exists: the fork server may still be importing."""
        self.report = -1
        """Read end of the pipe on which it reports the result of its start; -1 once that was read."""
        self.start_request: Delivery | None = None
        """Request to start it that is not answered yet; None for the master."""
        self.stop_requests: list[Delivery] = []
        self.successor: Successor | None = None
        """Incarnation to start once this one has ended."""
        self.started = start is None
        self.failure: StartReport | None = None
        self.stopping = False
        self.exit_reported = False
        """Whether the master knows that it has ended; the kernel may still be freeing its memory."""
        self.ended_before_stop = False
        """It was exiting already when its stop was requested: its end has another cause."""
        self._terminate_at = self._kill_at = math.inf
        self._log, self._log_offset = log, record.log_offset

    @classmethod
    def ordered(cls, start: StartOrder, *, request: Delivery | None) -> ChildProcess:
        """Create a child before its process exists."""
        own = start.bootstrap
        log_offset = start.log.stat().st_size if start.log.exists() else 0
        record = ChildRecord(own.process, own.incarnation, 0, 0, own.public_key, log_offset)
        child = cls(record, log=start.log, start=start)
        child.start_request = request
        return child

    @classmethod
    def adopted(cls, record: ChildRecord, handle: Child, *, log: Path) -> ChildProcess:
        """Create a child of an earlier agent from the table."""
        child = cls(record, log=log)
        child.handle = handle
        return child

    @property
    def is_adopted(self) -> bool:
        return self.start is None

    def stop(self, *, terminate_at: float, kill_at: float) -> None:
        """Schedule SIGTERM and then SIGKILL, in monotonic time. A later call can only make them earlier."""
        if not self.stopping and self.handle is not None:
            self.ended_before_stop = is_exiting(self.handle.pid)
        self.stopping = True
        self._terminate_at = min(self._terminate_at, terminate_at)
        self._kill_at = min(self._kill_at, kill_at)

    @property
    def signal_at(self) -> float:
        """When the next signal is due; infinite when none is, or the process does not exist."""
        return min(self._terminate_at, self._kill_at) if self.handle is not None else math.inf

    def send_due_signals(self, now: float) -> None:
        if self.handle is None or now < self.signal_at:
            return
        if now >= self._kill_at:
            self.handle.send_signal(signal.SIGKILL)
            self._kill_at = math.inf
        else:
            self.handle.send_signal(signal.SIGTERM)
        self._terminate_at = math.inf

    def read_report(self) -> bool:
        """Read the start report; False while there is none. After True the caller closes the pipe."""
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
        """Build the error for a child that ended before it had started."""
        if self.failure is not None:
            return self.failure.error()
        why = f"{describe_status(status)}; its log ends: {self.last_output() or '(empty)'}"
        killed = status is None or status < 0
        error = StartKilled if killed else StartFailed
        return error(process=self.process, phase="starting the interpreter", why=why)

    def record(self) -> ChildRecord | None:
        """Entry of the table; None when the process does not exist or has ended."""
        record = record_of(self.handle, process=self.process, incarnation=self.incarnation)
        if record is None:
            return None
        return msgspec.structs.replace(record, public_key=self.public_key, log_offset=self._log_offset)

    def report_to_master(self) -> ChildReport | None:
        """Report for a master that takes over; None when the process does not exist yet, or not any more."""
        if self.handle is None or self.exit_reported:
            return None
        return ChildReport(self.process, self.incarnation, self.handle.pid, self.public_key)

    def inspected(self, *, readings: Path, control_groups: ControlGroups) -> Inspected:
        """State of the process from outside; `readings` is the file in which it records its heartbeats."""
        stat = process_stat(self.handle.pid) if self.handle is not None else None
        if self.handle is None or stat is None:
            return Inspected("")
        try:
            recorded = readings.stat().st_mtime
        except OSError:
            recorded = 0.0
        return Inspected(
            "Z" if self.ending_status() is not None else stat.state,
            stat.cpu_s,
            frozen=control_groups.is_frozen(self.handle.pid),
            switches=context_switches(self.handle.pid),
            recorded=recorded,
        )

    def ending_status(self) -> int | None:
        """Status with which it ends, once it runs no more code and the kernel frees its memory; None before."""
        return None if self.handle is None else ending_status(self.handle.pid)

    def request_stack_dump(self, *, time: float) -> bool:
        """Let it write the stacks of its threads to its log, where it can; `time` is the wall clock."""
        if self.handle is None or not can_dump_stacks(self.handle):
            return False
        line = stack_dump.header(
            process=self.process, incarnation=self.incarnation, pid=self.handle.pid, time=time
        )
        with contextlib.suppress(OSError), self._log.open("ab") as log:
            log.write(line.encode())
        self.handle.send_signal(STACK_SIGNAL)
        return True

    def last_output(self) -> str:
        """End of the output of this incarnation."""
        return tail(self._log, offset=self._log_offset)


def tail(log: Path, *, offset: int = 0) -> str:
    """Last characters of a log after `offset`, without stack dumps; empty if it can not be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - _LAST_OUTPUT_BYTES))
            text = file.read().decode(errors="replace")
            return stack_dump.without_dumps(text)[-_LAST_OUTPUT_CHARACTERS:]
    except OSError:
        return ""


def record_of(handle: Child | None, *, process: str, incarnation: str = "") -> ChildRecord | None:
    """Entry of a process in the table; None when it does not exist or has ended."""
    start_time = process_start_time(handle.pid) if handle is not None else None
    if handle is None or start_time is None:
        return None
    return ChildRecord(process, incarnation, handle.pid, start_time)


def write_table(
    path: Path,
    records: Callable[[], Iterable[ChildRecord | None]],
    *,
    job: str,
    leases: tuple[LeaseUser, ...] = (),
    broken_chips: Mapping[str, ChipFault] | None = None,
) -> bool:
    """Replace the table atomically. False if that was not possible.

    The table is for the successor of an agent that died; a full disk, or a lack of descriptors, must not end an agent.
    """
    try:
        living = tuple(record for record in records() if record is not None)
        table = ChildrenTable(boot_id(), living, job, leases, dict(broken_chips or {}))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(table), durable=False)
    except OSError:
        COUNTERS.add("agent.table_not_written")
        return False
    return True


def end_orphans(path: Path, *, processes: Processes, timeout_s: float) -> None:
    """Kill the children of an agent that was killed, by its table, with their process groups. DeadlineExceeded if one
    does not end; the others have been killed then."""
    with contextlib.ExitStack() as stack:
        killed = []
        for record, handle in _each_alive(path, processes=processes):
            stack.callback(handle.close)
            # A stopped process does not end by itself: its number stays its own until the group is killed. It leads a
            # group, unless it was forked a moment ago and is still in the fork server's.
            handle.send_signal(signal.SIGSTOP)
            with contextlib.suppress(ProcessLookupError):
                if not handle.ended() and os.getpgid(handle.pid) == handle.pid:
                    os.killpg(handle.pid, signal.SIGKILL)
            handle.send_signal(signal.SIGKILL)
            killed.append((record, handle))
        for record, handle in killed:
            handle.wait_ended(whom=record.process, timeout_s=timeout_s)
            remove_counter_files(handle.pid)
    path.unlink(missing_ok=True)


def read_table(path: Path) -> ChildrenTable | None:
    """Read the table; None when there is none of this boot. UntrustedFile if another user could have written it: the
    processes that it names are killed."""
    try:
        table = msgspec.json.decode(read_owned(path), type=ChildrenTable)
    except (FileNotFoundError, msgspec.DecodeError):  # A crash of the host may leave an empty file.
        return None
    return table if table.boot_id == boot_id() else None


def find_alive(path: Path, *, processes: Processes) -> list[tuple[ChildRecord, Child]]:
    """Find the processes of a table that still run, each held by pidfd; a reused pid is recognised. All or none are
    held: OSError if a descriptor is missing for one of them."""
    with contextlib.ExitStack() as stack:
        alive = []
        for record, handle in _each_alive(path, processes=processes):
            stack.callback(handle.close)
            alive.append((record, handle))
        stack.pop_all()
        return alive


def _each_alive(path: Path, *, processes: Processes) -> Iterator[tuple[ChildRecord, Child]]:
    table = read_table(path)
    for record in table.children if table is not None else ():
        with contextlib.ExitStack() as stack:
            try:
                handle = processes.adopt(record.pid)
            except ProcessLookupError:
                continue
            stack.callback(handle.close)
            if process_start_time(record.pid) != record.start_time:
                continue
            stack.pop_all()
        yield record, handle
