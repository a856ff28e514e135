"""Uncaught exceptions of threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.process.membership import ShuttingDown
from kintsugi.process.thread_errors import NUM_THREAD_ERRORS, recorded_thread_errors
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import EventLog, FaultSeen, ProcessEnded, read_events


@pytest.fixture(autouse=True)
def _the_hook_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of pytest's, which fails a test whose thread raises."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


def faults(run_dir: Path) -> list[tuple[str, str]]:
    events = [record.event for record in read_events(run_dir)]
    return [(event.fault.kind, event.fault.message) for event in events if isinstance(event, FaultSeen)]


def run_in_thread(run_dir: Path, error: Exception, *, is_replaceable: bool = True) -> list[int]:
    """Exit codes with which the process was to be ended."""
    codes: list[int] = []

    def work() -> None:
        raise error

    log = EventLog(RunFolder(run_dir).events_file("model-0"), process="model-0")
    with recorded_thread_errors(log, process="model-0", is_replaceable=is_replaceable, end=codes.append):
        thread = threading.Thread(target=work, name="snapshot")
        thread.start()
        thread.join()
    log.close()
    return codes


def num_errors() -> int:
    return COUNTERS.snapshot().counters.get(NUM_THREAD_ERRORS, 0)


def test_the_exception_of_a_thread_is_recorded_counted_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = num_errors()
    assert run_in_thread(tmp_path, KeyError("lost")) == [], "the process continues"
    assert faults(tmp_path) == [("KeyError", "thread snapshot: 'lost'")]
    assert num_errors() == before + 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ShuttingDown("finished"), SystemExit(3)])
def test_an_ordered_end_of_a_thread_is_no_fault(tmp_path: Path, error: Exception) -> None:
    assert run_in_thread(tmp_path, error) == []
    assert faults(tmp_path) == []


@pytest.mark.parametrize(("is_replaceable", "codes"), [(True, [1]), (False, [])])
def test_a_failed_assertion_ends_a_process_that_can_be_replaced(
    tmp_path: Path, is_replaceable: bool, codes: list[int]
) -> None:
    assert run_in_thread(tmp_path, AssertionError("impossible"), is_replaceable=is_replaceable) == codes
    ends = [record.event for record in read_events(tmp_path) if isinstance(record.event, ProcessEnded)]
    assert [end.reason for end in ends] == ["AssertionError: thread snapshot: impossible"] * len(codes)


def test_the_hook_is_restored(tmp_path: Path) -> None:
    before: Callable[..., object] = threading.excepthook
    run_in_thread(tmp_path, KeyError("lost"))
    assert threading.excepthook is before


WORKER = """
import sys, threading
from kintsugi.process.main import run_process
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.types import Peer, Role

def work():
    raise {error}

def main(bootstrap):
    thread = threading.Thread(target=work, name="upload")
    thread.start()
    thread.join()
    return 0

master = Peer("master-0", "a", "host-0", "tcp://127.0.0.1:1", b"")
own = dict(job="job", run_dir=sys.argv[1], process="model-0", role=Role.MODEL, host="host-0", incarnation="a")
sys.exit(run_process(Bootstrap(**own, public_key=b"", secret_key=b"", master=master, lifeline=-1), main))
"""


@pytest.mark.parametrize(("error", "code"), [("OSError('disk')", 0), ("AssertionError('impossible')", 1)])
def test_a_worker_records_what_a_background_thread_raises(tmp_path: Path, error: str, code: int) -> None:
    program = WORKER.format(error=error)
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == code
    assert [message for _, message in faults(tmp_path)] == [
        f"thread upload: {error[error.index('(') + 2 : -2]}"
    ]
    assert "in work" in result.stderr
