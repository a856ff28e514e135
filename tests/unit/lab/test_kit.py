from __future__ import annotations

import json
from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.lab.kit import ANSWERS_FILE, write_kit
from kintsugi.lab.outcomes import Happened, record_of
from kintsugi.lab.records import RUNS_FILE, RunsFile, write_json
from kintsugi.observe.events import Alert, EventLog, Transition, events_path
from tests.unit.lab.test_outcomes import happened

__all__ = ["happened"]


def lab_folder(happened: Happened, folder: Path, *, runs: int = 1) -> Path:
    """What `kintsugi lab run` leaves."""
    record = record_of(happened)
    log = EventLog(events_path(folder / "run", "master-0"), process="master-0")
    log.emit(Transition("master", "run", "collecting", "training", "batch is full"))
    log.emit(Alert("server-0 is late"))
    log.close()
    write_json(RunsFile(host={}, date="", scale=1.0, runs=(record,) * runs), folder / RUNS_FILE)
    return folder


def test_a_kit_has_the_masters_log_and_neither_answers_nor_names(happened: Happened, tmp_path: Path) -> None:
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


def test_a_kit_is_not_made_twice(happened: Happened, tmp_path: Path) -> None:
    write_kit(lab_folder(happened, tmp_path))
    with pytest.raises(UserError, match="is there already"):
        write_kit(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of a `kintsugi lab run`"):
        write_kit(tmp_path)


def test_experiments_of_which_none_struck_have_nothing_to_ask(happened: Happened, tmp_path: Path) -> None:
    happened.injected = []
    with pytest.raises(UserError, match="nothing to ask"):
        write_kit(lab_folder(happened, tmp_path))
