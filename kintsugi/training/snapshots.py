"""Snapshots of a rank's state in host memory: written in the background, verified when they are used.

The live state is one flat tensor (`layout.py`). A background thread copies a finished step into the snapshot slot that
does not hold the committed step, while the step is committed and the next one begins. Every change of the live state
waits for that thread first. A process killed during the copy leaves a snapshot of the previous step; the other ranks
still have the new one.

A thread that saves the committed step holds its slot (`SlotHold`). Training goes on: the following steps are prepared
in the other slot and in a third one, which the first save adds where the host has the memory. Without a third slot the
copy of the step after the next waits, in its background thread, until the hold is released; training itself waits only
if it is about to change the live state again before that, which takes a disk that needs more than two steps for the
state. The latest committed snapshot is never overwritten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import psutil

from kintsugi.checkpoint.snapshot import (
    NUM_SLOTS,
    HeldSnapshots,
    SlotHeader,
    Snapshots,
    SnapshotSlot,
    find_slot,
)
from kintsugi.errors import DeadlineExceeded, IntegrityError, RefusedError
from kintsugi.model.arrays import Array, copied, from_buffer, is_on_accelerator
from kintsugi.model.seats import WHOLE, Seat
from kintsugi.model.tensor_file import TensorPlace
from kintsugi.protocol.recovery import StateFetched
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.spans import SPANS
from kintsugi.runtime.waits import join, wait
from kintsugi.telemetry.collect.cgroups import available_memory_bytes
from kintsugi.training.digests import digest as digest_bytes
from kintsugi.types import WeightManifest

INLINE_BYTES = 4 << 20
"""Smaller states are copied inline, because starting a thread would take longer."""
COPY_TIMEOUT_S = 600.0
HOLD_TIMEOUT_S = 3600.0
"""Limit for a save to read its snapshot. A save that hangs is ended by the deadline of its request long before."""
REVOKE_TIMEOUT_S = 30.0
"""Limit for a save to notice that its snapshot is taken away: it looks after every piece."""
MOST_HOLDS = 8
"""Holds of a slot that are remembered. A save that has read its snapshot can still be given up."""
THIRD_SLOT_RESERVE = 0.25
"""Share of the host's memory that has to remain available if a third slot is added."""
POLL_S = 0.02
"""Interval at which a wait for a save looks for requests that end it."""


class CopyCounters(msgspec.Struct, frozen=True):
    """Counters that are part of the state: hashed, saved and rolled back with the tensors."""

    step: int = 0
    """The last finished step of the run."""
    stage: str = ""
    updates: int = 0
    """Optimizer updates applied in this stage; drives the schedule and Adam's bias correction."""
    skipped: int = 0
    """Updates left out in this stage because their gradient was not finite."""
    reference: str = ""
    """Digest of the stage's frozen reference weights, which makes them part of the state's digest; empty if none."""
    critic_updates: int = 0
    """Updates of the critic, counted separately because it also learns while the actor waits."""
    critic_skipped: int = 0


def alike(one: CopyCounters, other: CopyCounters) -> bool:
    """Whether two boxes are of one state. Each pipeline stage has the digest of its own part of the reference."""
    return msgspec.structs.replace(one, reference="") == msgspec.structs.replace(other, reference="")


def digest_of(counters: CopyCounters, tensor: Array, *, box: str = "") -> str:
    """Digest of counters, weights and moments and, through the counters, of the reference weights; equal on all ranks
    with the same box after the same steps."""
    return digest_bytes(msgspec.msgpack.encode(counters) + box.encode(), tensor)


def reference_digest(reference: Array | None) -> str:
    """Digest of reference weights as in `CopyCounters.reference`."""
    return "" if reference is None else digest_bytes(b"", reference)


def state_fetched(manifest: WeightManifest, counters: CopyCounters, *, box: str = "") -> StateFetched:
    """Describe a state, or a box of one, that is sent to another process."""
    return StateFetched(
        manifest,
        counters.stage,
        counters.updates,
        counters.skipped,
        counters.reference,
        counters.critic_updates,
        counters.critic_skipped,
        box=box,
    )


def counters_of(fetched: StateFetched) -> CopyCounters:
    """Counters of a state received from another process."""
    return CopyCounters(
        fetched.manifest.step,
        fetched.stage,
        fetched.updates,
        fetched.skipped,
        fetched.reference,
        fetched.critic_updates,
        fetched.critic_skipped,
    )


class StoredState(Protocol):
    """A state outside this process: in a checkpoint, at another rank or at an agent."""

    @property
    def places(self) -> Mapping[str, TensorPlace]:
        """Name, dtype and shape of every tensor."""
        ...

    @property
    def has_any_box(self) -> bool:
        """Whether any box of the state can be read from it; `places` are then those of whole tensors."""
        ...

    @property
    def box(self) -> str:
        """The only box that it has, as `Seat.box`."""
        ...

    def read(
        self,
        into: Mapping[str, Array],
        *,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Fill these tensors, in pieces, and verify the bytes. `shapes`: of whole tensors of the state, by name, where
        the source may have cut them otherwise."""
        ...


class SlotHold:
    """Right of one thread to read a slot: nothing is written into the slot until `release`. A thread whose hold was
    taken away by `revoke` notices it by `check`, and releases it."""

    def __init__(self, step: int, *, purpose: str, yields: bool) -> None:
        """`yields`: the hold is taken away as soon as a later step needs the slot."""
        self.step, self.purpose, self.yields = step, purpose, yields
        self.stalled_s = 0.0
        """Time for which training stood still because of this hold."""
        self._released = threading.Event()
        self._revoked = ""

    @property
    def released(self) -> bool:
        return self._released.is_set()

    @property
    def revoked(self) -> bool:
        return bool(self._revoked)

    def check(self) -> None:
        """Raise RefusedError if the hold was taken away; also after `release`, because a state that was replaced must
        not be saved any more."""
        if self._revoked:
            raise RefusedError(f"the {self.purpose} of step {self.step} was given up: {self._revoked}")

    def release(self) -> None:
        """The slot has been read."""
        self._released.set()

    def revoke(self, reason: str) -> None:
        self._revoked = self._revoked or reason

    def await_release(self, *, given_up: Callable[[], bool] = lambda: False, timeout_s: float) -> bool:
        """Wait until the slot has been read; False if `given_up` says so before."""

        def attempt(remaining_s: float) -> bool | None:
            if self._released.wait(min(POLL_S, remaining_s)):
                return True
            return False if given_up() else None

        what = f"the {self.purpose} of step {self.step} to read its snapshot"
        return wait(attempt, whom="this process", what=what, timeout_s=timeout_s)


@dataclass(frozen=True)
class HeldState:
    """The committed state in its snapshot slot, for a thread that saves it beside training."""

    counters: CopyCounters
    tensors: Mapping[str, Array]
    """All tensors of the state, in host memory."""
    weights: Mapping[str, Array]
    """Weights of the actor by Hugging Face name: those of `tensors`, not yet converted to the compute dtype."""
    dtype: Any
    """Compute dtype, in which the model is saved."""
    await_copy: Callable[[], None]
    """Wait until the slot is completely written."""
    hold: SlotHold
    seat: Seat = WHOLE
    """Which box of the state it is. Without `weights` where there are others."""
    copied: frozenset[str] = frozenset()
    """Names of tensors that are also in another box, with which they are saved."""


class StateSnapshots:
    """Snapshots of one rank: the committed state and, if there is one, the prepared state."""

    def __init__(self, live: Array, *, snapshots: Snapshots, box: str = "") -> None:
        """`box`: which part of the state it is (`Seat.box`)."""
        self._live, self._box = live, box
        self._snapshots = snapshots
        self._views = [_view(slot, like=live) for slot in snapshots.slots]
        self._committed: int | None = None
        self._prepared: int | None = None
        self._copy: _Copy | None = None
        self._holds: list[list[SlotHold]] = [[] for _ in snapshots.slots]
        """Holds by slot; those that were released are dropped when the next one is taken."""
        self._transfer = transfer_of(live)
        self._loading: _Loading | None = None

    @property
    def committed(self) -> Array | None:
        """The committed state; None before the first copy, when the live state has not changed yet."""
        return None if self._committed is None else self._views[self._committed]

    def prepare(self, counters: CopyCounters) -> str:
        """Start to copy the live state, which `counters` describe; return its digest, perhaps before the copy ends."""
        self.settle()
        index = self._spare()
        slot, view = self._snapshots.slots[index], self._views[index]
        serial = self._snapshots.next_serial
        holds = [hold for hold in self._holds[index] if not hold.released]
        for hold in holds:
            if hold.yields:
                hold.revoke(f"step {counters.step} needs its memory")
        if not holds:
            slot.begin()
        self._prepared = index
        # Before the copy starts: the digest would otherwise wait in the device's queue behind the copy.
        digest = digest_of(counters, self._live, box=self._box)
        self._copy = _Copy(self._live, into=view, holds=holds, begin=slot.begin, transfer=self._transfer)
        self._copy.then(lambda: slot.prepare(_header(counters, digest=digest, serial=serial, box=self._box)))
        return digest

    def commit(self) -> None:
        """Make the prepared copy the committed one, now or as soon as it is complete."""
        assert self._prepared is not None
        slot = self._snapshots.slots[self._prepared]
        if self._copy is None:
            slot.commit()
        else:
            self._copy.then(slot.commit)
        self._committed, self._prepared = self._prepared, None

    def hold_committed(self, step: int) -> tuple[Array, Callable[[], None], SlotHold]:
        """Keep the committed slot as it is until the hold is released: its tensor, a function that waits until it is
        completely written, and the hold."""
        if self._committed is None:
            raise RefusedError("nothing is committed on this rank that could be saved")
        self._add_third_slot()
        hold = self._take_hold(self._committed, SlotHold(step, purpose="save", yields=False))
        copy = self._copy
        return self._views[self._committed], copy.finish if copy is not None else lambda: None, hold

    def hold(self, counters: CopyCounters) -> tuple[Array, SlotHold]:
        """Keep the slot of an earlier state as it is until the hold is released; RefusedError if it is not there."""
        self._add_third_slot()
        for index, slot in enumerate(self._snapshots.slots):
            header = slot.header
            if header is not None and alike(counters_in(header), counters):
                return self._views[index], self._take_hold(
                    index, SlotHold(counters.step, purpose="save", yields=False)
                )
        raise RefusedError(f"this rank has no snapshot of step {counters.step} any more")

    def _add_third_slot(self) -> None:
        """Add a slot for the steps that follow while one is saved, if the host has memory for it."""
        if len(self._views) > NUM_SLOTS:
            return
        reserve = THIRD_SLOT_RESERVE * psutil.virtual_memory().total
        if available_memory_bytes() - self._live.nbytes < reserve:
            return
        slot = self._snapshots.add_slot()
        if slot is None:
            return
        self._views.append(_view(slot, like=self._live))
        self._holds.append([])

    def _take_hold(self, index: int, hold: SlotHold) -> SlotHold:
        # Revoked ones are released only when their thread has noticed.
        for holds in self._holds:
            holds[:] = [each for each in holds if not each.released or each.purpose == "save"][-MOST_HOLDS:]
        self._holds[index].append(hold)
        return hold

    def reference_copy(self, stage: str, *, like: Array) -> Array:
        """The copy of a stage's frozen reference weights that is kept with the snapshots."""
        return _view(self._snapshots.reference(stage, size=like.nbytes), like=like)

    def hold_latest(self, step: int) -> tuple[Array, Callable[[], SlotHeader | None], SlotHold] | None:
        """Keep the newest copy, prepared or committed, as it is until a later step needs its slot, for a thread that
        reads it during training; None before the first. The function waits until the copy is complete and returns the
        slot's header."""
        index = self._committed if self._prepared is None else self._prepared
        if index is None:
            return None
        slot, copy = self._snapshots.slots[index], self._copy
        hold = self._take_hold(index, SlotHold(step, purpose="peer copy", yields=True))

        def header() -> SlotHeader | None:
            if copy is not None:
                copy.finish()
            return slot.header

        return self._views[index], header, hold

    def drop_prepared(self) -> None:
        """Clear the prepared copy, which will not be committed, so that it cannot be mistaken for the retried step."""
        if self._prepared is not None and self._copy is not None:
            self._copy.give_up()
        self.settle()
        if self._prepared is not None:
            self._snapshots.slots[self._prepared].clear()
            self._prepared = None

    def release(self) -> None:
        """Give up the live state and the views of the slots. A prepared copy is dropped, also one that waits for a
        save: no rank returns to it."""
        self.drop_prepared()
        self._views.clear()
        del self._live, self._snapshots

    def load(self) -> None:
        """Make the live state the committed one again."""
        assert self._committed is not None
        self.drop_prepared()
        self._load_slot(self._committed)

    def begin_load(self) -> None:
        """Begin to copy the newest snapshot that the previous incarnation left into the live state, beside what else
        has to be done before a repair asks for it. Until then nothing may use the live state."""
        index = max(range(len(self._views)), key=self._serial)
        header = self._snapshots.slots[index].header
        if header is not None and header.box == self._box and self._live.nbytes >= INLINE_BYTES:
            after = _recorded_event(self._live)
            self._loading = _Loading(index, header, lambda: self._load_slot(index, after=after))

    def digest(self, counters: CopyCounters) -> str:
        """Digest of the live state as it is now."""
        return digest_of(counters, self._live, box=self._box)

    def adopt(self, step: int, *, digest: str) -> CopyCounters:
        """Adopt the snapshot of `step` that the previous incarnation of this process left, verified."""
        self._revoke()
        loading = self._loading
        self.settle()
        slot, header = find_slot(self._snapshots.slots, step, digest=digest)
        index = self._snapshots.slots.index(slot)
        counters, view = counters_in(header), self._views[index]
        is_loaded = loading is not None and loading.has_loaded(index, header)
        if is_on_accelerator(self._live) and not is_loaded:
            self._load_slot(index)  # A device hashes the copy much faster than the host the original.
            is_loaded = True
        found = digest_of(counters, self._live if is_loaded else view, box=self._box)
        if found != header.digest:
            raise IntegrityError(f"the snapshot of step {step} hashes to {found}, expected {header.digest}")
        self._keep(index, is_loaded=is_loaded)
        return counters

    def copy_from(
        self, held: HeldSnapshots, step: int, *, digest: str, reference: Array | None = None
    ) -> CopyCounters:
        """Adopt another process's snapshot of `step` on this host, verified; its owner may be writing meanwhile."""
        slot, header = find_slot(held.slots, step, digest=digest)
        if slot.payload.nbytes != self._live.nbytes:
            raise IntegrityError(
                f"expected a snapshot of {self._live.nbytes} bytes, got one of {slot.payload.nbytes}"
            )
        counters, theirs = counters_in(header), _view(slot, like=self._live)
        self.fill(
            counters,
            lambda view: _copy_on_host(theirs, into=view),
            digest=header.digest,
            reference=reference,
        )
        return counters

    def fill(
        self,
        counters: CopyCounters,
        write: Callable[[Array], object],
        *,
        digest: str = "",
        reference: Array | None = None,
        is_older: bool = False,
    ) -> tuple[str, CopyCounters]:
        """Adopt the state that `write` fills a tensor with, and its stage's reference weights, which it may fill as
        well; return digest and counters. A state with the wrong digest changes nothing.

        `is_older`: the counters were saved without the digest of the reference.
        """
        self._revoke()
        self.drop_prepared()
        index = self._spare()
        slot, view = self._snapshots.slots[index], self._views[index]
        serial = self._snapshots.next_serial
        slot.begin()
        write(view)
        found = reference_digest(reference)
        if is_older:
            counters = msgspec.structs.replace(counters, reference=found)
        if found != counters.reference:
            slot.clear()
            raise IntegrityError(
                f"the reference weights of stage {counters.stage!r} hash to {found or 'none'}, "
                f"expected {counters.reference or 'none'}"
            )
        found = digest_of(counters, view, box=self._box)
        if digest not in ("", found):
            slot.clear()
            raise IntegrityError(f"the state of step {counters.step} hashes to {found}, expected {digest}")
        self.keep_reference(counters, reference)
        slot.prepare(_header(counters, digest=found, serial=serial, box=self._box))
        self._keep(index)
        self.forget_references(counters.stage)
        return found, counters

    def keep_reference(self, counters: CopyCounters, reference: Array | None) -> None:
        """Store a stage's reference weights with the snapshots, before the first snapshot that needs them. Intact ones
        are not rewritten, because a process killed meanwhile would leave none."""
        if reference is None:
            return
        slot = self._snapshots.reference(counters.stage, size=reference.nbytes)
        view = _view(slot, like=reference)
        if slot.header is not None and digest_bytes(b"", view) == counters.reference:
            return
        slot.begin()
        view[...] = reference
        slot.prepare(SlotHeader(0, counters.stage, 0, 0, counters.reference, 0))
        slot.commit()

    def forget_references(self, stage: str) -> None:
        """Drop the reference weights of all other stages; only once a snapshot of this stage is committed."""
        if self._snapshots.has_references_besides({stage}):
            self.settle()
            self._snapshots.keep_references({stage})

    def load_reference(
        self, stage: str, *, into: Array, digest: str, held: HeldSnapshots | None = None
    ) -> None:
        """Load a stage's reference weights, which hash to `digest`, from this rank's snapshots or from `held`."""
        slot = held.stored_reference(stage) if held else self._snapshots.reference(stage, size=into.nbytes)
        header = slot.header
        if header is None or header.stage != stage or slot.payload.nbytes != into.nbytes:
            raise RefusedError(f"there are no reference weights of stage {stage!r}")
        copy = copied(_view(slot, like=into))
        found = digest_bytes(b"", copy)
        if found != digest:
            raise IntegrityError(
                f"the reference weights of stage {stage!r} hash to {found}, expected {digest}"
            )
        into[...] = copy

    def settle(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the running copy has ended; raises if it failed. `check` is called while the copy waits for a
        save, and raises if the wait has to be given up."""
        if self._loading is not None:
            self._loading.finish()
            self._loading = None
        copy = self._copy
        if copy is None:
            return
        copy.await_holds(check)
        self._copy = None
        copy.finish()

    def await_copy(self) -> None:
        """Wait as `settle` does, without a change of state; for threads other than the training thread."""
        copy = self._copy
        if copy is not None:
            copy.finish()

    def _serial(self, index: int) -> int:
        """Order in which the slots were written; -1 for one without a complete payload."""
        header = self._snapshots.slots[index].header
        return -1 if header is None else header.serial

    def _spare(self) -> int:
        """Index of the slot to overwrite: not the committed one, one that no thread reads if there is such a one, the
        third one only if the others are read, else the older one."""

        def rank(index: int) -> tuple[bool, bool, int]:
            is_held = any(not hold.released for hold in self._holds[index])
            return is_held, index >= NUM_SLOTS, self._serial(index)

        return min((index for index in range(len(self._views)) if index != self._committed), key=rank)

    def _revoke(self) -> None:
        """Take the slots away from every reader: the state is about to be replaced."""
        for hold in [hold for holds in self._holds for hold in holds]:
            hold.revoke("the state of this rank was replaced")
            hold.await_release(timeout_s=REVOKE_TIMEOUT_S)

    def _keep(self, index: int, *, is_loaded: bool = False) -> None:
        """Commit this slot, clear the others, and load the slot into the live state, unless it is there already."""
        slots = self._snapshots.slots
        slots[index].commit()
        for other, slot in enumerate(slots):
            if other != index:
                slot.clear()
        self._committed, self._prepared = index, None
        if not is_loaded:
            self._load_slot(index)

    def _load_slot(self, index: int, *, after: Any = None) -> None:
        """Copy a slot into the live state, after everything that was enqueued on the device, or after an event."""
        since = SYSTEM_CLOCK.monotonic()
        after = after or _recorded_event(self._live)
        self._transfer(self._views[index], into=self._live, after=after)
        _note_copy("load_snapshot", self._live, since=since)


class _Loading:
    """A snapshot on its way into the live state, before it is known whether it is the one that a repair asks for."""

    def __init__(self, index: int, header: SlotHeader, load: Callable[[], None]) -> None:
        self._index, self._header, self._load = index, header, load
        self._done = False
        self._thread = threading.Thread(target=self._run, name="load-snapshot", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(RuntimeError, DeadlineExceeded):  # The repair then copies the snapshot itself.
            self._load()
            self._done = True

    def finish(self) -> None:
        """Wait until nothing is written into the live state any more."""
        what = "the copy of the last snapshot"
        join(self._thread, whom="this process", what=what, timeout_s=COPY_TIMEOUT_S)

    def has_loaded(self, index: int, header: SlotHeader) -> bool:
        """Whether the live state has this snapshot, as far as the copy shows: it is not verified yet."""
        return self._done and (index, header) == (self._index, self._header)


class _Copy:
    """Copy of a tensor into host memory, in a background thread if it is large or the target is held."""

    def __init__(
        self,
        tensor: Array,
        *,
        into: Array,
        holds: Sequence[SlotHold],
        begin: Callable[[], None],
        transfer: Transfer,
    ) -> None:
        """With `holds` on the target the copy begins, with a call of `begin`, when they are released."""
        self._copy_all = transfer
        self._tensor = tensor
        self._into = into
        self._holds = holds
        self._begin = begin
        self._given_up = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._copied = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._ready = _recorded_event(tensor)
        if tensor.nbytes < INLINE_BYTES and not holds:
            self._run()
        else:
            self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
            self._thread.start()

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function once the bytes are copied, perhaps now; in the order of the calls of `then`. After a failure
        no function is called."""
        with self._lock:
            if self._error is not None:
                return
            if self._copied:
                callback()
            else:
                self._callbacks.append(callback)

    def give_up(self) -> None:
        """Do not begin, if the copy still waits for a hold."""
        self._given_up = True

    def await_holds(self, check: Callable[[], None]) -> None:
        """Wait until no hold is in the way; `check` raises if the wait has to be given up."""

        def given_up() -> bool:
            check()
            return self._given_up

        for hold in self._holds:
            if hold.released:
                continue
            since = SYSTEM_CLOCK.monotonic()
            try:
                hold.await_release(given_up=given_up, timeout_s=HOLD_TIMEOUT_S)
            finally:
                hold.stalled_s += SYSTEM_CLOCK.monotonic() - since

    def finish(self) -> None:
        """Wait until copy and callbacks have ended; raises the exception that ended either."""
        if self._thread is not None:
            limit_s = HOLD_TIMEOUT_S if self._holds else COPY_TIMEOUT_S
            join(self._thread, whom="this process", what="the copy of its state", timeout_s=limit_s)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for hold in self._holds:
                limit_s = HOLD_TIMEOUT_S - COPY_TIMEOUT_S
                if not hold.await_release(given_up=lambda: self._given_up, timeout_s=limit_s):
                    return
            if self._holds:
                self._begin()
            self._transfer()
            with self._lock:
                self._copied = True
                for callback in self._callbacks:
                    callback()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: `finish` raises it.
            self._error = error

    def _transfer(self) -> None:
        since = SYSTEM_CLOCK.monotonic()
        self._copy_all(self._tensor, into=self._into, after=self._ready)
        _note_copy("copy_snapshot", self._tensor, since=since)


class Transfer(Protocol):
    """Copies a whole state, or its snapshot; returns when all of it has arrived."""

    def __call__(self, source: Any, /, *, into: Any, after: Any) -> None:
        """`after`: event of the device with which the source is complete and the target free; None on a host."""
        ...


def transfer_of(live: Any) -> Transfer:
    """Choose how this state and its snapshots in host memory are copied into each other."""
    if not is_on_accelerator(live):
        return _copy_on_host
    from kintsugi.training.staged_copies import DeviceLane, StagedCopies

    device = live.device
    return StagedCopies(lambda: DeviceLane(device)).copy


def _copy_on_host(source: Any, /, *, into: Any, after: Any = None) -> None:
    into[...] = source


def _recorded_event(tensor: Any) -> Any:
    """Event after everything that is enqueued on the tensor's device now; None on a host."""
    if not is_on_accelerator(tensor):
        return None
    import torch

    return torch.cuda.current_stream(tensor.device).record_event()


def _note_copy(name: str, tensor: Array, *, since: float) -> None:
    """Record a span for the copy of a large state."""
    if tensor.nbytes >= INLINE_BYTES:
        SPANS.add(name, {"bytes": tensor.nbytes}, since=since)


def _view(slot: SnapshotSlot, *, like: Array) -> Array:
    """Payload of a slot as a tensor in host memory."""
    view: Array = from_buffer(slot.payload[: like.nbytes], like=like).reshape(like.shape)
    return view


def slot_view(slot: SnapshotSlot, size: int, *, like: Any) -> Any:
    """The first elements of a slot's payload, as a flat tensor in host memory of the type of `like`."""
    num_bytes = size * like.itemsize
    if slot.payload.nbytes < num_bytes:
        raise IntegrityError(f"expected a snapshot of {num_bytes} bytes, got one of {slot.payload.nbytes}")
    return from_buffer(slot.payload[:num_bytes], like=like)


def _header(counters: CopyCounters, *, digest: str, serial: int, box: str) -> SlotHeader:
    return SlotHeader(
        counters.step,
        counters.stage,
        counters.updates,
        counters.skipped,
        digest,
        serial,
        counters.reference,
        counters.critic_updates,
        counters.critic_skipped,
        box,
    )


def counters_in(header: SlotHeader) -> CopyCounters:
    """Counters of the state in a slot."""
    return CopyCounters(
        header.step,
        header.stage,
        header.updates,
        header.skipped,
        header.reference,
        header.critic_updates,
        header.critic_skipped,
    )
