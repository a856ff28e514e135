"""A rank that takes another seat: its process goes on, with a fresh state for another box (`model/seats.py`).

The snapshots of the box that it had stay where they are, under a name of their own, until the group has committed
enough steps that it can not return to them. From them, and from those of other ranks, the new box is assembled
(`held_boxes.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.checkpoint.snapshot import NUM_SLOTS, SnapshotSegments
from kintsugi.config.schema import Config
from kintsugi.errors import DoesNotFit, Unfit
from kintsugi.model.seats import Mesh, Seat, mesh_of, seat_of, snapshots_of
from kintsugi.protocol.recovery import MeshShape
from kintsugi.telemetry.collect.cgroups import available_memory_bytes
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
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """`changed` is called with a fresh state that has taken the place of the one before. `available_bytes`: memory
        of the host that the process may still use."""
        self._available_bytes = available_bytes
        self._state, self._process = state, process
        self._configured = mesh_of(config.actor.layout)
        self._gathers_layers = config.actor.layout.gathers_layers
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
        self._check_memory(seat)
        if state.prepared_step == step:
            state.commit(step)
        last = state.committed_step
        self.boxes.kept.keep(
            state.release(), step=max(last, step)
        )  # A replacement has committed nothing itself.
        self.boxes.kept.take_back(snapshots_of(self._process, seat, self._configured))
        try:
            self._state = self._open_state(mesh)
        except Unfit:
            raise
        except Exception as error:  # Whatever it is: the state before is gone.
            raise Unfit(
                f"box {seat.box!r} could not be opened after the one before was given up: {error}"
            ) from error
        self._changed(self._state)
        return self._state

    def _check_memory(self, seat: Seat) -> None:
        """Raise DoesNotFit, before anything is changed, if the box of this seat would not fit: its snapshots need
        memory beside those of the box before, what the rank computes with takes the place of the one before."""
        state = self._state
        now, then = state.form_of(state.seat), state.form_of(seat)
        gathers = self._gathers_layers
        in_place = then.num_bytes(gathers_layers=gathers) - now.num_bytes(gathers_layers=gathers)
        if in_place <= 0:
            return
        snapshots = NUM_SLOTS * then.box.size * then.like.itemsize
        on_device, on_host = state.free_device_bytes, self._available_bytes()
        if on_device is None:
            snapshots += in_place
        elif in_place > on_device:
            raise DoesNotFit(
                f"box {seat.box!r} needs {in_place} bytes more on the device of {self._process} than box "
                f"{state.seat.box!r}, {on_device} are free"
            )
        if snapshots > on_host:
            raise DoesNotFit(
                f"box {seat.box!r} needs {snapshots} bytes more on the host of {self._process} than box "
                f"{state.seat.box!r}, {on_host} are available"
            )

    def committed(self, step: int) -> None:
        """Forget what the group can not return to after this step."""
        self.boxes.kept.forget_before(step)

    def _form(self, seat: Seat) -> BoxForm:
        return self._state.form_of(seat)
