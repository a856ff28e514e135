"""The health of a host's accelerators, as its node agent observes it.

    probe ─► readings, once a second, in a thread ─► health signals: what changed, what it means ─► master

A health signal says either that an accelerator is *broken*: its users have to be replaced, and no process may use it
any more; or that it is *worrying*, which operators should know. Errors of a program on a working accelerator (an
illegal access has an XID too) are neither: the process reports them itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import queue
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.agents import ChipFault
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import join, wait

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial pid namespace (`PROC_PID_INIT_INO` of the kernel)."""
POLL_S = 1.0
SILENT_S = 30.0
"""Warn when the driver has not answered for this long; with a failing accelerator it may take seconds."""
CLOSE_S = 0.2
"""Time for the thread to end; it may be blocked in the driver, and is left behind then."""
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program causes: exceptions, illegal accesses, time-outs and the end of its own channels."""
BROKEN_XIDS = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, *range(144, 152), 155, 156, 158, 167, 169}
)
"""XIDs for which NVIDIA's catalog demands a reset of the GPU or its host, or worse. For any other a restart of the
program is enough, or nothing is needed (154 only comments on others): its users get an error from the device, and the
operator gets a warning."""


class HealthSignalKind(StrEnum):
    LOST = "lost"
    XID = "xid"
    UNCORRECTED = "uncorrected errors"
    REMAPPING_FAILED = "remapping failed"
    REMAPPING_PENDING = "remapping pending"
    CORRECTED = "corrected errors"
    UNREADABLE = "unreadable"


class AcceleratorReading(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator at one moment: `AcceleratorReading(uuid="a1b2…", name="GPU 0 (NVIDIA H200)", corrected=3)`."""

    uuid: str
    """Identity, as the processes that use it register it."""
    name: str
    """Name to display."""
    lost: bool = False
    """The driver reports that it has lost the device."""
    unreadable: str = ""
    """Why it could not be read, if for another reason."""
    uncorrected: int = 0
    """Memory errors that could not be corrected, since the driver was loaded."""
    corrected: int = 0
    remapping_pending: bool = False
    """Memory will be retired or remapped at the next reset."""
    remapping_failed: bool = False
    """There is no spare memory left to remap to."""
    xids: tuple[int, ...] = ()
    """Errors that the driver has reported since the last reading."""
    pids: tuple[int, ...] = ()
    """Pids of the processes that use it, where the driver shares our pid namespace."""
    num_processes: int | None = None
    """Number of all processes that use it; None where the driver does not report it."""
    memory_of: dict[int, int] = {}
    """Pid → device memory in bytes."""
    memory_bytes: int = 0
    """Device memory in use by all processes."""
    memory_total_bytes: int = 0
    utilization: float | None = None
    """Share of the last sampling period in which a kernel ran on it."""
    temperature: float | None = None
    """Degrees Celsius."""
    clock_hertz: float | None = None
    """Clock rate of its multiprocessors; falls when it is throttled."""

    def metrics(self) -> dict[str, float]:
        """Metrics that are recorded over time, as far as the driver reports them."""
        known = {
            "memory_bytes": float(self.memory_bytes) if self.memory_total_bytes else None,
            "memory_total_bytes": float(self.memory_total_bytes) if self.memory_total_bytes else None,
            "utilization": self.utilization,
            "temperature": self.temperature,
            "clock_hertz": self.clock_hertz,
            "processes": None if self.num_processes is None else float(self.num_processes),
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def is_counted(self) -> bool:
        """Whether its counters were read."""
        return not (self.lost or self.unreadable)


class HealthSignal(msgspec.Struct, frozen=True):
    """Meaning of a reading: `HealthSignal("xid", "XID 79", broken=True)`."""

    kind: HealthSignalKind
    detail: str
    broken: bool


class AcceleratorProbe(Protocol):
    """Reads accelerators; a call may take as long as the driver needs."""

    def read(self) -> tuple[AcceleratorReading, ...]: ...


class AcceleratorUser(Protocol):
    """A child process of the agent."""

    @property
    def process(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


def health_signals(
    reading: AcceleratorReading,
    *,
    before: AcceleratorReading | None,
    counted: AcceleratorReading | None = None,
) -> list[HealthSignal]:
    """Compare a reading with the one before (None: it is the first). A loss counts when it is read twice.

    `counted` is the last reading with counters, if the one before had none: errors are not new because they could not
    be read for a moment.
    """
    found: list[HealthSignal] = []

    def note(kind: HealthSignalKind, detail: str, *, broken: bool) -> None:
        found.append(HealthSignal(kind, detail, broken))

    unknown = AcceleratorReading(uuid=reading.uuid, name=reading.name)
    counted = before if before is not None and before.is_counted else counted
    first = counted is None
    before, counted = before or unknown, counted or unknown
    if reading.lost and before.lost:
        note(HealthSignalKind.LOST, "the driver has lost it", broken=True)
    for xid in reading.xids:
        if xid not in PROGRAM_XIDS:
            note(HealthSignalKind.XID, f"XID {xid}", broken=xid in BROKEN_XIDS)
    if reading.uncorrected > counted.uncorrected:
        since = (
            "since its driver was loaded"
            if first
            else f"{reading.uncorrected - counted.uncorrected} of them new"
        )
        detail = f"{reading.uncorrected} uncorrected memory errors, {since}"
        note(HealthSignalKind.UNCORRECTED, detail, broken=not first)
    if reading.remapping_failed and not counted.remapping_failed:
        note(HealthSignalKind.REMAPPING_FAILED, "bad memory can not be remapped any more", broken=True)
    if reading.remapping_pending and not counted.remapping_pending:
        note(HealthSignalKind.REMAPPING_PENDING, "memory is to be retired at the next reset", broken=False)
    if _magnitude(reading.corrected) > _magnitude(counted.corrected):
        note(HealthSignalKind.CORRECTED, f"{reading.corrected} corrected memory errors", broken=False)
    if reading.unreadable and not before.unreadable:
        note(HealthSignalKind.UNREADABLE, reading.unreadable, broken=False)
    return found


def _magnitude(count: int) -> int:
    """Number of digits, so that slowly growing counters are reported a few times only."""
    return len(str(count)) if count else 0


class AcceleratorMonitor:
    """State of the host's accelerators. `new_faults` is called by the agent's loop and never blocks.

    The thread consumes nothing, produces readings, waits for its next turn and for the driver, and ends at `close` or
    when there is no accelerator.
    """

    def __init__(
        self, open_probe: Callable[[], AcceleratorProbe | None], *, host: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`open_probe` is called in the thread: a driver may take seconds to initialise."""
        self._open_probe = open_probe
        self._host = host
        self._clock = clock
        self.broken: dict[str, ChipFault] = {}
        """Identity → first fault; an accelerator stays broken until an operator resets it."""
        self._before: dict[str, AcceleratorReading] = {}
        self._counted: dict[str, AcceleratorReading] = {}
        """Identity → last reading with counters."""
        self._readings: queue.SimpleQueue[tuple[AcceleratorReading, ...]] = queue.SimpleQueue()
        self._read_at = clock.monotonic()
        self._is_silent = False
        self._reported_term: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="accelerators", daemon=True)

    @property
    def num_healthy(self) -> int | None:
        """Number of healthy accelerators; None on a host without accelerators or without NVML."""
        return len(self._before.keys() - self.broken.keys()) if self._before else None

    @property
    def readings(self) -> tuple[AcceleratorReading, ...]:
        """Latest reading of each accelerator."""
        return tuple(self._before.values())

    def adopt(self, broken: Mapping[str, ChipFault]) -> None:
        """Take over the faults that an earlier agent of this host has found."""
        self.broken.update(broken)

    def begin(self) -> None:
        self._thread.start()

    def new_faults(self, processes: Mapping[int, AcceleratorUser], *, term: int) -> list[ChipFault]:
        """Return faults that were not reported before; for the master of a new term all broken accelerators.

        `processes` are the agent's children by pid, so that the users of an accelerator can be named.
        """
        faults = self._take_readings()
        # Before the first reading the number of healthy accelerators is not known.
        if self._before and term != self._reported_term:
            self._reported_term = term
            reported = {fault.uuid for fault in faults}
            faults += [fault for uuid, fault in self.broken.items() if uuid not in reported]
        return [self._completed(fault, processes) for fault in faults]

    def _completed(self, fault: ChipFault, processes: Mapping[int, AcceleratorUser]) -> ChipFault:
        reading = self._before.get(fault.uuid)
        users = [processes[pid] for pid in (reading.pids if reading else ()) if pid in processes]
        return msgspec.structs.replace(
            fault,
            num_healthy=self.num_healthy or 0,
            processes={user.process: user.incarnation for user in users},
        )

    def _take_readings(self) -> list[ChipFault]:
        now, faults = self._clock.monotonic(), list[ChipFault]()
        with contextlib.suppress(queue.Empty):
            while True:
                readings = self._readings.get(block=False)
                self._read_at, self._is_silent = now, False
                for reading in readings:
                    faults += self._judge(reading)
        if self._before and not self._is_silent and now - self._read_at > SILENT_S:
            self._is_silent = True
            detail = f"the driver has not answered for {SILENT_S:g} s"
            silent = HealthSignal(HealthSignalKind.UNREADABLE, detail, broken=False)
            faults += [self._fault(reading, silent) for reading in self._before.values()]
        return faults

    def _judge(self, reading: AcceleratorReading) -> list[ChipFault]:
        uuid = reading.uuid
        found = health_signals(reading, before=self._before.get(uuid), counted=self._counted.get(uuid))
        self._before[uuid] = reading
        if reading.is_counted:
            self._counted[uuid] = reading
        if reading.uuid in self.broken:
            return []
        faults = [self._fault(reading, signal) for signal in found]
        for fault in faults:
            if fault.broken:
                self.broken.setdefault(fault.uuid, fault)
        return faults

    def _fault(self, reading: AcceleratorReading, signal: HealthSignal) -> ChipFault:
        return ChipFault(
            host=self._host,
            chip=reading.name,
            uuid=reading.uuid,
            kind=signal.kind,
            detail=signal.detail,
            broken=signal.broken,
        )

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with contextlib.suppress(DeadlineExceeded):
                join(self._thread, whom="accelerator thread", what="its end", timeout_s=CLOSE_S)

    def _watch(self) -> None:
        probe = self._open_probe()
        while probe is not None and not self._closing.is_set():
            self._readings.put(probe.read())
            try:
                wait(
                    lambda remaining_s: self._closing.wait(remaining_s) or None,
                    whom="accelerators",
                    what="the next reading",
                    timeout_s=POLL_S,
                )
            except DeadlineExceeded:
                continue


def open_probe(name: str) -> AcceleratorProbe | None:
    """Open a probe by name: `open_probe("kintsugi.cluster.accelerators:nvml_probe")`. None without accelerators."""
    if not name:
        return None
    module, _, function = name.partition(":")
    make: Callable[[], AcceleratorProbe | None] = getattr(importlib.import_module(module), function)
    return make()


def nvml_probe() -> AcceleratorProbe | None:
    """Open a probe of NVIDIA GPUs; None without NVML, its driver, or any GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        probe = NvmlProbe(pynvml, shares_pids=_is_first_namespace(Path("/proc/self/ns/pid")))
    except pynvml.NVMLError:
        return None
    return probe if probe.num_accelerators else None


def _is_first_namespace(path: Path) -> bool:
    """Whether this is the initial pid namespace, which drivers use."""
    return path.stat().st_ino == FIRST_PID_NAMESPACE


class NvmlProbe:
    """Reads every GPU of the host through NVML; used by one thread at a time."""

    def __init__(self, nvml: Any, *, shares_pids: bool = True) -> None:
        """`shares_pids`: whether the driver's pids are valid here. In a container they may name other processes."""
        self._nvml = nvml
        self._shares_pids = shares_pids
        self._handles: list[tuple[Any, str, str]] = []
        """Handle, identity, name."""
        self._events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
            self._handles.append((handle, uuid, f"GPU {index} ({_text(nvml.nvmlDeviceGetName(handle))})"))
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    @property
    def num_accelerators(self) -> int:
        return len(self._handles)

    def read(self) -> tuple[AcceleratorReading, ...]:
        xids = self._take_xids()
        return tuple(
            self._read(handle, uuid, name, tuple(xids.get(_address(handle), ())))
            for handle, uuid, name in self._handles
        )

    def _take_xids(self) -> dict[int | None, list[int]]:
        """Return XIDs since the last call, by the address of the GPU's handle; does not wait."""
        nvml, found = self._nvml, dict[int | None, list[int]]()
        with contextlib.suppress(nvml.NVMLError):
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                found.setdefault(_address(event.device), []).append(int(event.eventData))
        return found

    def _read(self, handle: Any, uuid: str, name: str, xids: tuple[int, ...]) -> AcceleratorReading:
        nvml = self._nvml
        try:
            _, _, pending, failed = self._get((0, 0, 0, 0), nvml.nvmlDeviceGetRemappedRows, handle)
            retiring = self._get(0, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
            users = self._get(None, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
            processes = users or ()
            memory = self._get(None, nvml.nvmlDeviceGetMemoryInfo, handle)
            rates = self._get(None, nvml.nvmlDeviceGetUtilizationRates, handle)
            temperature = self._get(None, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
            megahertz = self._get(None, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
            return AcceleratorReading(
                uuid=uuid,
                name=name,
                uncorrected=self._errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
                corrected=self._errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                remapping_pending=bool(pending or retiring),
                remapping_failed=bool(failed),
                xids=xids,
                pids=tuple(int(process.pid) for process in processes if self._shares_pids),
                num_processes=None if users is None else len(users),
                memory_of={
                    int(process.pid): int(process.usedGpuMemory or 0)
                    for process in processes
                    if self._shares_pids
                },
                memory_bytes=0 if memory is None else int(memory.used),
                memory_total_bytes=0 if memory is None else int(memory.total),
                utilization=None if rates is None else rates.gpu / 100,
                temperature=None if temperature is None else float(temperature),
                clock_hertz=None if megahertz is None else megahertz * 1e6,
            )
        except nvml.NVMLError_GpuIsLost:
            return AcceleratorReading(uuid=uuid, name=name, lost=True, xids=xids)
        except nvml.NVMLError as error:
            return AcceleratorReading(uuid=uuid, name=name, unreadable=str(error), xids=xids)

    def _errors(self, handle: Any, kind: int) -> int:
        nvml = self._nvml
        return int(self._get(0, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC))

    def _get(self, otherwise: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML; a value that the GPU does not support becomes `otherwise`."""
        try:
            return function(*arguments)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return otherwise


def _text(value: str | bytes) -> str:
    """Decode a string of NVML; older versions return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
