"""The buddy copy: what ranks of another host gave this agent, so that the loss of their whole host loses no step.

The states of the latest two steps are kept, in the agent's own memory: one that is prepared may never be committed. All
ranks hold the same state, so it does not matter whose it was. They are given back piece by piece, as a replica would
give them; who fetches one verifies it again. Copying and hashing take place in the agent's own loop, which answers
nobody else meanwhile.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import xxhash

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.messages import Body, Ok, WeightsFetched
from kintsugi.operations import FetchState, KeepState, StateFetched
from kintsugi.transport import Blob, Delivery, Endpoint, chunks
from kintsugi.types import Role, role_of

NUM_STEPS = 2


class Keeper:
    """`keep` what a rank sends, `answer` who asks for it."""

    def __init__(self, *, capacity: int) -> None:
        """`capacity` is the most bytes of one state; a larger one is refused before memory is taken for it."""
        self._capacity = capacity
        self._kept: dict[int, tuple[StateFetched, memoryview]] = {}

    def handle(self, delivery: Delivery, *, endpoint: Endpoint) -> None:
        """Carry out a request of a rank, and answer it. A rank gives nobody's state but its own."""
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
        """Take over a rank's latest state; one that was damaged on the way leaves what is there.

        It may be of an earlier step than the last: a run that went back trains those steps again, and those that were
        later are worth nothing.
        """
        manifest = request.state.manifest
        size = sum(piece.size for piece in manifest.pieces)
        if not 0 < size <= self._capacity or any(piece.size < 0 for piece in manifest.pieces):
            raise RefusedError(
                f"state of {request.owner}: expected 1 to {self._capacity} bytes, got a manifest of {size}"
            )
        buffer = memoryview(mmap.mmap(-1, size))
        end = 0
        for blob in blobs:
            data = memoryview(blob).cast("B")
            if end + data.nbytes > size:
                raise IntegrityError(f"state of {request.owner}: expected {size} bytes, got more")
            buffer[end : end + data.nbytes] = data
            end += data.nbytes
        if end != size:
            raise IntegrityError(f"state of {request.owner}: expected {size} bytes, got {end}")
        _verify(request, buffer)
        earlier = sorted(step for step in self._kept if step < manifest.step)[1 - NUM_STEPS :]
        self._kept = {step: self._kept[step] for step in earlier}
        self._kept[manifest.step] = (request.state, buffer)

    def answer(self, request: FetchState) -> tuple[Body, Sequence[Blob]]:
        """The manifest, or the bytes of the pieces asked for."""
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
        if request.step not in self._kept:
            there = ", ".join(str(step) for step in self._kept) or "none"
            raise RefusedError(f"no state of step {request.step} is kept; there are: {there}")
        return self._kept[request.step]


def _verify(request: KeepState, buffer: memoryview) -> None:
    for piece, start in zip(request.state.manifest.pieces, _packed_offsets(request.state), strict=True):
        found = xxhash.xxh3_64_hexdigest(buffer[start : start + piece.size])
        if found != piece.digest:
            raise IntegrityError(
                f"state of {request.owner}: expected {piece.name} with xxh3 {piece.digest}, got {found}"
            )


def _packed_offsets(state: StateFetched) -> list[int]:
    """Where each piece begins in the stream, which has no gaps; the manifest's own offsets have."""
    offsets, end = [], 0
    for piece in state.manifest.pieces:
        offsets.append(end)
        end += piece.size
    return offsets
