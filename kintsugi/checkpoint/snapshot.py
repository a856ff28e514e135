"""A rank's latest steps in memory that outlives it: two slots, held by the node agent where there is one.

    snapshot/model-0/0            | status | header | weights, moments, … |
    snapshot/model-0/1            | status | header | weights, moments, … |
    snapshot/model-0/reference-S  | status | header | the reference weights of stage S |

One slot holds the committed step; the next step is prepared in the other, and committing it is one byte. So whenever
the process is killed, the committed step is there, possibly the prepared next one as well, and a slot that was being
written says so:

    EMPTY ──► WRITING ──► PREPARED ──► COMMITTED ──► WRITING (the step after the next)

The status is a single byte, because a longer one could be found half written. Everything else is written while the
status says WRITING, and the header is checksummed. Without an agent (or when it has no room) the slots are private
memory, with the same code; they then end with the process.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import Protocol

import msgspec
import xxhash

from kintsugi.errors import RefusedError, WorldError

HEADER_BYTES = 4096
"""Before the payload, which therefore begins with a page."""
NUM_SLOTS = 2
_LENGTH_AT, _CHECKSUM_AT, _HEADER_AT = 4, 8, 16


class Segments(Protocol):
    """Shared memory of this host (`cluster.segments.SegmentClient`)."""

    def create(self, name: str, size: int) -> int: ...

    def open(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...


class Status(IntEnum):
    """What a slot's payload is worth."""

    EMPTY = 0
    WRITING = 1
    PREPARED = 2
    COMMITTED = 3


class Header(msgspec.Struct, frozen=True):
    """What a slot holds: the counters of `training.state.Counters`, and how to recognise the bytes."""

    step: int
    stage: str
    updates: int
    skipped: int
    digest: str
    serial: int
    """Grows with every write of either slot: a stage that begins changes the state, but not the step."""
    reference: str = ""
    critic_updates: int = 0
    critic_skipped: int = 0


class Slot:
    """One snapshot in memory: `begin`, write `payload`, `prepare`, `commit`."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.payload = memory[HEADER_BYTES:]

    @property
    def status(self) -> Status:
        found = self._memory[0]
        return Status(found) if found <= Status.COMMITTED else Status.EMPTY

    @property
    def header(self) -> Header | None:
        """Of what is whole; None while there is nothing, or what is there was cut short."""
        if self.status not in (Status.PREPARED, Status.COMMITTED):
            return None
        length = int.from_bytes(self._memory[_LENGTH_AT:_CHECKSUM_AT], "little")
        content = bytes(self._memory[_HEADER_AT : _HEADER_AT + min(length, HEADER_BYTES - _HEADER_AT)])
        if xxhash.xxh3_64_digest(content) != bytes(self._memory[_CHECKSUM_AT:_HEADER_AT]):
            return None
        return msgspec.msgpack.decode(content, type=Header)

    def begin(self) -> None:
        """The payload is about to change; until `prepare` nobody may use it."""
        self._memory[0] = Status.WRITING

    def prepare(self, header: Header) -> None:
        """The payload is whole."""
        assert self.status is Status.WRITING
        content = msgspec.msgpack.encode(header)
        assert len(content) <= HEADER_BYTES - _HEADER_AT
        self._memory[_HEADER_AT : _HEADER_AT + len(content)] = content
        self._memory[_LENGTH_AT:_CHECKSUM_AT] = len(content).to_bytes(4, "little")
        self._memory[_CHECKSUM_AT:_HEADER_AT] = xxhash.xxh3_64_digest(content)
        self._memory[0] = Status.PREPARED

    def commit(self) -> None:
        """The prepared step is in the journal."""
        assert self.status in (Status.PREPARED, Status.COMMITTED)
        self._memory[0] = Status.COMMITTED

    def clear(self) -> None:
        self._memory[0] = Status.EMPTY


class Snapshots:
    """The slots of one process, as its present incarnation uses them; it may find what the last one left."""

    def __init__(self, process: str, *, size: int, segments: Segments | None) -> None:
        """`size` is that of the payload. What the last incarnation left is there if it had the same size."""
        self._process = process
        self._segments = segments
        self._references: dict[str, Slot] = {}
        self.why_private = "" if segments is not None else "this host has no segment service"
        """Why the slots end with the process; empty where an agent holds them."""
        names = [f"{_folder(process)}/{index}" for index in range(NUM_SLOTS)]
        self.slots = tuple(self._slot(name, size=size) for name in names)

    @property
    def next_serial(self) -> int:
        return 1 + max((header.serial for slot in self.slots if (header := slot.header)), default=0)

    def expect(self, step: int, *, digest: str = "") -> Header:
        """What the slot of a step holds (see `find_slot`)."""
        return find_slot(self.slots, step, digest=digest)[1]

    def reference(self, stage: str, *, size: int) -> Slot:
        """Where the reference weights of a stage lie."""
        if stage not in self._references:
            self._references[stage] = self._slot(_reference_name(self._process, stage), size=size)
        return self._references[stage]

    def keep_references(self, stages: set[str]) -> None:
        """Forget those of all other stages."""
        for stage in self._references.keys() - stages:
            del self._references[stage]
            if self._segments is not None:
                self._segments.remove(_reference_name(self._process, stage))

    def _slot(self, name: str, *, size: int) -> Slot:
        size += HEADER_BYTES
        if self._segments is not None and not self.why_private:
            try:
                return Slot(_map(self._segments.create(name, size), size=size))
            except WorldError as error:
                self.why_private = str(error)
        return Slot(memoryview(mmap.mmap(-1, size)))


class HeldSnapshots:
    """Those of any process of this host, living or dead, for reading; RefusedError where there are none.

    Their owner may be writing: what is read here has to be copied first and its digest compared then.
    """

    def __init__(self, process: str, *, segments: Segments) -> None:
        self._process = process
        self._segments = segments
        self.slots = tuple(self._open(f"{_folder(process)}/{index}") for index in range(NUM_SLOTS))

    def expect(self, step: int, *, digest: str = "") -> Header:
        """What the slot of a step holds (see `find_slot`)."""
        return find_slot(self.slots, step, digest=digest)[1]

    def reference(self, stage: str) -> Slot:
        return self._open(_reference_name(self._process, stage))

    def _open(self, name: str) -> Slot:
        descriptor = self._segments.open(name)
        size = os.fstat(descriptor).st_size
        if size < HEADER_BYTES:
            os.close(descriptor)
            raise RefusedError(f"segment {name} of {size} bytes is no snapshot")
        return Slot(_map(descriptor, size=size))


def find_slot(slots: tuple[Slot, ...], step: int, *, digest: str = "") -> tuple[Slot, Header]:
    """The slot that holds a step, the later one if both do; with a digest only the one that is said to hash to it.

    A prepared step counts as well: whoever asks knows that it was committed. RefusedError if there is none.
    """
    held = [(slot, header) for slot in slots if (header := slot.header)]
    found = [pair for pair in held if pair[1].step == step and digest in ("", pair[1].digest)]
    if not found:
        there = ", ".join(f"{header.step} ({header.digest})" for _, header in held) or "none"
        raise RefusedError(f"no snapshot of step {step} {digest or 'with any digest'}; there are: {there}")
    return max(found, key=lambda pair: pair[1].serial)


def _map(descriptor: int, *, size: int) -> memoryview:
    """Map shared memory and let go of the descriptor."""
    try:
        return memoryview(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)


def _folder(process: str) -> str:
    return f"snapshot/{process}"


def _reference_name(process: str, stage: str) -> str:
    return f"{_folder(process)}/reference-{stage}"
