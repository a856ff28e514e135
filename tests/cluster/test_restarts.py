"""Agents and masters that are killed or stopped come back, and the processes of the run do not notice."""

from __future__ import annotations

import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.shortages import EXIT_ADDRESS_TAKEN, EXIT_NO_DESCRIPTORS
from kintsugi.telemetry.events import ProcessGone, read_events
from kintsugi.types import Role
from tests.cluster.tiny_runs import TinyRun, start_of, until

pytestmark = pytest.mark.cluster

FEW_DESCRIPTORS = 16
"""Fewer than an agent has open, and more than it polls: the kernel polls no more than may be open."""
KILLED_OR_STOPPED = pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["killed", "stopped"],
)


def end(run: TinyRun) -> None:
    """Stop the run and see that it ends as if nothing had happened."""
    run.note_sockets()
    assert run.launcher is not None
    run.launcher.send_signal(signal.SIGTERM)
    assert run.result() == (0, "")
    run.assert_nothing_left()


@KILLED_OR_STOPPED
def test_an_agent_comes_back_and_its_processes_keep_their_pids(run: TinyRun, number: int) -> None:
    run.start_and_wait(start_of("model-0"), start_of("rollout-0"), preload=("json",))
    first, started, master = run.agent_pid(), run.started(), run.master()
    os.kill(first, number)
    until(lambda: len(run.registrations("agent-0")) == 2, "the second agent")
    (incarnation, _), again = run.registrations("agent-0")
    assert again == (incarnation + 1, sorted(started.values()))
    assert run.agent_pid() != first
    assert run.master() == master, "it does not notice"
    assert all(process_start_time(pid) for pid in started.values())
    os.kill(started["model-0"], signal.SIGKILL)
    # Its parent takes the status; the agent knows it only when it looks while the process is still ending.
    reports = [["exited", "model-0", status] for status in (None, -signal.SIGKILL)]
    until(lambda: any(report in run.happened() for report in reports), "the exit of the adopted process")
    remains = Path(f"/proc/{started['model-0']}")
    until(lambda: not remains.exists(), "the launcher to take its remains away")
    end(run)


def take_descriptors(pid: int) -> None:
    """Let a process open nothing any more."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, most))


@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_agent_that_fails_comes_back_and_its_processes_keep_their_pids(run: TinyRun, index: int) -> None:
    run.start_and_wait(start_of("model-0"), start_of("model-1"), hosts=2)
    run.note_sockets()
    agent, started, master = f"agent-{index}", run.started(), run.master()
    first = run.agent_pid(agent)
    take_descriptors(first)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        # It can not take the connection, which it has no answer to but to fail.
        client.connect(f"\0kintsugi-{run.job()}-host-{index}")
        until(lambda: len(run.registrations(agent)) == 2, "the second agent")
    assert run.agent_pid(agent) != first
    assert run.registrations(agent)[1][1] == [started[f"model-{index}"]]
    assert run.master() == master, "it does not notice"
    assert all(process_start_time(pid) for pid in started.values())
    gone = [record.event for record in read_events(run.run_dir, process="launcher-0")]
    statuses = [(each.of, each.status) for each in gone if isinstance(each, ProcessGone)]
    assert statuses == [(agent, EXIT_NO_DESCRIPTORS)]
    end(run)


@pytest.mark.slow
def test_a_stranger_that_takes_the_name_of_an_agents_socket_delays_its_successor_and_ends_no_run(
    run: TinyRun,
) -> None:
    run.start_and_wait(start_of("model-0"))
    run.note_sockets()
    name, started, first = f"\0kintsugi-{run.job()}-host-0", run.started(), run.agent_pid()

    def codes() -> list[int | None]:
        gone = [record.event for record in read_events(run.run_dir, process="launcher-0")]
        return [each.status for each in gone if isinstance(each, ProcessGone) and each.of == "agent-0"]

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        os.kill(first, signal.SIGKILL)
        until(lambda: is_bound(stranger, name), "the name of the agent's socket")
        until(lambda: len(codes()) == 3, "two successors that do not get the name")
    assert codes() == [-signal.SIGKILL, EXIT_ADDRESS_TAKEN, EXIT_ADDRESS_TAKEN]
    until(lambda: len(run.registrations("agent-0")) == 2, "a successor that gets it")
    assert run.registrations("agent-0")[1][1] == sorted(started.values())
    end(run)


def is_bound(stranger: socket.socket, name: str) -> bool:
    try:
        stranger.bind(name)
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_run_goes_on_with_an_agent_that_has_no_descriptor_left(run: TinyRun) -> None:
    run.start_and_wait(start_of("model-0"), start_of("model-1"), hosts=2)
    agent, started = run.agent_pid("agent-1"), run.started()
    take_descriptors(agent)
    log = run.run_dir / "events" / "agent-1.jsonl"
    until(lambda: "Too many open files" in log.read_text(), "the agent to say what is wrong")
    os.kill(started["model-1"], signal.SIGKILL)
    until(lambda: ["exited", "model-1", -signal.SIGKILL] in run.happened(), "the end of its process")
    assert run.agent_pid("agent-1") == agent
    end(run)


@KILLED_OR_STOPPED
@pytest.mark.parametrize(
    "preload", [pytest.param((), marks=pytest.mark.slow), ("json",)], ids=["executed", "forked"]
)
def test_a_master_comes_back_on_the_same_socket_and_its_processes_keep_their_pids(
    run: TinyRun, number: int, preload: tuple[str, ...]
) -> None:
    run.start_and_wait(start_of("model-0"), start_of("rollout-0"), preload=preload)
    agent, started, (first, adopting, address) = run.agent_pid(), run.started(), run.master()
    assert not adopting
    os.kill(first, number)
    until(lambda: run.master()[0] != first and ["complete"] in run.happened(), "the second master")
    assert run.master()[1:] == (True, address)
    assert [children for _, children in run.registrations("agent-0")] == [sorted(started.values())]
    assert run.started() == started
    assert run.agent_pid() == agent
    end(run)


def test_master_and_agent_killed_together_come_back_both(run: TinyRun) -> None:
    run.start_and_wait(start_of("model-0"), start_of("model-1"), hosts=2)
    started, (first, _, address) = run.started(), run.master()
    agent = run.agent_pid("agent-0")
    os.kill(agent, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    until(lambda: run.master()[0] != first and ["complete"] in run.happened(), "the second master")
    assert run.master()[1:] == (True, address)
    assert run.started() == started
    end(run)


@pytest.mark.slow
def test_a_host_that_is_lost_as_a_whole_comes_back_with_an_empty_list(run: TinyRun) -> None:
    run.start_and_wait(start_of("model-0"), start_of("model-1"), hosts=2)
    started = run.started()
    agent = run.agent_pid("agent-1")
    os.kill(agent, signal.SIGSTOP)
    os.kill(started["model-1"], signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    until(lambda: len(run.registrations("agent-1")) == 2, "the second agent")
    assert run.registrations("agent-1")[1][1] == []
    assert process_start_time(started["model-0"]) is not None
    end(run)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "master"])
def test_a_stop_reaches_a_master_that_nobody_could_ask_at_that_moment(run: TinyRun, victim: str) -> None:
    launcher = run.start_and_wait(start_of("model-0"))
    run.note_sockets()
    agent, (master, _, _) = run.agent_pid(), run.master()
    os.kill(agent, signal.SIGSTOP)
    os.kill(agent if victim == "agent" else master, signal.SIGKILL)
    launcher.send_signal(signal.SIGTERM)
    if victim == "master":
        os.kill(agent, signal.SIGCONT)
    assert run.result() == (0, "")
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_second_stop_ends_a_stubborn_run_whose_agent_was_killed(run: TinyRun) -> None:
    launcher = run.start(programs={Role.MASTER: "cluster_programs:stubborn"})
    until((run.run_dir / "master-0.stubborn.json").exists, "the master to be stubborn")
    run.note_sockets()
    launcher.send_signal(signal.SIGINT)
    until((run.run_dir / "master-0.asked_to_end.json").exists, "the first signal to reach the master")
    os.kill(run.agent_pid(), signal.SIGKILL)
    launcher.send_signal(signal.SIGINT)
    code, _ = run.result()
    assert code == 1
    run.assert_nothing_left()


@pytest.mark.slow
def test_kill_9_of_the_launcher_leaves_nothing_of_a_run_whose_agent_came_back(run: TinyRun) -> None:
    launcher = run.start_and_wait(start_of("model-0"), start_of("rollout-0"))
    os.kill(run.agent_pid(), signal.SIGKILL)
    until(lambda: len(run.registrations("agent-0")) == 2, "the second agent")
    run.note_sockets()
    launcher.kill()
    run.assert_nothing_left(timeout_s=5.0)
