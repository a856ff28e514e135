"""Checkpoints of a state that is cut into boxes: each box is written by a rank that holds it.

    master ── Save ──► rank ── SavePiece ──► one rank of every other box
                       │ writes its box        write theirs into the same hidden folder of the run folder
                       │ ◄── PieceSaved ───────
                       writes the Hugging Face files from the boxes, verifies everything, renames

A rank whose host does not have the run folder brings its box there (`checkpoint_delivery.py`) before it answers. If
that is the rank that saves, it fetches the weights of the other boxes, and what it writes is verified, together with
them, beside the master.

A rank that can not write its box, or ends, is replaced by another one with the same box. If there is none the save is
refused, and the checkpoints before it stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kintsugi.checkpoint.manifest import StoredFile
from kintsugi.checkpoint.store import state_file, tensor_of, write_box
from kintsugi.errors import RefusedError, StorageError, StorageFull, WorldError
from kintsugi.model.device_errors import as_world_error
from kintsugi.model.seats import Seat, replica_of, seat_of
from kintsugi.model.tensor_slices import SliceName
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import PieceSaved, SavePiece
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import wait
from kintsugi.training.checkpoint_delivery import CheckpointDelivery
from kintsugi.training.snapshots import CopyCounters, HeldState, state_fetched
from kintsugi.transport import Delivery
from kintsugi.types import Role, WeightManifest, process_id

PIECE_TIMEOUT_S = 1800.0
"""Limit for a rank to write its box."""
POLL_S = 0.01

Ask = Callable[[str, Body, float], ReplyHandle]
"""Send a request with a deadline and do not wait for its reply; may be called by any thread."""


class BoxWriters:
    """The other ranks that write the boxes of one checkpoint."""

    def __init__(
        self,
        ask: Ask,
        *,
        process: str,
        seat: Seat,
        num_ranks: int,
        counters: CopyCounters,
        check: Callable[[], object],
        destination: Path,
        delivery: CheckpointDelivery | None = None,
    ) -> None:
        """`counters` are those of the state that is saved; `check` raises if the save was given up. `destination` is
        the hidden folder in the run folder; with `delivery` this rank does not see it."""
        self._ask, self._check = ask, check
        self._destination, self._delivery = destination, delivery
        self._seat, self._counters = seat, counters
        mine = replica_of(process, seat.mesh)
        ranks = [process_id(Role.MODEL, index) for index in range(num_ranks)]
        ranks.sort(key=lambda name: replica_of(name, seat.mesh) != mine)
        self._candidates: Mapping[int, list[str]] = {
            box: [name for name in ranks if seat_of(name, seat.mesh).number == box]
            for box in range(seat.boxes)
            if box != seat.number
        }
        self._asked: dict[int, ReplyHandle] = {}
        self.folder = Path()
        """Where this rank writes; after `wait` it has the weights of all boxes."""

    def ask(self, folder: Path) -> None:
        self.folder = folder
        for box, candidates in self._candidates.items():
            self._asked[box] = self._request(box, candidates[0])

    def wait(self) -> dict[str, StoredFile]:
        found: dict[str, StoredFile] = {}
        for box in self._candidates:
            saved = self._saved(box)
            expected = state_file(self._seat.mesh.seat(box))
            if saved.name != expected:
                raise RefusedError(f"expected the file {expected}, got {saved.name}")
            found[saved.name] = StoredFile(saved.size, saved.digest, saved.pieces)
        if self._delivery is not None:
            self._delivery.fetch_weights(found, step=self._counters.step, into=self.folder, check=self._check)
        return found

    def _saved(self, box: int) -> PieceSaved:
        """The file of one box, from the first rank that can write it. A disk without room, or one that fails, is told
        as such: the last save of a run waits for it."""
        failures: list[str] = []
        kinds: set[str] = set()
        for number, name in enumerate(self._candidates[box]):
            try:
                asked = self._asked[box] if number == 0 else self._request(box, name)
                self._await(asked, whom=name)
                return asked.result().expect(PieceSaved)
            except WorldError as error:
                self._check()
                failures.append(f"{name}: {error}")
                kinds.add(type(error).__name__ if error.cause is None else error.cause.kind)
        which = self._seat.mesh.seat(box).box
        what = f"no rank has written box {which} of step {self._counters.step}: {'; '.join(failures)}"
        if StorageFull.__name__ in kinds:
            raise StorageFull(what)
        raise (StorageError if StorageError.__name__ in kinds else RefusedError)(what)

    def _request(self, box: int, name: str) -> ReplyHandle:
        nothing = WeightManifest(self._counters.step, self._counters.step, (), 0, "")
        body = SavePiece(
            str(self._destination), state_fetched(nothing, self._counters, box=self._seat.mesh.seat(box).box)
        )
        return self._ask(name, body, PIECE_TIMEOUT_S)

    def _await(self, asked: ReplyHandle, *, whom: str) -> None:
        idle = threading.Event()

        def attempt(remaining_s: float) -> bool | None:
            self._check()
            if asked.done:
                return True
            idle.wait(min(POLL_S, remaining_s))
            return None

        wait(attempt, whom=whom, what="its box of the checkpoint", timeout_s=PIECE_TIMEOUT_S)


class BoxSaver:
    """Writes the box of this rank for another one that saves, each in a thread of its own."""

    def __init__(
        self,
        *,
        reply: Callable[[Delivery, Body], None],
        fail: Callable[[Delivery, BaseException], None],
        delivery: CheckpointDelivery | None = None,
    ) -> None:
        """`reply` and `fail` are called in the background threads. With `delivery` a box is written on this host and
        then brought to the run folder on another one."""
        self._reply, self._fail, self._delivery = reply, fail, delivery
        self._running: list[tuple[threading.Thread, HeldState]] = []

    def begin(self, delivery: Delivery, request: SavePiece, held: HeldState) -> None:
        self._running = [each for each in self._running if each[0].is_alive()]
        thread = threading.Thread(
            target=self._run, args=(delivery, request, held), name="save-box", daemon=True
        )
        self._running.append((thread, held))
        thread.start()

    @property
    def threads(self) -> Sequence[threading.Thread]:
        return [thread for thread, _ in self._running]

    def close(self) -> None:
        """Give up what is being written; the rank that saves asks another one."""
        for _, held in self._running:
            held.hold.revoke("this process ends")

    def _run(self, delivery: Delivery, request: SavePiece, held: HeldState) -> None:
        """Boundary of the background thread: its outcome is the reply."""
        try:
            name, stored = self._save(request, held)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the failure is the reply, with its cause.
            self._fail(delivery, as_world_error(error))
        else:
            self._reply(delivery, PieceSaved(name, stored.size, stored.digest, stored.pieces))
        finally:
            held.hold.release()

    def _save(self, request: SavePiece, held: HeldState) -> tuple[str, StoredFile]:
        held.await_copy()

        def on_bytes(size: int) -> None:
            COUNTERS.add("bytes_saved", size)
            held.hold.check()

        def write(folder: Path) -> tuple[str, StoredFile]:
            return write_box(
                folder, seat=held.seat, state=held.tensors, on_bytes=on_bytes, on_read=held.hold.release
            )

        if self._delivery is None:
            return write(Path(request.folder))
        return self._delivery.bring_box(write, step=held.counters.step, check=held.hold.check)


def own_tensors(held: HeldState) -> HeldState:
    """The state as it is written for its box: a frozen reference, which all shards have, is in the boxes of the first
    one, what is whole in each tensor slice in those of the first slice, and what several stages have in one of
    them."""
    seat = held.seat
    if seat.shard == 0 and seat.tensor == 0 and not held.copied:
        return held
    tensors = {
        name: tensor
        for name, tensor in held.tensors.items()
        if (seat.shard == 0 or not name.startswith("reference/"))
        and (seat.tensor == 0 or SliceName.parse(tensor_of(name)).count > 1)
        and name not in held.copied
    }
    return replace(held, tensors=tensors)
