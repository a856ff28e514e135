"""Ranks with parts of the state are lost, and none can be started in their place: the state is cut again over those
that live, and again when the others are back. No step is lost, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kintsugi.journal.facts import IncidentClosed, MeshChanged, RolledBack, StepCommitted
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import Run, play_selected, until
from tests.cluster.test_sharded_runs import resume_with

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]

FIRST, SECOND, RETURN, LAST_STEP = 4, 6, 9, 12
"""Steps, the three of SFT included: after which one rank is lost, then another one, and after which all are back."""
LONGEST_S = 400.0
COMMON = ("algorithm.steps=9", "actor.logical_shards=4")


def layout(
    ranks: int, *, shards: int = 1, stages: int = 1, tensors: int = 1, slices: int = 1
) -> tuple[str, ...]:
    cut = {"shards": shards, "stages": stages, "tensors": tensors}
    sizes = (f"actor.layout.{name}={size}" for name, size in cut.items())
    return (f"actor.workers={ranks}", *sizes, f"actor.logical_slices={slices}", *COMMON)


def undisturbed(run: Run, *, begun: tuple[str, ...]) -> None:
    run.longest_s = LONGEST_S
    run.start(*begun)
    run.finish()


def lose_for_a_while(run: Run, *, begun: tuple[str, ...], lost: Sequence[str]) -> None:
    """One rank after the other. New processes can not start while the run's configuration is out of reach; those that
    run do not need it."""
    run.longest_s = LONGEST_S
    steps = (FIRST, SECOND)[: len(lost)]
    run.start(*begun, gates=(*steps, RETURN))
    config, hidden = run.run_dir / "config.yaml", run.run_dir / "config.hidden"
    for step, rank in zip(steps, lost, strict=True):
        run.wait_at(step)
        if not hidden.exists():
            config.rename(hidden)
        before = num_closed(run)
        run.kill(rank)
        run.let_through(step)
        until(partial(lambda run, before: num_closed(run) > before, run, before), f"the run without {rank}")
    run.wait_at(RETURN)
    hidden.rename(config)
    until(lambda: all(len(run.pids_joined()[rank]) == 2 for rank in lost), "the return of the lost ranks")
    run.let_through(RETURN)
    run.finish()


def num_closed(run: Run) -> int:
    return sum(isinstance(fact, IncidentClosed) for fact in run.facts)


SHARDS = layout(4, shards=4)
BY_LAYER = (*SHARDS, "actor.layout.gather=layer")
PIPELINES = layout(4, stages=2, shards=2)
CUBE = layout(4, stages=2, tensors=2, slices=2)
TWELVE = (*layout(4, shards=4), "actor.logical_shards=12", "warmup.batch_size=12", "algorithm.batch_size=6")
SLICED = layout(4, shards=4, slices=2)
SCENARIOS: dict[str, Callable[[Run], None]] = {
    "four shards": partial(undisturbed, begun=SHARDS),
    "two pipelines": partial(undisturbed, begun=PIPELINES),
    "stages of tensors": partial(undisturbed, begun=CUBE),
    "twelve parts": partial(undisturbed, begun=TWELVE),
    "sliced shards": partial(undisturbed, begun=SLICED),
    "resumed with three shards": lambda run: resume_with(
        run, "actor.workers=3", "actor.layout.shards=3", begun=TWELVE
    ),
    "resumed with tensors": lambda run: resume_with(
        run, "actor.layout.shards=2", "actor.layout.tensors=2", begun=SLICED
    ),
    "shards lost": partial(lose_for_a_while, begun=SHARDS, lost=("model-3", "model-1")),
    "shards by layer lost": partial(lose_for_a_while, begun=BY_LAYER, lost=("model-3", "model-1")),
    "a pipeline lost": partial(lose_for_a_while, begun=PIPELINES, lost=("model-3",)),
    "a tensor rank lost": partial(lose_for_a_while, begun=CUBE, lost=("model-0",)),
}
LOST = {
    "shards lost": ("four shards", ["3x1x1", "2x1x1", "4x1x1"], {"model-3", "model-1"}),
    "shards by layer lost": ("four shards", ["3x1x1", "2x1x1", "4x1x1"], {"model-3", "model-1"}),
    "a pipeline lost": ("two pipelines", ["1x2x1", "2x2x1"], {"model-3"}),
    "a tensor rank lost": ("stages of tensors", ["1x2x1", "1x2x2"], {"model-0"}),
}
"""Name → its undisturbed twin, the meshes that the ranks form one after the other, the ranks that are lost."""


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(SCENARIOS, request, tmp_path_factory.mktemp("smaller"), at_once=1)


@pytest.mark.parametrize("name", list(LOST))
def test_the_state_is_cut_over_fewer_ranks_and_back_without_a_lost_step(
    name: str, run_of: Callable[[str], Run]
) -> None:
    twin_name, meshes, lost = LOST[name]
    run, twin = run_of(name), run_of(twin_name)
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    changes = [fact for fact in run.facts if isinstance(fact, MeshChanged)]
    assert [f"{each.shards}x{each.stages}x{each.tensors}" for each in changes] == meshes
    assert changes[-1].ranks == ()
    joined = run.pids_joined()
    assert {process for process, pids in joined.items() if len(pids) > 1} == lost, joined
    digests, expected = states(run), states(twin)
    alike = {step for step in digests if digests[step] == expected[step]}
    assert alike >= {*range(1, FIRST + 1), LAST_STEP}, (
        "in the configured mesh the states are those of the twin"
    )


@pytest.mark.parametrize(
    ("name", "twin"),
    [("resumed with three shards", "twelve parts"), ("resumed with tensors", "sliced shards")],
)
def test_a_checkpoint_of_four_shards_goes_on_in_other_meshes(
    name: str, twin: str, run_of: Callable[[str], Run]
) -> None:
    run = run_of(name)
    assert run.summary.weights_sha256 == run_of(twin).summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)


def states(run: Run) -> dict[int, str]:
    return {fact.step: fact.state_digest for fact in run.facts if isinstance(fact, StepCommitted)}
