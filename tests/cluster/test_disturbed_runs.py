"""Whole runs that are stopped, killed, wounded or can not begin: what becomes of them, and that nothing is left.

A fault strikes while the run stands at a gate (`programs/gated_rewards.py`), so it always strikes in the same place:
step 5 is committed, step 6 is being collected, and the last checkpoint is that of step 4.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kintsugi.checkpoint.store import latest
from kintsugi.errors import root_first
from kintsugi.journal.facts import CheckpointFailed, CheckpointSaved, ProcessLost, RolledBack
from kintsugi.lab.faults import fpu_rounding
from kintsugi.run_folder.reader import RunState, read_journal, read_status
from kintsugi.simulation.replay import replay
from kintsugi.telemetry.events import Alert, FaultSeen, ProcessEnded, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, Run, finished, play, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GATE = 5
SOON_S = 8.0
"""For the end of a run whose launcher was killed: the grace of its agents, and of their children."""


def stop_and_resume(run: Run) -> None:
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    assert "is running (process" in run.ask("resume", str(run.run_dir))[1]
    stopping = run.command("stop", str(run.run_dir))
    assert stopping.stdout is not None and "it ends after its step" in stopping.stdout.readline()
    run.let_through(GATE)
    output, errors = stopping.communicate(timeout=30)
    assert stopping.returncode == 0, errors
    assert "stopped at step 6 of 7" in output
    assert run.end() == (0, "")
    assert read_status(run.run_dir).state is RunState.STOPPED
    run.assert_nothing_left()
    code, errors = run.resume()
    assert code == 0, errors


def kill_launcher_and_resume(run: Run) -> None:
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    run.kill_launchers()
    code, errors = run.end()
    assert code == 1
    assert "were killed at the same time" in errors and f"`kintsugi resume {run.run_dir}`" in errors
    run.assert_nothing_left(timeout_s=SOON_S)
    assert read_status(run.run_dir).state is RunState.INTERRUPTED
    run.let_through(GATE)
    code, errors = run.resume()
    assert code == 0, errors
    assert [fact.step for fact in run.facts if isinstance(fact, RolledBack)] == [4]


def kill_rollout_worker(run: Run) -> None:
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    run.kill("rollout-0")
    until(lambda: len(run.pids_joined()["rollout-0"]) == 2, "another rollout-0")
    run.let_through(GATE)
    code, errors = run.end()
    assert code == 0, errors


def kill_server_that_loads(run: Run) -> None:
    """Stopped before the weights of step 6 are published, it is ended by us while the run waits for it to load them."""
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    run.kill("server-0", signal.SIGSTOP)
    run.let_through(GATE)
    code, errors = run.end()
    assert code == 0, errors


def make_it_compute_something_else(run: Run, process: str) -> None:
    """Its threads round towards zero from step 6 on, until it is replaced."""
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    assert fpu_rounding.set_rounding(read_journal(run.run_dir).processes[process], fpu_rounding.TOWARDS_ZERO)
    run.let_through(GATE)
    code, errors = run.end()
    assert code == 0, errors


RECOVERED: dict[str, Callable[[Run], None]] = {
    "stopped-and-resumed": stop_and_resume,
    "launcher-killed-and-resumed": kill_launcher_and_resume,
    "rollout-0-killed": kill_rollout_worker,
    "server-0-killed": kill_server_that_loads,
}
if fpu_rounding.missing() is None:
    RECOVERED |= {
        f"{process}-computes-something-else": partial(make_it_compute_something_else, process=process)
        for process in ("model-1", "server-0")
    }


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    played = play(RECOVERED, tmp_path_factory.mktemp("recovered"))
    return lambda name: finished(played[name])


@pytest.mark.parametrize("name", RECOVERED)
def test_a_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(
    undisturbed: Run, recovered: Callable[[str], Run], name: str
) -> None:
    run = recovered(name)
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    run.assert_nothing_left()


@pytest.mark.parametrize("name", RECOVERED)
def test_a_disturbed_run_trains_every_sample_exactly_once(recovered: Callable[[str], Run], name: str) -> None:
    assert_trained_exactly_once(recovered(name))


@pytest.mark.parametrize("name", RECOVERED)
def test_a_disturbed_run_gives_the_same_facts_again(recovered: Callable[[str], Run], name: str) -> None:
    again, journaled = replay(recovered(name).run_dir)
    assert again == journaled


@pytest.mark.parametrize("killed", ["rollout-0", "server-0"])
def test_a_killed_worker_is_replaced_and_no_other_process_changes(
    recovered: Callable[[str], Run], killed: str
) -> None:
    run = recovered(f"{killed}-killed")
    assert [fact.process for fact in run.facts if isinstance(fact, ProcessLost)] == [killed]
    others = {process: pids for process, pids in run.pids_joined().items() if process != killed}
    assert all(len(pids) == 1 for pids in others.values()), others
    alerts = [record.event.message for record in read_events(run.run_dir) if isinstance(record.event, Alert)]
    assert [message for message in alerts if message.startswith(killed)]


@pytest.mark.skipif(fpu_rounding.missing() is not None, reason=str(fpu_rounding.missing()))
@pytest.mark.parametrize("damaged", ["model-1", "server-0"])
def test_a_process_that_computes_something_else_says_so_itself_and_is_replaced_alone(
    recovered: Callable[[str], Run], damaged: str
) -> None:
    run = recovered(f"{damaged}-computes-something-else")
    (lost,) = [fact for fact in run.facts if isinstance(fact, ProcessLost)]
    assert lost.process == damaged
    faults = [
        record.event.fault for record in read_events(run.run_dir) if isinstance(record.event, FaultSeen)
    ]
    assert "does not compute any more what it did" in root_first(faults)[0].message
    others = {process: pids for process, pids in run.pids_joined().items() if process != damaged}
    assert all(len(pids) == 1 for pids in others.values()), others


# Ends at once, failed starts, full disks.


def interrupt(run: Run) -> None:
    """As Ctrl-C does: the whole group of the launcher, which nothing that it started belongs to."""
    launcher = run.start(gates=(GATE,))
    run.wait_at(GATE)
    os.killpg(launcher.pid, signal.SIGINT)
    run.wait_for_line("asked to stop", file="events/master-0.jsonl")
    run.let_through(GATE)
    assert run.end() == (0, "")
    assert read_journal(run.run_dir).saved_steps[-1] == 6
    assert read_status(run.run_dir).state is RunState.STOPPED
    run.assert_nothing_left()


def interrupt_twice(run: Run) -> None:
    launcher = run.start(gates=(GATE,))
    run.wait_at(GATE)
    launcher.send_signal(signal.SIGINT)
    run.wait_for_line("asked to stop", file="events/master-0.jsonl")
    assert launcher.poll() is None
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert time.monotonic() - began < 15.0
    assert code == 1
    assert "the run was interrupted; `kintsugi resume" in errors
    run.assert_nothing_left()
    damage(run.run_dir / "journal")
    code, errors = run.resume()
    assert code == 1
    assert "journal is damaged at offset" in errors
    run.assert_nothing_left()


def damage(journal: Path) -> None:
    with journal.open("r+b") as file:
        file.seek(1000)
        file.write(bytes(100))


def kill_launcher_and_agent_during_a_reward_that_never_ends(run: Run) -> None:
    run.start(gates=(GATE,))
    run.wait_at(GATE)
    launcher, _ = run.launcher_pair()
    os.kill(launcher, signal.SIGSTOP)  # or it would clean up after the agent
    run.kill("agent-0")
    run.kill_launchers()
    run.assert_nothing_left(timeout_s=SOON_S)
    ends = {r.stamp.process: r.event for r in read_events(run.run_dir) if isinstance(r.event, ProcessEnded)}
    assert {process: end.code for process, end in ends.items()} == {
        **dict.fromkeys(
            ("manager-0", "model-0", "model-1", "rollout-0", "rollout-1", "server-0", "server-1"), 0
        ),
        "watcher-0": 0,
        "master-0": 1,
    }


def stop_while_starting(run: Run) -> None:
    run.start()
    until((run.run_dir / "journal").exists, "the master")
    code, output = run.ask("stop", str(run.run_dir))
    assert code == 0, output
    code, errors = run.end()
    assert code == 0, errors
    assert read_status(run.run_dir).step == 0
    run.assert_nothing_left()


def break_a_worker_at_its_start(run: Run) -> None:
    run.start("algorithm.reward=[reward_that_breaks_in_workers.reward]")
    code, errors = run.end()
    assert code == 1, errors
    cause = errors.splitlines()[0]
    assert cause.startswith("cause: rollout-"), errors
    assert "RuntimeError: a library is missing" in errors
    run.assert_nothing_left()


def give_no_time_to_start(run: Run) -> None:
    run.start("cluster.start_timeout_s=0.2")
    code, errors = run.end()
    assert code == 1, errors
    assert "failed to start while" in errors and "(cluster.start_timeout_s)" in errors, errors
    run.assert_nothing_left()


def fill_the_disk(run: Run) -> None:
    """As far as the rank that saves can tell: files of more than 64 KiB can not be written during step 6."""
    run.start(gates=(GATE, 6))
    run.wait_at(GATE)
    writer = read_journal(run.run_dir).processes["model-0"]
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    run.let_through(GATE)
    run.wait_at(6)
    run.wait_for_line("checkpoint of step 6 failed", file="events/master-0.jsonl")
    newest = latest(run.run_dir / "checkpoints")
    assert newest is not None and newest.step == 4
    assert {path.name for path in newest.path.parent.glob("step-*")} == {"step-000002", "step-000004"}
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    run.let_through(6)
    run.finish()


def fill_the_disk_at_the_end(run: Run) -> None:
    """Until the run says what it waits for."""
    run.start(gates=(LAST_STEP,))
    run.wait_at(LAST_STEP)
    writer = read_journal(run.run_dir).processes["model-0"]
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    run.let_through(LAST_STEP)
    run.wait_for_line(f"checkpoint of step {LAST_STEP} waits for room", file="events/master-0.jsonl")
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    run.finish()


ODD_ENDS: dict[str, Callable[[Run], None]] = {
    "interrupted": interrupt,
    "interrupted-twice": interrupt_twice,
    "launcher-and-agent-killed": kill_launcher_and_agent_during_a_reward_that_never_ends,
    "stopped-while-starting": stop_while_starting,
    "broken-worker": break_a_worker_at_its_start,
    "no-time-to-start": give_no_time_to_start,
    "disk-full": fill_the_disk,
    "disk-full-at-the-end": fill_the_disk_at_the_end,
}


@pytest.fixture(scope="module")
def odd_end(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    played = play(ODD_ENDS, tmp_path_factory.mktemp("odd-ends"))
    return lambda name: finished(played[name])


def test_ctrl_c_stops_the_run_after_its_step_with_a_checkpoint(odd_end: Callable[[str], Run]) -> None:
    odd_end("interrupted")


def test_a_second_ctrl_c_ends_the_run_at_once_and_a_damaged_journal_is_not_resumed(
    odd_end: Callable[[str], Run],
) -> None:
    odd_end("interrupted-twice")


def test_launcher_and_agent_killed_together_leave_no_worker_not_even_in_a_reward(
    odd_end: Callable[[str], Run],
) -> None:
    odd_end("launcher-and-agent-killed")


def test_a_stop_while_starting_ends_the_run_promptly(odd_end: Callable[[str], Run]) -> None:
    odd_end("stopped-while-starting")


def test_a_worker_that_fails_at_its_start_is_named_with_its_reason(odd_end: Callable[[str], Run]) -> None:
    odd_end("broken-worker")


def test_a_start_that_takes_too_long_is_ended_and_says_what_was_missing(
    odd_end: Callable[[str], Run],
) -> None:
    odd_end("no-time-to-start")


def test_a_save_on_a_full_disk_fails_loudly_while_training_goes_on(
    undisturbed: Run, odd_end: Callable[[str], Run]
) -> None:
    run = odd_end("disk-full")
    (failed,) = [fact for fact in run.facts if isinstance(fact, CheckpointFailed)]
    assert (failed.step, failed.fault.kind, failed.fault.process) == (6, "StorageFull", "model-0")
    assert "File too large" in failed.fault.message
    alerts = [record.event.message for record in read_events(run.run_dir) if isinstance(record.event, Alert)]
    assert [message for message in alerts if "checkpoint of step 6 failed" in message]
    assert [fact.step for fact in run.facts if isinstance(fact, CheckpointSaved)] == [2, 4, LAST_STEP]
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256


def test_the_last_save_waits_for_room_on_a_full_disk(undisturbed: Run, odd_end: Callable[[str], Run]) -> None:
    run = odd_end("disk-full-at-the-end")
    assert not [fact for fact in run.facts if isinstance(fact, CheckpointFailed)]
    assert [fact.step for fact in run.facts if isinstance(fact, CheckpointSaved)][-1] == LAST_STEP
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
