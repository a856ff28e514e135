"""Transfer of a rank's committed state to a rank that needs it: the serving side and the fetching side.

Neither side makes a copy of the state: it is offered from the snapshot slot of the one rank and received, piece by
piece, into a slot of the other. Separate from `peer_replication.py`, which `state.py` imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from kintsugi.bulk.client import BulkClient
from kintsugi.bulk.pull import Pull, Share
from kintsugi.bulk.server import BulkServer
from kintsugi.errors import RefusedError
from kintsugi.model.arrays import Array, is_on_accelerator, view_of
from kintsugi.model.seats import Seat
from kintsugi.model.tensor_file import TensorPlace, stored_dtype
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, StateFetched
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.digests import piece_digest
from kintsugi.training.held_boxes import BoxReader, read_box
from kintsugi.training.peer_replication import describe_state, piece_range, state_export
from kintsugi.training.rank_state import RankState
from kintsugi.training.snapshots import CopyCounters, counters_of, state_fetched
from kintsugi.transport import Reply

EXPORT = "state"
"""Name of the offer of this rank's committed state."""

Ask = Callable[[str, Body], Reply]
"""Send a request to a process and wait, with a deadline, for its reply."""


class StateSource:
    """Offers the committed state of this rank from its snapshot, while another rank fetches it."""

    def __init__(self, state: RankState, server: BulkServer, *, boxes: BoxReader) -> None:
        """`boxes`: those that this rank does not hold, of which this host has snapshots."""
        self._state = state
        self._server = server
        self._boxes = boxes
        self._served: StateFetched | None = None
        self._others: dict[tuple[str, str, int], StateFetched] = {}
        """Owner, box and step → what is offered of it."""

    def answer(self, request: FetchState) -> StateFetched:
        """Return the manifest, with an offer of the pieces."""
        if request.step == self._state.prepared_step:
            self._state.commit(request.step)  # Only committed steps are requested.
        counters, box = self._state.committed_counters, self._state.seat.box
        if request.owner and (request.box, request.step) != (box, counters.step):
            return self._held_box(request)
        if request.box != box:
            raise RefusedError(f"this rank holds box {box!r} of the state, not {request.box!r}")
        if request.step != counters.step:
            raise RefusedError(f"this replica has committed step {counters.step}, not {request.step}")
        if self._served is None or self._served.manifest.step != request.step:
            tensors = self._state.snapshot_tensors()
            manifest = describe_state(tensors, step=request.step)
            offer = self._server.offer(EXPORT, state_export(manifest, tensors))
            self._served = msgspec.structs.replace(state_fetched(manifest, counters, box=box), offer=offer)
        return self._served

    def _held_box(self, request: FetchState) -> StateFetched:
        """Offer a box from the snapshots of this host: of one that this rank held before, of a lost rank, or of its own
        predecessor, which a rank without a seat does not take over."""
        key = request.owner, request.box, request.step
        if key not in self._others:
            held = read_box(
                self._boxes.kept.find(request.owner),
                self._boxes.form(Seat.of(request.box)),
                step=request.step,
            )
            manifest = describe_state(held.tensors, step=request.step)
            name = f"{EXPORT}-{len(self._others)}"
            offer = self._server.offer(name, state_export(manifest, held.tensors))
            fetched = state_fetched(manifest, held.counters, box=request.box)
            self._others[key] = msgspec.structs.replace(fetched, offer=offer)
        return self._others[key]

    def forget(self) -> None:
        """End the transfer; a rank that is still fetching is refused and starts again."""
        if self._served is not None:
            self._server.withdraw(EXPORT)
        self._served = None

    def forget_others(self) -> None:
        """End the transfers of other boxes: a step is committed with the boxes that were assembled from them."""
        for other in self._others.values():
            assert other.offer is not None
            self._server.withdraw(other.offer.export)
        self._others = {}


@dataclass(slots=True)
class StateFetcher:
    """Fetches states from replicas and keepers."""

    client: BulkClient
    ask: Ask
    check: Callable[[], object]
    """Called while waiting; raises if the fetch has to be given up."""
    interrupted_step: int = -1
    """Step of a fetch that has failed: pieces that it left are not fetched again."""

    def open(
        self, step: int, *, replica: str, owner: str = "", box: str = ""
    ) -> tuple[FetchedState, CopyCounters]:
        """Open the committed state of `step`, or a box of it, at a replica, or at the agent that keeps it for
        `owner`."""
        state = self.ask(replica, FetchState(step, owner=owner, box=box)).expect(StateFetched)
        if state.offer is None or state.offer.process != replica:
            raise RefusedError(f"{replica} does not offer its state of step {step}")
        return FetchedState(state, replica=replica, fetcher=self), counters_of(state)


class FetchedState:
    """State of a replica or a keeper, of which the manifest has arrived; `read` fetches the pieces into their place."""

    def __init__(self, state: StateFetched, *, replica: str, fetcher: StateFetcher) -> None:
        self._state, self._replica, self._fetcher = state, replica, fetcher
        self.box, self.has_any_box = state.box, False
        sizes: dict[str, int] = {}
        for piece in state.manifest.pieces:
            sizes[piece.name] = sizes.get(piece.name, 0) + piece.size
        self.places: Mapping[str, TensorPlace] = {
            piece.name: TensorPlace(piece.name, stored_dtype(piece.dtype), piece.shape, 0, sizes[piece.name])
            for piece in state.manifest.pieces
        }

    def read(
        self,
        into: Mapping[str, Array],
        *,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Fill tensors of the same names, dtypes and shapes; every piece is verified."""
        # Pieces arrive in host memory. Reference weights on a device are the only ones that need memory in between.
        targets = {name: _in_host_memory(array) for name, array in into.items()}
        views = {name: view_of(tensor) for name, tensor in targets.items()}
        pieces, offer, fetcher = self._state.manifest.pieces, self._state.offer, self._fetcher
        assert offer is not None
        step = self._state.manifest.step

        def place(index: int) -> memoryview:
            start, stop = piece_range(pieces[index])
            return views[pieces[index].name][start:stop]

        is_resumed, fetcher.interrupted_step = fetcher.interrupted_step == step, step
        missing = [
            index
            for index, piece in enumerate(pieces)
            if not (is_resumed and piece_digest(place(index)) == piece.digest)
        ]
        Pull(
            dict(enumerate(pieces)),
            [Share(self._replica, (self._replica,), tuple(missing))],
            into=place,
            locate=lambda process: offer,
            client=fetcher.client,
            what=f"the state of step {step}",
            check=fetcher.check,
        ).run()
        fetcher.interrupted_step = -1
        COUNTERS.add("state_bytes_fetched", sum(pieces[index].size for index in missing))
        for name, array in into.items():
            if targets[name] is not array:
                array[...] = targets[name]


def _in_host_memory(array: Any) -> Array:
    """An array itself, or a copy of a tensor on an accelerator."""
    return array.cpu() if is_on_accelerator(array) else array
