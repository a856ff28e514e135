"""A rank whose replacement does not come: the others go on without it, and take it back when it does come."""

from __future__ import annotations

import pytest

from kintsugi.journal.facts import IncidentClosed, ProcessJoined, StepCommitted, StrategyChosen
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, finished, play, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = "algorithm.steps=12"
SMALLER, RETURN, LAST = 5, 8, 15
"""Steps, the three of SFT included: the rank is lost after the first, and taken back after the second."""


def lose_a_rank_for_a_while(run: Run, *overrides: str) -> None:
    """New processes can not start while the run's configuration is out of reach; those that run do not need it."""
    run.start(STEPS, *overrides, gates=(SMALLER, RETURN))
    run.wait_at(SMALLER)
    config, hidden = run.run_dir / "config.yaml", run.run_dir / "config.hidden"
    config.rename(hidden)
    run.kill("model-1")
    run.let_through(SMALLER)
    until(lambda: any(isinstance(fact, IncidentClosed) for fact in run.facts), "the run to go on smaller")
    run.wait_at(RETURN)
    hidden.rename(config)
    until(lambda: len(run.pids_joined()["model-1"]) == 2, "the return of model-1")
    run.let_through(RETURN)
    code, errors = run.end()
    assert code == 0, errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run | BaseException]:
    def undisturbed(run: Run) -> None:
        run.start(STEPS)
        assert run.end()[0] == 0

    scenarios = {"smaller": lose_a_rank_for_a_while, "undisturbed": undisturbed}
    return play(scenarios, tmp_path_factory.mktemp("elastic"))


def test_the_run_goes_on_smaller_and_grows_back(runs: dict[str, Run | BaseException]) -> None:
    facts = finished(runs["smaller"]).facts
    assert [fact.strategy for fact in facts if isinstance(fact, StrategyChosen)][-1] == "elastic"
    joined = [
        i
        for i, fact in enumerate(facts)
        if isinstance(fact, ProcessJoined) and fact.peer.process == "model-1"
    ]
    assert len(joined) == 2
    committed = [i for i, fact in enumerate(facts) if isinstance(fact, StepCommitted)]
    assert any(i < joined[1] for i in committed) and any(i > joined[1] for i in committed)


def test_the_weights_are_those_of_a_run_that_was_never_smaller(runs: dict[str, Run | BaseException]) -> None:
    smaller, undisturbed = finished(runs["smaller"]), finished(runs["undisturbed"])
    assert smaller.summary.weights_sha256 == undisturbed.summary.weights_sha256
    assert_trained_exactly_once(smaller, last_step=LAST)
