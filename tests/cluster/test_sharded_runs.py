"""Runs whose optimizer state is cut over the ranks: the layout changes no bit, nor does the loss of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from kintsugi.checkpoint.store import latest
from kintsugi.journal.facts import IncidentClosed, StepCommitted
from kintsugi.model.huggingface import load
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, Run, play_selected

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]

PARTS = "actor.logical_shards=4"
"""Of the batch: what the bits depend on."""
KILLED_AT = 5
LONGEST_S = 300.0
"""Runs of four ranks on two busy cores take a minute; this only bounds a broken one."""


def layout(ranks: int, shards: int, stages: int = 1) -> tuple[str, ...]:
    return (
        f"actor.workers={ranks}",
        f"actor.layout.shards={shards}",
        f"actor.layout.stages={stages}",
        PARTS,
    )


def undisturbed(run: Run, *, ranks: int, shards: int, stages: int = 1) -> None:
    run.longest_s = LONGEST_S
    run.start(*layout(ranks, shards, stages))
    run.finish()


def kill_ranks(run: Run, *lost: str, ranks: int, shards: int, stages: int = 1) -> None:
    run.longest_s = LONGEST_S
    run.start(*layout(ranks, shards, stages), gates=(KILLED_AT,))
    run.wait_at(KILLED_AT)
    for rank in lost:
        run.kill(rank)
    run.let_through(KILLED_AT)
    run.finish()


def resume_with(run: Run, *changes: str, begun: tuple[str, ...]) -> None:
    """Stop a run after the checkpoint of step 4, and resume it with another layout."""
    run.longest_s = LONGEST_S
    run.start(*begun, gates=(KILLED_AT,))
    run.wait_at(KILLED_AT)
    run.kill_launchers()
    run.end()
    run.assert_nothing_left(timeout_s=60.0)
    (run.gates / str(KILLED_AT)).unlink()
    (run.gates / f"{KILLED_AT}.reached").unlink(missing_ok=True)
    run.launcher = run.command("resume", str(run.run_dir), *changes)
    run.finish()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "one rank": partial(undisturbed, ranks=1, shards=1),
    "two replicas": partial(undisturbed, ranks=2, shards=1),
    "two shards": partial(undisturbed, ranks=2, shards=2),
    "four shards": partial(undisturbed, ranks=4, shards=4),
    "two by two": partial(undisturbed, ranks=4, shards=2),
    "a shard killed": partial(lambda run, **of: kill_ranks(run, "model-2", **of), ranks=4, shards=4),
    "a replica killed": partial(lambda run, **of: kill_ranks(run, "model-1", **of), ranks=4, shards=2),
    "two shards killed": partial(
        lambda run, **of: kill_ranks(run, "model-0", "model-3", **of), ranks=4, shards=4
    ),
    "resumed with one": partial(
        lambda run, **of: resume_with(run, "actor.layout.shards=1", **of), begun=layout(4, 4)
    ),
    "resumed with two": partial(
        lambda run, **of: resume_with(run, "actor.layout.shards=2", **of), begun=layout(4, 4)
    ),
    "two stages": partial(undisturbed, ranks=2, shards=1, stages=2),
    "two pipelines": partial(undisturbed, ranks=4, shards=1, stages=2),
    "stages of shards": partial(undisturbed, ranks=4, shards=2, stages=2),
    "a stage killed": partial(
        lambda run, **of: kill_ranks(run, "model-1", **of), ranks=2, shards=1, stages=2
    ),
    "the first stage killed": partial(
        lambda run, **of: kill_ranks(run, "model-0", **of), ranks=4, shards=1, stages=2
    ),
    "stages resumed with one": partial(
        lambda run, **of: resume_with(run, "actor.layout.stages=1", **of), begun=layout(2, 1, 2)
    ),
    "stages resumed with shards": partial(
        lambda run, **of: resume_with(run, "actor.layout.stages=1", "actor.layout.shards=2", **of),
        begun=layout(2, 1, 2),
    ),
    "shards resumed with stages": partial(
        lambda run, **of: resume_with(run, "actor.layout.stages=2", "actor.layout.shards=1", **of),
        begun=layout(2, 2),
    ),
}
LOST = {
    "a shard killed": {"model-2"},
    "a replica killed": {"model-1"},
    "two shards killed": {"model-0", "model-3"},
    "a stage killed": {"model-1"},
    "the first stage killed": {"model-0"},
}
TWINS = {
    "a replica killed": "two by two",
    "a stage killed": "two stages",
    "the first stage killed": "two pipelines",
}
"""Undisturbed runs with the same layout; "four shards" for the others."""


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(SCENARIOS, request, tmp_path_factory.mktemp("sharded"), at_once=1)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "one rank"])
def test_the_weights_are_those_of_one_rank(name: str, run_of: Callable[[str], Run]) -> None:
    run, twin = run_of(name), run_of("one rank")
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)


@pytest.mark.parametrize("name", list(LOST))
def test_only_the_lost_ranks_are_replaced_and_every_step_has_the_state_of_the_twin(
    name: str, run_of: Callable[[str], Run]
) -> None:
    run = run_of(name)
    joined = run.pids_joined()
    again = {process for process, pids in joined.items() if len(pids) > 1}
    assert again == LOST[name], joined
    assert any(isinstance(fact, IncidentClosed) for fact in run.facts), "the kill was an incident"
    twin = run_of(TWINS.get(name, "four shards"))
    assert digests(run) == digests(twin)


def digests(run: Run) -> dict[int, str]:
    return {fact.step: fact.state_digest for fact in run.facts if isinstance(fact, StepCommitted)}


def test_a_checkpoint_of_boxes_has_a_model_folder_with_the_bits_of_the_others(
    run_of: Callable[[str], Run],
) -> None:
    whole, cut = (latest(run_of(name).run_dir / "checkpoints") for name in ("one rank", "four shards"))
    assert whole is not None and cut is not None
    names = sorted(path.name for path in cut.path.glob("trainer-*"))
    assert names == [f"trainer-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    theirs, ours = load_file(whole.path / "model.safetensors"), load_file(cut.path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    load(cut.path)
