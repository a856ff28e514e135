"""Saving of a rank's committed state beside training: a background thread writes the checkpoint from the snapshot.

    main thread                 save thread
    Save arrives ─ hold slot ─► wait until the snapshot is complete
    RunCall, CommitStep, …      write it, digest it          (the slot is held)
    RunCall, …                  release the slot, sync, read back, rename
                                reply Saved

The thread reads host memory only: it needs neither the device nor a lease on it. It gives up the interpreter's lock for
every piece, so heartbeats and training continue. `bytes_saved` counts the bytes written and read back, as progress.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from kintsugi.checkpoint.store import Checkpoint, save_checkpoint
from kintsugi.errors import DeadlineExceeded, Unfit
from kintsugi.model.device_errors import as_world_error
from kintsugi.model.tensor_file import FileContent
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import Save, Saved
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.counters import COUNTERS, SAVE_PROGRESS
from kintsugi.runtime.spans import SPANS
from kintsugi.runtime.waits import join
from kintsugi.telemetry.collect.cgroups import available_memory_bytes
from kintsugi.telemetry.events import Alert, AlertEvent
from kintsugi.training.box_saving import BoxWriters
from kintsugi.training.checkpoint_delivery import CheckpointDelivery
from kintsugi.training.snapshots import CopyCounters, HeldState
from kintsugi.transport import Delivery, subject

STALL_S = 0.5
"""Training that stood still for longer because of a save is reported."""
CLOSE_TIMEOUT_S = 5.0
MOST_AHEAD_BYTES, AHEAD_SHARE = 12 << 30, 1 / 6
"""Bytes of a checkpoint that may be in the page cache only, and their share of the memory that is available. They let
go of the snapshot earlier: a disk of 1.0 GB/s needs 25 s for 25 GB, three steps of a 1.8 B model take 15 s. By default
Linux slows a writer down at 15 % of the memory."""

ModelFiles = Callable[[HeldState, BoxWriters | None], Iterable[tuple[str, FileContent]]]
"""Files of a Hugging Face folder with the weights of a state, or of the boxes that were written."""


class CheckpointSaver:
    """One save at a time. A request that arrives meanwhile joins it: a new master repeats the request of its
    predecessor, and the answer says which step was saved."""

    def __init__(
        self,
        *,
        model_files: ModelFiles,
        keep: int,
        reply: Callable[[Delivery, Body], None],
        fail: Callable[[Delivery, BaseException], None],
        emit: Callable[[AlertEvent], object] = lambda event: None,
        delivery: CheckpointDelivery | None = None,
    ) -> None:
        """`reply`, `fail` and `emit` are called in the background thread. With `delivery` a checkpoint is written on
        this host, and brought to the run folder on another one, where it is verified."""
        self._delivery = delivery
        self._model_files = model_files
        self._keep = keep
        self._reply, self._fail, self._emit = reply, fail, emit
        self._lock = threading.Lock()
        self._waiting: list[Delivery] = []
        """Requests to which the current save is the answer; empty if none is under way."""
        self._held: HeldState | None = None
        self._thread: threading.Thread | None = None
        self._fatal: Exception | None = None

    def join(self, delivery: Delivery) -> bool:
        """Let the save that is under way answer this request; False if there is none."""
        with self._lock:
            if not self._waiting:
                return False
            self._waiting.append(delivery)
            return True

    def begin(
        self, delivery: Delivery, *, request: Save, held: HeldState, others: BoxWriters | None = None
    ) -> None:
        """Start to save a state; the request is answered when it is durable and verified, or has failed. `others` write
        the boxes that this rank does not hold."""
        with self._lock:
            assert not self._waiting, "a request that arrives during a save joins it"
            self._waiting = [delivery]
        self._held = held
        self._thread = threading.Thread(
            target=self._run, args=(request, held, others), name="save", daemon=True
        )
        self._thread.start()

    def raise_fatal(self) -> None:
        """Raise, in the main thread, an error of a save that has to end this process."""
        if self._fatal is not None:
            raise self._fatal

    def close(self) -> None:
        """End the save that is under way, if any; what it has written is removed."""
        thread, held = self._thread, self._held
        if thread is None or held is None:
            return
        held.hold.revoke("this process ends")
        try:
            join(thread, whom="this process", what="the end of its save", timeout_s=CLOSE_TIMEOUT_S)
        except DeadlineExceeded:
            return  # The disk hangs. The thread ends with the process, and the next save removes what is left.

    def _run(self, request: Save, held: HeldState, others: BoxWriters | None) -> None:
        """Boundary of the background thread: its outcome is the answer to all requests that wait."""
        since = SYSTEM_CLOCK.monotonic()
        saved: Saved | None = None
        fault: Exception | None = None
        try:
            saved = self._save(request, held, others, since=since)
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the failure is the reply, with its cause.
            fault = as_world_error(error)
            if isinstance(fault, Unfit | AssertionError):
                self._fatal = fault
        finally:
            held.hold.release()
            SAVE_PROGRESS.end()
        error_name = None if fault is None else type(fault).__name__
        about = {**subject(request), "error": error_name, "stalled_s": round(held.hold.stalled_s, 3)}
        SPANS.add("save", about, since=since)
        self._report_stall(held)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            if saved is not None:
                self._reply(delivery, saved)
            else:
                assert fault is not None
                self._fail(delivery, fault)
        del fault  # Its traceback references this frame, and with it the state.

    def _save(self, request: Save, held: HeldState, others: BoxWriters | None, *, since: float) -> Saved:
        held.await_copy()
        read_at = since
        num_bytes = 0
        SAVE_PROGRESS.begin(_expected_bytes(held))

        def on_bytes(size: int) -> None:
            nonlocal num_bytes
            num_bytes += size
            COUNTERS.add("bytes_saved", size)
            SAVE_PROGRESS.add(size / 2)  # Every byte is written, then read back or brought to another host.
            held.hold.check()

        def on_read() -> None:
            nonlocal read_at
            read_at = SYSTEM_CLOCK.monotonic()
            held.hold.release()

        folder = Path(request.folder) if self._delivery is None else self._delivery.folder
        checkpoint = save_checkpoint(
            folder,
            step=held.counters.step,
            stage=held.counters.stage,
            state=held.tensors,
            extra=msgspec.to_builtins(saved_counters(held)),
            model_files=self._model_files(held, others),
            keep=self._keep,
            best_steps=request.best_steps,
            on_bytes=on_bytes,
            on_read=on_read,
            ahead_bytes=min(MOST_AHEAD_BYTES, int(AHEAD_SHARE * available_memory_bytes())),
            seat=held.seat,
            others=others,
            bring=None if self._delivery is None else partial(self._bring, self._delivery, request, held),
        )
        ended = SYSTEM_CLOCK.monotonic()
        timing = {
            "write": read_at - since,
            "verify": ended - read_at,
            "stall": held.hold.stalled_s,
            "bytes": float(num_bytes // 2 if self._delivery is None else num_bytes),
        }
        return Saved(checkpoint.step, str(checkpoint.path), checkpoint.digest, timing)

    def _bring(
        self,
        delivery: CheckpointDelivery,
        request: Save,
        held: HeldState,
        folder: Path,
        names: Sequence[str],
    ) -> Checkpoint:
        return delivery.deliver(
            folder,
            names,
            step=held.counters.step,
            keep=self._keep,
            best_steps=request.best_steps,
            check=held.hold.check,
            on_sent=lambda size: SAVE_PROGRESS.add(size / 2),
        )

    def _report_stall(self, held: HeldState) -> None:
        stalled_s = held.hold.stalled_s
        if stalled_s > STALL_S:
            message = (
                f"training stood still for {stalled_s:.1f} s, because step {held.counters.step} was not "
                "written to the disk two steps later"
            )
            self._emit(Alert(message, {"step": held.counters.step, "stalled_s": stalled_s}))


def saved_counters(held: HeldState) -> CopyCounters:
    """Counters of the whole state: the digest of a reference that is cut over ranks is that of a part."""
    is_cut = held.seat.mesh.model_ranks > 1
    return msgspec.structs.replace(held.counters, reference="") if is_cut else held.counters


def _expected_bytes(held: HeldState) -> int:
    """Size of the checkpoint: the trainer's state, and the weights as they are exported."""
    state = sum(array.nbytes for array in held.tensors.values())
    return state + sum(math.prod(array.shape) * held.dtype.itemsize for array in held.weights.values())
