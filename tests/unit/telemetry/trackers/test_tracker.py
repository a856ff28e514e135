from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kintsugi.config.recipe import load
from kintsugi.config.schema import Config
from kintsugi.telemetry.step_metrics import MetricsWriter
from kintsugi.telemetry.trackers.tensorboard_files import HYPERPARAMETERS
from kintsugi.telemetry.trackers.tracker import TrackedRun, parameters_of

PROGRAM = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
events = EventAccumulator(sys.argv[1]).Reload()
content = events.PluginTagToContent("hparams")
started = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
sys.stdout.write(started.group_name + "\\n")
for name, value in sorted(started.hparams.items()):
    sys.stdout.write(f"{name} {value.WhichOneof('kind')} {value.number_value or value.string_value}\\n")
experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
sys.stdout.write(" ".join(each.name.tag for each in experiment.metric_infos))
"""


def config() -> Config:
    return load(
        "grpo_arithmetic", ["run_dir=runs/x", "monitoring.webhook=https://hooks.example.com/secret"]
    ).config


def test_parameters_have_no_address_and_no_folder_of_the_run() -> None:
    parameters = TrackedRun(Path("runs/x"), "job1", parameters_of(config())).flat_parameters
    assert parameters["algorithm.name"] == "grpo" and parameters["algorithm.steps"] == 250
    assert not [name for name in parameters if name.startswith(("run_dir", "monitoring", "logging"))]
    assert "secret" not in str(parameters)


def test_every_field_of_the_table_of_hyperparameters_is_one_of_the_configuration() -> None:
    assert (
        set(HYPERPARAMETERS)
        <= TrackedRun(Path("runs/x"), "job1", parameters_of(config())).flat_parameters.keys()
    )


def test_tensorboard_shows_the_hyperparameters_of_a_run_beside_its_results(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    with MetricsWriter(folder, run_id="a1b2c3", parameters=parameters_of(config())) as writer:
        writer.write(1, {"loss": 1.0})
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    name, *values, metrics = result.stdout.splitlines()
    assert name == "demo a1b2"
    assert "algorithm.steps number_value 250.0" in values and "algorithm.name string_value grpo" in values
    assert [line.split()[0] for line in values] == sorted(HYPERPARAMETERS)
    assert metrics.startswith("eval/accuracy reward/mean")
