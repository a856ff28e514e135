"""Snapshot slots: what a killed process leaves behind is recognised for what it is."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import xxhash

from kintsugi.checkpoint.snapshot import (
    HEADER_BYTES,
    HeldSnapshots,
    SlotHeader,
    SlotStatus,
    Snapshots,
    SnapshotSlot,
    find_slot,
    outdated,
)
from kintsugi.errors import RefusedError
from kintsugi.runtime.clock import random_stream
from tests.unit.training.fakes import FakeSegments

SIZE = 64


def header(step: int, *, serial: int, stage: str = "grpo", digest: str = "") -> SlotHeader:
    return SlotHeader(step, stage, updates=step, skipped=0, digest=digest or f"d{step}", serial=serial)


@pytest.fixture
def segments() -> Iterator[FakeSegments]:
    held = FakeSegments()
    yield held
    held.close()


def write(slot: SnapshotSlot, step: int, *, serial: int, digest: str = "", stage: str = "grpo") -> None:
    slot.begin()
    slot.payload[:4] = step.to_bytes(4, "little")
    slot.prepare(header(step, serial=serial, digest=digest, stage=stage))


def test_a_successor_finds_the_committed_step_and_the_prepared_one(segments: FakeSegments) -> None:
    mine = Snapshots("model-0", size=SIZE, segments=segments)
    write(mine.slots[0], 3, serial=1)
    mine.slots[0].commit()
    write(mine.slots[1], 4, serial=2)
    successor = Snapshots("model-0", size=SIZE, segments=segments)
    assert [slot.status for slot in successor.slots] == [SlotStatus.COMMITTED, SlotStatus.PREPARED]
    for step, slot in zip((3, 4), successor.slots, strict=True):
        found, found_header = find_slot(successor.slots, step)
        assert found is slot and found_header.step == step
        assert bytes(slot.payload[:4]) == step.to_bytes(4, "little")
    assert successor.next_serial == 3


def test_a_slot_that_was_being_written_is_not_used(segments: FakeSegments) -> None:
    mine = Snapshots("model-0", size=SIZE, segments=segments)
    write(mine.slots[0], 3, serial=1)
    mine.slots[0].begin()
    with pytest.raises(RefusedError, match="no snapshot of step 3"):
        find_slot(Snapshots("model-0", size=SIZE, segments=segments).slots, 3)


def test_a_header_that_was_cut_short_is_not_used() -> None:
    memory = memoryview(bytearray(HEADER_BYTES + SIZE))
    slot = SnapshotSlot(memory)
    write(slot, 3, serial=1)
    memory[20] ^= 0xFF
    assert slot.header is None


def test_a_slot_whose_status_means_nothing_is_empty() -> None:
    memory = memoryview(bytearray(HEADER_BYTES + SIZE))
    memory[0] = 77
    slot = SnapshotSlot(memory)
    assert (slot.status, slot.header) == (SlotStatus.EMPTY, None)


def test_of_two_states_of_one_step_the_later_is_meant_unless_the_digest_says_otherwise() -> None:
    slots = Snapshots("model-0", size=SIZE, segments=None).slots
    write(slots[0], 3, serial=2, stage="grpo", digest="new")
    write(slots[1], 3, serial=1, stage="sft", digest="old")
    assert find_slot(slots, 3)[1].stage == "grpo"
    assert find_slot(slots, 3, digest="old")[1].stage == "sft"
    with pytest.raises(RefusedError, match=r"no snapshot of step 3 other; there are: 3 \(new\), 3 \(old\)"):
        find_slot(slots, 3, digest="other")


@pytest.mark.parametrize("agent", ["gone", "none"])
def test_without_an_agent_the_slots_are_private_and_say_why(segments: FakeSegments, agent: str) -> None:
    segments.gone = agent == "gone"
    snapshots = Snapshots("model-0", size=SIZE, segments=segments if agent == "gone" else None)
    write(snapshots.slots[0], 1, serial=1)
    assert find_slot(snapshots.slots, 1)[1].step == 1
    assert (
        "agent of this host is gone" if agent == "gone" else "no segment service"
    ) in snapshots.why_private


def test_any_process_of_the_host_can_look_at_anothers_snapshots(segments: FakeSegments) -> None:
    mine = Snapshots("model-0", size=SIZE, segments=segments)
    write(mine.slots[1], 5, serial=1)
    assert HeldSnapshots("model-0", segments=segments).expect(5).digest == "d5"
    with pytest.raises(RefusedError, match="no segment snapshot/model-7/0"):
        HeldSnapshots("model-7", segments=segments)


def test_snapshots_that_only_lost_ranks_had_are_outdated_once_the_run_does_not_return_to_their_steps(
    segments: FakeSegments,
) -> None:
    for owner, steps in (
        ("model-0", (3, 4)),
        ("model-1", (3, 4)),
        ("model-2", (6, 7)),
        ("model-3@0-of-2x1x1", (3, 4)),
        ("model-0@0-of-2x1x1", (3, 4)),
    ):
        held = Snapshots(owner, size=SIZE, segments=segments)
        for serial, step in enumerate(steps):
            write(held.slots[serial], step, serial=serial + 1)
        write(held.reference("grpo", size=SIZE), 0, serial=0)
    torn = Snapshots("model-4", size=SIZE, segments=segments)
    torn.slots[0].begin()
    segments.create("weights", SIZE)

    def owners(*, before: int) -> set[str]:
        names = outdated(segments.names(), segments=segments, before=before, living={"model-0", "rollout-0"})
        assert all(name in segments.names() for name in names)
        assert "snapshot/model-1/reference-grpo" in names or before < 5
        return {name.split("/")[1] for name in names}

    assert owners(before=4) == {"model-4"}
    assert owners(before=5) == {"model-1", "model-3@0-of-2x1x1", "model-4"}
    assert owners(before=8) == {"model-1", "model-2", "model-3@0-of-2x1x1", "model-4"}


def test_reference_weights_of_earlier_stages_are_forgotten(segments: FakeSegments) -> None:
    mine = Snapshots("model-0", size=SIZE, segments=segments)
    for stage in ("first", "second"):
        mine.reference(stage, size=8)
    mine.keep_references({"second"})
    assert [name for name in segments.names() if "reference" in name] == ["snapshot/model-0/reference-second"]


WRITER = """
import mmap, sys, xxhash
from kintsugi.checkpoint.snapshot import SlotHeader, SnapshotSlot
slots = [SnapshotSlot(memoryview(mmap.mmap(int(fd), 0))) for fd in sys.argv[1:]]
for step in range(1, 1 << 30):
    slot = slots[step % 2]
    slot.begin()
    for start in range(0, len(slot.payload), 4096):
        slot.payload[start : start + 4096] = (step % 251).to_bytes(1, "little") * 4096
    slot.prepare(SlotHeader(step, "grpo", step, 0, xxhash.xxh3_64_hexdigest(slot.payload), step))
    slot.commit()
    if step == 2:
        print("going", flush=True)
"""


@pytest.mark.slow
def test_whenever_the_writer_is_killed_a_whole_step_is_there_and_nothing_half_written_passes_for_one() -> (
    None
):
    random = random_stream(5, "kills")
    found_writing = 0
    for _ in range(20):
        descriptors = [os.memfd_create("snapshot") for _ in range(2)]
        for descriptor in descriptors:
            os.ftruncate(descriptor, HEADER_BYTES + (1 << 20))
        command = [sys.executable, "-c", WRITER, *map(str, descriptors)]
        with subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"going\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(random.uniform(0.0, 0.02))
            writer.kill()
        slots = [SnapshotSlot(memoryview(mmap.mmap(descriptor, 0))) for descriptor in descriptors]
        whole = [(slot, header) for slot in slots if (header := slot.header)]
        assert whole
        assert all(xxhash.xxh3_64_hexdigest(slot.payload) == header.digest for slot, header in whole)
        found_writing += any(slot.status is SlotStatus.WRITING for slot in slots)
        for descriptor in descriptors:
            os.close(descriptor)
    assert found_writing > 0, "no kill came in the middle of a write"
