"""Any process of a run is killed or stopped, one after another: the run goes on as if nothing had happened.

Faults strike while the run stands at a gate (`programs/gated_rewards.py`) or on its way from one to the next. Several
strike each run, because a start costs more than a recovery.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import pytest

from kintsugi.cluster.child import ChildrenTable
from kintsugi.journal.facts import IncidentClosed, StateFolded, StepCommitted
from kintsugi.journal.journal import kept_files, read_records
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import ProcessBegan, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import PROGRAMS, Run, play_selected, until

pytestmark = pytest.mark.cluster

GATES = (4, 5, 6)
WORKERS = {"manager-0", "model-0", "model-1", "rollout-0", "rollout-1", "server-0", "server-1"}
EVERYBODY = WORKERS | {"master-0", "agent-0"}


def pids_of(run: Run, process: str) -> list[int]:
    """Of all its incarnations, in their order."""
    records = read_events(run.run_dir, process=process)
    return [record.event.pid for record in records if isinstance(record.event, ProcessBegan)]


def is_known(run: Run, process: str) -> bool:
    return run.pids_joined().get(process, [0])[-1] == pids_of(run, process)[-1]


def strike(run: Run, *processes: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Hit processes, all of which must be alive, and wait until each has a successor."""
    hit = {process: pids_of(run, process)[-1] for process in processes}
    alive = run.pids()
    assert set(hit.values()) <= alive.keys(), f"{hit} are not all among {alive}"
    for pid in hit.values():
        os.kill(pid, number)
    for process, pid in hit.items():
        until(lambda process=process, pid=pid: pids_of(run, process)[-1] != pid, f"another {process}")  # type: ignore[misc]
        if process.startswith("agent"):  # Before it is known, it would not hear that the run has ended.
            until(lambda process=process: is_known(run, process), f"the registration of {process}")  # type: ignore[misc]


def strike_at_gates(run: Run, *, faults: tuple[tuple[str, ...], ...], number: signal.Signals) -> None:
    """One group of processes at each gate."""
    run.start(gates=GATES[: len(faults)])
    for gate, processes in zip(GATES, faults, strict=False):
        run.wait_at(gate)
        strike(run, *processes, number=number)
        run.let_through(gate)
    code, errors = run.end()
    assert code == 0, errors


def stop_rank_in_a_collective(run: Run) -> None:
    """The other rank waits for it inside a collective, from which it has to be freed; its agent sees it stopped."""
    run.start(gates=(5,))
    run.wait_at(5)
    run.kill("model-1", signal.SIGSTOP)
    run.let_through(5)
    run.wait_for_line("step 6 on 2 ranks", file="events/master-0.jsonl")
    until(lambda: len(pids_of(run, "model-1")) == 2, "another model-1")
    code, errors = run.end()
    assert code == 0, errors


def lose_a_host(run: Run) -> None:
    """An agent and everything it started, at the same moment."""
    run.start("cluster.hosts=2", gates=(5,))
    run.wait_at(5)
    table = msgspec.json.decode(RunFolder(run.run_dir).agent_file("agent-1").read_bytes(), type=ChildrenTable)
    lost = [child.process for child in table.children if child.process in WORKERS]
    assert len(lost) >= 2
    strike(run, "agent-1", *lost)
    run.let_through(5)
    code, errors = run.end()
    assert code == 0, errors


def lose_masters_after_compactions(run: Run) -> None:
    """Three masters in a row, each of which finds a journal that begins with a folded state."""
    folders = (PROGRAMS / "small_journal", PROGRAMS, os.environ.get("PYTHONPATH", ""))
    run.environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    run.start(gates=GATES)
    for gate in GATES:
        run.wait_at(gate)
        (first, *_) = read_records(run.run_dir / "journal", most=1)
        assert isinstance(first.facts[0], StateFolded)
        strike(run, "master-0")
        run.let_through(gate)
    code, errors = run.end()
    assert code == 0, errors


KILLED: dict[str, tuple[tuple[str, ...], ...]] = {
    "control": (("master-0",), ("manager-0",), ("agent-0",)),
    "workers": (("model-0",), ("server-0", "rollout-1"), ("model-1",)),
}
STOPPED: dict[str, tuple[tuple[str, ...], ...]] = {
    "stopped-control": (("master-0",), ("agent-0",), ("manager-0",)),
    "stopped-workers": (("model-0",), ("server-1",), ("rollout-0",)),
}
BOTH_RANKS = {"both-ranks": (("model-0", "model-1"),)}


def scenarios_of(
    faults: Mapping[str, tuple[tuple[str, ...], ...]], number: signal.Signals
) -> dict[str, Callable[[Run], None]]:
    return {name: partial(strike_at_gates, faults=groups, number=number) for name, groups in faults.items()}


QUICK: dict[str, Callable[[Run], None]] = {
    **scenarios_of(KILLED, signal.SIGKILL),
    "stopped-rank-in-a-collective": stop_rank_in_a_collective,
    "host": lose_a_host,
    "compacted-journal": lose_masters_after_compactions,
}
LONG: dict[str, Callable[[Run], None]] = {
    **scenarios_of(STOPPED, signal.SIGSTOP),
    **scenarios_of(BOTH_RANKS, signal.SIGKILL),
}


@pytest.fixture(scope="module")
def struck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(LONG | QUICK, request, tmp_path_factory.mktemp("struck"))


def assert_as_if_nothing_had_happened(run: Run, undisturbed: Run) -> None:
    assert run.summary.outcome == "finished"
    assert run.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(run)
    run.assert_nothing_left()


@pytest.mark.parametrize("name", QUICK)
def test_a_run_ends_as_if_nothing_had_happened_whoever_is_killed(
    undisturbed: Run, struck: Callable[[str], Run], name: str
) -> None:
    assert_as_if_nothing_had_happened(struck(name), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_run_ends_as_if_nothing_had_happened_whoever_is_stopped(
    undisturbed: Run, struck: Callable[[str], Run], name: str
) -> None:
    assert_as_if_nothing_had_happened(struck(name), undisturbed)


@pytest.mark.parametrize("name", KILLED)
def test_only_those_who_were_killed_are_replaced(struck: Callable[[str], Run], name: str) -> None:
    run, killed = struck(name), {process for group in KILLED[name] for process in group}
    assert {process: len(pids_of(run, process)) for process in EVERYBODY} == {
        process: 2 if process in killed else 1 for process in EVERYBODY
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_only_those_who_were_stopped_are_replaced(struck: Callable[[str], Run], name: str) -> None:
    run, stopped = struck(name), {process for group in STOPPED[name] for process in group}
    assert {process: len(pids_of(run, process)) for process in EVERYBODY} == {
        process: 2 if process in stopped else 1 for process in EVERYBODY
    }


def test_the_other_host_does_not_notice_the_loss_of_one(struck: Callable[[str], Run]) -> None:
    run = struck("host")
    replaced = {process for process in EVERYBODY | {"agent-1"} if len(pids_of(run, process)) > 1}
    hosts = {peer.process: peer.host for peer in run.peers_joined()}
    assert {hosts[process] for process in replaced} == {"host-1"}


def test_an_incident_is_written_up_with_what_it_cost(struck: Callable[[str], Run]) -> None:
    closed = [fact for fact in struck("workers").facts if isinstance(fact, IncidentClosed)]
    assert {process for fact in closed for process in fact.processes} >= {"model-0", "model-1"}
    assert all(fact.timing for fact in closed)


def test_a_compacted_journal_and_the_files_that_it_replaced_have_all_facts_of_the_run(
    undisturbed: Run, struck: Callable[[str], Run]
) -> None:
    run = struck("compacted-journal")
    assert len(kept_files(run.run_dir / "journal")) >= len(GATES)
    assert not any(isinstance(fact, StateFolded) for fact in run.facts)
    committed = [fact for fact in run.facts if isinstance(fact, StepCommitted)]
    expected = [fact for fact in undisturbed.facts if isinstance(fact, StepCommitted)]
    assert [(fact.step, fact.state_digest) for fact in committed] == [
        (fact.step, fact.state_digest) for fact in expected
    ]
