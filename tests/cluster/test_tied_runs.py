"""Runs of a model whose output projection is its embedding, cut over pipeline stages: neither the layout nor the loss
of either end changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from kintsugi.checkpoint.store import latest
from kintsugi.journal.facts import IncidentClosed, RolledBack, StepCommitted
from kintsugi.model import huggingface
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, Run, play_selected
from tests.cluster.test_sharded_runs import play_losing, resume_with
from tests.unit.model.tied_model import write_tied_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]

MODEL = "model"


def layout(
    *, stages: int = 1, tensors: int = 1, shards: int = 1, slices: int = 1, dtype: str = "float32"
) -> tuple[str, ...]:
    """With a frozen reference, which both ends need too."""
    return (
        "model.new=null",
        f"model.path={MODEL}",
        "algorithm.beta=0.1",
        f"actor.workers={stages * tensors * shards}",
        f"actor.layout.stages={stages}",
        f"actor.layout.tensors={tensors}",
        f"actor.layout.shards={shards}",
        f"actor.logical_slices={slices}",
        "actor.logical_shards=2",
        f"actor.dtype={dtype}",
    )


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "one rank": partial(play_losing, begun=layout()),
    "two stages": partial(play_losing, begun=layout(stages=2)),
    "three stages": partial(play_losing, begun=layout(stages=3)),
    "stages of shards": partial(play_losing, begun=layout(stages=2, shards=2)),
    "the first stage killed": partial(play_losing, lost=("model-0",), begun=layout(stages=2)),
    "the last stage killed": partial(play_losing, lost=("model-1",), begun=layout(stages=2)),
    "a shard of the last stage killed": partial(
        play_losing, lost=("model-3",), begun=layout(stages=2, shards=2)
    ),
    "stages resumed with one rank": lambda run: resume_with(
        run, "actor.layout.stages=1", begun=layout(stages=2)
    ),
    "stages resumed with shards": lambda run: resume_with(
        run, "actor.layout.stages=1", "actor.layout.shards=2", begun=layout(stages=2)
    ),
    "shards resumed with stages": lambda run: resume_with(
        run, "actor.layout.stages=2", "actor.layout.shards=1", begun=layout(shards=2)
    ),
    "one rank in slices": partial(play_losing, begun=layout(slices=2)),
    "stages of tensors": partial(play_losing, begun=layout(stages=2, tensors=2, slices=2)),
    "a tensor rank of the first stage killed": partial(
        play_losing, lost=("model-1",), begun=layout(stages=2, tensors=2, slices=2)
    ),
    "one rank in bfloat16": partial(play_losing, begun=layout(dtype="bfloat16")),
    "two stages in bfloat16": partial(
        play_losing, lost=("model-0",), begun=layout(stages=2, dtype="bfloat16")
    ),
}
TWINS = {
    "stages of tensors": "one rank in slices",
    "a tensor rank of the first stage killed": "one rank in slices",
    "two stages in bfloat16": "one rank in bfloat16",
}
"""Undisturbed runs of one rank with the same bits; by default "one rank"."""
LOST = {
    "the first stage killed": ("model-0", "two stages"),
    "the last stage killed": ("model-1", "two stages"),
    "a shard of the last stage killed": ("model-3", "stages of shards"),
    "a tensor rank of the first stage killed": ("model-1", "stages of tensors"),
}
"""The lost rank, and an undisturbed run of the same layout."""


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    folder = tmp_path_factory.mktemp("tied")
    write_tied_model(folder / MODEL)
    return play_selected(SCENARIOS, request, folder, at_once=1)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("one rank")])
def test_the_weights_are_those_of_one_rank(name: str, run_of: Callable[[str], Run]) -> None:
    run, twin = run_of(name), run_of(TWINS.get(name, "one rank"))
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)


@pytest.mark.parametrize("name", list(LOST))
def test_only_the_lost_end_is_replaced_and_every_step_has_the_state_of_the_twin(
    name: str, run_of: Callable[[str], Run]
) -> None:
    lost, twin_name = LOST[name]
    run, twin = run_of(name), run_of(twin_name)
    joined = run.pids_joined()
    assert {process for process, pids in joined.items() if len(pids) > 1} == {lost}, joined
    assert any(isinstance(fact, IncidentClosed) for fact in run.facts), "the kill was an incident"
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    ours, theirs = (
        {fact.step: fact.state_digest for fact in each.facts if isinstance(fact, StepCommitted)}
        for each in (run, twin)
    )
    assert ours == theirs


def test_the_model_folder_of_a_checkpoint_has_one_copy_of_the_matrix(run_of: Callable[[str], Run]) -> None:
    whole, cut = (latest(run_of(name).run_dir / "checkpoints") for name in ("one rank", "two stages"))
    assert whole is not None and cut is not None
    theirs, ours = load_file(whole.path / "model.safetensors"), load_file(cut.path / "model.safetensors")
    assert theirs.keys() == ours.keys() and "lm_head.weight" not in ours
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert huggingface.load(cut.path).config.tie_embeddings
