"""The command of the launcher's Job: by its exit code the Job makes another pod, or does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster.kustomize import BASE
from tests.cluster.tiny_runs import until

TEMPORARY_FAILURE = 75
PROGRAM = """#!/bin/sh
echo "$PWD: $@" >> {folder}/started
trap 'echo "{{\\"outcome\\": \\"$OUTCOME\\"}}" > {folder}/runs/run/summary.json; exit $CODE' TERM
[ -z "$WAITS" ] && exit $CODE
echo > {folder}/waits
while :; do sleep 0.05; done
"""
"""Stands for the interpreter: notes its arguments, then ends with a code, or waits for SIGTERM to do so."""


class Launcher:
    """The script of the Job, in a folder instead of the volume."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "runs" / "run").mkdir(parents=True)
        (folder / "shown").mkdir()
        (folder / "shown" / "recipe.yaml").write_text("name: x")
        # As the kubelet shows the files of a ConfigMap.
        (folder / "recipe").mkdir()
        (folder / "recipe" / "recipe.yaml").symlink_to(folder / "shown" / "recipe.yaml")
        python = folder / "python"
        python.write_text(PROGRAM.format(folder=folder))
        python.chmod(0o755)
        job, _ = yaml.safe_load_all((BASE / "launcher.yaml").read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
        *self._shell, script = container["command"]
        self._script = script.replace("/recipe/*", f"{folder}/recipe/*").replace("/runs/", f"{folder}/runs/")

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        path = f"{self.folder}:{os.environ['PATH']}"
        return subprocess.Popen([*self._shell, self._script], env={**os.environ, **environment, "PATH": path})

    def end(self, *, outcome: str, code: int) -> int:
        """Ask a run to end, as a drain does; return the exit code of the pod."""
        process = self.start(OUTCOME=outcome, CODE=str(code), WAITS="yes")
        until((self.folder / "waits").exists, "the program", timeout_s=30.0)
        process.terminate()
        return process.wait(30)

    @property
    def started(self) -> list[str]:
        return (self.folder / "started").read_text().splitlines()


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_that_ends_by_itself_ends_the_pod_with_its_exit_code(launcher: Launcher, code: int) -> None:
    assert launcher.start(CODE=str(code)).wait(30) == code
    volume = launcher.folder / "runs"
    assert launcher.started == [f"{volume}/recipe: -P -m kintsugi train recipe.yaml run_dir={volume}/run"]
    assert not (volume / "recipe" / "recipe.yaml").is_symlink(), "the files of another pod have other paths"


def test_a_run_that_is_on_the_volume_is_resumed(launcher: Launcher) -> None:
    (launcher.folder / "runs" / "run" / "journal").mkdir()
    assert launcher.start(CODE="0").wait(30) == 0
    (given,) = launcher.started
    assert given.endswith(f": -P -m kintsugi resume {launcher.folder}/runs/run --take-over")


def test_a_run_that_is_finished_is_left_as_it_is(launcher: Launcher) -> None:
    """`kintsugi resume` would refuse it, and the Job would fail."""
    (launcher.folder / "runs" / "run" / "journal").mkdir()
    (launcher.folder / "runs" / "run" / "summary.json").write_text('{\n  "outcome": "finished"\n}')
    assert launcher.start(CODE="1").wait(30) == 0
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize(
    ("outcome", "code", "expected"),
    [("stopped", 0, TEMPORARY_FAILURE), ("finished", 0, 0), ("failed", 1, 1)],
)
def test_a_pod_that_is_asked_to_end_fails_unless_its_run_is_finished(
    launcher: Launcher, outcome: str, code: int, expected: int
) -> None:
    """A pod that succeeds would complete the Job, and nothing would resume the run."""
    assert launcher.end(outcome=outcome, code=code) == expected
