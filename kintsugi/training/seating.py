"""A rank that takes another seat: its process goes on, with a fresh state for another box (`model/seats.py`).

The snapshots of the box that it had stay where they are, under a name of their own, until the group has committed
enough steps that it can not return to them. From them, and from those of other ranks, the new box is assembled
(`held_boxes.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import Config
from kintsugi.model.seats import Mesh, Seat, mesh_of, seat_of, snapshots_of
from kintsugi.protocol.recovery import MeshShape
from kintsugi.training.held_boxes import BoxForm, BoxReader, Fetch, KeptSnapshots
from kintsugi.training.rank_state import RankState

OpenState = Callable[[Mesh], RankState]
"""Open the state of this process for its seat in a mesh."""


class RankSeating:
    """Seat of one process, and the boxes that it can read besides its own."""

    def __init__(
        self,
        state: RankState,
        config: Config,
        *,
        process: str,
        segments: SnapshotSegments | None,
        open_state: OpenState,
        fetch: Fetch,
        changed: Callable[[RankState], None],
    ) -> None:
        """`changed` is called with a fresh state that has taken the place of the one before."""
        self._state, self._process = state, process
        self._configured = mesh_of(config.actor.layout)
        self._open_state, self._changed = open_state, changed
        self.boxes = BoxReader(KeptSnapshots(segments), fetch, self._form)

    def take_seat(self, shape: MeshShape | None, ranks: tuple[str, ...], *, step: int) -> RankState:
        mesh = self._configured
        if shape is not None:
            mesh = Mesh(shape.shards, shape.stages, shape.tensors, ranks)
        seat, state = seat_of(self._process, mesh), self._state
        if seat == state.seat:
            state.enter_mesh(mesh)
            return state
        if state.prepared_step == step:
            state.commit(step)
        last = state.committed_step
        self.boxes.kept.keep(state.release(), step=last)
        self.boxes.kept.take_back(snapshots_of(self._process, seat, self._configured))
        self._state = self._open_state(mesh)
        self._changed(self._state)
        return self._state

    def committed(self, step: int) -> None:
        """Forget what the group can not return to after this step."""
        self.boxes.kept.forget_before(step)

    def _form(self, seat: Seat) -> BoxForm:
        return self._state.form_of(seat)
