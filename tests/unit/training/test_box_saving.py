"""A rank that saves a cut state has the other boxes written by ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.checkpoint.store import latest, load_checkpoint
from kintsugi.config.schema import ActorSection, Config, LayoutSection
from kintsugi.errors import Fault, ProcessDied, RefusedError, RemoteError
from kintsugi.model import huggingface
from kintsugi.protocol.membership import Failed
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import StateFetched
from kintsugi.protocol.training import PieceSaved, Save, Saved, SavePiece, StartStage
from kintsugi.transport import Reply
from kintsugi.types import WeightManifest
from tests.unit.cluster.delivering import Run, opened_run
from tests.unit.training.fakes import CONFIG, Rank


def config_of(ranks: int, shards: int) -> Config:
    actor = ActorSection(workers=ranks, logical_shards=4, layout=LayoutSection(shards=shards))
    return msgspec.structs.replace(CONFIG, actor=actor)


def ranks_of(ranks: int, shards: int) -> list[Rank]:
    """Ranks that have begun the first stage; the first one reaches the others."""
    config = config_of(ranks, shards)
    found = [Rank(f"model-{index}", config=config) for index in range(ranks)]
    for rank in found:
        rank.put(StartStage("warmup", 0))
    for rank in found[1:]:
        found[0].shell.peers[rank.shell.process] = writer(rank)
    return found


def writer(rank: Rank) -> Callable[[Body], Reply]:
    def answer(body: Body) -> Reply:
        rank.put(body)
        for thread in rank.worker._box_saver.threads:
            thread.join(10)
        reply = rank.shell.replies[-1]
        if isinstance(reply, Failed):
            raise RefusedError(reply.fault.message)
        return Reply(reply)

    return answer


def test_the_boxes_of_two_ranks_make_the_checkpoint_of_one(tmp_path: Path) -> None:
    first, _ = ranks_of(2, 2)
    (whole,) = ranks_of(1, 1)
    saved = first.ask(Save(0, "warmup", str(tmp_path / "cut")))
    assert isinstance(saved, Saved), saved
    twin = whole.ask(Save(0, "warmup", str(tmp_path / "whole")))
    assert isinstance(twin, Saved), twin
    ours, theirs = huggingface.load(Path(saved.path)), huggingface.load(Path(twin.path))
    for name, parameter in theirs.named_parameters():
        assert torch.equal(dict(ours.named_parameters())[name], parameter), name
    stored, extra = load_checkpoint(Path(saved.path))
    _, expected = load_checkpoint(Path(twin.path))
    assert extra == expected
    tensors = {name: torch.empty_like(tensor) for name, tensor in whole.state.snapshot_tensors().items()}
    stored.read(tensors)
    assert all(torch.equal(tensors[name], each) for name, each in whole.state.snapshot_tensors().items())


def test_a_box_whose_rank_is_gone_is_written_by_its_replica(tmp_path: Path) -> None:
    ranks = ranks_of(4, 2)

    def gone(body: Body) -> Reply:
        raise ProcessDied("model-1 is gone")

    ranks[0].shell.peers["model-1"] = gone
    saved = ranks[0].ask(Save(0, "warmup", str(tmp_path)))
    assert isinstance(saved, Saved), saved
    assert [process for process, body in ranks[0].shell.asked if isinstance(body, SavePiece)] == [
        "model-1",
        "model-3",
    ]
    load_checkpoint(Path(saved.path))


def test_a_save_without_a_writer_for_a_box_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = ranks_of(2, 2)
    second.state.begin_update()
    second.state.end_update(1)
    second.state.commit(1)
    second.state.begin_update()
    second.state.end_update(2)
    second.state.commit(2)
    refusal = first.refusal(Save(0, "warmup", str(tmp_path)))
    assert refusal.startswith("RefusedError: no rank has written box 1/2 of step 0: model-1: ")
    assert "no snapshot of step 0" in refusal
    assert latest(tmp_path) is None
    assert not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize("kind", ["StorageFull", "StorageError"])
def test_a_disk_that_does_not_take_a_box_is_told_as_such(tmp_path: Path, kind: str) -> None:
    """The last save of a run waits for space."""
    first, _ = ranks_of(2, 2)

    def full(body: Body) -> Reply:
        fault = Fault("id", kind, "model-1", "no space left on disk", 0.0)
        raise RemoteError(fault)

    first.shell.peers["model-1"] = full
    refusal = first.refusal(Save(0, "warmup", str(tmp_path)))
    assert refusal.startswith(f"{kind}: no rank has written box 1/2 of step 0: model-1: ")


def test_a_rank_that_has_gone_on_still_writes_the_step_before_the_last(tmp_path: Path) -> None:
    first, second = ranks_of(2, 2)
    second.state.begin_update()
    second.state.end_update(1)
    second.state.commit(1)
    assert isinstance(first.ask(Save(0, "warmup", str(tmp_path))), Saved)


def test_a_rank_writes_no_other_box_than_its_own(tmp_path: Path) -> None:
    _, second = ranks_of(2, 2)
    state = StateFetched(WeightManifest(0, 0, (), 0, ""), "warmup", 0, 0, box="0/2")
    assert "this rank holds box '1/2', not '0/2'" in second.refusal(SavePiece(str(tmp_path), state))


@pytest.mark.parametrize("shards", [2, 4])
def test_what_is_written_is_named_by_its_box(tmp_path: Path, shards: int) -> None:
    ranks = ranks_of(shards, shards)
    counters = ranks[-1].state.committed_counters
    box = f"{shards - 1}/{shards}"
    state = StateFetched(
        WeightManifest(0, 0, (), 0, ""), counters.stage, 0, 0, reference=counters.reference, box=box
    )
    reply = writer(ranks[-1])(SavePiece(str(tmp_path), state)).expect(PieceSaved)
    assert reply.name == f"trainer-{shards:05d}-of-{shards:05d}.safetensors"
    assert (tmp_path / reply.name).stat().st_size == reply.size


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with opened_run(tmp_path / "hosts", monkeypatch) as opened:
        yield opened


def ranks_on_hosts(run: Run, away: Iterable[int]) -> list[Rank]:
    """Four ranks with two parts; some of them on hosts that do not have the run folder."""
    config = config_of(4, 2)
    found = []
    for index in range(4):
        name = f"model-{index}"
        delivery = run.rank(name) if index in away else None
        rank = Rank(name, config=config, delivery=delivery)
        rank.shell.peers["agent-0"] = partial(run.ask, name)
        rank.put(StartStage("warmup", 0))
        found.append(rank)
    for rank in found[1:]:
        found[0].shell.peers[rank.shell.process] = writer(rank)
    return found


@pytest.mark.parametrize("away", [{0, 1}, {0}, {1}], ids=str)
def test_ranks_of_several_hosts_write_the_checkpoint_that_ranks_of_one_do(
    run: Run, tmp_path: Path, away: set[int]
) -> None:
    first, *_ = ranks_on_hosts(run, away)
    saved = first.ask(Save(0, "warmup", str(run.run_folder)))
    assert isinstance(saved, Saved), saved
    beside, *_ = ranks_of(4, 2)
    twin = beside.ask(Save(0, "warmup", str(tmp_path / "one")))
    assert isinstance(twin, Saved), twin
    assert saved.digest == twin.digest
    assert Path(saved.path) == run.run_folder / "step-000000"


def test_a_box_whose_rank_and_host_are_gone_is_brought_by_its_replica_on_another_host(run: Run) -> None:
    ranks = ranks_on_hosts(run, {1, 3})

    def gone(body: Body) -> Reply:
        raise ProcessDied("model-1 is gone")

    ranks[0].shell.peers["model-1"] = gone
    saved = ranks[0].ask(Save(0, "warmup", str(run.run_folder)))
    assert isinstance(saved, Saved), saved
    load_checkpoint(Path(saved.path))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_of_another_host_returns_to_the_box_of_a_checkpoint_and_fetches_no_other(
    run: Run, rank: int
) -> None:
    ranks = ranks_on_hosts(run, {0, 1, 3})
    saved = ranks[0].ask(Save(0, "warmup", str(run.run_folder)))
    assert isinstance(saved, Saved), saved
    name = f"model-{rank}"
    fresh = Rank(name, config=config_of(4, 2), seed=8, delivery=run.rank(name))
    fresh.shell.peers["agent-0"] = partial(run.ask, name)
    stored, counters = fresh.worker._load_state(0, saved.path)
    expected = ranks[rank].state
    fresh.state.restore(stored, counters=counters, stage=expected.stage, digest=expected.prepared_digest)
    assert fresh.state.prepared_digest == expected.prepared_digest
    fetched = {path.name for path in (run.rank(name).folder).rglob("trainer-*")}
    assert fetched == {"trainer-00002-of-00002.safetensors"}
