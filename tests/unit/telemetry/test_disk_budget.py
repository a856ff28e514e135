from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.disk_budget import (
    DISK_BUDGET,
    EVENTS_SIZE,
    GROWN_READINGS_SIZE,
    LOGS_SIZE,
    SMALLEST_SIZE,
    SPANS_SIZE,
    DiskBudget,
    bound_log,
)
from kintsugi.telemetry.events import EventLog, Note, read_events
from kintsugi.telemetry.jsonl_log import NUM_OLD


@pytest.fixture(name="large_run")
def fixture_large_run() -> Iterator[None]:
    DISK_BUDGET.divide(100_000)
    yield
    DISK_BUDGET.divide(1)


def test_files_of_all_processes_together_stay_within_the_budget_of_the_run() -> None:
    budget = DiskBudget()
    for num_processes in (1, 8, 100, 900):
        budget.divide(num_processes)
        for total in (SPANS_SIZE, GROWN_READINGS_SIZE, EVENTS_SIZE):
            size = budget.file_size(total, num_files=NUM_OLD + 1, largest=256 << 20)
            assert size * (NUM_OLD + 1) * num_processes <= total
        assert 2 * num_processes * budget.file_size(LOGS_SIZE, num_files=2, largest=64 << 20) <= LOGS_SIZE


@pytest.mark.usefixtures("large_run")
def test_events_are_rotated_also_where_several_parts_of_a_process_write_them(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("agent-0")
    logs = [EventLog(path, process="agent-0") for _ in range(3)]
    text = "x" * 10_000
    numbers = range(200)
    for number in numbers:
        logs[number % 3].emit(Note(f"{number} {text}"))
    files = list(path.parent.iterdir())
    assert len(files) == NUM_OLD + 1
    assert sum(each.stat().st_size for each in files) <= (NUM_OLD + 1) * SMALLEST_SIZE
    found = [record.event for record in read_events(tmp_path, process="agent-0")]
    kept = [int(event.message.split()[0]) for event in found if isinstance(event, Note)]
    assert kept == list(numbers)[-len(kept) :] and len(kept) > 50


@pytest.mark.usefixtures("large_run")
def test_a_large_log_is_put_aside_and_its_process_goes_on_writing(tmp_path: Path) -> None:
    path = tmp_path / "model-0.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"first\n" + b"." * SMALLEST_SIZE + b"\nlast\n")
        bound_log(path)
        log.write(b"next\n")
    assert path.read_bytes() == b"next\n"
    aside = (tmp_path / "model-0.1.log").read_bytes()
    assert aside.endswith(b"\nlast\n") and len(aside) == SMALLEST_SIZE
    bound_log(path)
    assert path.read_bytes() == b"next\n"
    bound_log(tmp_path / "missing.log")
    assert sorted(os.listdir(tmp_path)) == ["model-0.1.log", "model-0.log"]
