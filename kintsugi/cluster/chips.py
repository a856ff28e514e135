"""The health of a host's accelerators (chips), as its node agent sees it.

    probe ─► readings, once a second, in a thread ─► signs: what changed, what it means ─► the agent tells the master

A sign is either that a chip is *broken*, so that whoever uses it has to be replaced and nobody may use it any more, or
*worrying*, which is told to people. What a program does wrong on a chip that works (an illegal access has an XID, too)
is neither: the process says so itself.
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
from kintsugi.runtime import SYSTEM_CLOCK, Clock, wait
from kintsugi.supervision import ChipFault

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""As the kernel names it, of all in which processes may be counted (`PROC_PID_INIT_INO`)."""
POLL_S = 1.0
SILENT_S = 30.0
"""A driver that has not answered for so long is worth a word; one whose chip is failing may take seconds."""
CLOSE_S = 0.2
"""For the thread to end; it may be inside a driver that does not answer, and is left behind then."""
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""NVIDIA's numbers for what the program did: exceptions, illegal accesses, time-outs and ends of its own channels."""
BROKEN_XIDS = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, *range(144, 152), 155, 156, 158, 167, 169}
)
"""Those after which NVIDIA's catalog has the chip or its host reset, or worse. After any other a restart of the program
is enough, or nothing is needed (154 only comments on others): whom it hit is told by the device, and people by us."""


class SignKind(StrEnum):
    LOST = "lost"
    XID = "xid"
    UNCORRECTED = "uncorrected errors"
    REMAPPING_FAILED = "remapping failed"
    REMAPPING_PENDING = "remapping pending"
    CORRECTED = "corrected errors"
    UNREADABLE = "unreadable"


class ChipReading(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator at one moment: `ChipReading(uuid="a1b2…", name="GPU 0 (NVIDIA H200)", corrected=3)`."""

    uuid: str
    """Its identity, as the processes that use it name it."""
    name: str
    """For people."""
    lost: bool = False
    """The driver says that it is not there any more."""
    unreadable: str = ""
    """Why it could not be read, for any other reason."""
    uncorrected: int = 0
    """Memory errors that could not be corrected, since the driver was loaded."""
    corrected: int = 0
    remapping_pending: bool = False
    """Memory is to be retired or remapped at the next reset."""
    remapping_failed: bool = False
    """There is no spare memory left to remap to."""
    xids: tuple[int, ...] = ()
    """Errors that the driver has told of since the last reading."""
    pids: tuple[int, ...] = ()
    """Of the processes that use it, where the driver can see them."""
    num_processes: int | None = None
    """That use it, whosever they are; None where the driver does not tell."""
    memory_of: dict[int, int] = {}
    """Pid → bytes of its memory, of those."""
    memory_bytes: int = 0
    """In use, by whomever."""
    memory_total_bytes: int = 0
    utilization: float | None = None
    """Share of the last moment in which something ran on it."""
    temperature: float | None = None
    """Degrees Celsius."""
    clock_hertz: float | None = None
    """Of its processors; falls when it is throttled."""

    def figures(self) -> dict[str, float]:
        """What is recorded of it over time, as far as the driver tells."""
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
        """Whether its counters say anything."""
        return not (self.lost or self.unreadable)


class Sign(msgspec.Struct, frozen=True):
    """What a reading means: `Sign("xid", "XID 79", broken=True)`."""

    kind: SignKind
    detail: str
    broken: bool


class Probe(Protocol):
    """How accelerators are read; the call may take as long as the driver likes."""

    def read(self) -> tuple[ChipReading, ...]: ...


class Named(Protocol):
    """A process of the agent's."""

    @property
    def process(self) -> str: ...

    @property
    def incarnation(self) -> str: ...


def signs(
    reading: ChipReading, *, before: ChipReading | None, counted: ChipReading | None = None
) -> list[Sign]:
    """What is new since the reading before (None: it is the first). A loss counts when it is seen twice.

    `counted` is the last one that had counters, where the one before had none: old errors are not new ones because
    they could not be read for a moment.
    """
    found: list[Sign] = []

    def note(kind: SignKind, detail: str, *, broken: bool) -> None:
        found.append(Sign(kind, detail, broken))

    unknown = ChipReading(uuid=reading.uuid, name=reading.name)
    counted = before if before is not None and before.is_counted else counted
    first = counted is None
    before, counted = before or unknown, counted or unknown
    if reading.lost and before.lost:
        note(SignKind.LOST, "the driver has lost it", broken=True)
    for xid in reading.xids:
        if xid not in PROGRAM_XIDS:
            note(SignKind.XID, f"XID {xid}", broken=xid in BROKEN_XIDS)
    if reading.uncorrected > counted.uncorrected:
        since = (
            "since its driver was loaded"
            if first
            else f"{reading.uncorrected - counted.uncorrected} of them new"
        )
        detail = f"{reading.uncorrected} uncorrected memory errors, {since}"
        note(SignKind.UNCORRECTED, detail, broken=not first)
    if reading.remapping_failed and not counted.remapping_failed:
        note(SignKind.REMAPPING_FAILED, "bad memory can not be remapped any more", broken=True)
    if reading.remapping_pending and not counted.remapping_pending:
        note(SignKind.REMAPPING_PENDING, "memory is to be retired at the next reset", broken=False)
    if _magnitude(reading.corrected) > _magnitude(counted.corrected):
        note(SignKind.CORRECTED, f"{reading.corrected} corrected memory errors", broken=False)
    if reading.unreadable and not before.unreadable:
        note(SignKind.UNREADABLE, reading.unreadable, broken=False)
    return found


def _magnitude(count: int) -> int:
    """Grows ever more seldom, so that people are told of a trickle a few times only."""
    return len(str(count)) if count else 0


class ChipWatch:
    """What is known of the host's accelerators. `news` is called by the agent's loop and never waits.

    The thread consumes nothing, produces readings, waits for its next turn and for the driver, and ends at `close` or
    when there is nothing to watch.
    """

    def __init__(
        self, open_probe: Callable[[], Probe | None], *, host: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`open_probe` is called in the thread: a driver may take seconds to begin."""
        self._open_probe, self._host, self._clock = open_probe, host, clock
        self.broken: dict[str, ChipFault] = {}
        """Identity → the first sign that it is broken; nothing mends it but an operator."""
        self._before: dict[str, ChipReading] = {}
        self._counted: dict[str, ChipReading] = {}
        """The last reading of each that had counters."""
        self._readings: queue.SimpleQueue[tuple[ChipReading, ...]] = queue.SimpleQueue()
        self._read_at = clock.monotonic()
        self._is_silent = False
        self._told_epoch: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chips", daemon=True)

    @property
    def num_healthy(self) -> int | None:
        """None where nothing is known of any accelerator: a host without, or without the library to ask."""
        return len(self._before.keys() - self.broken.keys()) if self._before else None

    @property
    def readings(self) -> tuple[ChipReading, ...]:
        """The last of each."""
        return tuple(self._before.values())

    def adopt(self, broken: Mapping[str, ChipFault]) -> None:
        """What an earlier agent of this host had found."""
        self.broken.update(broken)

    def begin(self) -> None:
        self._thread.start()

    def news(self, processes: Mapping[int, Named], *, epoch: int) -> list[ChipFault]:
        """Signs that were not told before, and to the master of a new epoch all that is broken.

        `processes` are the agent's by their pids, so that those can be named whom the driver saw on the chip.
        """
        faults = self._take_in()
        if (
            self._before and epoch != self._told_epoch
        ):  # Before the first reading it is not known what is left.
            self._told_epoch = epoch
            told = {fault.uuid for fault in faults}
            faults += [fault for uuid, fault in self.broken.items() if uuid not in told]
        return [self._completed(fault, processes) for fault in faults]

    def _completed(self, fault: ChipFault, processes: Mapping[int, Named]) -> ChipFault:
        reading = self._before.get(fault.uuid)
        users = [processes[pid] for pid in (reading.pids if reading else ()) if pid in processes]
        return msgspec.structs.replace(
            fault,
            num_healthy=self.num_healthy or 0,
            processes={user.process: user.incarnation for user in users},
        )

    def _take_in(self) -> list[ChipFault]:
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
            silent = Sign(SignKind.UNREADABLE, detail, broken=False)
            faults += [self._fault(reading, silent) for reading in self._before.values()]
        return faults

    def _judge(self, reading: ChipReading) -> list[ChipFault]:
        uuid = reading.uuid
        found = signs(reading, before=self._before.get(uuid), counted=self._counted.get(uuid))
        self._before[uuid] = reading
        if reading.is_counted:
            self._counted[uuid] = reading
        if reading.uuid in self.broken:
            return []
        faults = [self._fault(reading, sign) for sign in found]
        for fault in faults:
            if fault.broken:
                self.broken.setdefault(fault.uuid, fault)
        return faults

    def _fault(self, reading: ChipReading, sign: Sign) -> ChipFault:
        return ChipFault(
            host=self._host,
            chip=reading.name,
            uuid=reading.uuid,
            kind=sign.kind,
            detail=sign.detail,
            broken=sign.broken,
        )

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with contextlib.suppress(DeadlineExceeded):
                wait(self._attempt_join, whom="chips thread", what="its end", timeout_s=CLOSE_S)

    def _attempt_join(self, remaining_s: float) -> bool | None:
        self._thread.join(remaining_s)
        return None if self._thread.is_alive() else True

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


def open_probe(name: str) -> Probe | None:
    """`open_probe("kintsugi.cluster.chips:nvml_probe")`; None where there is nothing to watch."""
    if not name:
        return None
    module, _, function = name.partition(":")
    make: Callable[[], Probe | None] = getattr(importlib.import_module(module), function)
    return make()


def nvml_probe() -> Probe | None:
    """NVIDIA's accelerators, by its management library; None without the library, its driver, or any card."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        probe = NvmlProbe(pynvml, shares_pids=_is_first_namespace(Path("/proc/self/ns/pid")))
    except pynvml.NVMLError:
        return None
    return probe if probe.num_chips else None


def _is_first_namespace(path: Path) -> bool:
    """Whether a process counts processes as the kernel, and so its drivers, does."""
    return path.stat().st_ino == FIRST_PID_NAMESPACE


class NvmlProbe:
    """Reads every card of the host through NVML; used by one thread at a time."""

    def __init__(self, nvml: Any, *, shares_pids: bool = True) -> None:
        """`shares_pids`: the driver's process numbers are ours. In a container they may name somebody else."""
        self._nvml, self._shares_pids = nvml, shares_pids
        self._chips: list[tuple[Any, str, str]] = []
        """Handle, identity, name."""
        self._events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
            self._chips.append((handle, uuid, f"GPU {index} ({_text(nvml.nvmlDeviceGetName(handle))})"))
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    @property
    def num_chips(self) -> int:
        return len(self._chips)

    def read(self) -> tuple[ChipReading, ...]:
        xids = self._take_xids()
        return tuple(
            self._read(handle, uuid, name, tuple(xids.get(_address(handle), ())))
            for handle, uuid, name in self._chips
        )

    def _take_xids(self) -> dict[int | None, list[int]]:
        """What has come since the last call, by the address of the card's handle; does not wait."""
        nvml, found = self._nvml, dict[int | None, list[int]]()
        with contextlib.suppress(nvml.NVMLError):
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                found.setdefault(_address(event.device), []).append(int(event.eventData))
        return found

    def _read(self, handle: Any, uuid: str, name: str, xids: tuple[int, ...]) -> ChipReading:
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
            return ChipReading(
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
            return ChipReading(uuid=uuid, name=name, lost=True, xids=xids)
        except nvml.NVMLError as error:
            return ChipReading(uuid=uuid, name=name, unreadable=str(error), xids=xids)

    def _errors(self, handle: Any, kind: int) -> int:
        nvml = self._nvml
        return int(self._get(0, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC))

    def _get(self, otherwise: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a card does not have, it does not have trouble with."""
        try:
            return function(*arguments)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return otherwise


def _text(value: str | bytes) -> str:
    """Older versions of the library give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
