"""Runs that a Python program starts, and rollouts that are kept and trained on later; real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kintsugi.run_folder.reader import checkpoint_folders, read_summary
from kintsugi.telemetry.saved_rollouts import read_groups
from tests.cluster.real_runs import RECIPE, Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PROGRAM = """
    import asyncio, signal, sys, threading
    from kintsugi import train

    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.

    SHARE = 0.5

    def digits(completions, **columns):
        return [SHARE * len(completion) for completion in completions]

    def run():
        return train({recipe!r}, "warmup=null", "algorithm.steps={steps}", reward=digits, run_dir="run")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A program of its own that trains; its folder is the test's."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *, steps: int) -> subprocess.Popen[str]:
        text = textwrap.dedent(PROGRAM.format(recipe=str(RECIPE), steps=steps)) + textwrap.dedent(body)
        (tmp_path / "program.py").write_text(text)
        program = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()
        program.communicate(timeout=10)


def has_trained(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and '"loss"' in metrics.read_text()


def test_a_thread_trains_while_an_event_loop_runs(start: Start, tmp_path: Path) -> None:
    program = start(
        """
        async def main():
            training = asyncio.create_task(asyncio.to_thread(run))
            turns = 0
            while not training.done():
                turns += 1
                await asyncio.sleep(0.05)
            result = await training
            assert turns > 5 and threading.active_count() >= 1
            print("RESULT", result.outcome, len(result.metrics["reward/mean"]), result.weights.name)

        asyncio.run(main())
        """,
        steps=3,
    )
    output, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    assert "RESULT finished 3 step-000003" in output and "step 3/3" in output
    assert "SHARE = 0.5" in (tmp_path / "run" / "rewards.py").read_text()


def test_an_interrupt_stops_the_run_after_its_step_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    program = start("run()", steps=5000)
    until(lambda: has_trained(tmp_path / "run") or program.poll() is not None, "the first step")
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt") and program.returncode != 0
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.outcome == "stopped"
    assert max(checkpoint_folders(tmp_path / "run")) == summary.steps


def test_a_run_ends_with_the_program_that_started_it(start: Start, tmp_path: Path) -> None:
    program = start("run()", steps=5000)
    until(lambda: has_trained(tmp_path / "run") or program.poll() is not None, "the first step")
    program.kill()
    program.communicate(timeout=10)
    until(lambda: not (tmp_path / "run" / "launcher.json").exists(), "the end of the run")
    summary = read_summary(tmp_path / "run")
    assert summary is not None and summary.outcome == "stopped"


def test_rollouts_are_kept_once_each_though_a_rank_is_killed(tmp_path: Path) -> None:
    kept = {}
    for name in ("quiet", "disturbed"):
        run = Run(tmp_path / name)
        try:
            run.start("algorithm.name=rollout", "warmup=null", "eval.num_samples=0", gates=(2,))
            run.wait_at(2)
            if name == "disturbed":
                run.kill("model-1")
            run.let_through(2)
            run.finish()
            assert len(run.pids_joined()["model-1"]) == (2 if name == "disturbed" else 1)
        finally:
            run.close()
        folder = run.run_dir / "rollouts"
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        kept[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(kept["quiet"]) == 4 * 4
    assert kept["disturbed"] == kept["quiet"]
    groups = read_groups(tmp_path / "quiet" / "rollouts")
    assert len(groups) == 4 * 8 and {len(group) for group in groups} == {4}
    for sample in (sample for group in groups for sample in group):
        first, second = sample.prompt.rstrip("=").split("+")
        assert sample.columns["answer"] == str(int(first) + int(second))[::-1], sample


def test_saved_rollouts_are_trained_on_without_generating(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    try:
        code, said = run.ask("rollout", str(RECIPE), "--steps", "2", "warmup=null", "run_dir=collected")
        assert code == 0, said
        code, said = run.ask(
            "train",
            str(RECIPE),
            "warmup=null",
            "algorithm.steps=3",
            "data.source=collected/rollouts",
            "data.eval_source=arithmetic",
            "run_dir=offline",
        )
        assert code == 0, said
    finally:
        run.close()
    summary = read_summary(tmp_path / "offline")
    assert summary is not None
    assert (summary.samples_trained, summary.tokens_generated) == (3 * 8 * 4, 0)
    assert summary.logprob_abs_diff_mean is not None and os.path.exists(
        tmp_path / "offline" / "verdicts.jsonl"
    )
