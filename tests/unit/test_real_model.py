"""The harness of `benchmarks/real_model.py`: readings of a GPU, and the moment at which a fault is sent."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.real_model_report import Phase, busy_share, phases, saves, typical
from benchmarks.real_model_watch import Device, Fault, HostReading, Monitor, Trigger, peaks
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import EventLog, Record, Span, Stamp, Transition
from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports, write_processes


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A GPU with two processes, one of which does not say its memory."""
    module = ModuleType("pynvml")
    users = [SimpleNamespace(pid=7, usedGpuMemory=3_000_000_000), SimpleNamespace(pid=8, usedGpuMemory=None)]
    for name, value in {
        "NVMLError": RuntimeError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=80),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=5_000_000_000),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: users,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def reported(run_dir: Path, *, pid: int, process: str = "model-0") -> None:
    report = ProcessReport(
        process=process, role="model", host="host-0", pid=pid, incarnation="1.1", status="live", silent_s=0.5
    )
    write_processes(run_dir, ProcessReports(time.time(), (report,)))


def effect(trigger: Trigger) -> dict[str, object] | None:
    """What the trigger has done by now."""
    return trigger.fired


def test_a_gpu_is_read_by_process_and_altogether(nvml: ModuleType, tmp_path: Path) -> None:
    device = Device()
    assert device.why_absent == ""
    assert device.busy() == 0.8
    assert device.memory() == (5_000_000_000, {7: 3_000_000_000, 8: 0})
    reported(tmp_path, pid=7)
    reading = Monitor(tmp_path, device)._reading()
    assert reading.device_bytes_of == {"model-0": 3_000_000_000}
    assert reading.device_bytes_unnamed == [0]
    assert peaks([reading], "device_bytes_of") == {"model-0": {"first": 3.0, "last": 3.0, "peak": 3.0}}


def test_without_nvml_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = Device()
    assert device.why_absent == "nvidia-ml-py is not installed"
    assert device.busy() is None
    assert device.memory() == (None, {})


def test_a_fault_is_sent_once_in_the_chosen_pass_of_its_phase(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        reported(tmp_path, pid=child.pid)
        path = RunFolder(tmp_path).events_file("master-0")
        path.parent.mkdir(parents=True)
        log = EventLog(path, process="master-0")
        fault = Fault("model-0", "training")
        trigger = Trigger(fault, run_dir=tmp_path, step=2, share=0.0, save_bytes=0)
        for before, after in (("collecting", "training"), ("training", "committing")):
            log.emit(Transition("master", "run", before, after, ""))
            trigger.poll()
        assert effect(trigger) is None
        log.emit(Transition("master", "run", "collecting", "training", ""))
        trigger.poll()
        first = effect(trigger)
        assert first is not None and first["passes_before"] == 1
        assert child.wait(10) == -signal.SIGKILL
        trigger.poll()
        assert effect(trigger) is first
    finally:
        child.kill()
        child.wait()


def test_a_fault_of_a_save_waits_for_its_share_of_the_checkpoint(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        reported(tmp_path, pid=child.pid)
        trigger = Trigger(Fault("model-0", "saving"), run_dir=tmp_path, step=1, share=0.5, save_bytes=100)
        folder = RunFolder(tmp_path).checkpoints_folder / ".saving-step-000001"
        folder.mkdir(parents=True)
        (folder / "trainer.safetensors").write_bytes(bytes(49))
        trigger.poll()
        assert effect(trigger) is None
        (folder / "trainer.safetensors").write_bytes(bytes(50))
        trigger.poll()
        assert effect(trigger) is not None
        assert child.wait(10) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_use_of_the_gpu_counts_the_phases_of_steps_only(nvml: ModuleType, tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Device(), busy=[(1.5, 1.0), (2.5, 0.5), (3.5, 0.0), (9.0, 0.0)])
    found = [Phase("training", 1, 2), Phase("publishing", 2, 3), Phase("saving", 3, 4)]
    assert busy_share(monitor, found) == {"steps": 0.75, "publishing": 0.5, "saving": 0.0, "training": 1.0}


def test_medians_leave_the_first_steps_out() -> None:
    names = ("seconds", "train", "generate", "weights", "commit", "reward", "tokens", "mean_length")
    steps = [dict.fromkeys(names, value) for value in (90.0, 80.0, 1.0, 2.0, 3.0)]
    assert typical(steps)["seconds"] == 2.0
    assert typical([]) == {}
    assert HostReading.__dataclass_fields__.keys() >= {"saving", "silent_s_of"}


def test_a_save_beside_training_is_no_phase_of_the_run_and_says_how_long_training_stood_still() -> None:
    def at(seconds: float, event: Transition | Span) -> Record:
        return Record(Stamp(seconds, seconds, "master-0"), event)

    records = [
        at(0, Transition("master", "run", "publishing", "collecting", "")),
        at(0, Transition("master", "save", "idle", "saving", "")),
        at(2, Transition("master", "run", "collecting", "training", "")),
        at(5, Transition("master", "save", "saving", "idle", "")),
        at(5, Span("save", 0, 5, {"step": "2", "stalled_s": "0.25"})),
        at(6, Transition("master", "run", "training", "committing", "")),
    ]
    found = phases(records)
    assert found == [Phase("collecting", 0, 2), Phase("training", 2, 6)]
    report = saves(records, [], found)
    assert (report["standing_still_s"], report["waited_for_the_last_s"]) == ([0.25], 0)
