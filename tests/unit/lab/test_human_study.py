from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.errors import Fault, UserError
from kintsugi.lab.human_study import ANSWERS_FILE, master_log, write_kit
from kintsugi.lab.scenarios.outcome import ObservedOutcome, record_of
from kintsugi.lab.scenarios.records import RUNS_FILE, RunsFile, write_json
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen, Transition
from tests.unit.lab.test_outcome import happened

__all__ = ["happened"]


def lab_folder(happened: ObservedOutcome, folder: Path, *, runs: int = 1) -> Path:
    """What `kintsugi lab run` leaves."""
    record = record_of(happened)
    log = EventLog(RunFolder(folder / "run").events_file("master-0"), process="master-0")
    log.emit(Transition("master", "run", "collecting", "training", "batch is full"))
    log.emit(Alert("server-0 is late"))
    log.close()
    write_json(RunsFile(host={}, date="", scale=1.0, runs=(record,) * runs), folder / RUNS_FILE)
    return folder


def test_a_kit_has_the_masters_log_and_neither_answers_nor_names(
    happened: ObservedOutcome, tmp_path: Path
) -> None:
    kit = write_kit(lab_folder(happened, tmp_path))
    assert sorted(path.name for path in kit.rglob("*") if path.is_file()) == [
        "README.md",
        "master.log",
        "sheet.csv",
    ]
    (log,) = kit.rglob("master.log")
    assert "server-0 is late" in log.read_text() and "S1" not in log.read_text()
    (answer,) = json.loads((tmp_path / ANSWERS_FILE).read_text())["answers"]
    assert (answer["scenario"], answer["target"]) == ("S1", "model-1")


def test_a_kit_is_made_of_a_folder_that_was_moved(happened: ObservedOutcome, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    assert happened.run_dir is not None
    happened.folder = made / "S1-ours"
    happened.folder.mkdir()
    happened.run_dir.rename(happened.folder / "run")
    happened.run_dir = happened.folder / "run"
    record = record_of(happened)
    write_json(RunsFile(host={}, date="", scale=1.0, runs=(record,)), made / RUNS_FILE)
    moved = made.rename(tmp_path / "moved")
    assert list(write_kit(moved).rglob("master.log"))


def test_the_masters_log_has_nothing_of_what_the_diagnosis_said(
    happened: ObservedOutcome, tmp_path: Path
) -> None:
    verdict = "model-1: network_delay: its link is slow"
    told = Fault(id="d", kind="Diagnosed", process="model-1", message=verdict, time=0.0)
    end = Fault(id="f", kind="ProcessDied", process="model-1", message="it was lost", time=0.0, cause=told)
    log = EventLog(RunFolder(tmp_path / "run").events_file("master-0"), process="master-0")
    for event in (
        FaultSeen(end),
        Alert(f"mended by recover: {verdict}"),
        Transition("master", "run", "collecting", "recovering", "it was lost"),
        Alert("something else"),
    ):
        log.emit(event)
    log.close()
    assert [line.split(" ", 2)[2] for line in master_log(tmp_path / "run")] == ["WARNING something else"]


def test_a_kit_is_not_made_twice(happened: ObservedOutcome, tmp_path: Path) -> None:
    write_kit(lab_folder(happened, tmp_path))
    with pytest.raises(UserError, match="is there already"):
        write_kit(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of a `kintsugi lab run`"):
        write_kit(tmp_path)


def test_experiments_without_an_injected_fault_have_nothing_to_diagnose(
    happened: ObservedOutcome, tmp_path: Path
) -> None:
    happened.injected = []
    with pytest.raises(UserError, match="nothing to diagnose"):
        write_kit(lab_folder(happened, tmp_path))
