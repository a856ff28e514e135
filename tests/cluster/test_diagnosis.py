"""Real runs with real faults, done by hand: the true cause is named within seconds, by the watcher and by the command.

Nothing of the laboratory is used here: signals, and a control group where there is root.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from kintsugi.diagnosis import diagnose
from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_journal
from tests.cluster.real_runs import Run, until

pytestmark = pytest.mark.slow

STEPS = 400
CPU = Path("/sys/fs/cgroup/cpu")
WITHIN_S = 10.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Warm, with some seconds of a usual past."""
    run = Run(tmp_path / "run")
    run.start("warmup=null", f"algorithm.steps={STEPS}", "checkpoint.every=50", "eval.every=0")
    until(lambda: num_steps(run) >= 12, "12 steps")
    time.sleep(6.0)  # A past, not a wait: what is usual has to be seen for a while.
    yield run
    run.close()


def num_steps(run: Run) -> int:
    path = run.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def told(run: Run) -> list[tuple[str, str]]:
    """What the watcher of the run has named so far."""
    path = RunFolder(run.run_dir).diagnoses_file
    lines = path.read_bytes().partition(b"\0")[0].splitlines() if path.exists() else []
    diagnoses = [msgspec.json.decode(line, type=Diagnosis) for line in lines]
    return [(cause.process, cause.kind.value) for each in diagnoses for cause in each.causes]


def pid_of(run: Run, process: str) -> int:
    pid = read_journal(run.run_dir).processes[process]
    assert pid in run.pids()
    return pid


def test_nothing_is_blamed_in_a_healthy_run_and_a_killed_rollout_worker_is_though_another_takes_its_place(
    run: Run,
) -> None:
    time.sleep(6.0)
    assert diagnose(run.run_dir).causes == ()
    assert told(run) == []
    pid = pid_of(run, "rollout-1")
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: ("rollout-1", "killed") in told(run), "the verdict of the watcher", timeout_s=WITHIN_S)
    assert pid not in run.pids()
    (cause,) = diagnose(run.run_dir).causes
    assert (cause.process, cause.kind) == ("rollout-1", "killed")
    assert abs(cause.onset - at) < 2.0
    assert cause.path[-1].process == "master-0"
    code, output = run.ask("diagnose", str(run.run_dir), "--json")
    assert code == 0
    assert json.loads(output)["causes"][0]["process"] == "rollout-1"
    until(lambda: "diagnosed" in run.ask("incidents", str(run.run_dir))[1], "the verdict beside the incident")


def test_a_stopped_server_is_named_and_not_the_kill_with_which_the_run_answered(run: Run) -> None:
    pid = pid_of(run, "server-0")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: ("server-0", "stopped") in told(run), "the verdict of the watcher", timeout_s=WITHIN_S)
    until(lambda: pid not in run.pids(), "the end of the one that stood still")
    time.sleep(1.5)
    assert [(cause.process, cause.kind) for cause in diagnose(run.run_dir).causes] == [
        ("server-0", "stopped")
    ]


@contextmanager
def starved(pid: int) -> Iterator[Path]:
    """A twentieth of a processor for one process, until this is left."""
    group = CPU / f"kintsugi-test-{uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("5000")
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for inside in (group / "cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(inside)
        until(lambda: not (group / "cgroup.procs").read_text().strip(), "an empty group")
        group.rmdir()


@pytest.mark.skipif(
    os.geteuid() != 0 or not (CPU / "cpu.cfs_quota_us").parent.is_dir() or not os.access(CPU, os.W_OK),
    reason="needs root and control groups of version 1",
)
def test_a_rank_that_is_kept_from_the_processor_is_named_while_it_lasts(run: Run) -> None:
    with starved(pid_of(run, "model-1")) as group:
        until(lambda: ("model-1", "cpu") in told(run), "the verdict of the watcher", timeout_s=2 * WITHIN_S)
        throttled = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(throttled["nr_throttled"]) > 0
        assert diagnose(run.run_dir).causes[0].process == "model-1"
