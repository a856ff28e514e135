"""The command that shows a run, its launcher and the standby are killed, alone and with others: the run goes on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterable

import pytest

from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.shortages import EXIT_NO_MEMORY
from kintsugi.telemetry.events import ProcessGone, RunAborted, read_events
from kintsugi.types import Role
from tests.cluster.tiny_runs import TinyRun, start_of, until

pytestmark = pytest.mark.cluster

ENDED_S = 20.0


def begin(run: TinyRun, *, hosts: int = 1) -> tuple[int, int]:
    """Start a run of a few processes; return launcher and standby."""
    run.start_and_wait(start_of("model-0"), start_of("rollout-0"), hosts=hosts, supervised=True)
    run.note_sockets()
    return run.pair()


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def end(run: TinyRun) -> None:
    """Stop the run by a signal to the command, and see that it ends as if nothing had happened."""
    assert run.launcher is not None
    run.launcher.send_signal(signal.SIGTERM)
    assert run.result() == (0, "")
    run.assert_nothing_left(timeout_s=ENDED_S)
    assert not (run.run_dir / "launcher.json").exists()


def are_alive(pids: Iterable[int]) -> bool:
    return all(process_start_time(pid) is not None for pid in pids)


def assert_as_before(run: TinyRun, *, started: dict[str, int], agent: int, master: int) -> None:
    """Agents, master and workers are the same processes, and the agents still do what the master asks."""
    assert (run.started(), run.agent_pid(), run.master()[0]) == (started, agent, master)
    assert are_alive((*started.values(), agent, master))


def test_the_exit_code_is_the_masters_and_nothing_is_left(run: TinyRun) -> None:
    run.start(start_of("model-0"), start_of("rollout-0"), exit_code=3, supervised=True)
    assert run.result() == (3, "")
    run_files = {path.name for path in run.run_dir.iterdir()}
    assert "launcher.json" not in run_files
    until(lambda: not run.pids(), "the end of all processes")


def test_ctrl_c_of_the_command_stops_the_run(run: TinyRun) -> None:
    begin(run)
    assert run.launcher is not None
    os.killpg(run.launcher.pid, signal.SIGINT)
    assert run.result() == (0, "")
    run.assert_nothing_left(timeout_s=ENDED_S)
    assert not [event for event in run.happened() if event[0] == "exited"], "workers must not hear Ctrl-C"


def test_a_second_ctrl_c_ends_even_a_stubborn_run(run: TinyRun) -> None:
    command = run.start(programs={Role.MASTER: "cluster_programs:stubborn"}, supervised=True)
    until((run.run_dir / "master-0.stubborn.json").exists, "the master to be stubborn")
    run.note_sockets()
    command.send_signal(signal.SIGINT)
    until((run.run_dir / "master-0.asked_to_end.json").exists, "the first signal to reach the master")
    command.send_signal(signal.SIGINT)
    code, _ = run.result()
    assert code == 1
    run.assert_nothing_left(timeout_s=ENDED_S)
    recorded = [each.event for each in read_events(run.run_dir, process="launcher-0")]
    assert any(isinstance(event, RunAborted) for event in recorded)


def test_an_error_of_the_launcher_is_the_error_of_the_command(run: TinyRun) -> None:
    run.start(programs={Role.MASTER: "cluster_program_that_breaks:main"}, supervised=True)
    code, errors = run.result()
    assert code == 99
    assert "master-0 failed to start while importing cluster_program_that_breaks:main" in errors
    until(lambda: not run.pids(), "the end of all processes")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["killed", "hung-up"])
def test_a_run_goes_on_without_its_command(run: TinyRun, number: signal.Signals) -> None:
    launcher, standby = begin(run)
    started, agent, master = run.started(), run.agent_pid(), run.master()[0]
    assert run.launcher is not None
    run.launcher.send_signal(number)
    assert run.launcher.wait(20) == -number
    os.kill(started["model-0"], signal.SIGKILL)
    until(lambda: ["exited", "model-0", -signal.SIGKILL] in run.happened(), "the agent's report")
    assert (run.agent_pid(), run.master()[0], run.launchers()) == (agent, master, (launcher, standby))
    os.kill(launcher, signal.SIGTERM)
    run.assert_nothing_left(timeout_s=ENDED_S)
    assert not (run.run_dir / "launcher.json").exists()


def test_the_standby_takes_over_from_a_launcher_that_was_killed(run: TinyRun) -> None:
    launcher, standby = begin(run, hosts=2)
    started, agent, master = run.started(), run.agent_pid(), run.master()[0]
    kill(launcher)
    second, third = run.pair(other_than=(launcher,))
    assert second == standby
    assert_as_before(run, started=started, agent=agent, master=master)
    with_keys = (second, third, agent, master, *started.values())
    assert {resource.prlimit(pid, resource.RLIMIT_CORE)[0] for pid in with_keys} == {0}
    gone = [record.event for record in read_events(run.run_dir, process="launcher-0")]
    assert [(each.of, each.pid, each.status) for each in gone if isinstance(each, ProcessGone)] == [
        ("launcher-0", launcher, -signal.SIGKILL)
    ]
    kill(run.agent_pid("agent-1"))
    until(lambda: len(run.registrations("agent-1")) == 2, "another agent of the new launcher")
    assert are_alive((third, *started.values()))
    end(run)


def test_launchers_that_are_killed_one_after_the_other_are_all_replaced(run: TinyRun) -> None:
    pair = begin(run)
    started, agent, master = run.started(), run.agent_pid(), run.master()[0]
    seen = [*pair]
    for index in (0, 1, 0, 0, 1):
        kill(pair[index])
        pair = run.pair(other_than=(pair[index],))
        seen += pair
        assert_as_before(run, started=started, agent=agent, master=master)
    assert len(set(seen)) == 7
    # The agents have another parent now: their end is known by report.
    kill(agent)
    until(lambda: len(run.registrations("agent-0")) == 2, "the second agent")
    assert run.registrations("agent-0")[1][1] == sorted(started.values())
    assert run.master()[0] == master
    end(run)


@pytest.mark.parametrize("victim", ["launcher", "standby"])
def test_a_launcher_that_is_stopped_is_replaced(run: TinyRun, victim: str) -> None:
    pair = begin(run)
    hit = pair[victim == "standby"]
    os.kill(hit, signal.SIGSTOP)
    run.pair(other_than=(hit,))
    until(lambda: process_start_time(hit) is None, "the end of the stopped one")
    end(run)


@pytest.mark.parametrize("victim", ["agent", "master", "command"])
def test_launcher_and_another_process_killed_together_come_back_both(run: TinyRun, victim: str) -> None:
    launcher, _ = begin(run)
    started, agent, (master, _, address) = run.started(), run.agent_pid(), run.master()
    assert run.launcher is not None
    kill(launcher, {"agent": agent, "master": master, "command": run.launcher.pid}[victim])
    run.pair(other_than=(launcher,))
    if victim == "agent":
        until(lambda: len(run.registrations("agent-0")) == 2, "the second agent")
        assert run.registrations("agent-0")[1][1] == sorted(started.values())
    elif victim == "master":
        until(lambda: run.master()[0] != master and ["complete"] in run.happened(), "the second master")
        assert run.master()[1:] == (True, address)
    assert run.started() == started
    assert are_alive(started.values())
    if victim != "command":
        end(run)
        return
    os.kill(run.launchers()[0], signal.SIGTERM)
    run.assert_nothing_left(timeout_s=ENDED_S)


def test_a_launcher_that_is_killed_while_it_starts_is_replaced(run: TinyRun) -> None:
    run.start(start_of("model-0"), hosts=2, supervised=True)
    launcher, _ = run.pair()
    kill(launcher)
    until(lambda: ["complete"] in run.happened(), "the run to be complete")
    run.note_sockets()
    run.pair(other_than=(launcher,))
    assert run.agent_pid() and run.agent_pid("agent-1")
    end(run)


def test_a_stop_request_survives_the_launcher_that_received_it(run: TinyRun) -> None:
    command = run.start(programs={Role.MASTER: "cluster_programs:stubborn"}, supervised=True)
    until((run.run_dir / "master-0.stubborn.json").exists, "the master to be stubborn")
    run.note_sockets()
    launcher, _ = run.pair()
    command.send_signal(signal.SIGINT)
    until((run.run_dir / "master-0.asked_to_end.json").exists, "the first signal to reach the master")
    kill(launcher)
    run.pair(other_than=(launcher,))
    command.send_signal(signal.SIGINT)
    code, _ = run.result()
    assert code == 1
    run.assert_nothing_left(timeout_s=ENDED_S)


@pytest.mark.parametrize("with_command", [False, True], ids=["", "and-command"])
def test_launcher_and_standby_killed_together_leave_nothing(run: TinyRun, with_command: bool) -> None:
    pair = begin(run, hosts=2)
    assert run.launcher is not None
    kill(*pair, *([run.launcher.pid] if with_command else []))
    run.assert_nothing_left(timeout_s=ENDED_S)
    for agent in ("agent-0", "agent-1"):
        events = [record.event for record in read_events(run.run_dir, process=agent)]
        lost = [event for event in events if isinstance(event, ProcessGone) and event.of == "launcher-0"]
        assert [(event.pid, event.how) for event in lost] == [(pair[0], "ended together with its standby")]
    if not with_command:
        code, errors = run.result()
        assert code == 99
        assert errors.startswith("ProcessDied: launcher-0")


def test_a_master_that_leaves_for_want_of_memory_is_replaced_and_its_workers_stay(run: TinyRun) -> None:
    run.start(start_of("model-0"), exit_code=EXIT_NO_MEMORY, supervised=True)
    until(lambda: run.happened() and run.master()[1] and ["complete"] in run.happened(), "the second master")
    run.note_sockets()
    started = [record.event for record in read_events(run.run_dir, process="agent-0")]
    gone = [event for event in started if isinstance(event, ProcessGone)]
    assert [(event.of, event.how) for event in gone] == [
        ("master-0", "exited with code 72 (it got no memory)")
    ]
    end(run)
