"""An experiment as a user makes it: a file of one's own, through the command line, on a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kintsugi.lab.scenarios.experiments import experiments_folder

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAULT = {
    "ability": "stop",
    "target": "rollout-1",
    "trigger": {"step": 20, "phase": "collecting"},
    "duration_s": 10.0,
}
EXPERIMENT = {
    "name": "mine",
    "title": "a rollout worker that stands still",
    "about": "It exists, and does nothing.",
    "challenges": ["A"],
    "workload": {
        "recipe": str(experiments_folder() / "workloads" / "grpo.yaml"),
        "set": {"algorithm.batch_size": 16, "algorithm.steps": 30},
    },
    "faults": [FAULT],
    "cause": {"process": "rollout-1", "kinds": ["stopped"]},
}
KEYS = {
    *(
        "scenario",
        "profile",
        "workload",
        "injected",
        "surfaced",
        "hops",
        "diagnosed",
        "correct",
        "first_effect",
    ),
    *(
        "recovered",
        "steps_lost",
        "log_files",
        "log_lines",
        "seconds",
        "baseline",
        "timeline",
        "series",
        "folder",
    ),
}


def lab(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kintsugi", "lab", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_an_experiment_is_carried_out_diagnosed_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    result = lab("run", str(path), "--folder", "lab", "--json", "found.json", folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    (run,) = found["runs"]
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(run) >= KEYS
    (injected,) = run["injected"]
    assert (injected["target"], injected["kind"], injected["phase"]) == ("rollout-1", "stop", "collecting")
    assert injected["end"] > injected["start"], "undone"
    assert run["correct"] and run["recovered"] and run["steps_lost"] == 0
    assert (run["diagnosed"]["process"], run["diagnosed"]["kind"]) == ("rollout-1", "stopped")
    assert run["diagnosed_after_s"] <= 10.0
    assert lab("kit", "lab", folder=tmp_path).returncode == 0
    markers = [json.loads(marker.read_text()) for marker in (tmp_path / "lab").rglob("markers/*.json")]
    assert [marker["process"] for marker in markers] == ["rollout-1"]


def test_a_target_that_does_not_exist_starts_nothing_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    faults = [{**FAULT, "target": "rollout-9"}]
    path.write_text(yaml.safe_dump({**EXPERIMENT, "faults": faults}))
    result = lab("run", str(path), "--folder", "lab", folder=tmp_path)
    assert result.returncode == 2 and "no process 'rollout-9'" in result.stderr
    assert not (tmp_path / "lab").exists()
