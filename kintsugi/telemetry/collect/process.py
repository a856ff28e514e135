"""Readings of processes and of the host from /proc and the control groups; names in `docs/metrics.md`.

Nothing here waits for a disk or a driver: measurements that can hang are in `telemetry/collect/probes.py`, in threads
of their own. Values that the kernel does not report are left out, never guessed.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from kintsugi.runtime.proc import TICK_S, stat_fields
from kintsugi.telemetry.collect.cgroups import ControlGroups
from kintsugi.telemetry.readings import HostReading, ProcessReading
from kintsugi.types import Role, role_of

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
PRESSURES = ("cpu", "io", "memory")
MOST_OPEN, LONGEST = 256, 8192
"""Number of files of /proc that are kept open, and bytes of the longest."""
UNREADABLE = (OSError, ValueError, IndexError, KeyError, NotImplementedError)
"""Errors of a read of /proc: the process is gone or another user's, the kernel has another format, or psutil finds
nothing."""


class OpenFiles:
    """Files of /proc that are read repeatedly: opened once, and read from the beginning each time.

    An open file stays that of one process, even if its pid is reused. Beyond `most` files, the others are opened each
    time.
    """

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._descriptors: dict[str, int] = {}

    def read(self, path: str) -> str:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            if len(self._descriptors) >= self._most:
                return _read(path)
            descriptor = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, LONGEST, 0).decode(errors="replace")
        except OSError:
            self.forget(path)
            raise

    def forget(self, prefix: str) -> None:
        for path in [path for path in self._descriptors if path.startswith(prefix)]:
            os.close(self._descriptors.pop(path))


class ProcessSampler:
    """Measures one process repeatedly; keeps the run delay of threads that have ended."""

    def __init__(
        self, name: str, pid: int, *, control_groups: ControlGroups, files: OpenFiles | None = None
    ) -> None:
        """`files` may be shared; `close` closes those of this process."""
        self.name, self.pid = name, pid
        self._control_groups = control_groups
        self._files = files or OpenFiles()
        self._folder = f"/proc/{pid}"
        self._delays: dict[str, int] = {}
        self._run_delay_ns = 0
        self._children_ticks: dict[int, int] = {}
        self._children_total = 0
        self._with_io_delay = _setting("/proc/sys/kernel/task_delayacct") == "1"
        self.rss_bytes = 0.0

    def sample(self) -> ProcessReading | None:
        """Return a reading; None if the process is gone."""
        try:
            fields = stat_fields(self._files.read(f"{self._folder}/stat"))
        except OSError:
            return None
        self.rss_bytes = float(int(fields[21]) * PAGE_SIZE)
        values = {
            "cpu_s": (int(fields[11]) + int(fields[12])) * TICK_S,
            "rss_bytes": self.rss_bytes,
            "threads": float(fields[17]),
            "major_faults": float(fields[9]),
        }
        if self._with_io_delay:
            values["io_delay_s"] = int(fields[39]) * TICK_S
        for more in (self._scheduling, self._switches, self._storage, self._descriptors, self._children):
            try:
                values |= more()
            except UNREADABLE:
                continue
        values |= self._allowances(address_space=float(fields[20]))
        return ProcessReading(
            self.name, self.pid, fields[0], {name: round(value, 6) for name, value in values.items()}
        )

    def _scheduling(self) -> dict[str, float]:
        """Return the time that its threads, ended ones included, were runnable and did not run."""
        delays: dict[str, int] = {}
        for thread in os.listdir(f"{self._folder}/task"):
            try:
                delay = int(self._files.read(f"{self._folder}/task/{thread}/schedstat").split()[1])
            except (OSError, IndexError):
                continue
            delays[thread] = delay
            self._run_delay_ns += max(0, delay - self._delays.get(thread, 0))
        for ended in self._delays.keys() - delays.keys():
            self._files.forget(f"{self._folder}/task/{ended}/")
        self._delays = delays
        return {
            "run_delay_s": self._run_delay_ns / 1e9,
            "processors": float(len(os.sched_getaffinity(self.pid))),
        }

    def _switches(self) -> dict[str, float]:
        status = self._files.read(f"{self._folder}/status")
        lines = status[status.index("\nvoluntary_ctxt_switches:") + 1 :].splitlines()
        names = ("voluntary_switches", "involuntary_switches")
        return {name: float(line.split()[1]) for name, line in zip(names, lines, strict=False)}

    def _storage(self) -> dict[str, float]:
        entries = dict(line.split(": ") for line in self._files.read(f"{self._folder}/io").splitlines())
        return {name: float(entries[name]) for name in ("read_bytes", "write_bytes")}

    def _descriptors(self) -> dict[str, float]:
        found = {"descriptors": float(len(os.listdir(f"{self._folder}/fd")))}
        limit, _ = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        return found if limit == resource.RLIM_INFINITY else {**found, "descriptor_limit": float(limit)}

    def _children(self) -> dict[str, float]:
        """Return readings of its children and grandchildren: processes of user code, and their sandboxes."""
        found = [*self._started_by(self.pid)]
        found += [pid for child in found for pid in self._started_by(child)]
        if role_of(self.name) is Role.AGENT or not (found or self._children_total):
            return {}
        ticks: dict[int, int] = {}
        pages = 0
        for pid in found:
            try:
                fields = stat_fields(_read(f"/proc/{pid}/stat"))
            except OSError:
                continue
            ticks[pid], pages = int(fields[11]) + int(fields[12]), pages + int(fields[21])
            self._children_total += max(0, ticks[pid] - self._children_ticks.get(pid, 0))
        self._children_ticks = ticks
        return {
            "children": float(len(ticks)),
            "children_cpu_s": self._children_total * TICK_S,
            "children_rss_bytes": float(pages * PAGE_SIZE),
        }

    def _started_by(self, pid: int) -> list[int]:
        """Return the children of its main thread, which is the one that starts processes here; empty if not
        reported."""
        try:
            return [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]
        except OSError:
            return []

    def _allowances(self, *, address_space: float) -> dict[str, float]:
        """Return limits and their usage; of two memory limits the one that is used up more."""
        values: dict[str, float] = {}
        limits: list[tuple[float, float]] = []
        try:
            allowance = self._control_groups.allowance(self._control_groups.of(self.pid))
        except UNREADABLE:
            allowance = None
        if allowance is not None:
            if allowance.throttled_s is not None:
                values["throttled_s"] = allowance.throttled_s
            if allowance.frozen:
                values["frozen"] = 1.0
            if allowance.memory_limit_bytes is not None and allowance.memory_used_bytes is not None:
                limits.append((allowance.memory_limit_bytes, allowance.memory_used_bytes))
        try:
            own, _ = resource.prlimit(self.pid, resource.RLIMIT_AS)
            if own != resource.RLIM_INFINITY:
                limits.append((float(own), address_space))
        except OSError:
            pass
        if limits:
            limit, used = max(limits, key=lambda pair: pair[1] / max(1.0, pair[0]))
            values |= {"memory_limit_bytes": limit, "memory_used_bytes": used}
        return values

    def close(self) -> None:
        self._files.forget(f"{self._folder}/")


class HostStatSampler:
    """Measures the host repeatedly."""

    def __init__(self, host: str, *, run_dir: str) -> None:
        self._host = host
        self._disk = _disk_of(run_dir)

    def sample(self, more: dict[str, float] | None = None) -> HostReading:
        """Return a reading; `more` are values that were measured elsewhere."""
        values: dict[str, float] = {}
        for part in (_processors, _memory, _pressure, self._storage, _network):
            try:
                values |= part()
            except UNREADABLE:
                continue
        values |= more or {}
        return HostReading(self._host, {name: round(value, 6) for name, value in values.items()})

    def _storage(self) -> dict[str, float]:
        """Return counters of the disk of the run folder, where it is known; otherwise of all disks."""
        counters = (
            psutil.disk_io_counters()
            if self._disk is None
            else psutil.disk_io_counters(perdisk=True).get(self._disk)
        )
        if counters is None:
            return {}
        return {
            "disk_read_bytes": float(counters.read_bytes),
            "disk_write_bytes": float(counters.write_bytes),
            "disk_busy_s": counters.busy_time / 1e3,
        }


def _processors() -> dict[str, float]:
    """Return CPU times. Busy is everything but idle, I/O wait and time stolen by the hypervisor."""
    times = [int(field) * TICK_S for field in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    user, nice, system, _, iowait, interrupt, soft_interrupt, steal = times
    return {
        "cpu_count": float(os.cpu_count() or 1),
        "cpu_busy_s": user + nice + system + interrupt + soft_interrupt,
        "cpu_iowait_s": iowait,
        "cpu_steal_s": steal,
        "load_1": os.getloadavg()[0],
    }


def _memory() -> dict[str, float]:
    entries = {
        name: float(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in _read("/proc/meminfo").splitlines()[:5])
    }
    return {
        "memory_total_bytes": entries["MemTotal"],
        "memory_available_bytes": entries["MemAvailable"],
        "oom_kills": float(oom_kills()),
    }


def oom_kills() -> int:
    """Return the number of out-of-memory kills on this host, those of control groups included."""
    found = (line.split()[1] for line in _read("/proc/vmstat").splitlines() if line.startswith("oom_kill "))
    return int(next(found, 0))


def _pressure() -> dict[str, float]:
    """Return the times in which processes waited for a resource; a kernel without PSI has no such files."""
    values = {}
    for name in PRESSURES:
        try:
            some = _read(f"/proc/pressure/{name}").partition("\n")[0]
        except OSError:
            continue
        values[f"pressure_{name}_s"] = int(some.rpartition("total=")[2]) / 1e6
    return values


def _network() -> dict[str, float]:
    """Return counters of all interfaces but loopback, in the network namespace of this process."""
    received = sent = 0
    for line in _read("/proc/self/net/dev").splitlines()[2:]:
        interface, _, counters = line.partition(":")
        fields = counters.split()
        if interface.strip() != "lo":
            received, sent = received + int(fields[0]), sent + int(fields[8])
    protocol = dict(_protocol_counters())
    return {
        "network_in_bytes": float(received),
        "network_out_bytes": float(sent),
        "tcp_retransmits": float(protocol["RetransSegs"]),
        "tcp_checksum_errors": float(protocol.get("InCsumErrors", 0)),
    }


def _protocol_counters() -> Iterator[tuple[str, str]]:
    """Yield the TCP counters. /proc/net/snmp has a line of names and one of numbers for each protocol."""
    names, numbers = (
        line.split()[1:] for line in _read("/proc/self/net/snmp").splitlines() if line.startswith("Tcp:")
    )
    yield from zip(names, numbers, strict=True)


def _disk_of(run_dir: str) -> str | None:
    """Return the disk of the run folder as psutil names it (`sda1`); None for a file system without a disk."""
    try:
        device = os.stat(run_dir).st_dev
        return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True).name
    except OSError:
        return None


def _setting(path: str) -> str:
    try:
        return _read(path).strip()
    except OSError:
        return ""


def _read(path: str) -> str:
    """Read a file of /proc, unbuffered: the layers of a text file cost more than the kernel does."""
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode(errors="replace")
