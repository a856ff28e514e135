"""Copies of a state are made beside it, and are whole or not there."""

from __future__ import annotations

import threading

import pytest
import torch

from kintsugi.checkpoint.snapshot import Snapshots, Status
from kintsugi.errors import IntegrityError
from kintsugi.training import copies as module
from kintsugi.training.copies import Counters, StateCopies, digest_of, reference_digest
from tests.unit.training.fakes import FakeSegments

LARGE = module.INLINE_BYTES // 4


def new_copies(numel: int) -> tuple[torch.Tensor, Snapshots, StateCopies]:
    live = torch.arange(3 * numel, dtype=torch.float32).view(3, numel)
    snapshots = Snapshots("model-0", size=live.nbytes, segments=None)
    return live, snapshots, StateCopies(live, snapshots=snapshots)


@pytest.mark.parametrize("numel", [8, LARGE])
def test_a_prepared_copy_is_committed_by_one_byte_and_loads_the_same_bits(numel: int) -> None:
    live, snapshots, copies = new_copies(numel)
    counters = Counters(1, "grpo", 1)
    digest = copies.prepare(counters)
    copies.settle()
    assert [slot.status for slot in snapshots.slots] == [Status.PREPARED, Status.EMPTY]
    copies.commit()
    assert snapshots.expect(1, digest=digest).updates == 1
    expected = live.clone()
    live.add_(1.0)
    copies.load()
    assert torch.equal(live, expected) and copies.digest(counters) == digest


def test_two_steps_take_turns_in_the_slots() -> None:
    live, snapshots, copies = new_copies(8)
    for step in (1, 2, 3):
        live.add_(1.0)
        copies.prepare(Counters(step))
        copies.commit()
    assert sorted(slot.header.step for slot in snapshots.slots if slot.header) == [2, 3]


def test_the_slot_says_writing_until_copy_and_digest_are_both_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _, snapshots, copies = new_copies(LARGE)
    go_on, seen = threading.Event(), []
    transfer = module._Copy._transfer

    def slow(copy: module._Copy) -> None:
        assert go_on.wait(10)
        transfer(copy)

    monkeypatch.setattr(module._Copy, "_transfer", slow)
    copies.prepare(Counters(1))
    seen.append(snapshots.slots[0].status)
    go_on.set()
    copies.settle()
    seen.append(snapshots.slots[0].status)
    assert seen == [Status.WRITING, Status.PREPARED]


def test_a_commit_does_not_wait_for_the_copy_and_counts_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, snapshots, copies = new_copies(LARGE)
    go_on, seen = threading.Event(), []
    transfer = module._Copy._transfer

    def slow(copy: module._Copy) -> None:
        assert go_on.wait(10)
        transfer(copy)

    monkeypatch.setattr(module._Copy, "_transfer", slow)
    digest = copies.prepare(Counters(1))
    copies.commit()
    seen.append(snapshots.slots[0].status)
    go_on.set()
    copies.settle()
    seen.append(snapshots.slots[0].status)
    assert seen == [Status.WRITING, Status.COMMITTED]
    assert snapshots.expect(1).digest == digest
    assert copies.committed is not None and torch.equal(copies.committed, live)


def test_a_copy_that_fails_raises_where_it_is_waited_for_and_leaves_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, snapshots, copies = new_copies(LARGE)

    def broken(copy: module._Copy) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module._Copy, "_transfer", broken)
    copies.prepare(Counters(1))
    copies.commit()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copies.settle()
    assert snapshots.slots[0].header is None


def test_a_state_with_the_wrong_digest_changes_neither_the_live_nor_the_committed_one() -> None:
    live, snapshots, copies = new_copies(8)
    copies.prepare(Counters(1))
    copies.commit()
    before = live.clone()
    with pytest.raises(IntegrityError, match="expected feed"):
        copies.fill(Counters(2), lambda view: view.zero_(), digest="feed")
    assert torch.equal(live, before)
    assert snapshots.expect(1).digest == digest_of(Counters(1), live)


def test_who_reads_a_slot_learns_that_it_was_overtaken() -> None:
    _, _, copies = new_copies(LARGE)
    assert copies.latest() is None
    digest = copies.prepare(Counters(1))
    latest = copies.latest()
    assert latest is not None
    header = latest[1]
    before = header()
    assert before is not None and before.digest == digest
    copies.commit()
    copies.prepare(Counters(2))
    copies.commit()
    assert header() == before
    copies.prepare(Counters(3))
    assert header() != before


def test_the_reference_of_an_earlier_stage_stays_until_the_next_one_is_committed() -> None:
    live, segments = torch.zeros(3, 4), FakeSegments()
    copies = StateCopies(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))

    def references() -> list[str]:
        return sorted(name.rpartition("-")[2] for name in segments.names() if "reference" in name)

    weights = torch.ones(4)
    first, second = (Counters(1, stage, reference=reference_digest(weights)) for stage in ("a", "b"))
    copies.fill(first, lambda view: view.zero_(), reference=weights)
    copies.keep_reference(second, weights)
    copies.prepare(second)
    assert references() == ["a", "b"]
    copies.commit()
    copies.forget_references("b")
    assert references() == ["b"]
    segments.close()
