"""Real runs with the real libraries of the trackers, offline or in local files: what each of them has of a run whose
master is killed, and which is resumed with more steps; and a run whose trackers cannot be reached."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kintsugi.run_folder.reader import read_metrics
from kintsugi.telemetry.events import OperationFailed, ProcessBegan, read_events
from tests.cluster.real_runs import Run, finished, play

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TRACKERS = [name for name in ("wandb", "mlflow", "trackio") if find_spec(name) is not None]
SWITCHES = [f"logging.{name}=true" for name in TRACKERS]
MORE_STEPS = 6
LAST_STEP = 9
"""Three of the warm-up, and those of GRPO after the resumption."""
KILLED_AT = 5
NOWHERE = "http://127.0.0.1:9"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in TRACKERS, reason=f"needs {name}: make test-extras")


def environment(folder: Path) -> dict[str, str]:
    return {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }


def kill_master_then_extend(run: Run) -> None:
    run.environment = environment(run.run_dir.parent)
    run.start(*SWITCHES, gates=(KILLED_AT,))
    run.wait_at(KILLED_AT)
    run.kill("master-0")
    run.let_through(KILLED_AT)
    run.finish()
    run.launcher = run.command("resume", str(run.run_dir), f"algorithm.steps={MORE_STEPS}")
    code, errors = run.end()
    assert code == 0, errors
    run.assert_nothing_left()


def reach_nothing(run: Run) -> None:
    run.environment = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": NOWHERE,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "5",
        "MLFLOW_TRACKING_URI": NOWHERE,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "TRACKIO_DIR": "/proc/no-such-folder",
    }
    run.start(*SWITCHES)
    assert run.launcher is not None
    _, errors = run.launcher.communicate(timeout=240)
    assert run.launcher.returncode == 0, errors
    run.assert_nothing_left(timeout_s=20.0)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    if not TRACKERS:
        pytest.skip("no tracker besides TensorBoard is installed: make test-extras")
    scenarios = {"tracked": kill_master_then_extend, "unreachable": reach_nothing}
    runs = play(scenarios, tmp_path_factory.mktemp("trackers"))
    return lambda name: finished(runs[name])


def expected(run: Run, name: str) -> dict[int, float]:
    """A metric of the steps, as `metrics.jsonl` has it."""
    lines, _ = read_metrics(run.run_dir)
    return {int(line["step"] or 0): value for line in lines if (value := line.get(name)) is not None}


def assert_since_the_kill(run: Run, rewards: dict[int, float]) -> None:
    """A library may lose what it had not written when the master was killed, and nothing else."""
    recorded = expected(run, "reward/mean")
    assert rewards == pytest.approx({step: recorded[step] for step in rewards})
    assert set(recorded) - set(rewards) <= set(range(1, KILLED_AT + 1))


def test_the_run_was_disturbed_and_extended(played: Callable[[str], Run]) -> None:
    run = played("tracked")
    began = [each.event for each in read_events(run.run_dir, process="master-0")]
    assert len([event for event in began if isinstance(event, ProcessBegan)]) == 3
    assert sorted(expected(run, "loss")) == list(range(1, LAST_STEP + 1))


# Weights & Biases.


def wandb_records(run: Run) -> Iterator[Any]:
    """Records of the offline files in their order: a log in blocks of 32 KiB, as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted((run.run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        content, place, record = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", content, place)
            record += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # The whole record, or its last part.
                decoded = wandb_internal_pb2.Record()
                decoded.ParseFromString(record)
                yield decoded
                record = b""


@needs("wandb")
def test_wandb_has_every_step_under_one_id_with_configuration_system_and_tables(
    played: Callable[[str], Run],
) -> None:
    run = played("tracked")
    steps: dict[int, dict[str, Any]] = {}
    ids, configs, files = set(), [], []
    for record in wandb_records(run):
        match record.WhichOneof("record_type"):
            case "run":
                ids.add((record.run.project, record.run.run_id))
            case "config":
                configs.append({each.key: json.loads(each.value_json) for each in record.config.update})
            case "history":
                line = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json)
                    for each in record.history.item
                }
                steps.setdefault(line["_step"], {}).update(line)
            case "artifact":
                files.append(record.artifact.name)
    assert len(ids) == 1 and next(iter(ids))[0] == "kintsugi"
    assert_since_the_kill(
        run, {step: line["reward/mean"] for step, line in steps.items() if "reward/mean" in line}
    )
    assert any(name.startswith("system/host-0/") for line in steps.values() for name in line)
    assert [config["algorithm"]["steps"] for config in configs][-2:] == [4, MORE_STEPS]
    assert not any("monitoring" in config or "run_dir" in config for config in configs)
    assert any("completions" in name for name in files) and any("incidents" in name for name in files)


# MLflow.


@needs("mlflow")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_mlflow_has_one_run_with_every_step_its_parameters_and_what_was_changed(
    played: Callable[[str], Run],
) -> None:
    from mlflow import MlflowClient

    run = played("tracked")
    client = MlflowClient(environment(run.run_dir.parent)["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("kintsugi")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.run_dir.name, "FINISHED")
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert_since_the_kill(run, {each.step: each.value for each in history})
    assert found.data.params["algorithm.steps"] == "4"
    assert found.data.tags["changed.algorithm.steps"] == str(MORE_STEPS)
    assert any(name.startswith("system/host-0/") for name in found.data.metrics)
    folders = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert folders == {"completions", "incidents"}


# Trackio.


@needs("trackio")
def test_trackio_has_every_step_of_one_run_and_its_configuration(played: Callable[[str], Run]) -> None:
    import sqlite3

    run = played("tracked")
    database = sqlite3.connect(run.run_dir.parent / "trackio" / "kintsugi.db")
    lines = [
        (step, json.loads(content))
        for step, content in database.execute("SELECT step, metrics FROM metrics ORDER BY id")
    ]
    names = {name for (name,) in database.execute("SELECT DISTINCT run_name FROM metrics")}
    configs = [json.loads(content) for (content,) in database.execute("SELECT config FROM configs")]
    database.close()
    assert len(names) == 1
    assert_since_the_kill(run, {step: line["reward/mean"] for step, line in lines if "reward/mean" in line})
    assert any(name.startswith("system/host-0/") for _, line in lines for name in line)
    assert any("completions" in line for _, line in lines)
    assert configs[-1]["actor.learning_rate"] > 0


# Whatever they do.


def test_trackers_that_cannot_be_reached_are_reported_and_change_no_bit(
    played: Callable[[str], Run], undisturbed: Run
) -> None:
    run = played("unreachable")
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    failed = [
        record.event.message
        for record in read_events(run.run_dir, process="master-0")
        if isinstance(record.event, OperationFailed)
    ]
    for name in TRACKERS:
        label = {"wandb": "W&B: ", "mlflow": "MLflow: ", "trackio": "Trackio: "}[name]
        assert [message for message in failed if label in message], failed
