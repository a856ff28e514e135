"""Measurements beside a run, from outside: device and host memory, use of the GPU, and a fault at a chosen moment.

Nothing here is part of the run: the kernel, NVML and the files of the run folder are read.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_status
from kintsugi.telemetry.events import Tail, Transition
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.telemetry.store.tracing import MASTER_PHASES

DEVICE_INTERVAL_S = 0.1
HOST_INTERVAL_S = 0.5
TRIGGER_INTERVAL_S = 0.002
SHARED_MEMORY = Path("/dev/shm")
STEP_PHASES = frozenset({"collecting", "training", "committing", "publishing"})


class Device:
    """The first GPU through NVML; without NVML or a GPU nothing is read."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
        except ImportError:
            self.why_absent = "nvidia-ml-py is not installed"
        except pynvml.NVMLError as error:
            self.why_absent = f"NVML: {error}"
        else:
            self.why_absent = ""

    def busy(self) -> float | None:
        """Share of the last sampling period of the driver in which a kernel ran."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def memory(self) -> tuple[int | None, dict[int, int]]:
        """Bytes in use altogether, and by pid as the driver names processes (in a container these may be others)."""
        info = self._read("nvmlDeviceGetMemoryInfo")
        users = self._read("nvmlDeviceGetComputeRunningProcesses") or ()
        by_pid = {int(each.pid): int(each.usedGpuMemory or 0) for each in users}
        return (None if info is None else int(info.used)), by_pid

    def _read(self, name: str) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(self._handle)
        except self._nvml.NVMLError:
            return None


@dataclass
class HostReading:
    """One moment. Bytes by process name; device memory of pids that are none of ours is `unnamed`, largest first."""

    time: float
    device_bytes: int | None
    device_bytes_of: dict[str, int]
    device_bytes_unnamed: list[int]
    rss_bytes_of: dict[str, int]
    silent_s_of: dict[str, float]
    """Seconds since the master heard the process, as the master wrote it down."""
    shared_memory_bytes: int
    available_bytes: int
    saving: bool
    """A checkpoint is being written."""
    differences_of: dict[str, tuple[int, int]]
    """Versions that an agent has fetched as differences so far, and the bytes of these."""


@dataclass
class Monitor:
    """Samples a run in a thread, between `start` and `stop`."""

    run_dir: Path
    device: Device
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(wall clock, share)."""
    readings: list[HostReading] = field(default_factory=list)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def write(self, path: Path) -> None:
        """All samples as JSON lines, for plots."""
        lines = [json.dumps(asdict(reading)) for reading in self.readings]
        lines += [json.dumps({"time": at, "busy": share}) for at, share in self.busy]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _watch(self) -> None:
        next_host = 0.0
        while not self._closing.wait(DEVICE_INTERVAL_S):
            share = self.device.busy()
            if share is not None:
                self.busy.append((time.time(), share))
            if time.monotonic() >= next_host:
                next_host = time.monotonic() + HOST_INTERVAL_S
                self.readings.append(self._reading())

    def _reading(self) -> HostReading:
        reports = read_processes(self.run_dir)
        processes = {} if reports is None else {each.process: each for each in reports.processes}
        names = {each.pid: name for name, each in processes.items()}
        total, by_pid = self.device.memory()
        resident = {name: rss_bytes(pid) for pid, name in names.items()}
        return HostReading(
            time=time.time(),
            device_bytes=total,
            device_bytes_of={names[pid]: size for pid, size in by_pid.items() if pid in names},
            device_bytes_unnamed=sorted(
                (size for pid, size in by_pid.items() if pid not in names), reverse=True
            ),
            rss_bytes_of={name: size for name, size in resident.items() if size},
            silent_s_of={
                name: each.silent_s for name, each in processes.items() if each.silent_s is not None
            },
            shared_memory_bytes=_shared_memory_bytes(),
            available_bytes=_available_bytes(),
            saving=is_saving(self.run_dir),
            differences_of={
                name: (each.counters["weights.deltas"], each.counters["weights.delta_bytes"])
                for name, each in processes.items()
                if "weights.deltas" in each.counters
            },
        )


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _shared_memory_bytes() -> int:
    stats = os.statvfs(SHARED_MEMORY)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def shared_memory_files() -> set[str]:
    try:
        return {entry.name for entry in SHARED_MEMORY.iterdir()}
    except OSError:
        return set()


def unfinished_saves(run_dir: Path) -> list[Path]:
    folder = RunFolder(run_dir).checkpoints_folder
    return sorted(folder.glob(".saving-*")) if folder.is_dir() else []


def is_saving(run_dir: Path) -> bool:
    return bool(unfinished_saves(run_dir))


@dataclass(frozen=True)
class Fault:
    """A signal to one process in one phase of the master."""

    process: str
    during: str
    """Phase; `saving` is while the files of a checkpoint are written."""
    number: int = signal.SIGKILL

    @property
    def kinds(self) -> frozenset[str]:
        """Verdicts that are right."""
        return frozenset({"killed"} if self.number == signal.SIGKILL else {"stopped"})


LAUNCHER = "launcher-0"

FAULTS: dict[str, Fault | None] = {
    "none": None,
    "rank": Fault("model-0", "training"),
    "server": Fault("server-0", "collecting"),
    "master": Fault("master-0", "training"),
    "save": Fault("model-0", "saving"),
    "manager": Fault("manager-0", "collecting"),
    "rollout": Fault("rollout-0", "collecting"),
    "agent": Fault("agent-0", "training"),
    "launcher": Fault(LAUNCHER, "training"),
    "rank-stop": Fault("model-0", "training", signal.SIGSTOP),
    "server-stop": Fault("server-0", "collecting", signal.SIGSTOP),
    "master-stop": Fault("master-0", "training", signal.SIGSTOP),
    "manager-stop": Fault("manager-0", "collecting", signal.SIGSTOP),
    "rollout-stop": Fault("rollout-0", "collecting", signal.SIGSTOP),
}


class Trigger:
    """Sends a fault once: in the `step`-th pass of its phase, when `share` of that phase's usual time is over.

    `poll` is called often, from one thread. A save has no usual time before the first one: there the signal is sent
    when the unfinished checkpoint has `share` of `save_bytes`.
    """

    def __init__(self, fault: Fault, *, run_dir: Path, step: int, share: float, save_bytes: int) -> None:
        self._fault, self._run_dir = fault, run_dir
        self._step, self._share, self._save_bytes = step, share, save_bytes
        self._events = Tail(RunFolder(run_dir).events_file("master-0"))
        self._durations: list[float] = []
        self._entered: float | None = None
        self._passes = 0
        self._due: float | None = None
        self.fired: dict[str, Any] | None = None

    def poll(self) -> None:
        if self.fired is not None:
            return
        self._follow()
        if self._fault.during == "saving":
            self._poll_save()
        elif self._due is not None and time.time() >= self._due:
            self._fire()

    def _follow(self) -> None:
        """Passes of the phase so far; the delay of the chosen one is a share of the median of those before."""
        for record in self._events.records():
            event = record.event
            if not isinstance(event, Transition) or (event.machine, event.key) != MASTER_PHASES:
                continue
            if event.before == self._fault.during and self._entered is not None:
                self._durations.append(record.stamp.time - self._entered)
                self._entered = None
            if event.after == self._fault.during:
                self._entered, self._passes = record.stamp.time, self._passes + 1
                if self._passes >= self._step and self._due is None:
                    usual = statistics.median(self._durations) if self._durations else 0.0
                    self._due = record.stamp.time + self._share * usual

    def _poll_save(self) -> None:
        for folder in unfinished_saves(self._run_dir):
            try:
                size = sum(path.stat().st_size for path in folder.iterdir())
            except OSError:
                continue
            if size > 0 and size >= self._share * self._save_bytes:
                self._fire(detail=f"{size} bytes of the checkpoint written")
                return

    def _fire(self, detail: str = "") -> None:
        pid = _pid_of(self._fault.process, run_dir=self._run_dir)
        if pid is None:
            return
        at = time.time()
        os.kill(pid, self._fault.number)
        self.fired = {
            "process": self._fault.process,
            "signal": signal.Signals(self._fault.number).name,
            "pid": pid,
            "time": at,
            "phase": self._fault.during,
            "passes_before": max(0, self._passes - 1),
            "into_phase_s": None if self._entered is None else round(at - self._entered, 3),
            "detail": detail,
        }


def _pid_of(process: str, *, run_dir: Path) -> int | None:
    if process == LAUNCHER:
        return read_status(run_dir).pid
    reports = read_processes(run_dir)
    found = [each.pid for each in (reports.processes if reports else ()) if each.process == process]
    return found[0] if found else None


def peaks(readings: list[HostReading], what: str) -> dict[str, dict[str, float]]:
    """First, last and largest value in GB of each process, `what` being a field with bytes by process."""
    series: dict[str, list[int]] = {}
    for reading in readings:
        values: Mapping[str, int] = getattr(reading, what)
        for name, size in values.items():
            series.setdefault(name, []).append(size)
    return {
        name: {"first": _gb(sizes[0]), "last": _gb(sizes[-1]), "peak": _gb(max(sizes))}
        for name, sizes in sorted(series.items())
    }


def _gb(size: int) -> float:
    return round(size / 1e9, 3)
