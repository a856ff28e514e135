"""Peer snapshots: training states of ranks of another host, held so that the loss of a whole host loses no step.

The states of the latest two steps are held in the agent's own memory, because a prepared step may never be committed.
All ranks hold the same state, so it does not matter which of them sent it. A state arrives and is returned piece by
piece; each is verified when it arrives, and again by its receiver. A message takes the agent's loop some milliseconds.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

from kintsugi.errors import DataDamaged, IntegrityError, RefusedError
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, KeepState, StateFetched
from kintsugi.protocol.weights import WeightsFetched
from kintsugi.runtime.digests import piece_digest
from kintsugi.transport import Blob, Delivery, Endpoint, chunks
from kintsugi.types import Role, role_of

NUM_STEPS = 2


@dataclass
class _Arriving:
    """A state of which pieces are missing."""

    owner: str
    state: StateFetched
    buffer: memoryview
    offsets: list[int]
    missing: set[int] = field(default_factory=set)


class PeerSnapshotStore:
    """Holds the latest states: `keep` stores pieces of one, `answer` returns them."""

    def __init__(self, *, capacity: int) -> None:
        """`capacity` is the maximum size of one state in bytes; a larger one is refused before memory is allocated."""
        self._capacity = capacity
        self._states: dict[int, tuple[StateFetched, memoryview]] = {}
        self._arriving: _Arriving | None = None

    def handle(self, delivery: Delivery, *, endpoint: Endpoint) -> None:
        """Carry out a request of a rank and answer it. A rank can only store its own state."""
        request, sender = delivery.body, delivery.envelope.sender
        try:
            if isinstance(request, KeepState):
                if request.owner != sender or role_of(sender) is not Role.MODEL:
                    raise RefusedError(f"{sender} can not give the state of {request.owner}")
                self.keep(request, delivery.blobs)
                endpoint.reply(delivery, Ok())
            else:
                assert isinstance(request, FetchState)
                body, blobs = self.answer(request)
                endpoint.reply(delivery, body, blobs=blobs)
        except (IntegrityError, RefusedError) as error:
            endpoint.fail(delivery, error)

    def keep(self, request: KeepState, blobs: Sequence[Blob]) -> None:
        """Store pieces of a rank's latest state; the last one completes it. A damaged piece is refused, and ends the
        copy; the states before stay.

        Its step may be earlier than the last one: after a rollback steps are trained again, and the later states are
        dropped.
        """
        arriving = self._arriving
        if arriving is None or (arriving.owner, arriving.state) != (request.owner, request.state):
            arriving = self._arriving = self._begin(request)
        try:
            self._take(arriving, request.pieces or tuple(range(len(arriving.offsets))), blobs)
        except (IntegrityError, RefusedError):
            self._arriving = None
            raise
        if arriving.missing:
            return
        self._arriving = None
        step = arriving.state.manifest.step
        earlier = sorted(other for other in self._states if other < step)[1 - NUM_STEPS :]
        self._states = {other: self._states[other] for other in earlier}
        self._states[step] = (arriving.state, arriving.buffer)

    def _begin(self, request: KeepState) -> _Arriving:
        manifest = request.state.manifest
        size = sum(piece.size for piece in manifest.pieces)
        if not 0 < size <= self._capacity or any(piece.size < 0 for piece in manifest.pieces):
            raise RefusedError(
                f"state of {request.owner}: expected 1 to {self._capacity} bytes, got a manifest of {size}"
            )
        self._arriving = None  # Its memory is freed before more is taken.
        buffer = memoryview(mmap.mmap(-1, size))
        offsets = _packed_offsets(request.state)
        return _Arriving(request.owner, request.state, buffer, offsets, set(range(len(offsets))))

    def _take(self, arriving: _Arriving, indices: Sequence[int], blobs: Sequence[Blob]) -> None:
        """Copy pieces, which the blobs contain one after the other, to their places, and verify them there."""
        owner, pieces = arriving.owner, arriving.state.manifest.pieces
        if any(not 0 <= index < len(pieces) for index in indices):
            raise RefusedError(f"state of {owner}: it has {len(pieces)} pieces, got {tuple(indices)}")
        targets = [
            arriving.buffer[arriving.offsets[index] : arriving.offsets[index] + pieces[index].size]
            for index in indices
        ]
        size, got = sum(map(len, targets)), sum(memoryview(blob).nbytes for blob in blobs)
        if size != got:
            raise IntegrityError(f"state of {owner}: expected {size} bytes, got {got}")
        _scatter(blobs, targets)
        for index, target in zip(indices, targets, strict=True):
            found = piece_digest(target)
            if found != pieces[index].digest:
                raise IntegrityError(
                    f"state of {owner}: expected {pieces[index].name} with xxh3 {pieces[index].digest}, got {found}",
                    detail=DataDamaged(owner),
                )
            arriving.missing.discard(index)

    def answer(self, request: FetchState) -> tuple[Body, Sequence[Blob]]:
        """Return the manifest, or the bytes of the requested pieces."""
        state, buffer = self._find(request)
        if not request.pieces:
            return state, ()
        offsets = _packed_offsets(state)
        frames: list[memoryview] = []
        for index in request.pieces:
            if not 0 <= index < len(offsets):
                raise RefusedError(f"the state has {len(offsets)} pieces, not one {index}")
            start = offsets[index]
            frames += chunks(buffer[start : start + state.manifest.pieces[index].size])
        return WeightsFetched(request.step), frames

    def _find(self, request: FetchState) -> tuple[StateFetched, memoryview]:
        if request.step not in self._states:
            there = ", ".join(str(step) for step in self._states) or "none"
            raise RefusedError(f"no state of step {request.step} is kept; there are: {there}")
        return self._states[request.step]


def _scatter(blobs: Sequence[Blob], targets: Sequence[memoryview]) -> None:
    """Copy the bytes of all blobs, one after the other, into the targets, which have the same size together."""
    ahead = [memoryview(blob).cast("B") for blob in reversed(blobs)]
    for target in targets:
        filled = 0
        while filled < len(target):
            source = ahead.pop()
            count = min(len(source), len(target) - filled)
            target[filled : filled + count] = source[:count]
            filled += count
            if count < len(source):
                ahead.append(source[count:])


def _packed_offsets(state: StateFetched) -> list[int]:
    """Offsets of the pieces in the stream, which has no gaps; the manifest's own offsets have."""
    offsets, end = [], 0
    for piece in state.manifest.pieces:
        offsets.append(end)
        end += piece.size
    return offsets
