"""Generation servers come and go while a run goes on, and its result does not change by that."""

from __future__ import annotations

import os
import signal

import pytest

from kintsugi.cluster.child import read_table
from kintsugi.control.processes import RETIRED
from kintsugi.control.user_requests import UserRequests
from kintsugi.journal.facts import IncidentOpened, ProcessJoined, ProcessLost, ServersScaled, TermStarted
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_journal
from kintsugi.telemetry.process_reports import read_processes
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SETTINGS = ("algorithm.steps=12", "cluster.hosts=2")
WARMUP, LAST = 3, 15
GATES = (5, 9)


def servers(run: Run) -> list[str]:
    return sorted(name for name in read_journal(run.run_dir).processes if name.startswith("server-"))


def scale(run: Run, count: int) -> None:
    code, said = run.ask("scale", str(run.run_dir), "--servers", str(count))
    assert code == 0, said


def leave_request(run: Run, count: int) -> None:
    """As the command does, which takes long to start where there is much to do."""
    UserRequests(run.run_dir).submit(servers=count)
    until(lambda: read_journal(run.run_dir).scaled_to == count, "the answer")


def wait_for_servers(run: Run, count: int) -> None:
    expected = [f"server-{index}" for index in range(count)]
    until(lambda: servers(run) == expected, f"{expected} instead of {servers(run)}")


def tokens(run: Run, server: str) -> int:
    """That a server has sampled, by its own count."""
    reports = read_processes(run.run_dir)
    found = [each for each in reports.processes if each.process == server] if reports is not None else []
    return found[0].counters.get("tokens", 0) if found else 0


def undisturbed(run: Run) -> None:
    run.start(*SETTINGS)
    run.finish()


def two_four_one(run: Run) -> None:
    run.start(*SETTINGS, gates=GATES)
    run.wait_at(5)
    scale(run, 4)
    wait_for_servers(run, 4)
    code, said = run.ask("status", str(run.run_dir))
    assert code == 0 and "4, scaled from 2" in said
    run.let_through(5)
    until(lambda: tokens(run, "server-2") and tokens(run, "server-3"), "samples of the new servers")
    run.wait_at(9)
    scale(run, 1)
    wait_for_servers(run, 1)
    code, said = run.ask("scale", str(run.run_dir), "--servers", "33")
    assert (code, "at most as many servers as the 32 samples of a step" in said) == (2, True), said
    run.let_through(9)
    run.finish()


def restless(run: Run) -> None:
    """No step waits for a scaling here: requests are under way when their server goes."""
    run.start(*SETTINGS, gates=(11,))
    metrics = run.run_dir / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > WARMUP, "the main stage")
    for count in (4, 1, 3, 1, 3):
        leave_request(run, count)
    until(lambda: "server-2" in servers(run), "a new server")
    run.kill("server-2")
    run.wait_at(11)
    wait_for_servers(run, 3)
    run.let_through(11)
    run.finish()


def kill_master(run: Run) -> None:
    """Also one that was forked, and has no command line of its own."""
    table = read_table(RunFolder(run.run_dir).agent_file("agent-0"))
    assert table is not None
    (pid,) = [record.pid for record in table.children if record.process == "master-0"]
    os.kill(pid, signal.SIGKILL)


def master_killed(run: Run) -> None:
    run.start(*SETTINGS, gates=GATES)
    run.wait_at(5)
    UserRequests(run.run_dir).submit(servers=4)
    kill_master(run)
    wait_for_servers(run, 4)
    kill_master(run)
    run.let_through(5)
    run.wait_at(9)
    scale(run, 1)
    kill_master(run)
    wait_for_servers(run, 1)
    run.let_through(9)
    run.finish()


SCENARIOS = {
    "undisturbed": undisturbed,
    "two four one": two_four_one,
    "restless": restless,
    "master killed": master_killed,
}
Played = dict[str, Run | BaseException]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(SCENARIOS, tmp_path_factory.mktemp("scaling"))


@pytest.mark.parametrize("name", ["two four one", "restless", "master killed"])
def test_a_run_whose_servers_come_and_go_ends_in_the_same_weights(played: Played, name: str) -> None:
    run = finished(played[name])
    assert run.summary.weights_sha256 == finished(played["undisturbed"]).summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST)


def test_new_servers_are_spread_over_the_hosts_and_surplus_ones_leave_without_an_incident(
    played: Played,
) -> None:
    facts = finished(played["two four one"]).facts
    joined = {fact.peer.process: fact.peer.host for fact in facts if isinstance(fact, ProcessJoined)}
    assert {joined["server-2"], joined["server-3"]} == {"host-0", "host-1"}
    left = {fact.process for fact in facts if isinstance(fact, ProcessLost) and fact.fault.kind == RETIRED}
    assert left == {"server-1", "server-2", "server-3"}
    assert not [fact for fact in facts if isinstance(fact, IncidentOpened)]


def test_a_killed_server_of_a_scaled_run_is_replaced(played: Played) -> None:
    pids = finished(played["restless"]).pids_joined()
    assert len(pids["server-2"]) >= 2


def test_a_request_outlives_a_master_that_dies_right_after_it_and_is_answered_once(played: Played) -> None:
    facts = finished(played["master killed"]).facts
    assert [fact.servers for fact in facts if isinstance(fact, ServersScaled)] == [4, 1]
    assert sum(isinstance(fact, TermStarted) for fact in facts) == 4
