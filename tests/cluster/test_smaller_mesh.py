"""Ranks with parts of the state are lost, and none can be started in their place: the state is cut again over those that
live, and again when the others are back. No step is lost, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kintsugi.journal.facts import IncidentClosed, MeshChanged, RolledBack, StepCommitted
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, play_selected, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]

STEPS = "algorithm.steps=9"
FIRST, SECOND, RETURN, LAST_STEP = 4, 6, 9, 12
"""Steps, the three of SFT included: after which one rank is lost, then another one, and after which both are back."""
LONGEST_S = 400.0


def shards(ranks: int, parts: int) -> tuple[str, ...]:
    return (f"actor.workers={ranks}", f"actor.layout.shards={parts}", "actor.logical_shards=4", STEPS)


def undisturbed(run: Run, *layout: str) -> None:
    run.longest_s = LONGEST_S
    run.start(*layout)
    run.finish()


def closed(run: Run) -> int:
    return sum(isinstance(fact, IncidentClosed) for fact in run.facts)


def lose_two_and_take_them_back(run: Run, *layout: str) -> None:
    """New processes can not start while the run's configuration is out of reach; those that run do not need it."""
    run.longest_s = LONGEST_S
    run.start(*layout, gates=(FIRST, SECOND, RETURN))
    config, hidden = run.run_dir / "config.yaml", run.run_dir / "config.hidden"
    for step, rank in ((FIRST, "model-3"), (SECOND, "model-1")):
        run.wait_at(step)
        if not hidden.exists():
            config.rename(hidden)
        before = closed(run)
        run.kill(rank)
        run.let_through(step)
        until(lambda before=before: closed(run) > before, f"the run to go on without {rank}")  # type: ignore[misc]
    run.wait_at(RETURN)
    hidden.rename(config)
    until(
        lambda: all(len(run.pids_joined()[rank]) == 2 for rank in ("model-1", "model-3")),
        "the return of the lost ranks",
    )
    run.let_through(RETURN)
    run.finish()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "four shards": lambda run: undisturbed(run, *shards(4, 4)),
    "4 3 2 4": lambda run: lose_two_and_take_them_back(run, *shards(4, 4)),
}


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(SCENARIOS, request, tmp_path_factory.mktemp("smaller"), at_once=1)


@pytest.mark.parametrize("name", ["4 3 2 4"])
def test_the_state_is_cut_over_fewer_ranks_and_back_without_a_lost_step(
    name: str, run_of: Callable[[str], Run]
) -> None:
    run, twin = run_of(name), run_of("four shards")
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    changes = [fact for fact in run.facts if isinstance(fact, MeshChanged)]
    assert [change.shards for change in changes] == [3, 2, 4]
    assert changes[-1].ranks == ()
    joined = run.pids_joined()
    again = {process for process, pids in joined.items() if len(pids) > 1}
    assert again == {"model-1", "model-3"}, joined
    digests, expected = states(run), states(twin)
    alike = {step for step in digests if digests[step] == expected[step]}
    assert alike >= {*range(1, FIRST + 1), LAST_STEP}, "with four parts the states are those of the twin"


def states(run: Run) -> dict[int, str]:
    return {fact.step: fact.state_digest for fact in run.facts if isinstance(fact, StepCommitted)}
