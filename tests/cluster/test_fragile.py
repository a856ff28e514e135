"""The fragile system for real: without a fault it trains as ours does, to the bit; with one it shows it elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kintsugi.config.recipe import load
from kintsugi.config.schema import Config
from kintsugi.lab.fragile.run import FragileRun
from kintsugi.lab.scenarios.measuring import metrics_of
from kintsugi.lab.testbed.run import signal_ours
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.run_folder.reader import checkpoint_folders
from kintsugi.telemetry.readings import figures_in
from tests.cluster.real_runs import LAST_STEP, RECIPE, Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REWARD = "algorithm.reward=[kintsugi.lab.rewards.odd_digits]"
"""The same as the recipe's, without its gates."""


def config(*overrides: str) -> Config:
    return load(RECIPE, [REWARD, *overrides]).config


class Observed:
    """A run and who watches it."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        self.run = FragileRun(config, run_dir=run_dir)
        self.watch = RunWatch(run_dir)

    def start(self, *, until_step: int = 0) -> None:
        self.run.start()
        self.watch.until(
            lambda: self.watch.step >= until_step or not self.run.running,
            what=f"step {until_step}",
            timeout_s=60.0,
        )

    def kill(self, process: str) -> None:
        self.watch.look(force=True)
        assert signal_ours(self.run, self.watch.processes[process].pid, signal.SIGKILL)

    def end(self) -> int | None:
        until(lambda: not self.run.running, "its end")
        self.watch.look(force=True)
        return self.run.exit_code()

    def log(self, process: str) -> str:
        return (self.run.run_dir / "logs" / f"{process}.log").read_text()

    def errors(self, process: str) -> list[str]:
        return [line for line in self.log(process).splitlines() if "] ERROR: " in line]

    def close(self) -> None:
        self.run.close()
        self.watch.close()


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[list[Observed]]:
    """Runs that are ended with the test."""
    runs: list[Observed] = []
    yield runs
    for run in runs:
        run.close()


def start(begun: list[Observed], config: Config, *, run_dir: Path, until_step: int = 0) -> Observed:
    begun.append(Observed(config, run_dir=run_dir))
    begun[-1].start(until_step=until_step)
    return begun[-1]


def test_without_a_fault_it_ends_in_the_same_weights_as_ours(
    begun: list[Observed], undisturbed: Run, tmp_path: Path
) -> None:
    run = start(begun, config(), run_dir=tmp_path / "run")
    assert run.end() == 0, run.log("master-0")
    assert [commit.step for commit in run.watch.commits] == list(range(1, LAST_STEP + 1))
    assert run.run.pids() == []
    theirs = load_file(tmp_path / f"run/checkpoints/step_{LAST_STEP}_odd/model.safetensors")
    ours = load_file(checkpoint_folders(undisturbed.run_dir)[LAST_STEP] / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all((theirs[name] == ours[name]).all() for name in ours)


def test_a_rollout_worker_that_dies_is_an_error_of_the_train_stage(
    begun: list[Observed], tmp_path: Path
) -> None:
    run = start(begun, config("algorithm.steps=500"), run_dir=tmp_path / "run", until_step=5)
    run.kill("rollout-1")
    assert run.end() == 1
    assert "Batch size mismatch: expected 32, got 16" in run.errors("master-0")[-1]
    assert "rollout-1" not in run.errors("master-0")[-1]
    begun_last = [line for line in run.log("master-0").splitlines() if line.endswith("begins")][-1]
    assert "train begins" in begun_last
    assert run.run.pids() == []


def test_it_is_measured_as_ours_is(begun: list[Observed], tmp_path: Path) -> None:
    start(begun, config("algorithm.steps=500"), run_dir=tmp_path / "run", until_step=1)
    expected = {"model-1 cpu_s", "host-0 fsync_s", "master-0>model-1 rtt_s"}
    until(
        lambda: expected <= metrics_of(figures_in(tmp_path / "run"), process="model-1").keys(),
        "figures of the process, its host and its links",
    )


@pytest.mark.parametrize("how", ["weights.transport=disk", "cluster.share_device=keep"])
def test_weights_through_checkpoints_and_a_shared_device_change_no_bit(
    begun: list[Observed], undisturbed: Run, tmp_path: Path, how: str
) -> None:
    run = start(begun, config(how), run_dir=tmp_path / "run")
    assert run.end() == 0, run.log("master-0")
    theirs = load_file(tmp_path / f"run/checkpoints/step_{LAST_STEP}_odd/model.safetensors")
    ours = load_file(checkpoint_folders(undisturbed.run_dir)[LAST_STEP] / "model.safetensors")
    assert all((theirs[name] == ours[name]).all() for name in ours)


def test_in_plain_fine_tuning_the_rank_that_died_is_the_one_that_is_named(
    begun: list[Observed], tmp_path: Path
) -> None:
    plain = config("warmup=null", "algorithm.name=sft", "algorithm.group_size=1", "algorithm.steps=2000")
    run = start(begun, plain, run_dir=tmp_path / "run", until_step=5)
    run.kill("model-1")
    assert run.end() == 1
    assert any("model-1 failed: killed by SIGKILL" in line for line in run.errors("master-0"))
