"""Ranks and servers of one host take turns on its device, here the processors: the run ends in the same bits, a lost
notification costs seconds and is named, and who dies with the device in its hands does not take it along."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.device_lease.arbiter import GRACE_S, LEASE_S
from kintsugi.errors import root_first
from kintsugi.journal.facts import ProcessLost
from kintsugi.telemetry.events import Alert, Note, read_events
from kintsugi.telemetry.process_reports import read_processes
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play, until
from tests.cluster.test_kill_anything import pids_of, strike

pytestmark = pytest.mark.cluster

SHARED = "cluster.share_device=keep"
ONE_EACH = (SHARED, "actor.workers=1", "generation.servers=1")


def said_by_agent(run: Run, kind: type[Alert | Note]) -> list[str]:
    records = read_events(run.run_dir, process="agent-0")
    return [record.event.message for record in records if isinstance(record.event, kind)]


def handed_over(run: Run) -> dict[str, int]:
    """As the processes said last, about a second ago."""
    reports = read_processes(run.run_dir)
    if reports is None:
        return {}
    return {each.process: each.counters.get("lease.handed_over", 0) for each in reports.processes}


def assert_same_as(undisturbed: Run, run: Run) -> None:
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)


def test_a_rank_and_a_server_that_share_a_device_end_in_the_same_bits(
    tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path / "run")
    try:
        run.start(*ONE_EACH, gates=(5,))
        run.wait_at(5)
        until(
            lambda: min(handed_over(run).get(name, 0) for name in ("model-0", "server-0")) >= 2,
            "turns of both",
        )
        run.let_through(5)
        run.finish()
    finally:
        run.close()
    assert_same_as(undisturbed, run)
    assert said_by_agent(run, Alert) == []


def lose_a_recall(run: Run) -> None:
    run.environment["KINTSUGI_TEST_DEAF"] = "once"
    run.start(*ONE_EACH)
    until(lambda: list(run.gates.glob("deaf-*")), "a recall that is lost")
    until(lambda: said_by_agent(run, Alert), "its name", timeout_s=LEASE_S + GRACE_S)
    run.finish()


def never_give_the_device_back(run: Run) -> None:
    run.environment["KINTSUGI_TEST_DEAF"] = "stuck"
    run.start(*ONE_EACH)
    run.finish()


def die_with_the_device(run: Run) -> None:
    run.environment["KINTSUGI_TEST_DIE_IN"] = "kintsugi.training.model_calls:ModelCalls.run:5"
    run.start(SHARED)
    run.finish()


def come_and_go(run: Run) -> None:
    run.start(SHARED, gates=(4, 5, 6))
    run.wait_at(4)
    strike(run, "agent-0")
    run.let_through(4)
    run.wait_at(5)
    strike(run, "server-0")
    run.let_through(5)
    run.wait_at(6)
    strike(run, "model-0", number=signal.SIGSTOP)
    run.let_through(6)
    run.finish()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "a lost recall": lose_a_recall,
    "a stuck holder": never_give_the_device_back,
    "a dead holder": die_with_the_device,
    "come and go": come_and_go,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """All of them at a time: most of each is a wait for the end of a lease."""
    runs = play(SCENARIOS, tmp_path_factory.mktemp("shared"), at_once=len(SCENARIOS))
    return lambda name: finished(runs[name])


@pytest.mark.slow
def test_a_recall_that_is_lost_is_named_while_it_is_and_the_lease_runs_out(
    undisturbed: Run, played: Callable[[str], Run]
) -> None:
    run = played("a lost recall")
    lost = {path.read_text() for path in run.gates.glob("deaf-*")}
    (first, *_) = said_by_agent(run, Alert)
    assert "has not answered LeaseRecalled" in first and "waiting for it: " in first
    assert any(token in first for token in lost)
    assert any("after all" in note for note in said_by_agent(run, Note))
    assert all(len(pids) == 1 for pids in run.pids_joined().values()), "nobody had to be replaced"
    assert_same_as(undisturbed, run)


@pytest.mark.slow
def test_who_never_gives_the_device_back_is_ended_for_that_and_replaced(
    undisturbed: Run, played: Callable[[str], Run]
) -> None:
    run = played("a stuck holder")
    (stuck,) = run.gates.glob("deaf-*")
    replaced = [pids[0] for pids in run.pids_joined().values() if len(pids) == 2]
    assert replaced == [int(stuck.name.removeprefix("deaf-"))]
    assert any("its lease is over, so it is ended" in alert for alert in said_by_agent(run, Alert))
    (fault,) = [fact.fault for fact in run.facts if isinstance(fact, ProcessLost)]
    assert "has not answered LeaseRecalled" in root_first([fault])[0].message
    assert_same_as(undisturbed, run)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_holds_the_device_is_fenced_and_the_run_goes_on(
    undisturbed: Run, played: Callable[[str], Run]
) -> None:
    run = played("a dead holder")
    died = int((run.gates / "died").read_text())
    assert died in {*pids_of(run, "model-0"), *pids_of(run, "model-1")}
    assert_same_as(undisturbed, run)


@pytest.mark.slow
def test_agents_servers_and_stopped_holders_come_and_go_and_the_bits_stay(
    undisturbed: Run, played: Callable[[str], Run]
) -> None:
    run = played("come and go")
    assert any("asked back before anyone is let in" in note for note in said_by_agent(run, Note))
    assert_same_as(undisturbed, run)
