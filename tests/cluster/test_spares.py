"""A rank that is killed is replaced by a process that was waiting for that: its pid is older than the fault.

No such process is left behind by anybody, however its run, its agent or its launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from kintsugi.telemetry.process_reports import read_processes
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, until
from tests.cluster.test_kill_anything import pids_of
from tests.cluster.tiny_runs import TinyRun, start_of

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def spares_of(run: Run) -> list[int]:
    """Pids of the spares that are prepared, as far as the agent has told."""
    reports = read_processes(run.run_dir)
    agents = [report for report in (reports.processes if reports else ()) if report.role == "agent"]
    if not all(report.counters.get("agent.spares_prepared") for report in agents):
        return []
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in run.pids()}
    return [pid for pid, name in names.items() if name.startswith("spare-")]


def spare_pids(run: TinyRun) -> set[int]:
    """Those that have begun, prepared or not."""
    names = {}
    for pid in run.pids():
        with contextlib.suppress(FileNotFoundError):
            names[pid] = Path(f"/proc/{pid}/comm").read_text()
    return {pid for pid, name in names.items() if name.startswith("spare-")}


def replace_by_spare(run: Run, process: str) -> None:
    """Kill a process while a spare waits, and see the spare take its place."""
    until(lambda: spares_of(run), "a spare that is prepared")
    (spare,) = spares_of(run)
    os.kill(pids_of(run, process)[-1], signal.SIGKILL)
    until(lambda: len(pids_of(run, process)) == 2, f"another {process}")
    assert pids_of(run, process)[-1] == spare


def test_killed_processes_are_replaced_by_spares_and_the_weights_stay_the_same(
    tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path / "run")
    try:
        run.start("cluster.spares=1", gates=(4, 5))
        for gate, process in ((4, "model-0"), (5, "server-1")):
            run.wait_at(gate)
            replace_by_spare(run, process)
            run.let_through(gate)
        run.finish()
    finally:
        run.close()
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)


def test_spares_end_with_the_run_and_with_an_agent_that_is_killed(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), preload=("json",), spares=2)
    until(lambda: len(spare_pids(run)) == 2, "two spares")
    first = spare_pids(run)
    os.kill(run.agent_pid(), signal.SIGKILL)
    until(lambda: len(spare_pids(run) - first) == 2, "two spares of the second agent")
    assert not first & spare_pids(run)
    run.note_sockets()
    launcher.send_signal(signal.SIGTERM)
    assert run.result() == (0, "")
    run.assert_nothing_left()


@pytest.mark.slow
def test_kill_9_of_the_launcher_leaves_no_spare(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), preload=("json",), spares=2)
    until(lambda: len(spare_pids(run)) == 2, "two spares")
    run.note_sockets()
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)
