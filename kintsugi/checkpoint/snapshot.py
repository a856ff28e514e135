"""Snapshots of a rank's latest steps in memory that outlives the process: slots, held by the host's agent.

    snapshot/model-0/0            | status | header | weights, moments, … |
    snapshot/model-0/1            | status | header | weights, moments, … |
    snapshot/model-0/2            the same, added by the first save if the host has memory for it
    snapshot/model-0/reference-S  | status | header | the reference weights of stage S |

One slot holds the committed step. The next step is prepared in the other slot, and a write of one byte commits it. At
whatever point the process is killed, the committed step is there, perhaps the prepared next one as well, and a slot
that was being written is marked as such:

    EMPTY ──► WRITING ──► PREPARED ──► COMMITTED ──► WRITING (the step after the next)

The status is a single byte, because a longer one could be half written. Everything else is written while the status is
WRITING, and the header has a checksum. While a save reads the committed slot, a third slot lets the steps after it take
turns in the other two. Without an agent, or if the agent has no memory left, the slots are private
memory and end with the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import Protocol

import msgspec
import xxhash

from kintsugi.errors import RefusedError, WorldError
from kintsugi.model.seats import holder_of

HEADER_BYTES = 4096
"""Size of the header; the payload therefore begins on a page boundary."""
NUM_SLOTS = 2
"""Slots that every rank has. One more may be added."""
_KIND = "snapshot"
"""First part of the names of all slots."""
_LENGTH_AT, _CHECKSUM_AT, _HEADER_AT = 4, 8, 16


class SnapshotSegments(Protocol):
    """Shared memory of this host (`cluster.shared_memory.SegmentClient`)."""

    def create(self, name: str, size: int) -> int: ...

    def open(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...


class SlotStatus(IntEnum):
    """State of a slot's payload."""

    EMPTY = 0
    WRITING = 1
    PREPARED = 2
    COMMITTED = 3


class SlotHeader(msgspec.Struct, frozen=True):
    """Description of a slot's payload: the counters of `training.snapshots.CopyCounters`, and its digest."""

    step: int
    stage: str
    updates: int
    skipped: int
    digest: str
    serial: int
    """Write counter of all slots. It orders two states of one step: starting a stage changes the state only."""
    reference: str = ""
    critic_updates: int = 0
    critic_skipped: int = 0
    box: str = ""
    """Part of the state that the payload is; empty for all of it."""


class SnapshotSlot:
    """One snapshot in memory: `begin`, write `payload`, `prepare`, `commit`."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.payload = memory[HEADER_BYTES:]

    @property
    def status(self) -> SlotStatus:
        found = self._memory[0]
        return SlotStatus(found) if found <= SlotStatus.COMMITTED else SlotStatus.EMPTY

    @property
    def header(self) -> SlotHeader | None:
        """Header of a complete payload; None if the slot is empty or was only partly written."""
        if self.status not in (SlotStatus.PREPARED, SlotStatus.COMMITTED):
            return None
        length = int.from_bytes(self._memory[_LENGTH_AT:_CHECKSUM_AT], "little")
        content = bytes(self._memory[_HEADER_AT : _HEADER_AT + min(length, HEADER_BYTES - _HEADER_AT)])
        if xxhash.xxh3_64_digest(content) != bytes(self._memory[_CHECKSUM_AT:_HEADER_AT]):
            return None
        return msgspec.msgpack.decode(content, type=SlotHeader)

    def begin(self) -> None:
        """Mark the payload as invalid before it changes, until `prepare`."""
        self._memory[0] = SlotStatus.WRITING

    def prepare(self, header: SlotHeader) -> None:
        """Mark the payload as complete."""
        assert self.status is SlotStatus.WRITING
        content = msgspec.msgpack.encode(header)
        assert len(content) <= HEADER_BYTES - _HEADER_AT
        self._memory[_HEADER_AT : _HEADER_AT + len(content)] = content
        self._memory[_LENGTH_AT:_CHECKSUM_AT] = len(content).to_bytes(4, "little")
        self._memory[_CHECKSUM_AT:_HEADER_AT] = xxhash.xxh3_64_digest(content)
        self._memory[0] = SlotStatus.PREPARED

    def commit(self) -> None:
        """Mark the step as committed, once it is in the journal."""
        assert self.status in (SlotStatus.PREPARED, SlotStatus.COMMITTED)
        self._memory[0] = SlotStatus.COMMITTED

    def clear(self) -> None:
        self._memory[0] = SlotStatus.EMPTY


class Snapshots:
    """Slots of one process; a new incarnation finds the contents that its predecessor left."""

    def __init__(self, process: str, *, size: int, segments: SnapshotSegments | None) -> None:
        """`process`: the name under which the slots are kept. `size` is that of the payload. Contents of the previous
        incarnation are kept if they have the same size."""
        self.owner = process
        self._segments = segments
        self._references: dict[str, SnapshotSlot] = {}
        self.why_private = "" if segments is not None else "this host has no segment service"
        """Why the slots end with the process; empty if an agent holds them."""
        self._size = size
        names = [_slot_name(process, index) for index in range(NUM_SLOTS)]
        self.slots = tuple(self._slot(name, size=size) for name in names)
        if self._holds_third():
            self.add_slot()

    @property
    def next_serial(self) -> int:
        return 1 + max((header.serial for slot in self.slots if (header := slot.header)), default=0)

    def add_slot(self) -> SnapshotSlot | None:
        """Add a third slot, as durable as the others; None if the agent has no memory left for it."""
        assert len(self.slots) == NUM_SLOTS, "one slot is added at most"
        was_private = bool(self.why_private)
        slot = self._slot(_slot_name(self.owner, NUM_SLOTS), size=self._size)
        if self.why_private and not was_private:
            self.why_private = ""  # The other slots are still held by the agent.
            return None
        self.slots += (slot,)
        return slot

    def _holds_third(self) -> bool:
        """Whether the previous incarnation left a third slot, which may hold the committed step."""
        if self._segments is None or self.why_private:
            return False
        try:
            descriptor = self._segments.open(_slot_name(self.owner, NUM_SLOTS))
        except WorldError:
            return False
        os.close(descriptor)
        return True

    def expect(self, step: int, *, digest: str = "") -> SlotHeader:
        """Return the header of the slot that holds a step (see `find_slot`)."""
        return find_slot(self.slots, step, digest=digest)[1]

    def reference(self, stage: str, *, size: int) -> SnapshotSlot:
        """Slot of the reference weights of a stage."""
        if stage not in self._references:
            self._references[stage] = self._slot(_reference_name(self.owner, stage), size=size)
        return self._references[stage]

    def stored_reference(self, stage: str) -> SnapshotSlot:
        """The same slot, only if there is one."""
        if stage in self._references:
            return self._references[stage]
        if self._segments is None:
            raise RefusedError(f"there are no reference weights of stage {stage!r}")
        return _opened(_reference_name(self.owner, stage), segments=self._segments)

    def remove(self) -> None:
        """Give the memory of all slots back to the host; the process has another box now."""
        if self._segments is None:
            return
        names = [_slot_name(self.owner, index) for index in range(len(self.slots))]
        for name in (*names, *(_reference_name(self.owner, stage) for stage in self._references)):
            self._segments.remove(name)

    def has_references_besides(self, stages: set[str]) -> bool:
        """Whether `keep_references` would drop any."""
        return bool(self._references.keys() - stages)

    def keep_references(self, stages: set[str]) -> None:
        """Drop the reference weights of all other stages."""
        for stage in self._references.keys() - stages:
            del self._references[stage]
            if self._segments is not None:
                self._segments.remove(_reference_name(self.owner, stage))

    def _slot(self, name: str, *, size: int) -> SnapshotSlot:
        size += HEADER_BYTES
        if self._segments is not None and not self.why_private:
            try:
                return SnapshotSlot(_map(self._segments.create(name, size), size=size))
            except WorldError as error:
                self.why_private = str(error)
        return SnapshotSlot(memoryview(mmap.mmap(-1, size)))


class HeldSnapshots:
    """Snapshots of any process of this host, alive or dead, for reading; RefusedError if there are none.

    Their owner may be writing: a reader copies the payload first and then compares the digest of the copy.
    """

    def __init__(self, process: str, *, segments: SnapshotSegments) -> None:
        self._process = process
        self._segments = segments
        self.slots = tuple(self._open(_slot_name(process, index)) for index in range(NUM_SLOTS))
        with suppress(RefusedError):  # Most processes have no third slot.
            self.slots += (self._open(_slot_name(process, NUM_SLOTS)),)

    def expect(self, step: int, *, digest: str = "") -> SlotHeader:
        """Return the header of the slot that holds a step (see `find_slot`)."""
        return find_slot(self.slots, step, digest=digest)[1]

    def stored_reference(self, stage: str) -> SnapshotSlot:
        return self._open(_reference_name(self._process, stage))

    def _open(self, name: str) -> SnapshotSlot:
        return _opened(name, segments=self._segments)


def outdated(
    names: Iterable[str], *, segments: SnapshotSegments, before: int, living: Collection[str]
) -> list[str]:
    """Return which of a host's segments hold only snapshots of steps before this one, of processes that are not
    `living` here. A rank that died with the box of another mesh, or runs on another host now, has left them."""
    owned: dict[str, list[str]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0]
        if kind == _KIND and holder_of(owner) not in living:
            owned.setdefault(owner, []).append(name)
    found: list[str] = []
    for owner, own in owned.items():
        headers = [_opened(name, segments=segments).header for name in own if not _is_reference(owner, name)]
        if all(header is None or header.step < before for header in headers):
            found += own
    return found


def find_slot(
    slots: tuple[SnapshotSlot, ...], step: int, *, digest: str = ""
) -> tuple[SnapshotSlot, SlotHeader]:
    """Find the slot that holds a step, the later one if both do; with a digest only a slot with this digest.

    A prepared step is found as well: the caller knows that it was committed. RefusedError if there is none.
    """
    held = [(slot, header) for slot in slots if (header := slot.header)]
    found = [pair for pair in held if pair[1].step == step and digest in ("", pair[1].digest)]
    if not found:
        there = ", ".join(f"{header.step} ({header.digest})" for _, header in held) or "none"
        raise RefusedError(f"no snapshot of step {step} {digest or 'with any digest'}; there are: {there}")
    return max(found, key=lambda pair: pair[1].serial)


def _opened(name: str, *, segments: SnapshotSegments) -> SnapshotSlot:
    """A slot that exists; RefusedError if there is none of this name."""
    descriptor = segments.open(name)
    size = os.fstat(descriptor).st_size
    if size < HEADER_BYTES:
        os.close(descriptor)
        raise RefusedError(f"segment {name} of {size} bytes is no snapshot")
    return SnapshotSlot(_map(descriptor, size=size))


def _map(descriptor: int, *, size: int) -> memoryview:
    """Map shared memory and close the descriptor."""
    try:
        return memoryview(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


def _slot_name(process: str, index: int) -> str:
    return f"{_KIND}/{process}/{index}"


def _reference_name(process: str, stage: str) -> str:
    return f"{_KIND}/{process}/reference-{stage}"


def _is_reference(owner: str, name: str) -> bool:
    return name.startswith(_reference_name(owner, ""))
