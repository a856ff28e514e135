"""Copies of a state are made beside it, and are whole or not there."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch

from kintsugi.checkpoint.snapshot import HeldSnapshots, SlotHeader, SlotStatus, Snapshots
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.training import snapshots as module
from kintsugi.training.snapshots import CopyCounters, StateSnapshots, digest_of, reference_digest
from tests.unit.training.fakes import FakeSegments

LARGE = module.INLINE_BYTES // 4


def new_copies(numel: int) -> tuple[torch.Tensor, Snapshots, StateSnapshots]:
    live = torch.arange(3 * numel, dtype=torch.float32).view(3, numel)
    snapshots = Snapshots("model-0", size=live.nbytes, segments=None)
    return live, snapshots, StateSnapshots(live, snapshots=snapshots)


@pytest.mark.parametrize("numel", [8, LARGE])
def test_a_prepared_copy_is_committed_by_one_byte_and_loads_the_same_bits(numel: int) -> None:
    live, snapshots, copies = new_copies(numel)
    counters = CopyCounters(1, "grpo", 1)
    digest = copies.prepare(counters)
    copies.settle()
    assert [slot.status for slot in snapshots.slots] == [SlotStatus.PREPARED, SlotStatus.EMPTY]
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
        copies.prepare(CopyCounters(step))
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
    copies.prepare(CopyCounters(1))
    seen.append(snapshots.slots[0].status)
    go_on.set()
    copies.settle()
    seen.append(snapshots.slots[0].status)
    assert seen == [SlotStatus.WRITING, SlotStatus.PREPARED]


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
    digest = copies.prepare(CopyCounters(1))
    copies.commit()
    seen.append(snapshots.slots[0].status)
    go_on.set()
    copies.settle()
    seen.append(snapshots.slots[0].status)
    assert seen == [SlotStatus.WRITING, SlotStatus.COMMITTED]
    assert snapshots.expect(1).digest == digest
    assert copies.committed is not None and torch.equal(copies.committed, live)


def test_a_copy_that_fails_raises_where_it_is_waited_for_and_leaves_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, snapshots, copies = new_copies(LARGE)

    def broken(copy: module._Copy) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(module._Copy, "_transfer", broken)
    copies.prepare(CopyCounters(1))
    copies.commit()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copies.settle()
    assert snapshots.slots[0].header is None


@pytest.mark.parametrize("size", [8, LARGE], ids=["inline", "in a thread"])
@pytest.mark.parametrize("error", [MemoryError("no memory left"), OSError("the segment is gone")], ids=repr)
def test_any_exception_of_a_copy_raises_where_it_is_waited_for(
    error: Exception, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, copies = new_copies(size)

    def broken(copy: module._Copy) -> None:
        raise error

    monkeypatch.setattr(module._Copy, "_transfer", broken)
    copies.prepare(CopyCounters(1))
    with pytest.raises(type(error), match=str(error)):
        copies.settle()


def test_a_slot_that_cannot_be_marked_as_whole_raises_where_the_copy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, snapshots, copies = new_copies(LARGE)
    transfer, marked = module._Copy._transfer, threading.Event()

    def slow(copy: module._Copy) -> None:
        assert marked.wait(10)
        transfer(copy)

    def broken(header: SlotHeader) -> None:
        raise OSError("the segment is gone")

    monkeypatch.setattr(module._Copy, "_transfer", slow)
    monkeypatch.setattr(snapshots.slots[0], "prepare", broken)
    copies.prepare(CopyCounters(1))
    copies.commit()
    marked.set()
    with pytest.raises(OSError, match="the segment is gone"):
        copies.settle()
    assert snapshots.slots[0].header is None, "a slot that is not whole is not committed"


def test_a_state_with_the_wrong_digest_changes_neither_the_live_nor_the_committed_one() -> None:
    live, snapshots, copies = new_copies(8)
    copies.prepare(CopyCounters(1))
    copies.commit()
    before = live.clone()
    with pytest.raises(IntegrityError, match="expected feed"):
        copies.fill(CopyCounters(2), lambda view: view.zero_(), digest="feed")
    assert torch.equal(live, before)
    assert snapshots.expect(1).digest == digest_of(CopyCounters(1), live)


def test_a_reader_that_yields_gives_its_slot_up_to_the_step_after_the_next() -> None:
    _, snapshots, copies = new_copies(LARGE)
    assert copies.hold_latest(1) is None
    digest = copies.prepare(CopyCounters(1))
    latest = copies.hold_latest(1)
    assert latest is not None
    _, header, hold = latest
    before = header()
    assert before is not None and before.digest == digest
    copies.commit()
    copies.prepare(CopyCounters(2))
    copies.commit()
    assert (header(), bool(hold.revoked)) == (before, False)
    copies.prepare(CopyCounters(3))
    assert hold.revoked
    with pytest.raises(RefusedError, match="the peer copy of step 1 was given up: step 3 needs its memory"):
        hold.check()
    assert snapshots.slots[0].header == before, "it is overwritten when the reader has let go"
    hold.release()
    copies.settle()
    assert snapshots.expect(3).serial == 3


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without memory for a third slot."""
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 0)


def train(live: torch.Tensor, copies: StateSnapshots, steps: Iterable[int]) -> dict[int, str]:
    """Change, prepare and commit; return the digests by step."""
    digests = {}
    for step in steps:
        copies.settle()
        live.add_(1.0)
        digests[step] = copies.prepare(CopyCounters(step))
        copies.commit()
    copies.settle()
    return digests


@pytest.mark.parametrize("numel", [8, LARGE])
def test_training_goes_on_for_any_number_of_steps_while_one_is_saved(numel: int) -> None:
    live, snapshots, copies = new_copies(numel)
    train(live, copies, [1])
    saved, await_copy, hold = copies.hold_committed(1)
    await_copy()
    before = saved.clone()
    for step in range(2, 12):
        digests = train(live, copies, [step])
        assert snapshots.expect(step, digest=digests[step]).step == step
    assert torch.equal(saved, before) and snapshots.expect(1).step == 1
    assert hold.stalled_s == 0.0
    hold.release()
    train(live, copies, [12, 13])
    rested = snapshots.slots[2].header
    train(live, copies, [14, 15, 16])
    assert rested is not None and snapshots.slots[2].header == rested, "without a save two slots take turns"


def test_a_successor_finds_the_step_that_was_committed_in_the_third_slot() -> None:
    live, segments = torch.zeros(3, 4), FakeSegments()
    copies = StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))
    train(live, copies, [1])
    copies.hold_committed(1)
    digests = train(live, copies, [2, 3])
    assert Snapshots("model-0", size=live.nbytes, segments=segments).slots[2].header is not None
    for step, digest in digests.items():
        held = HeldSnapshots("model-0", segments=segments)
        assert held.expect(step, digest=digest).step == step
        fresh = torch.zeros(3, 4)
        successor = StateSnapshots(fresh, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))
        if step == 3:
            assert successor.adopt(step, digest=digest).step == 3
            assert torch.equal(fresh, live)
            slots = Snapshots("model-0", size=live.nbytes, segments=segments).slots
            assert [slot.header.step for slot in slots if slot.header] == [3], (
                "no other step is left to be mistaken"
            )
    segments.close()


def test_without_memory_at_the_agent_there_is_no_third_slot_and_the_two_stay_durable() -> None:
    class Full(FakeSegments):
        def create(self, name: str, size: int) -> int:
            if name.endswith("/2"):
                raise RefusedError("segment snapshot/model-0/2 of 4144 bytes does not fit")
            return super().create(name, size)

    live, segments = torch.zeros(3, 4), Full()
    snapshots = Snapshots("model-0", size=live.nbytes, segments=segments)
    copies = StateSnapshots(live, snapshots=snapshots)
    train(live, copies, [1])
    copies.hold_committed(1)
    assert len(snapshots.slots) == 2 and not snapshots.why_private
    segments.close()


@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize("numel", [8, LARGE])
def test_a_held_slot_is_not_overwritten_and_training_goes_on_until_it_would_change_the_live_state(
    numel: int,
) -> None:
    live, snapshots, copies = new_copies(numel)
    copies.prepare(CopyCounters(1))
    copies.commit()
    saved, await_copy, hold = copies.hold_committed(1)
    await_copy()
    before = saved.clone()
    for step in (2, 3):
        copies.settle()
        live.add_(1.0)
        copies.prepare(CopyCounters(step))
        copies.commit()
    assert torch.equal(saved, before) and snapshots.expect(1).step == 1
    assert snapshots.expect(2).step == 2, "the step before stays as well"
    with pytest.raises(RefusedError, match="no snapshot of step 3"):
        snapshots.expect(3)

    class GivenUp(Exception):
        pass

    def interrupt() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        copies.settle(interrupt)
    timer = threading.Timer(0.05, hold.release)
    timer.start()
    copies.settle()
    timer.join()
    assert snapshots.expect(3).step == 3 and torch.equal(saved, live)
    assert hold.stalled_s > 0.0


@pytest.mark.usefixtures("short_of_memory")
def test_a_prepared_copy_that_waits_for_a_save_is_dropped_without_waiting() -> None:
    live, _, copies = new_copies(LARGE)
    for step in (1, 2):
        copies.settle()
        live.add_(1.0)
        copies.prepare(CopyCounters(step))
        copies.commit()
        if step == 1:
            saved, _, hold = copies.hold_committed(1)
    copies.settle()
    before, committed = saved.clone(), live.clone()
    live.add_(1.0)
    copies.prepare(CopyCounters(3))
    copies.drop_prepared()
    copies.load()
    assert torch.equal(live, committed) and torch.equal(saved, before)
    assert not hold.revoked, "the step that is saved has not been undone"
    hold.release()


def test_a_save_is_given_up_when_the_state_is_replaced() -> None:
    live, _, copies = new_copies(8)
    copies.prepare(CopyCounters(1))
    copies.commit()
    _, _, hold = copies.hold_committed(1)
    noticed: list[str] = []

    def save() -> None:
        while not noticed:
            try:
                hold.check()
            except RefusedError as error:
                noticed.append(str(error))
        hold.release()

    saver = threading.Thread(target=save)
    saver.start()
    copies.fill(CopyCounters(5), lambda view: view.fill_(7.0))
    saver.join(10)
    assert noticed == ["the save of step 1 was given up: the state of this rank was replaced"]
    assert torch.equal(live, torch.full_like(live, 7.0))


def test_the_reference_of_an_earlier_stage_stays_until_the_next_one_is_committed() -> None:
    live, segments = torch.zeros(3, 4), FakeSegments()
    copies = StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))

    def references() -> list[str]:
        return sorted(name.rpartition("-")[2] for name in segments.names() if "reference" in name)

    weights = torch.ones(4)
    first, second = (CopyCounters(1, stage, reference=reference_digest(weights)) for stage in ("a", "b"))
    copies.fill(first, lambda view: view.zero_(), reference=weights)
    copies.keep_reference(second, weights)
    copies.prepare(second)
    assert references() == ["a", "b"]
    copies.commit()
    copies.forget_references("b")
    assert references() == ["b"]
    segments.close()


def left_snapshots(numel: int, segments: FakeSegments) -> tuple[torch.Tensor, str]:
    """The state of steps 1 and 2, as a process that was killed left them; the digest of the second."""
    live = torch.arange(numel, dtype=torch.float32)
    copies = StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))
    digest = ""
    for step in (1, 2):
        live.add_(1.0)
        digest = copies.prepare(CopyCounters(step))
        copies.commit()
        copies.settle()
    return live, digest


def successor(numel: int, segments: FakeSegments) -> tuple[torch.Tensor, StateSnapshots]:
    live = torch.zeros(numel)
    return live, StateSnapshots(live, snapshots=Snapshots("model-0", size=live.nbytes, segments=segments))


@pytest.mark.parametrize("numel", [8, LARGE])
def test_a_successor_that_loads_the_newest_snapshot_in_advance_adopts_it(numel: int) -> None:
    segments = FakeSegments()
    expected, digest = left_snapshots(numel, segments)
    live, copies = successor(numel, segments)
    copies.begin_load()
    assert copies.adopt(2, digest=digest) == CopyCounters(2)
    assert torch.equal(live, expected) and copies.digest(CopyCounters(2)) == digest
    segments.close()


def test_a_snapshot_that_was_loaded_in_advance_is_verified_in_the_live_state() -> None:
    segments = FakeSegments()
    _, digest = left_snapshots(LARGE, segments)
    live, copies = successor(LARGE, segments)
    copies.begin_load()
    assert copies._loading is not None
    copies._loading.finish()
    live[0] += 1.0
    with pytest.raises(IntegrityError, match="the snapshot of step 2 hashes to"):
        copies.adopt(2, digest=digest)
    segments.close()


def test_a_repair_from_another_step_or_source_replaces_what_was_loaded_in_advance() -> None:
    segments = FakeSegments()
    expected, _ = left_snapshots(LARGE, segments)
    live, copies = successor(LARGE, segments)
    copies.begin_load()
    assert copies.adopt(1, digest="") == CopyCounters(1)
    assert torch.equal(live, expected - 1.0)
    live, copies = successor(LARGE, segments)
    copies.begin_load()
    copies.fill(CopyCounters(5), lambda view: view.fill_(7.0))
    assert torch.equal(live, torch.full_like(live, 7.0))
    segments.close()
