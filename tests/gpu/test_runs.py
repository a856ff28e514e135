"""Whole runs on the accelerator, through the real launcher; all workers share the one card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"
SHORT = (
    "warmup.steps=4",
    "algorithm.steps=3",
    "actor.warmup_steps=1",
    "eval.every=3",
    "checkpoint.every=3",
)


def train(run_dir: Path, *overrides: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-m", "kintsugi", "train", str(RECIPE), f"run_dir={run_dir}", *overrides],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def test_a_shortened_recipe_learns_on_the_card(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "algorithm.steps=80", "eval.every=80", "checkpoint.every=80")
    assert summary["steps"] == 155 + 80
    assert summary["eval_accuracy_after"] > summary["eval_accuracy_before"] + 0.1
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["logprob_abs_diff_mean"] < 1e-5
    notes = [
        line
        for path in sorted((tmp_path / "run" / "events").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert any("gloo through host memory" in line for line in notes)


def test_neither_ranks_nor_servers_change_a_bit_of_the_weights(tmp_path: Path) -> None:
    usual = train(tmp_path / "usual", *SHORT)
    again = train(tmp_path / "again", *SHORT)
    one_of_each = train(tmp_path / "one", *SHORT, "actor.workers=1", "generation.servers=1")
    assert again["weights_sha256"] == usual["weights_sha256"]
    assert one_of_each["weights_sha256"] == usual["weights_sha256"]


def test_a_run_in_bfloat16_stays_within_reach_of_its_sampler(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", *SHORT, "actor.dtype=bfloat16")
    assert summary["steps"] == 7
    assert summary["logprob_abs_diff_mean"] < 5e-3
