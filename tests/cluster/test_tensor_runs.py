"""Runs whose models are cut into logical tensor slices: neither the number of ranks that share them, nor the loss of
one, changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from kintsugi.checkpoint.store import latest
from kintsugi.journal.facts import IncidentClosed, RolledBack, StepCommitted
from kintsugi.run_folder.reader import read_journal
from kintsugi.telemetry.events import Span, read_events
from kintsugi.weights.transports.stream import HOLD_TIMEOUT_S
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, Run, play_selected, until
from tests.cluster.test_sharded_runs import KILLED_AT, LONGEST_S, play_losing, resume_with

AGENT, SERVER = "agent-0", "server-0"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]


def layout(*, tensors: int = 1, stages: int = 1, shards: int = 1, replicas: int = 1) -> tuple[str, ...]:
    return (
        f"actor.workers={tensors * stages * shards * replicas}",
        f"actor.layout.tensors={tensors}",
        f"actor.layout.stages={stages}",
        f"actor.layout.shards={shards}",
        "actor.logical_slices=2",
        "actor.logical_shards=2",
    )


def lose_agent_and_server(run: Run) -> None:
    """Kill the agent to which the ranks have uploaded their slices, and then a server that has to load them again."""
    run.longest_s = LONGEST_S
    run.start(*layout(tensors=2), "generation.servers=1", gates=(KILLED_AT,))
    run.wait_at(KILLED_AT)
    before = read_journal(run.run_dir).processes[AGENT]
    run.kill(AGENT)
    until(lambda: read_journal(run.run_dir).processes[AGENT] != before, "the successor of the agent")
    run.kill(SERVER)
    run.wait_for_line("is admitted", file="events/manager-0.jsonl")
    run.let_through(KILLED_AT)
    run.finish()


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "one rank": partial(play_losing, begun=layout()),
    "two tensors": partial(play_losing, begun=layout(tensors=2)),
    "two replicas of tensors": partial(play_losing, begun=layout(tensors=2, replicas=2)),
    "tensors of stages": partial(play_losing, begun=layout(tensors=2, stages=2)),
    "shards of tensors": partial(play_losing, begun=layout(tensors=2, shards=2)),
    "a tensor rank killed": partial(play_losing, lost=("model-1",), begun=layout(tensors=2)),
    "its agent and a server killed": lose_agent_and_server,
    "resumed without": lambda run: resume_with(run, "actor.layout.tensors=1", begun=layout(tensors=2)),
    "resumed with two": lambda run: resume_with(run, "actor.layout.tensors=2", begun=layout(replicas=2)),
}


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(SCENARIOS, request, tmp_path_factory.mktemp("tensors"), at_once=1)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "one rank"])
def test_the_weights_are_those_of_one_rank_with_as_many_slices(
    name: str, run_of: Callable[[str], Run]
) -> None:
    run, twin = run_of(name), run_of("one rank")
    assert run.summary.weights_sha256 == twin.summary.weights_sha256
    assert_trained_exactly_once(run, last_step=LAST_STEP)


def test_only_the_lost_rank_of_a_layer_is_replaced(run_of: Callable[[str], Run]) -> None:
    run, twin = run_of("a tensor rank killed"), run_of("two tensors")
    joined = run.pids_joined()
    assert {process for process, pids in joined.items() if len(pids) > 1} == {"model-1"}, joined
    assert any(isinstance(fact, IncidentClosed) for fact in run.facts), "the kill was an incident"
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    ours, theirs = (
        {fact.step: fact.state_digest for fact in each.facts if isinstance(fact, StepCommitted)}
        for each in (run, twin)
    )
    assert ours == theirs


def test_a_server_does_not_wait_for_slices_that_were_uploaded_to_an_agent_that_is_gone(
    run_of: Callable[[str], Run],
) -> None:
    run = run_of("its agent and a server killed")
    joined = run.pids_joined()
    assert {process for process, pids in joined.items() if len(pids) > 1} == {AGENT, SERVER}, joined
    fetched = [
        record.event.duration_s
        for record in read_events(run.run_dir, process=SERVER)
        if isinstance(record.event, Span) and record.event.name == "weights_fetch"
    ]
    assert fetched and max(fetched) < HOLD_TIMEOUT_S / 2, fetched


def test_a_checkpoint_of_slices_has_a_model_folder_with_the_bits_of_the_other(
    run_of: Callable[[str], Run],
) -> None:
    whole, cut = (latest(run_of(name).run_dir / "checkpoints") for name in ("one rank", "two tensors"))
    assert whole is not None and cut is not None
    theirs, ours = load_file(whole.path / "model.safetensors"), load_file(cut.path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
