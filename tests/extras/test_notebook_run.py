"""A run in a real notebook kernel, executed by nbconvert: one block that is updated, and a result with curves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("nbconvert", reason="needs nbconvert: make test-extras")
pytest.importorskip("ipykernel", reason="needs ipykernel: make test-extras")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CELLS = (
    """
seen = []
from kintsugi import train

result = train(
    "grpo_arithmetic",
    "warmup.steps=3",
    "algorithm.steps=4",
    "actor.warmup_steps=0",
    "data.num_eval=20",
    "eval.num_samples=0",
    on_step=lambda metrics: seen.append(metrics["step"]),
)
""",
    "result",
    "seen",
    "result.plot()",
    """
def broken(completions, **columns):
    return [float(word) for word in completions]

train("grpo_arithmetic", "warmup=null", "algorithm.steps=1", "actor.warmup_steps=0", "data.num_eval=20", reward=broken)
""",
)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Outputs of every cell, as the executed notebook keeps them."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [
        {"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "source": source.strip(), "outputs": []}
        | {"execution_count": None}
        for number, source in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    (folder / "run.ipynb").write_text(json.dumps(notebook))
    command = "nbconvert --to notebook --execute --allow-errors --output executed.ipynb run.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [cell["outputs"] for cell in json.loads((folder / "executed.ipynb").read_text())["cells"]]


def html_of(output: dict[str, Any]) -> str:
    return "".join(output["data"]["text/html"])


def test_a_run_is_one_block_that_keeps_its_final_state(executed: list[list[dict[str, Any]]]) -> None:
    (block,) = executed[0]
    assert block["output_type"] == "display_data"
    assert "step 7/7" in html_of(block) and "reward" in html_of(block)
    assert "\x1b" not in html_of(block)


def test_the_result_has_curves_and_can_be_plotted(executed: list[list[dict[str, Any]]]) -> None:
    (shown,) = executed[1]
    assert "<svg" in html_of(shown) and "finished, 7 steps" in html_of(shown)
    assert any("image/png" in output.get("data", {}) for output in executed[3])


def test_the_callback_is_called_for_every_step_and_evaluation_in_order(
    executed: list[list[dict[str, Any]]],
) -> None:
    (shown,) = executed[2]
    steps = json.loads("".join(shown["data"]["text/plain"]))
    assert steps == sorted(steps) and set(range(1, 8)) <= set(steps)


def test_a_reward_that_raises_shows_its_traceback(executed: list[list[dict[str, Any]]]) -> None:
    errors = [output for output in executed[4] if output["output_type"] == "error"]
    (error,) = errors
    text = "\n".join(error["traceback"])
    assert error["ename"] == "RunFailed"
    assert "could not convert string to float" in text and "float(word)" in text
