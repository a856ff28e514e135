"""Episodes of several turns in real runs: what happens to their processes changes no bit, and what an environment does
wrong is set aside with its reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kintsugi.run_folder.reader import read_journal
from tests.cluster.real_runs import LAST_STEP, Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RECIPE = Path(__file__).with_name("episodes.yaml")


class EpisodesRun(Run):
    """A run of episodes."""

    def begin(self, *overrides: str, gates: tuple[int, ...] = ()) -> None:
        for step in gates:
            (self.gates / str(step)).touch()
        self.launcher = self.command("train", str(RECIPE), f"run_dir={self.run_dir}", *overrides)

    def finish(self) -> None:
        code, errors = self.end()
        assert code == 0, errors
        assert self.summary.steps == LAST_STEP
        self.assert_nothing_left()

    def notes(self) -> str:
        return "".join(file.read_text() for file in (self.run_dir / "events").glob("rollout-*.jsonl"))

    def environment_processes(self) -> list[int]:
        """One beside each rollout worker."""
        workers = [pid for name, pid in read_journal(self.run_dir).processes.items() if "rollout" in name]
        children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in workers]
        return [int(child) for found in children for child in found]


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodesRun]:
    run = EpisodesRun(tmp_path_factory.mktemp("peaceful") / "run")
    run.begin()
    try:
        run.finish()
        yield run
    finally:
        run.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[EpisodesRun]:
    run = EpisodesRun(tmp_path / "run")
    yield run
    run.close()


def test_episodes_are_trained_and_evaluated_and_told_in_figures(peaceful: EpisodesRun) -> None:
    trained = [line for line in peaceful.lines("metrics.jsonl") if "reward/return" in line]
    assert len(trained) == 4
    assert all(line["reward/turns"] == 2.0 and abs(line["ratio_mean"] - 1.0) < 1e-4 for line in trained)
    assert all(0.0 <= line["reward/return"] <= 1.5 for line in trained)
    samples = peaceful.lines("samples.jsonl")
    assert samples and all("⟨1+⟩" in sample["completion"] for sample in samples)
    assert peaceful.summary.eval_accuracy_after is not None


def test_killed_environment_processes_and_a_killed_worker_change_no_bit(
    real: EpisodesRun, peaceful: EpisodesRun
) -> None:
    real.begin(gates=(5,))
    real.wait_at(5)
    (worker,) = real.pids_joined()["rollout-0"]
    processes = real.environment_processes()
    assert len(processes) == 2
    # That of the other worker, which notices it; the worker that is killed would not.
    (killed,) = [pid for pid in processes if worker in {each.pid for each in psutil.Process(pid).parents()}]
    os.kill(killed, signal.SIGKILL)
    real.kill("rollout-1")
    until(lambda: len(real.pids_joined()["rollout-1"]) == 2, "another rollout-1")
    real.let_through(5)
    real.finish()
    assert real.summary.weights_sha256 == peaceful.summary.weights_sha256
    assert "the environment process killed by SIGKILL; it is replaced" in real.notes()
    assert len(real.pids_joined()["rollout-1"]) == 2


MISTAKES = {
    "raises": "`step` of the environment raised RuntimeError: out of order",
    "lies": "`step` of the environment: expected a `Step` or a tuple",
    "hangs": "`step` of the environment took longer than `rollout.turn_timeout_s`=0.5 s",
}


def test_what_an_environment_does_wrong_is_set_aside_and_the_run_goes_on_without(real: EpisodesRun) -> None:
    real.begin(
        "warmup=null",
        "rollout.options={mistakes: true}",
        "rollout.attempts=1",
        "rollout.turn_timeout_s=0.5",
    )
    code, errors = real.end()
    assert code == 0, errors
    reasons = real.summary.samples_quarantined
    for mistake, reason in MISTAKES.items():
        assert any(each.startswith(reason) for each in reasons), f"{mistake}: {reasons}"
    assert all(each.startswith(tuple(MISTAKES.values())) for each in reasons), reasons


def test_an_environment_that_can_not_be_imported_is_refused_before_anything_starts(real: EpisodesRun) -> None:
    real.begin("rollout.environment=my_lost_module.Game")
    code, errors = real.end()
    assert code != 0 and "`rollout.environment`: expected my_lost_module.Game to be importable" in errors
    assert not real.run_dir.exists()
