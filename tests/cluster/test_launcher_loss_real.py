"""Real runs whose command, launcher and output are lost: they end in the bits of the undisturbed run."""

from __future__ import annotations

import os
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.journal.facts import StopAccepted
from kintsugi.run_folder.reader import read_status
from kintsugi.telemetry.events import Alert, ProcessBegan, ProcessGone, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, PROGRAMS, RECIPE, Run, kill_all, play_selected, until

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


def detach(run: Run) -> None:
    """Start without staying, close the terminal, look twice from other ones, and leave the first look by Ctrl-C."""
    terminal, run.output = pty.openpty()
    command = run.start("--detach", gates=(4,))
    os.close(run.output)
    assert command.wait(60) == 0
    os.close(terminal)
    until((run.gates / "4.reached").exists, "step 4 of the detached run")
    run.output = subprocess.PIPE
    first, second = (run.command("attach", str(run.run_dir)) for _ in range(2))
    assert first.stdout is not None and first.stdout.readline()
    first.send_signal(signal.SIGINT)
    told, errors = first.communicate(timeout=180)
    assert first.returncode == 0 and "detached; the run goes on" in told, told + errors
    run.let_through(4)
    told, errors = second.communicate(timeout=180)
    assert second.returncode == 0 and "held-out accuracy" in told, told + errors
    run.assert_nothing_left(timeout_s=20.0)


def hang_up_to_stop(run: Run) -> None:
    """Close the terminal that a command controls, which was told to stop then; resume what it left."""
    (run.gates / "4").touch()
    terminal, run.output = pty.openpty()
    train = ["-m", "kintsugi", "train", str(RECIPE), f"run_dir={run.run_dir}", "--on-hangup", "stop"]
    taken = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    run.launcher = run.shell(f"exec {shlex.join([sys.executable, '-c', taken, sys.executable, *train])}")
    os.close(run.output)
    run.wait_at(4)
    os.close(terminal)
    until(lambda: any(isinstance(fact, StopAccepted) for fact in run.facts), "the stop")
    run.let_through(4)
    run.launcher.communicate(timeout=180)
    assert run.summary.outcome == "stopped" and run.summary.steps < LAST_STEP
    run.assert_nothing_left(timeout_s=20.0)
    run.output = subprocess.PIPE
    code, errors = run.resume()
    assert code == 0, errors


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


def kill_everything_else(run: Run) -> None:
    """All processes but the launcher and the command, in one moment: ranks and agents lose all memory of the state."""
    command = run.start(gates=(5,))
    run.wait_at(5)
    launcher, _ = run.launcher_pair()
    kill_all(pid for pid in run.pids() if pid not in (launcher, command.pid))
    run.let_through(5)
    run.finish()


def kill_everything_at_once(run: Run) -> None:
    """Launcher and standby too. Afterwards every command says what happened, and the run is resumed."""
    run.start(gates=(5,))
    run.wait_at(5)
    kill_all(run.pids())
    run.assert_nothing_left(timeout_s=20.0)
    run.let_through(5)
    for command in ("status", "incidents", "diagnose"):
        code, told = run.ask(command, str(run.run_dir))
        assert code == 0 and "all its processes were killed at the same moment" in " ".join(told.split())
        assert "kintsugi resume" in told and "no incidents" not in told and "nothing to blame" not in told
    code, errors = run.resume()
    assert code == 0, errors


def limit_files_of_master(run: Run) -> None:
    """The master may write no byte more to any file: another one is started, and the reason is known."""
    run.start(gates=(5,))
    run.wait_at(5)
    master = pids_of(run, "master-0")[-1]
    _, hard = resource.prlimit(master, resource.RLIMIT_FSIZE)
    resource.prlimit(master, resource.RLIMIT_FSIZE, (0, hard))
    run.let_through(5)
    run.finish()
    gone = [record.event for record in read_events(run.run_dir, process="agent-0")]
    assert [each.how for each in gone if isinstance(each, ProcessGone) and each.pid == master] == [
        "exited with code 74 (it met its own limit of the size of a file, ulimit -f)"
    ]


def lose_master_without_trackers(run: Run) -> None:
    """W&B cannot be reached, and TensorBoard's folder is a file, at the start of the run and of another master."""
    path = os.pathsep.join([str(PROGRAMS), str(PROGRAMS / "unreachable"), os.environ.get("PYTHONPATH", "")])
    run.environment = {"PYTHONPATH": path}
    run.start("logging.wandb=true", gates=(5,))
    run.wait_at(5)
    shutil.rmtree(run.run_dir / "tensorboard")
    (run.run_dir / "tensorboard").touch()
    os.kill(pids_of(run, "master-0")[-1], signal.SIGKILL)
    run.let_through(5)
    run.finish()
    alerts = [record.event.message for record in read_events(run.run_dir) if isinstance(record.event, Alert)]
    assert [each for each in alerts if "W&B: no route to host" in each]
    assert [each for each in alerts if "tensorboard" in each]


def save_to_a_read_only_disk(run: Run) -> None:
    """The last save waits until the folder can be written again."""
    folder = run.run_dir / "checkpoints"
    run.start(gates=(LAST_STEP,))
    run.wait_at(LAST_STEP)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        run.let_through(LAST_STEP)
        run.wait_for_line(f"checkpoint of step {LAST_STEP} waits for the disk", file="events/master-0.jsonl")
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    run.finish()


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
LONG: dict[str, Callable[[Run], None]] = {
    "everything-else": kill_everything_else,
    "everything": kill_everything_at_once,
    "file-limit": limit_files_of_master,
    "trackers": lose_master_without_trackers,
}
LEFT: dict[str, Callable[[Run], None]] = {"detached": detach, "terminal-to-stop": hang_up_to_stop}
if os.geteuid() == 0:
    LONG["read-only"] = save_to_a_read_only_disk


@pytest.fixture(scope="module")
def lost(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(LONG | LEFT | SCENARIOS, request, tmp_path_factory.mktemp("lost"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_run_survives_the_loss_of_everything_but_its_launcher_and_what_a_host_refuses(
    undisturbed: Run, lost: Callable[[str], Run], name: str
) -> None:
    assert_as_undisturbed(lost(name), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_a_run_that_is_left_alone_or_stopped_by_a_hang_up_ends_as_if_nothing_had_happened(
    undisturbed: Run, lost: Callable[[str], Run], name: str
) -> None:
    assert_as_undisturbed(lost(name), undisturbed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_as_if_nothing_had_happened(
    undisturbed: Run, lost: Callable[[str], Run], name: str
) -> None:
    assert_as_undisturbed(lost(name), undisturbed)


def assert_as_undisturbed(run: Run, undisturbed: Run) -> None:
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)


def test_no_worker_is_replaced_when_launchers_are_lost(lost: Callable[[str], Run]) -> None:
    run = lost("launchers")
    began = {process: len(pids_of(run, process)) for process in (*WORKERS, "master-0", "agent-0")}
    assert began == {**dict.fromkeys(WORKERS, 1), "master-0": 2, "agent-0": 2}
