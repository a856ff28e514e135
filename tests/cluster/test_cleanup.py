"""Nothing of ours is left, however a run ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from kintsugi.cluster.restart_policy import MOST_RESTARTS
from kintsugi.types import Role
from tests.cluster.tiny_runs import TinyRun, start_of, until

pytestmark = pytest.mark.cluster


def test_the_exit_code_is_the_masters_and_nothing_is_left(run: TinyRun) -> None:
    run.start(start_of("model-0"), start_of("rollout-0"), exit_code=3)
    assert run.result() == (3, "")
    assert not run.pids()
    assert not (run.run_dir / "launcher.json").exists()
    assert not list((run.run_dir / "agents").iterdir())


@pytest.mark.slow
def test_two_hosts_end_with_the_masters_exit_code(run: TinyRun) -> None:
    run.start(start_of("model-0"), start_of("model-1"), hosts=2, exit_code=0)
    assert run.result() == (0, "")
    assert not run.pids()
    assert [event for event in run.happened() if event[0] == "started"]


def test_ctrl_c_stops_the_master_gracefully_and_leaves_nothing(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("rollout-0"))
    run.note_sockets()
    os.killpg(launcher.pid, signal.SIGINT)
    assert run.result() == (0, "")
    run.assert_nothing_left()
    assert not [event for event in run.happened() if event[0] == "exited"], "workers must not hear Ctrl-C"


def test_a_second_ctrl_c_ends_even_a_stubborn_run_at_once(run: TinyRun) -> None:
    launcher = run.start(programs={Role.MASTER: "cluster_programs:stubborn"})
    until((run.run_dir / "master-0.stubborn.json").exists, "the master to be stubborn")
    run.note_sockets()
    launcher.send_signal(signal.SIGINT)
    until((run.run_dir / "master-0.asked_to_end.json").exists, "the first signal to reach the master")
    assert launcher.poll() is None
    begun = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    code, _ = run.result()
    assert code == 1
    assert time.monotonic() - begun < 10.0, "the first one waits for the master, which does not end"
    run.assert_nothing_left()


def test_kill_9_of_the_launcher_leaves_nothing(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("model-1"), start_of("rollout-0"), hosts=2)
    run.note_sockets()
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)


def test_kill_9_of_launcher_and_agent_together_ends_the_workers_by_their_lifeline(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("model-1"), preload=("json",))
    run.note_sockets()
    agent = run.agent_pid()
    os.kill(agent, signal.SIGKILL)
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)


@pytest.mark.slow
def test_an_agent_that_is_killed_again_and_again_ends_the_run_with_its_name_and_leaves_nothing(
    run: TinyRun,
) -> None:
    run.start_and_wait(start_of("model-0"), programs={Role.MODEL: "cluster_programs:stubborn"})
    run.note_sockets()
    for incarnation in range(MOST_RESTARTS + 1):
        until(lambda: len(run.registrations("agent-0")) > incarnation, f"agent {incarnation}")  # noqa: B023
        os.kill(run.agent_pid(), signal.SIGKILL)
    code, errors = run.result()
    assert code == 99
    assert f"ProcessDied: agent-0 killed by SIGKILL, more than {MOST_RESTARTS} times" in errors
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_master_that_dies_again_and_again_ends_the_run_with_its_name_and_leaves_nothing(
    run: TinyRun,
) -> None:
    run.start(start_of("model-0"), start_of("rollout-0"), kill_itself=True)
    code, errors = run.result()
    assert code == 99
    assert "ProcessDied: master-0 was killed by SIGKILL" in errors
    assert not run.pids()


def test_a_master_that_cannot_be_imported_names_process_phase_and_reason(run: TinyRun) -> None:
    run.start(programs={Role.MASTER: "cluster_program_that_breaks:main"})
    code, errors = run.result()
    assert code == 99
    assert errors == (
        "StartFailed: master-0 failed to start while importing cluster_program_that_breaks:main: "
        "RuntimeError: a library is missing\n"
    )
    assert not run.pids()


def test_a_start_that_takes_too_long_is_ended_and_leaves_nothing(run: TinyRun) -> None:
    run.start(programs={Role.MASTER: "cluster_program_that_hangs:main"}, start_timeout_s=0.5)
    code, errors = run.result()
    assert code == 99
    assert errors == (
        "StartFailed: agent-0 failed to start while starting the master: "
        "not ready after 0.5 s (cluster.start_timeout_s)\n"
    )
    assert not run.pids()


def test_ctrl_c_while_the_master_is_still_starting_leaves_nothing(run: TinyRun) -> None:
    launcher = run.start(programs={Role.MASTER: "cluster_program_that_hangs:main"})
    until(lambda: any("master-0" in command for command in run.pids().values()), "the master's process")
    launcher.send_signal(signal.SIGINT)
    assert run.result() == (1, "")
    assert not run.pids()


def test_a_worker_that_cannot_be_imported_is_told_to_the_master_and_nothing_of_it_is_left(
    run: TinyRun,
) -> None:
    run.start_and_wait(
        start_of("model-0"), start_of("server-0"), programs={Role.SERVER: "cluster_program_that_breaks:main"}
    )
    (failed,) = [event[1] for event in run.happened() if event[0] == "failed"]
    assert "server-0 failed to start while importing cluster_program_that_breaks:main" in failed
    assert "RuntimeError: a library is missing" in failed
    commands = [command for command in run.pids().values() if "server-0" in command]
    assert not commands


def test_a_taken_port_is_the_users_mistake_and_is_known_before_anything_starts(run: TinyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run.start(port=port)
        code, errors = run.result()
    assert code == 99
    assert (
        errors == f"ConfigError: cluster.port: port {port} of 127.0.0.1 is taken; expected a free one, or 0\n"
    )
    assert not (run.run_dir / "logs").exists()


def test_a_folder_is_run_by_one_launcher_at_a_time(run: TinyRun) -> None:
    first = run.start_and_wait()
    second = subprocess.run(first.args, capture_output=True, text=True, check=False, timeout=20)
    assert second.returncode == 99
    assert f"is in use: process {first.pid} runs it" in second.stderr
    assert first.poll() is None
