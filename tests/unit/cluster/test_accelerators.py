"""What readings of accelerators mean, what is told of them, and how NVIDIA's library is asked."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.accelerators import (
    SILENT_S,
    AcceleratorMonitor,
    AcceleratorReading,
    HealthSignalKind,
    NvmlProbe,
    health_signals,
    open_probe,
)
from kintsugi.errors import KintsugiError
from kintsugi.protocol.agents import ChipFault
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import ChildReport
from tests.unit.cluster.conftest import until

MakeHost = Callable[..., Any]


def reading(**values: Any) -> AcceleratorReading:
    return AcceleratorReading(uuid="a1", name="GPU 0", **values)


HEALTHY = reading()


@pytest.mark.parametrize(
    ("before", "now", "kind", "broken"),
    [
        (reading(lost=True), reading(lost=True), HealthSignalKind.LOST, True),
        (HEALTHY, reading(xids=(79,)), HealthSignalKind.XID, True),
        (HEALTHY, reading(xids=(94,)), HealthSignalKind.XID, False),
        (HEALTHY, reading(xids=(69,)), HealthSignalKind.XID, False),
        (HEALTHY, reading(xids=(154,)), HealthSignalKind.XID, False),
        (reading(uncorrected=2), reading(uncorrected=3), HealthSignalKind.UNCORRECTED, True),
        (None, reading(uncorrected=3), HealthSignalKind.UNCORRECTED, False),
        (HEALTHY, reading(remapping_failed=True), HealthSignalKind.REMAPPING_FAILED, True),
        (HEALTHY, reading(remapping_pending=True), HealthSignalKind.REMAPPING_PENDING, False),
        (reading(corrected=9), reading(corrected=10), HealthSignalKind.CORRECTED, False),
        (HEALTHY, reading(unreadable="Unknown Error"), HealthSignalKind.UNREADABLE, False),
    ],
)
def test_a_change_is_a_sign(
    before: AcceleratorReading | None, now: AcceleratorReading, kind: HealthSignalKind, broken: bool
) -> None:
    (signal,) = health_signals(now, before=before)
    assert (signal.kind, signal.broken) == (kind, broken)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (HEALTHY, HEALTHY),
        (HEALTHY, reading(lost=True)),
        (HEALTHY, reading(xids=(13, 31, 43, 45))),
        (reading(uncorrected=3), reading(uncorrected=3)),
        (reading(remapping_pending=True), reading(remapping_pending=True)),
        (reading(corrected=10), reading(corrected=99)),
        (reading(unreadable="x"), reading(unreadable="x")),
    ],
    ids=[
        "healthy",
        "lost once",
        "the program's doing",
        "old errors",
        "still pending",
        "a trickle",
        "still unreadable",
    ],
)
def test_what_is_no_news_or_not_the_chips_fault_is_no_sign(
    before: AcceleratorReading, now: AcceleratorReading
) -> None:
    assert health_signals(now, before=before) == []


class FakeProbe:
    """Gives the readings that the test puts in, each once."""

    def __init__(self) -> None:
        self.readings: queue.SimpleQueue[tuple[AcceleratorReading, ...]] = queue.SimpleQueue()

    def read(self) -> tuple[AcceleratorReading, ...]:
        return self.readings.get()


class Watched:
    """A watch whose thread reads only what the test gives it."""

    def __init__(self) -> None:
        self.clock, self.probe = VirtualClock(), FakeProbe()
        self.watch = AcceleratorMonitor(lambda: self.probe, host="host-0", clock=self.clock)

    def see(self, *readings: AcceleratorReading, term: int = 1) -> list[ChipFault]:
        self.watch._readings.put(readings)
        return self.new_faults(term=term)

    def new_faults(self, *, term: int = 1) -> list[ChipFault]:
        return self.watch.new_faults({77: ChildReport("model-0", "1.3", 77, b"")}, term=term)


def test_a_broken_chip_is_told_once_with_its_users_and_what_is_left() -> None:
    watched, other = Watched(), AcceleratorReading(uuid="b2", name="GPU 1")
    assert watched.see(HEALTHY, other) == []
    (fault,) = watched.see(reading(xids=(79,), pids=(77, 1)), other)
    assert (fault.uuid, fault.kind, fault.broken) == ("a1", "xid", True)
    assert (fault.processes, fault.num_healthy) == ({"model-0": "1.3"}, 1)
    assert watched.see(reading(lost=True), other) == watched.see(reading(lost=True), other) == []


def test_a_new_master_is_told_again_of_what_is_broken_and_a_new_agent_knows_it() -> None:
    watched, successor = Watched(), Watched()
    watched.see(HEALTHY)
    (fault,) = watched.see(reading(xids=(79,)))
    assert watched.new_faults() == [] and watched.new_faults(term=2) == [fault]
    successor.watch.adopt(watched.watch.broken)
    assert successor.new_faults() == [], "before its first reading it does not know what is left"
    assert successor.see(HEALTHY) == [fault] and successor.watch.num_healthy == 0


@pytest.mark.parametrize(
    "gap", [reading(unreadable="Timeout"), reading(lost=True)], ids=["unreadable", "lost"]
)
def test_old_errors_are_not_new_ones_because_they_could_not_be_read_for_a_moment(
    gap: AcceleratorReading,
) -> None:
    watched, old = Watched(), reading(uncorrected=3, corrected=10, remapping_pending=True)
    watched.see(old)
    watched.see(gap)
    assert watched.see(old) == []
    watched.see(gap)
    (fault,) = watched.see(reading(uncorrected=4))
    assert fault.broken and "1 of them new" in fault.detail


def test_errors_from_before_the_first_reading_that_has_counters_are_worrying_only() -> None:
    watched = Watched()
    watched.see(reading(unreadable="Timeout"))
    (fault,) = watched.see(reading(uncorrected=3))
    assert not fault.broken and watched.watch.num_healthy == 1


def test_a_driver_that_does_not_answer_is_worrying_and_told_once() -> None:
    watched = Watched()
    watched.see(HEALTHY)
    watched.clock.advance(SILENT_S + 1)
    (fault,) = watched.new_faults()
    assert not fault.broken and watched.new_faults() == [] and watched.watch.num_healthy == 1


def test_the_thread_reads_at_once_and_ends_with_the_watch() -> None:
    probe = FakeProbe()
    probe.readings.put((HEALTHY,))
    watch = AcceleratorMonitor(lambda: probe, host="host-0")
    watch.begin()
    until(lambda: watch.new_faults({}, term=1) == [] and watch.num_healthy == 1, "the first reading")
    probe.readings.put((HEALTHY,))
    watch.close()


def test_without_accelerators_nothing_is_known_and_nothing_told() -> None:
    watch = AcceleratorMonitor(lambda: open_probe(""), host="host-0")
    watch.begin()
    watch.close()
    assert watch.new_faults({}, term=1) == [] and watch.num_healthy is None


class FakeNvml:
    """As much of `pynvml` as the probe uses: one card, whose answers the test sets."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801 - the library's name
        pass

    class NVMLError_NoPermission(NVMLError):  # noqa: N801 - the library's name
        pass

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801 - the library's name
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC = 1, 0, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - the library's name
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p(4711)
        self.events: list[Any] = []
        self.failure: Exception | None = None

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> ctypes.c_void_p:
        return self.handle

    def nvmlDeviceGetUUID(self, handle: object) -> bytes:
        return b"GPU-a1"

    def nvmlDeviceGetName(self, handle: object) -> str:
        return "NVIDIA H200"

    def nvmlDeviceRegisterEvents(self, handle: object, kinds: int, events: object) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.events:
            raise self.NVMLError("timeout")
        return self.events.pop()

    def nvmlDeviceGetRemappedRows(self, handle: object) -> tuple[int, int, int, int]:
        return 0, 0, 1, 0

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: object) -> int:
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[Any]:
        return [msgspec.defstruct("Process", [("pid", int), ("usedGpuMemory", int)])(77, 1 << 30)]

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Any:
        return msgspec.defstruct("Memory", [("used", int), ("total", int)])(2 << 30, 141 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        return msgspec.defstruct("Rates", [("gpu", int)])(75)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 45

    def nvmlDeviceGetClockInfo(self, handle: object, which: int) -> int:
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetTotalEccErrors(self, handle: object, kind: int, counter: int) -> int:
        if self.failure is not None:
            raise self.failure
        return 5 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else 2


def test_nvidias_library_is_read_into_a_reading() -> None:
    nvml = FakeNvml()
    probe = NvmlProbe(nvml)
    event = msgspec.defstruct("Event", [("device", Any), ("eventData", int)])
    nvml.events.append(event(ctypes.c_void_p(4711), 79))
    expected = AcceleratorReading(
        uuid="a1",
        name="GPU 0 (NVIDIA H200)",
        uncorrected=2,
        corrected=5,
        remapping_pending=True,
        xids=(79,),
        pids=(77,),
        num_processes=1,
        memory_of={77: 1 << 30},
        memory_bytes=2 << 30,
        memory_total_bytes=141 << 30,
        utilization=0.75,
        temperature=45.0,
    )
    assert probe.read() == (expected,)
    assert probe.read() == (msgspec.structs.replace(expected, xids=()),), "an event is told once"


def test_what_the_driver_does_not_tell_of_a_card_is_left_out_of_its_figures() -> None:
    (reading,) = NvmlProbe(FakeNvml()).read()
    assert reading.metrics() == {
        "memory_bytes": float(2 << 30),
        "memory_total_bytes": float(141 << 30),
        "utilization": 0.75,
        "temperature": 45.0,
        "processes": 1.0,
    }
    assert AcceleratorReading(uuid="a1", name="GPU 0", lost=True).metrics() == {}


def test_process_numbers_of_another_namespace_name_nobody() -> None:
    (reading,) = NvmlProbe(FakeNvml(), shares_pids=False).read()
    assert reading.pids == ()
    assert reading.metrics()["processes"] == 1.0, "how many they are is known all the same"


def test_how_many_use_a_card_is_left_out_where_the_driver_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise FakeNvml.NVMLError_NotSupported

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    (reading,) = NvmlProbe(FakeNvml()).read()
    assert "processes" not in reading.metrics() and reading.pids == ()


def test_a_card_that_the_driver_lost_is_told_from_one_that_it_can_not_read() -> None:
    nvml = FakeNvml()
    probe = NvmlProbe(nvml)
    nvml.failure = nvml.NVMLError_GpuIsLost()
    assert probe.read()[0].lost
    nvml.failure = nvml.NVMLError("Unknown Error")
    (unreadable,) = probe.read()
    assert (unreadable.lost, unreadable.unreadable) == (False, "Unknown Error")


def write_chips(folder: Path, *readings: AcceleratorReading, agent: str = "agent-0") -> None:
    new = folder / f"{agent}.new"
    new.write_bytes(msgspec.json.encode(readings))
    new.replace(folder / f"{agent}.json")


def test_an_agent_tells_of_a_chip_that_breaks_and_starts_nobody_where_none_is_left(
    make_host: MakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips = tmp_path / "chips"
    chips.mkdir()
    monkeypatch.setenv("KINTSUGI_TEST_CHIPS", str(chips))
    write_chips(chips, HEALTHY)
    host = make_host(model="idle", rollout="idle", probe="cluster_programs:file_probe")
    started = host.start("model-0")
    write_chips(chips, reading(xids=(79,), pids=(started.pid,)))
    until(lambda: host.turn() and bool(host.chip_faults), "what the agent tells")
    (fault,) = host.chip_faults
    assert fault.broken and fault.processes == {"model-0": started.incarnation} and fault.num_healthy == 0
    with pytest.raises(KintsugiError, match="choosing an accelerator: GPU 0 of host-0 is broken: XID 79"):
        host.start("model-1")
    assert host.start("rollout-0").pid, "who needs none is started as before"
    write_chips(chips, HEALTHY)
    host.replace_agent()
    until(lambda: host.turn() and len(host.chip_faults) == 2, "what the second agent tells")
    assert host.chip_faults[1].summary == fault.summary
