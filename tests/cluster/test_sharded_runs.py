"""Runs whose optimizer state is cut over the ranks: the layout changes no bit, nor does the loss of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from kintsugi.checkpoint.store import latest
from kintsugi.cluster.child import ChildrenTable
from kintsugi.journal.facts import IncidentClosed, ProcessJoined, RolledBack, StepCommitted, StrategyChosen
from kintsugi.model.huggingface import load
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_journal
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, Run, play_selected, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.sharding]

PARTS = "actor.logical_shards=4"
"""Of the batch: what the bits depend on."""
KILLED_AT = 5
ROLES = ("model-", "rollout-", "server-")
SMALLER, RETURN = 4, 6
"""Steps after which ranks are lost, and are taken back."""
LONGEST_S = 300.0
"""Runs of four ranks on two busy cores take a minute; this only bounds a broken one."""


ALGORITHMS = {
    "ppo": ("warmup=null", "algorithm.name=ppo", "algorithm.beta=0.05", "algorithm.updates_per_step=2"),
    "reward model": ("warmup=null", "algorithm.name=reward_model", "algorithm.group_size=2"),
}
"""Without a warm-up: critic and reference begin as the initial actor, which every rank has had whole."""


def layout(ranks: int, shards: int, stages: int = 1, gather: str = "step") -> tuple[str, ...]:
    return (
        f"actor.workers={ranks}",
        f"actor.layout.shards={shards}",
        f"actor.layout.stages={stages}",
        f"actor.layout.gather={gather}",
        PARTS,
    )


def play_losing(run: Run, *, lost: tuple[str, ...] = (), begun: tuple[str, ...]) -> None:
    """Play a run with a layout; the ranks of `lost` are killed in the middle."""
    run.longest_s = LONGEST_S
    run.start(*begun, gates=(KILLED_AT,) if lost else ())
    if lost:
        run.wait_at(KILLED_AT)
        for rank in lost:
            run.kill(rank)
        run.let_through(KILLED_AT)
    run.finish()


def undisturbed(run: Run, *more: str, ranks: int, shards: int, stages: int = 1, gather: str = "step") -> None:
    play_losing(run, begun=(*layout(ranks, shards, stages, gather), *more))


def kill_ranks(run: Run, *lost: str, ranks: int, shards: int, stages: int = 1, gather: str = "step") -> None:
    play_losing(run, lost=lost, begun=layout(ranks, shards, stages, gather))


def die_within_a_pass(run: Run) -> None:
    """The rank that first computes a loss of step 6 dies. Both have then begun to exchange the weights of a layer."""
    run.longest_s = LONGEST_S
    run.environment["KINTSUGI_TEST_DIE_IN"] = "kintsugi.training.objectives:PolicyGradient.loss:6"
    run.start(*layout(2, 2, gather="layer"))
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


def lose_a_host(run: Run) -> None:
    """The second of two hosts with all its processes, in one moment. No process is left that has its memory."""
    run.longest_s = LONGEST_S
    run.start(*layout(4, 2), "cluster.hosts=2", gates=(KILLED_AT,))
    run.wait_at(KILLED_AT)
    table = msgspec.json.decode(RunFolder(run.run_dir).agent_file("agent-1").read_bytes(), type=ChildrenTable)
    children = [child.process for child in table.children if child.process.startswith(ROLES)]
    assert {"model-2", "model-3"} <= set(children) and not {"model-0", "model-1"} & set(children)
    processes = read_journal(run.run_dir).processes
    for name in ("agent-1", *children):
        os.kill(processes[name], signal.SIGKILL)
    run.let_through(KILLED_AT)
    run.finish()


def lose_ranks_for_a_while(run: Run, *, lost: Sequence[str]) -> None:
    """Of four ranks with two parts, each part keeps a rank. New processes can not start while the run's configuration
    is out of reach."""
    run.longest_s = LONGEST_S
    run.start(*layout(4, 2), gates=(SMALLER, RETURN))
    run.wait_at(SMALLER)
    config, hidden = run.run_dir / "config.yaml", run.run_dir / "config.hidden"
    config.rename(hidden)
    for rank in lost:
        run.kill(rank)
    run.let_through(SMALLER)
    until(lambda: any(isinstance(fact, IncidentClosed) for fact in run.facts), "the run to go on smaller")
    run.wait_at(RETURN)
    hidden.rename(config)
    until(lambda: all(len(run.pids_joined()[rank]) == 2 for rank in lost), "the return of the lost ranks")
    run.let_through(RETURN)
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
    "a host lost": lose_a_host,
    "smaller by one": partial(lose_ranks_for_a_while, lost=("model-1",)),
    "smaller by two": partial(lose_ranks_for_a_while, lost=("model-1", "model-2")),
    "resumed with one": partial(
        lambda run, **of: resume_with(run, "actor.layout.shards=1", **of), begun=layout(4, 4)
    ),
    "resumed with two": partial(
        lambda run, **of: resume_with(run, "actor.layout.shards=2", **of), begun=layout(4, 4)
    ),
    "two shards by layer": partial(undisturbed, ranks=2, shards=2, gather="layer"),
    "four shards by layer": partial(undisturbed, ranks=4, shards=4, gather="layer"),
    "two by two by layer": partial(undisturbed, ranks=4, shards=2, gather="layer"),
    "a shard by layer killed": partial(
        lambda run, **of: kill_ranks(run, "model-2", **of), ranks=4, shards=4, gather="layer"
    ),
    "one of two killed while weights are on their way": die_within_a_pass,
    "by layer resumed by step": partial(
        lambda run, **of: resume_with(run, "actor.layout.gather=step", **of),
        begun=layout(2, 2, gather="layer"),
    ),
    "by step resumed by layer": partial(
        lambda run, **of: resume_with(run, "actor.layout.gather=layer", **of), begun=layout(2, 2)
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
for algorithm, settings in ALGORITHMS.items():
    SCENARIOS[f"{algorithm} on one rank"] = partial(
        lambda run, of: undisturbed(run, *of, ranks=1, shards=1), of=settings
    )
    SCENARIOS[f"{algorithm} by layer"] = partial(
        lambda run, of: undisturbed(run, *of, ranks=2, shards=2, gather="layer"), of=settings
    )
LOST = {
    "a shard killed": {"model-2"},
    "a replica killed": {"model-1"},
    "a shard by layer killed": {"model-2"},
    "two shards killed": {"model-0", "model-3"},
    "a stage killed": {"model-1"},
    "the first stage killed": {"model-0"},
    "a host lost": {"model-2", "model-3"},
    "smaller by one": {"model-1"},
    "smaller by two": {"model-1", "model-2"},
}
TWINS = {
    "a stage killed": "two stages",
    "the first stage killed": "two pipelines",
}
"""Undisturbed runs with the same layout, where it has stages."""


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return play_selected(SCENARIOS, request, tmp_path_factory.mktemp("sharded"), at_once=1)


OF_ALGORITHMS = [f"{name} {how}" for name in ALGORITHMS for how in ("on one rank", "by layer")]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_critic_a_reference_and_a_reward_model_have_the_bits_of_one_rank_by_layer(
    name: str, run_of: Callable[[str], Run]
) -> None:
    one, by_layer = (run_of(f"{name} {how}") for how in ("on one rank", "by layer"))
    assert by_layer.summary.weights_sha256 == one.summary.weights_sha256
    assert digests(by_layer).keys() == digests(one).keys()


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ("one rank", *OF_ALGORITHMS)])
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
    ranks = {process for process in again if process.startswith("model")}
    assert ranks == LOST[name], joined
    assert again == ranks or name == "a host lost", joined
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    assert any(isinstance(fact, IncidentClosed) for fact in run.facts), "the kill was an incident"
    twin = run_of(TWINS.get(name, "four shards" if "shard" in name else "two by two"))
    assert digests(run) == digests(twin)


def test_a_rank_that_is_lost_within_an_exchange_of_weights_is_replaced_alone(
    run_of: Callable[[str], Run],
) -> None:
    run = run_of("one of two killed while weights are on their way")
    died = int((run.gates / "died").read_text())
    again = {name: pids for name, pids in run.pids_joined().items() if len(pids) > 1}
    assert len(again) == 1 and died in next(iter(again.values())), again
    assert not any(isinstance(fact, RolledBack) for fact in run.facts), "no step is lost"
    assert digests(run) == digests(run_of("two shards"))


@pytest.mark.parametrize("name", ["smaller by one", "smaller by two"])
def test_the_ranks_that_are_left_go_on_while_each_part_has_one(
    name: str, run_of: Callable[[str], Run]
) -> None:
    facts = run_of(name).facts
    assert [fact.strategy for fact in facts if isinstance(fact, StrategyChosen)][-1] == "elastic"
    returned = max(i for i, fact in enumerate(facts) if isinstance(fact, ProcessJoined))
    committed = [i for i, fact in enumerate(facts) if isinstance(fact, StepCommitted)]
    chosen = max(i for i, fact in enumerate(facts) if isinstance(fact, StrategyChosen))
    assert any(chosen < i < returned for i in committed) and committed[-1] > returned


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
