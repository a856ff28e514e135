"""A master is killed while the ranks are in the middle of a training call: the call is finished, and counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from kintsugi.control.phases.table import Phase
from kintsugi.journal.facts import IncidentClosed, StrategyChosen
from kintsugi.recovery.strategy import Strategy
from kintsugi.simulation.replay import replay
from kintsugi.telemetry.events import Transition, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import PROGRAMS, Run, finished, play, until
from tests.cluster.test_kill_anything import strike

pytestmark = pytest.mark.cluster

GATE = 5
GATED = f"algorithm.name={PROGRAMS}/gated_losses.py:gated_grpo"


def undisturbed_run(run: Run) -> None:
    run.start(GATED)
    assert run.end()[0] == 0


def killed_in_a_call(run: Run, *, num_deaths: int) -> None:
    """Both ranks stand in a micro-batch when the master dies, and until its successor waits for them."""
    gate = run.gates / f"call-{GATE}"
    gate.touch()
    run.start(GATED)
    until(lambda: len(list(run.gates.glob(f"call-{GATE}.*"))) == 2, "both ranks in the call")
    for number in range(1, num_deaths + 1):
        strike(run, "master-0")
        until(lambda number=number: num_adoptions(run) == number, "its successor")  # type: ignore[misc]
    gate.unlink()
    code, errors = run.end()
    assert code == 0, errors


def num_adoptions(run: Run) -> int:
    events = [record.event for record in read_events(run.run_dir, process="master-0")]
    return sum(isinstance(event, Transition) and event.after == Phase.ADOPTING for event in events)


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "undisturbed": undisturbed_run,
    "once": partial(killed_in_a_call, num_deaths=1),
    "twice": partial(killed_in_a_call, num_deaths=2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    played = play(SCENARIOS, tmp_path_factory.mktemp("taken-over"))
    return lambda name: finished(played[name])


def micro_batches(run: Run) -> Counter[str]:
    """Step → how many micro-batches were computed for it, on all ranks together."""
    return Counter((run.gates / "micro_batches").read_text().split())


@pytest.mark.parametrize("name", ["once", "twice"])
def test_a_call_that_runs_when_the_master_dies_is_computed_once_and_counts(
    runs: Callable[[str], Run], name: str
) -> None:
    run, whole = runs(name), runs("undisturbed")
    assert micro_batches(whole)[str(GATE + 1)] > 0
    assert micro_batches(run) == micro_batches(whole)
    assert run.summary.weights_sha256 == whole.summary.weights_sha256
    assert all(len(pids) == 1 for process, pids in run.pids_joined().items() if process != "master-0")
    chosen = [fact.strategy for fact in run.facts if isinstance(fact, StrategyChosen)]
    assert chosen and set(chosen) == {Strategy.CONTINUE}
    (closed,) = [fact for fact in run.facts if isinstance(fact, IncidentClosed)]
    assert (closed.outcome, closed.step, closed.processes) == (Strategy.CONTINUE, GATE + 1, ("master-0",))
    assert_trained_exactly_once(run)
    again, journaled = replay(run.run_dir)
    assert again == journaled
