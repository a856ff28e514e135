"""Peer snapshots: training states of ranks of another host, held so that the loss of a whole host loses no step.

The states of the latest two steps are held in the agent's own memory, because a prepared step may never be committed.
All ranks hold the same state, or the same box of it, so it does not matter which of them sent it. A background thread
fetches a state from the rank that offers it; every piece is verified when it arrives, and again by the rank that
fetches it from here. The boxes of a state are held independently of each other.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.bulk.exports import FileExport
from kintsugi.bulk.pull import Pull, Share
from kintsugi.errors import KintsugiError, RefusedError
from kintsugi.process.loop_calls import LoopCalls
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, KeepState, StateFetched
from kintsugi.transport import Delivery
from kintsugi.types import Role, role_of

NUM_STEPS = 2


class Replies(Protocol):
    """The part of an endpoint that answers requests."""

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> object: ...


@dataclass(eq=False)
class _State:
    """Memory of one state, without the gaps that the manifest has between its pieces."""

    state: StateFetched
    descriptor: int
    buffer: memoryview
    places: dict[int, tuple[int, int]]

    @classmethod
    def create(cls, state: StateFetched, *, size: int) -> _State:
        descriptor = os.memfd_create("kintsugi-peer-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            buffer = memoryview(mmap.mmap(descriptor, size))
        except OSError:
            os.close(descriptor)
            raise
        places, end = {}, 0
        for index, piece in enumerate(state.manifest.pieces):
            places[index] = end, piece.size
            end += piece.size
        return cls(state, descriptor, buffer, places)


class PeerSnapshotStore:
    """Holds the latest states. It belongs to the agent's loop, and never blocks it for a transfer."""

    def __init__(self, replies: Replies, bulk: BulkEndpoint, calls: LoopCalls, *, capacity: int) -> None:
        """`capacity` is the maximum size of one state in bytes; a larger one is refused before memory is allocated."""
        self._replies = replies
        self._bulk = bulk
        self._calls = calls
        self._capacity = capacity
        self._states: dict[tuple[str, int], _State] = {}
        """Box and step → its state."""
        self._arriving: dict[str, _State] = {}
        """Box → the state that is being fetched."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of which states, or boxes of them, are held."""
        return tuple(dict.fromkeys(step for _, step in self._states))

    def handle(self, delivery: Delivery) -> None:
        """Carry out a request of a rank. A rank can only store its own state."""
        request, sender = delivery.body, delivery.envelope.sender
        try:
            if isinstance(request, KeepState):
                if request.owner != sender or role_of(sender) is not Role.MODEL:
                    raise RefusedError(f"{sender} can not give the state of {request.owner}")
                self._begin(delivery, request)
            else:
                assert isinstance(request, FetchState)
                self._replies.reply(delivery, self._offered(request))
        except (KintsugiError, OSError) as error:
            self._replies.fail(delivery, error)

    def forget_before(self, step: int) -> None:
        """Drop the states of earlier steps: the latest ones of boxes that no rank has any more, and those that ranks
        have begun to send to another agent."""
        for box, held in tuple(self._states):
            if held < step:
                self._drop(box, held)

    def close(self) -> None:
        self._arriving.clear()
        for key in tuple(self._states):
            self._drop(*key)

    def _begin(self, delivery: Delivery, request: KeepState) -> None:
        """Fetch a state in the background. It replaces one that is still arriving; those before stay."""
        manifest, offer, owner = request.state.manifest, request.state.offer, request.owner
        box = request.state.box
        size = sum(piece.size for piece in manifest.pieces)
        if not 0 < size <= self._capacity or any(piece.size < 0 for piece in manifest.pieces):
            raise RefusedError(
                f"state of {owner}: expected 1 to {self._capacity} bytes, got a manifest of {size}"
            )
        if offer is None or offer.process != owner:
            raise RefusedError(f"{owner} offered no state of step {manifest.step}")
        self._arriving.pop(box, None)  # Its fetch ends at the next check, and its memory is free then.
        arriving = self._arriving[box] = _State.create(request.state, size=size)

        def place(index: int) -> memoryview:
            start, length = arriving.places[index]
            return arriving.buffer[start : start + length]

        def check() -> None:
            if self._arriving.get(box) is not arriving:
                raise RefusedError(f"the state of step {manifest.step} was given up for another one")

        pull = Pull(
            dict(enumerate(manifest.pieces)),
            [Share(owner, (owner,), tuple(range(len(manifest.pieces))))],
            into=place,
            locate=lambda process: offer,
            client=self._bulk.client,
            what=f"the state of {owner}",
            check=check,
        )

        def work() -> None:
            error: Exception | None = None
            try:
                pull.run()
            except Exception as failure:  # noqa: BLE001 - the thread's outermost boundary: the loop answers with it.
                error = failure
            self._calls.run(lambda: self._arrived(delivery, arriving, error))

        threading.Thread(target=work, name="peer-snapshot", daemon=True).start()

    def _arrived(self, delivery: Delivery, arriving: _State, error: Exception | None) -> None:
        """Hold a state that is whole and verified. Its step may be earlier than the last one: after a rollback steps
        are trained again, and the later states are dropped."""
        box = arriving.state.box
        if self._arriving.get(box) is arriving:
            del self._arriving[box]
        elif error is None:
            error = RefusedError("a later state has replaced this one")
        if error is not None:
            os.close(arriving.descriptor)
            self._replies.fail(delivery, error)
            return
        step = arriving.state.manifest.step
        held = [other for each, other in self._states if each == box]
        earlier = sorted(other for other in held if other < step)[1 - NUM_STEPS :]
        for other in held:
            if other not in earlier:
                self._drop(box, other)
        self._states[box, step] = self._offer(arriving)
        self._replies.reply(delivery, Ok())

    def _offer(self, arriving: _State) -> _State:
        """Offer a state from here."""
        export = FileExport(arriving.places, arriving.buffer, descriptor=arriving.descriptor, is_whole=True)
        name = f"state-{arriving.state.manifest.step}"
        if arriving.state.box:
            name += f"-{arriving.state.box.replace('/', '-of-')}"
        offer = self._bulk.server.offer(name, export)
        arriving.state = msgspec.structs.replace(arriving.state, offer=offer)
        return arriving

    def _offered(self, request: FetchState) -> StateFetched:
        found = self._states.get((request.box, request.step))
        if found is None:
            there = (
                ", ".join(" of box ".join(filter(None, (str(s), box))) for box, s in self._states) or "none"
            )
            which = f"box {request.box} of the state" if request.box else "state"
            raise RefusedError(f"no {which} of step {request.step} is kept; there are: {there}")
        return found.state

    def _drop(self, box: str, step: int) -> None:
        dropped = self._states.pop((box, step))
        assert dropped.state.offer is not None
        self._bulk.server.withdraw(dropped.state.offer.export)
        os.close(dropped.descriptor)
