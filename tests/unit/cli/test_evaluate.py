from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.cli import evaluate
from kintsugi.config.recipe import dump
from kintsugi.config.schema import Config
from kintsugi.errors import Fault, UserError, WorldError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.events import EventLog, FaultSeen

Launch = Callable[[int, Fault], None]


@pytest.fixture
def launch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """A run in `tmp_path` whose evaluation ends with this exit code and fault."""
    dump(Config(name="mine"), tmp_path / "config.yaml")
    monkeypatch.setattr(
        reader, "chosen_checkpoint", lambda run_dir, *, step: run_dir / "checkpoints" / "step-5"
    )

    def prepare(code: int, fault: Fault) -> None:
        def launch(config: Config, *, run_dir: Path, on_tick: Callable[[], None]) -> int:
            log = EventLog(RunFolder(run_dir).events_file("master-0"), process="master-0")
            log.emit(FaultSeen(fault))
            log.close()
            return code

        monkeypatch.setattr(evaluate, "launch", launch)

    return prepare


def test_a_failed_evaluation_names_its_cause_and_its_folder(tmp_path: Path, launch_ends: Launch) -> None:
    cause = Fault("a", "StorageError", "model-0", "disk full", SYSTEM_CLOCK.wall())
    launch_ends(1, Fault("b", "RemoteError", "master-0", "restore failed", SYSTEM_CLOCK.wall(), cause))
    with pytest.raises(WorldError) as failed:
        evaluate.evaluate_checkpoint(tmp_path, step=None)
    told = "model-0: StorageError: disk full; then master-0: RemoteError: restore failed"
    assert f"the evaluation failed: {told}; its folder is {tmp_path}/evaluations/step-5-1" == str(
        failed.value
    )


def test_a_mistake_of_the_user_stays_one(tmp_path: Path, launch_ends: Launch) -> None:
    launch_ends(2, Fault("a", "DataError", "master-0", "rows.jsonl: expected rows", SYSTEM_CLOCK.wall()))
    with pytest.raises(UserError, match=r"^rows\.jsonl: expected rows$"):
        evaluate.evaluate_checkpoint(tmp_path, step=None)
