from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import Fault
from kintsugi.lab.campaign import log_readers
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen, Note

NOON = datetime(2026, 11, 16, 12, 0, 0).timestamp()


class Logs:
    """A run folder into which events and log lines are written at chosen moments."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir()

    def event(self, process: str, event: Alert | FaultSeen | Note, *, at: float) -> None:
        log = EventLog(
            RunFolder(self.run_dir).events_file(process),
            process=process,
            clock=VirtualClock(start=0.0, wall=NOON + at),
        )
        log.emit(event)
        log.close()

    def line(self, process: str, text: str, *, at: float) -> None:
        stamp = datetime.fromtimestamp(NOON + at).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        with (self.run_dir / "logs" / f"{process}.log").open("a") as file:
            file.write(f"[{stamp}] {text}\n")


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def fault(process: str, kind: str, message: str) -> FaultSeen:
    return FaultSeen(Fault(id="f", kind=kind, process=process, message=message, time=0.0))


def test_the_last_error_of_the_master_is_taken_at_its_word(logs: Logs) -> None:
    logs.event("master-0", fault("model-1", "ProcessDied", "killed by SIGKILL"), at=1.0)
    logs.event("master-0", Alert("waited 30 s for server-0: its answer"), at=2.0)
    logs.event("model-0", fault("model-0", "GroupBroken", "connection reset"), at=3.0)
    read = log_readers.last_error(log_readers.errors_in(logs.run_dir))
    assert read is not None
    assert (read.process, read.kind, read.onset) == ("server-0", FaultKind.NETWORK_DELAY, NOON + 2.0)


def test_the_first_error_of_any_log_is_the_earliest(logs: Logs) -> None:
    logs.line("model-1", "ERROR: CUDA out of memory", at=0.5)
    logs.line("master-0", "ERROR: Error stopping job model-1: Request timeout", at=30.0)
    errors = log_readers.errors_in(logs.run_dir)
    first, last = log_readers.first_error(errors), log_readers.last_error(errors)
    assert first is not None and last is not None
    assert (first.process, first.kind) == ("model-1", FaultKind.DEVICE_MEMORY)
    assert last.kind is FaultKind.NETWORK_DELAY, "the clean-up has buried it"


def test_nothing_is_read_that_was_written_before_or_after(logs: Logs) -> None:
    for at in (1.0, 2.0, 3.0):
        logs.event("master-0", Alert(f"alert {at}"), at=at)
    errors = log_readers.errors_in(logs.run_dir, since=NOON + 1.5, until=NOON + 2.5)
    assert [error.message for error in errors] == ["alert 2.0"]


def test_notes_and_ordinary_lines_are_no_errors_and_silence_is_no_answer(logs: Logs) -> None:
    logs.event("master-0", Note("step 3 took long"), at=1.0)
    logs.line("model-0", "INFO: uploaded the weights", at=1.0)
    errors = log_readers.errors_in(logs.run_dir)
    assert errors == []
    assert log_readers.last_error(errors) is None and log_readers.first_error(errors) is None


def test_what_the_diagnosis_says_is_not_compared_with_itself(logs: Logs) -> None:
    logs.event("watcher-0", Alert("model-1: network_delay"), at=1.0)
    assert log_readers.errors_in(logs.run_dir) == []


def test_what_recovery_quotes_of_the_diagnosis_is_the_diagnosis_too(logs: Logs) -> None:
    verdict = "model-1: network_delay: its link is slow"
    told = Fault(id="d", kind="Diagnosed", process="model-1", message=verdict, time=0.0)
    end = Fault(
        id="f", kind="ProcessDied", process="model-1", message="model-1 was lost", time=0.0, cause=told
    )
    logs.event("master-0", FaultSeen(end), at=1.0)
    logs.event("master-0", Alert(f"{verdict}. model: training stops until it is replaced"), at=1.1)
    logs.event("master-0", Alert(f"mended by recover: {verdict}"), at=2.0)
    logs.event("master-0", fault("model-0", "ProcessDied", "model-0 was lost"), at=0.5)
    errors = log_readers.errors_in(logs.run_dir)
    assert [error.message for error in errors] == ["ProcessDied: model-0: model-0 was lost"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("recovered from network_loss of model-1: timed out", FaultKind.NETWORK_LOSS),
        ("the cause is: disk full", FaultKind.DISK_FULL),
        ("server-0 has not answered LeaseGranted for 1.1 s", FaultKind.HANDOVER),
        ("the link from model-1 to agent-0 is slow", FaultKind.NETWORK_DELAY),
        ("its numeric result differs", FaultKind.NUMERIC),
        ("StorageFull: model-0: No space left on device", FaultKind.DISK_FULL),
        ("Checkpoint corrupted: EOFError at position 12", FaultKind.CORRUPTION),
        ("rollout-1 was killed by SIGKILL", FaultKind.KILLED),
        ("Temporary failure in name resolution: could not resolve host-1", FaultKind.DNS),
        ("MemoryError", FaultKind.MEMORY),
        ("something else", FaultKind.CRASHED),
    ],
)
def test_words_in_a_message_make_people_think_of_a_kind(message: str, kind: FaultKind) -> None:
    assert log_readers.kind_of(message) is kind


def test_an_error_with_the_name_of_its_module_is_an_error(logs: Logs) -> None:
    path = logs.run_dir / "logs" / "model-0.log"
    path.write_text("kintsugi.errors.StorageError: step-5: Input/output error\n")
    (error,) = log_readers.errors_in(logs.run_dir)
    assert log_readers.kind_of(error.message) is FaultKind.DISK_ERROR


def test_lines_without_a_time_that_stood_there_before_are_not_read_again(logs: Logs) -> None:
    path = logs.run_dir / "logs" / "model-0.log"
    path.write_text("OSError: No space left on device\n")
    before = log_readers.log_sizes(logs.run_dir)
    with path.open("a") as log:
        log.write("MemoryError\n")
    (error,) = log_readers.errors_in(logs.run_dir, beyond=before)
    assert error.message == "MemoryError"
    read = log_readers.to_read(logs.run_dir, target="model-0", since=0.0, until=error.t + 1.0, beyond=before)
    assert (read.files, read.lines) == (1, 1)


def test_a_person_reads_the_masters_log_and_those_of_every_worker_of_the_role(logs: Logs) -> None:
    for process in ("master-0", "model-0", "model-1", "rollout-0"):
        for at in (1.0, 2.0, 9.0):
            logs.line(process, "INFO: working", at=at)
    read = log_readers.to_read(logs.run_dir, target="model-1", since=NOON, until=NOON + 5.0)
    assert (read.files, read.lines) == (3, 6)
