from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kintsugi.cli import evaluate
from kintsugi.config.recipe import dump, load
from kintsugi.config.schema import Config
from kintsugi.errors import Fault, UserError, WorldError
from kintsugi.model.architecture import parameter_shapes
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import character_tokenizer
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


def write_checkpoint(folder: Path, config: Config) -> None:
    """A model folder with the shape of the recipe and zeros as weights."""
    character_tokenizer("0123456789+=").save(folder)
    model, _ = plan_model(config)
    (folder / "config.json").write_text(json.dumps(model.to_huggingface()))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model).items()}
    save_file(zeros, folder / "model.safetensors")


def test_an_evaluation_with_other_settings_is_validated_and_has_no_steps(
    tmp_path: Path, launch_ends: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = load("grpo_arithmetic", [f"run_dir={tmp_path}"]).config
    dump(of_run, tmp_path / "config.yaml")
    write_checkpoint(tmp_path / "checkpoints" / "step-5", of_run)
    launched: list[Config] = []

    def launch(config: Config, *, run_dir: Path, on_tick: Callable[[], None]) -> int:
        launched.append(config)
        return 1

    monkeypatch.setattr(evaluate, "launch", launch)
    with pytest.raises(WorldError):
        evaluate.evaluate_checkpoint(tmp_path, step=None, overrides=["eval.num_samples=3"])
    (config,) = launched
    assert config.eval.num_samples == 3 and config.algorithm.steps == 0
    with pytest.raises(UserError, match=r"sampling\.max_new_tokens.*expected"):
        evaluate.evaluate_checkpoint(tmp_path, step=None, overrides=["sampling.max_new_tokens=0"])
    with pytest.raises(UserError, match="the rest belongs to the run"):
        evaluate.evaluate_checkpoint(tmp_path, step=None, overrides=["actor.learning_rate=1"])
    assert launched == [config]
