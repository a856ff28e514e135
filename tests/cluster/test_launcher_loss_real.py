"""Real runs whose command, launcher and output are lost: they end in the bits of the undisturbed run."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.run_folder.reader import read_status
from kintsugi.telemetry.events import ProcessBegan, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play, until

pytestmark = pytest.mark.cluster

WORKERS = ("manager-0", "model-0", "model-1", "rollout-0", "rollout-1", "server-0", "server-1")


def pids_of(run: Run, process: str) -> list[int]:
    """Pids of all its incarnations, in their order."""
    records = read_events(run.run_dir, process=process)
    return [record.event.pid for record in records if isinstance(record.event, ProcessBegan)]


def kill_launcher_and(run: Run, *others: str) -> None:
    """Kill the launcher, and other processes in the same moment; wait until each is replaced."""
    launcher, _ = run.launcher_pair()
    hit = {process: pids_of(run, process)[-1] for process in others}
    for pid in (launcher, *hit.values()):
        os.kill(pid, signal.SIGKILL)
    run.launcher_pair(other_than=(launcher,))
    for process, pid in hit.items():
        until(lambda process=process, pid=pid: pids_of(run, process)[-1] != pid, f"another {process}")  # type: ignore[misc]
    if "agent-0" in others:  # Before it is known, it would not hear that the run has ended.
        until(lambda: run.pids_joined()["agent-0"][-1] == pids_of(run, "agent-0")[-1], "its registration")


def lose_launchers(run: Run) -> None:
    run.start(gates=(4, 5, 6))
    for gate, others in ((4, ()), (5, ("master-0",)), (6, ("agent-0",))):
        run.wait_at(gate)
        kill_launcher_and(run, *others)
        run.let_through(gate)
    run.finish()


def lose_command(run: Run) -> None:
    command = run.start(gates=(4,))
    run.wait_at(4)
    run.launcher_pair()
    command.kill()
    command.wait(20)
    assert read_status(run.run_dir).state == "running"
    run.let_through(4)
    until((run.run_dir / "summary.json").exists, "the end of the run")
    run.assert_nothing_left(timeout_s=20.0)


def hang_up(run: Run) -> None:
    """Close the terminal: further output of the command fails, and the kernel sends SIGHUP to a session's leader."""
    terminal, run.output = pty.openpty()
    command = run.start(gates=(4,))
    os.close(run.output)
    run.wait_at(4)
    os.close(terminal)
    run.let_through(4)
    command.wait(60)
    until((run.run_dir / "summary.json").exists, "the end of the run")
    run.assert_nothing_left(timeout_s=20.0)


def close_the_pipe(run: Run) -> None:
    """As `kintsugi train … | head -1` does."""
    command = run.start(gates=(4,))
    run.wait_at(4)
    assert command.stdout is not None
    assert command.stdout.readline().startswith("run folder")
    command.stdout.close()
    run.let_through(4)
    assert command.wait(60) == 0
    run.assert_nothing_left(timeout_s=20.0)


def fill_the_output(run: Run) -> None:
    with Path("/dev/full").open("w") as full:
        run.output = full
        run.start()
        run.finish()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "launchers": lose_launchers,
    "command": lose_command,
    "terminal": hang_up,
    "pipe": close_the_pipe,
    "full-output": fill_the_output,
}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    played = play(SCENARIOS, tmp_path_factory.mktemp("lost"))
    return lambda name: finished(played[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_as_if_nothing_had_happened(
    undisturbed: Run, lost: Callable[[str], Run], name: str
) -> None:
    run = lost(name)
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)


def test_no_worker_is_replaced_when_launchers_are_lost(lost: Callable[[str], Run]) -> None:
    run = lost("launchers")
    began = {process: len(pids_of(run, process)) for process in (*WORKERS, "master-0", "agent-0")}
    assert began == {**dict.fromkeys(WORKERS, 1), "master-0": 2, "agent-0": 2}
