"""Transfer of a rank's committed state to a rank that needs it: the serving side and the fetching side.

Neither side makes a copy of the state: it is served from the snapshot slot of the one rank and written, piece by piece,
into a slot of the other. Separate from `peer_replication.py`, which `state.py` imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kintsugi.errors import RefusedError
from kintsugi.model.arrays import Array, is_on_accelerator, view_of
from kintsugi.model.tensor_file import TensorPlace, stored_dtype
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import FetchState, StateFetched
from kintsugi.protocol.weights import WeightsFetched
from kintsugi.runtime.counters import COUNTERS
from kintsugi.training.peer_replication import describe_state, piece_bytes, piece_range
from kintsugi.training.rank_state import RankState
from kintsugi.training.snapshots import CopyCounters, counters_of, state_fetched
from kintsugi.transport import Blob, Reply, chunks
from kintsugi.types import Piece, StreamSource, WeightManifest
from kintsugi.weights.transports.stream import Pull, StreamAnswered

Ask = Callable[[str, Body], Reply]
"""Send a request to a process and wait, with a deadline, for its reply."""


class StateSource:
    """Serves the committed state of this rank from its snapshot, while another rank fetches it."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._served: tuple[WeightManifest, Mapping[str, Array]] | None = None

    def answer(self, request: FetchState) -> tuple[Body, Sequence[Blob]]:
        """Return the manifest, or the bytes of the requested pieces."""
        if request.pieces:
            return WeightsFetched(request.step), self._frames(request)
        if request.step == self._state.prepared_step:
            self._state.commit(request.step)  # Only committed steps are requested.
        counters = self._state.committed_counters
        if request.step != counters.step:
            raise RefusedError(f"this replica has committed step {counters.step}, not {request.step}")
        if self._served is None or self._served[0].step != request.step:
            tensors = self._state.snapshot_tensors()
            self._served = describe_state(tensors, step=request.step), tensors
        return state_fetched(self._served[0], counters), ()

    def forget(self) -> None:
        """End the transfer; a rank that is still fetching is refused and starts again."""
        self._served = None

    def _frames(self, request: FetchState) -> list[memoryview]:
        if self._served is None or self._served[0].step != request.step:
            raise RefusedError(f"this replica does not serve the state of step {request.step} any more")
        manifest, tensors = self._served
        if not all(0 <= index < len(manifest.pieces) for index in request.pieces):
            raise RefusedError(f"the state has {len(manifest.pieces)} pieces, got {request.pieces}")
        pieces = [manifest.pieces[index] for index in request.pieces]
        return [frame for piece in pieces for frame in chunks(piece_bytes(tensors[piece.name], piece))]


class FetchedState:
    """State of a replica or a keeper, of which the manifest has arrived; `read` fetches the pieces into their place."""

    def __init__(self, manifest: WeightManifest, *, replica: str, owner: str, ask: Ask) -> None:
        self._manifest, self._replica, self._owner, self._ask = manifest, replica, owner, ask
        sizes: dict[str, int] = {}
        for piece in manifest.pieces:
            sizes[piece.name] = sizes.get(piece.name, 0) + piece.size
        self.places: Mapping[str, TensorPlace] = {
            piece.name: TensorPlace(piece.name, stored_dtype(piece.dtype), piece.shape, 0, sizes[piece.name])
            for piece in manifest.pieces
        }

    def read(self, into: Mapping[str, Array]) -> None:
        """Fill tensors of the same names, dtypes and shapes; every piece is verified."""
        # Pieces arrive in host memory. Reference weights on a device are the only ones that need memory in between.
        targets = {name: _in_host_memory(array) for name, array in into.items()}
        views = {name: view_of(tensor) for name, tensor in targets.items()}

        def place(piece: Piece) -> memoryview:
            start, stop = piece_range(piece)
            COUNTERS.add("state_bytes_fetched", piece.size)
            return views[piece.name][start:stop]

        Pull(
            self._manifest,
            StreamSource(self._replica),
            into=place,
            send_request=lambda process, request, _: StreamAnswered(
                self._ask(process, FetchState(self._manifest.step, request.pieces, self._owner))
            ),
        ).run()
        for name, array in into.items():
            if targets[name] is not array:
                array[...] = targets[name]


def _in_host_memory(array: Any) -> Array:
    """An array itself, or a copy of a tensor on an accelerator."""
    return array.cpu() if is_on_accelerator(array) else array


def fetch_state(step: int, *, replica: str, ask: Ask, owner: str = "") -> tuple[FetchedState, CopyCounters]:
    """Open the committed state of `step` at a replica, or at the agent that keeps it for `owner`."""
    reply = ask(replica, FetchState(step, owner=owner)).expect(StateFetched)
    return FetchedState(reply.manifest, replica=replica, owner=owner, ask=ask), counters_of(reply)
