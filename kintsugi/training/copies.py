"""Copies of a rank's state outside of it: made behind its back, verified when they are used.

The live state is one flat tensor (`layout.py`). A finished step is copied into the snapshot
slot that does not hold the committed one, by a thread, while the answer travels, the step is committed and the next one
begins; who wants to change the live state waits for that thread first. A process killed meanwhile leaves the step
before, and its replicas the step itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from kintsugi.checkpoint.snapshot import Header, HeldSnapshots, Slot, Snapshots, find_slot
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.operations import StateFetched
from kintsugi.runtime import wait
from kintsugi.training.digests import digest as digest_bytes
from kintsugi.types import WeightManifest

INLINE_BYTES = 4 << 20
"""Less is copied faster than a thread is started."""
TRANSFER_BYTES = 32 << 20
"""Moved to the host in one piece; between two of them others get their turn, who wait for a few numbers."""
COPY_TIMEOUT_S = 600.0


class Counters(msgspec.Struct, frozen=True):
    """What counts as state: it is hashed, saved and rolled back with the tensors."""

    step: int = 0
    """The last finished step of the run."""
    stage: str = ""
    updates: int = 0
    """Optimizer updates applied in this stage; drives the schedule and Adam's bias correction."""
    skipped: int = 0
    """Updates left out in this stage because their gradient was not finite."""
    reference: str = ""
    """Digest of the stage's frozen reference weights, taken once, so that it is part of every state's; empty without
    them."""
    critic_updates: int = 0
    """The critic counts for itself: it also learns while the actor waits."""
    critic_skipped: int = 0


def digest_of(counters: Counters, tensor: Tensor) -> str:
    """Over counters, weights and moments, and by the counters over the reference weights; equal on all ranks after the
    same steps."""
    return digest_bytes(msgspec.msgpack.encode(counters), tensor)


def reference_digest(reference: Tensor | None) -> str:
    """What `Counters.reference` says of these weights."""
    return "" if reference is None else digest_bytes(b"", reference)


def state_fetched(manifest: WeightManifest, counters: Counters) -> StateFetched:
    """What is said of a state that is given to another process."""
    return StateFetched(
        manifest,
        counters.stage,
        counters.updates,
        counters.skipped,
        counters.reference,
        counters.critic_updates,
        counters.critic_skipped,
    )


def counters_of(fetched: StateFetched) -> Counters:
    """The counters of a state that another process gives."""
    return Counters(
        fetched.manifest.step,
        fetched.stage,
        fetched.updates,
        fetched.skipped,
        fetched.reference,
        fetched.critic_updates,
        fetched.critic_skipped,
    )


class StateCopies:
    """The committed state of one rank and, while there is one, the prepared next."""

    def __init__(self, live: Tensor, *, snapshots: Snapshots) -> None:
        self._live = live
        self._snapshots = snapshots
        self._views = tuple(_view(slot, like=live) for slot in snapshots.slots)
        self._committed: int | None = None
        self._prepared: int | None = None
        self._copy: _Copy | None = None
        self._pinning: threading.Thread | None = None
        if live.is_cuda:
            # Takes seconds for a large state, in which the rank has better things to do.
            self._pinning = threading.Thread(target=self._pin, name="pin-snapshots", daemon=True)
            self._pinning.start()

    @property
    def committed(self) -> Tensor | None:
        """The committed state; None while nothing was copied, because the live state has never changed."""
        return None if self._committed is None else self._views[self._committed]

    def prepare(self, counters: Counters) -> str:
        """Copy the live state, which `counters` describe, and give its digest. The copy may still be under way."""
        self.settle()
        if self._pinning is not None:
            _join(self._pinning, what="pinned memory for its snapshots")
        index = self._spare()
        slot, view = self._snapshots.slots[index], self._views[index]
        serial = self._snapshots.next_serial
        slot.begin()
        self._prepared = index
        # Before the copy begins, behind which a device's answer would have to queue on its way to the host.
        digest = digest_of(counters, self._live)
        self._copy = _Copy(self._live, into=view)
        self._copy.then(lambda: slot.prepare(_header(counters, digest=digest, serial=serial)))
        return digest

    def commit(self) -> None:
        """The prepared copy is the committed one, now or as soon as it is whole."""
        assert self._prepared is not None
        slot = self._snapshots.slots[self._prepared]
        if self._copy is None:
            slot.commit()
        else:
            self._copy.then(slot.commit)
        self._committed, self._prepared = self._prepared, None

    def latest(self) -> tuple[Tensor, Callable[[], Header | None]] | None:
        """The newest copy, prepared or committed, for a thread that reads it while training goes on; None before the
        first. The function waits until the copy is whole and says what the slot holds; a reader asks before and
        after, because the step after the next overwrites the slot."""
        index = self._committed if self._prepared is None else self._prepared
        if index is None:
            return None
        slot, copy = self._snapshots.slots[index], self._copy

        def header() -> Header | None:
            if copy is not None:
                copy.finish()
            return slot.header

        return self._views[index], header

    def drop_prepared(self) -> None:
        """What was prepared will not be committed; nobody must find it and take it for what comes instead."""
        self.settle()
        if self._prepared is not None:
            self._snapshots.slots[self._prepared].clear()
            self._prepared = None

    def load(self) -> None:
        """Make the live state the committed one again."""
        assert self._committed is not None
        self.drop_prepared()
        self._live.copy_(self._views[self._committed])

    def digest(self, counters: Counters) -> str:
        """Of the live state as it is now."""
        return digest_of(counters, self._live)

    def adopt(self, step: int, *, digest: str) -> Counters:
        """Become what the last incarnation of this process left of `step`."""
        self.settle()
        slot, header = find_slot(self._snapshots.slots, step, digest=digest)
        index = self._snapshots.slots.index(slot)
        counters, found = _counters(header), digest_of(_counters(header), self._views[index])
        if found != header.digest:
            raise IntegrityError(f"the snapshot of step {step} hashes to {found}, expected {header.digest}")
        self._keep(index)
        return counters

    def copy_from(
        self, held: HeldSnapshots, step: int, *, digest: str, reference: Tensor | None = None
    ) -> Counters:
        """Become what another process of this host has, or had, of `step`; it may be writing meanwhile."""
        slot, header = find_slot(held.slots, step, digest=digest)
        if slot.payload.nbytes != self._live.nbytes:
            raise IntegrityError(
                f"expected a snapshot of {self._live.nbytes} bytes, got one of {slot.payload.nbytes}"
            )
        counters, theirs = _counters(header), _view(slot, like=self._live)
        self.fill(counters, lambda view: view.copy_(theirs), digest=header.digest, reference=reference)
        return counters

    def fill(
        self,
        counters: Counters,
        write: Callable[[Tensor], object],
        *,
        digest: str = "",
        reference: Tensor | None = None,
    ) -> str:
        """Become the state that `write` writes into a tensor of the live one's shape, with its stage's reference
        weights beside it. A wrong one changes nothing."""
        found = reference_digest(reference)
        if found != counters.reference:
            raise IntegrityError(
                f"the reference weights of stage {counters.stage!r} hash to {found or 'none'}, "
                f"expected {counters.reference or 'none'}"
            )
        self.drop_prepared()
        index = self._spare()
        slot, view = self._snapshots.slots[index], self._views[index]
        serial = self._snapshots.next_serial
        slot.begin()
        write(view)
        found = digest_of(counters, view)
        if digest not in ("", found):
            slot.clear()
            raise IntegrityError(f"the state of step {counters.step} hashes to {found}, expected {digest}")
        self.keep_reference(counters, reference)
        slot.prepare(_header(counters, digest=found, serial=serial))
        self._keep(index)
        self.forget_references(counters.stage)
        return found

    def keep_reference(self, counters: Counters, reference: Tensor | None) -> None:
        """Put a stage's reference weights beside the snapshots, before the first that needs them; not again where they
        are whole, because a process killed meanwhile would leave none."""
        if reference is None:
            return
        slot = self._snapshots.reference(counters.stage, size=reference.nbytes)
        view = _view(slot, like=reference)
        if slot.header is not None and digest_bytes(b"", view) == counters.reference:
            return
        slot.begin()
        view.copy_(reference)
        slot.prepare(Header(0, counters.stage, 0, 0, counters.reference, 0))
        slot.commit()

    def forget_references(self, stage: str) -> None:
        """Those of all other stages, once a snapshot of this stage is committed: until then another may be needed."""
        self.settle()
        self._snapshots.keep_references({stage})

    def load_reference(
        self, stage: str, *, into: Tensor, digest: str, held: HeldSnapshots | None = None
    ) -> None:
        """Take a stage's reference weights, which hash to `digest`, from beside the snapshots, own or others'."""
        slot = held.reference(stage) if held else self._snapshots.reference(stage, size=into.nbytes)
        header = slot.header
        if header is None or header.stage != stage or slot.payload.nbytes != into.nbytes:
            raise RefusedError(f"there are no reference weights of stage {stage!r}")
        copied = _view(slot, like=into).clone()
        found = digest_bytes(b"", copied)
        if found != digest:
            raise IntegrityError(
                f"the reference weights of stage {stage!r} hash to {found}, expected {digest}"
            )
        into.copy_(copied)

    def settle(self) -> None:
        """Wait until the copy that is under way has ended."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.finish()

    def await_copy(self) -> None:
        """The same for another thread than the one that trains: nothing but the waiting."""
        copy = self._copy
        if copy is not None:
            copy.finish()

    def _pin(self) -> None:
        """Let the device write into the slots by itself. Where it refuses, copies are slower and nothing else."""
        runtime: Any = torch.cuda.cudart()
        for view in self._views:
            address = view.data_ptr()
            if int(runtime.cudaHostRegister(address, view.nbytes, 0)) == 0:
                weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
            else:
                with suppress(RuntimeError):  # A refusal is kept for the next who starts something there.
                    torch.zeros(1, device=self._live.device)

    def _spare(self) -> int:
        """The slot that may be overwritten: not the committed one, else the older one."""
        if self._committed is not None:
            return 1 - self._committed
        serials = [-1 if (header := slot.header) is None else header.serial for slot in self._snapshots.slots]
        return serials.index(min(serials))

    def _keep(self, index: int) -> None:
        """This slot is the committed state, and so is the live one."""
        slots = self._snapshots.slots
        slots[index].commit()
        slots[1 - index].clear()
        self._committed, self._prepared = index, None
        self._live.copy_(self._views[index])


class _Copy:
    """A tensor on its way into host memory, in a thread of its own where that is worth it."""

    def __init__(self, tensor: Tensor, *, into: Tensor) -> None:
        self._tensor = tensor
        self._into = into
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] = []
        self._copied = False
        self._error: RuntimeError | None = None
        self._thread: threading.Thread | None = None
        self._ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        if tensor.nbytes < INLINE_BYTES:
            self._run()
        else:
            self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
            self._thread.start()

    def then(self, afterwards: Callable[[], None]) -> None:
        """Do this once the bytes are there, perhaps now; in the order in which it was asked for."""
        with self._lock:
            if self._copied:
                afterwards()
            else:
                self._afterwards.append(afterwards)

    def finish(self) -> None:
        """Wait until the copy has ended; raises what it ended in."""
        if self._thread is not None:
            _join(self._thread, what="the copy of its state")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._transfer()
        except RuntimeError as error:  # What a device error is; it belongs to whoever waits.
            self._error = error
            return
        with self._lock:
            self._copied = True
            for afterwards in self._afterwards:
                afterwards()

    def _transfer(self) -> None:
        if self._ready is None:
            self._into.copy_(self._tensor)
            return
        stream = torch.cuda.Stream(self._tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            numel = TRANSFER_BYTES // self._tensor.element_size()
            pieces = zip(self._tensor.view(-1).split(numel), self._into.view(-1).split(numel), strict=True)
            for source, target in pieces:
                target.copy_(source, non_blocking=True)
        stream.synchronize()


def _view(slot: Slot, *, like: Tensor) -> Tensor:
    """A slot's payload as a tensor in host memory."""
    return torch.frombuffer(slot.payload, dtype=like.dtype, count=like.numel()).view(like.shape)


def _join(thread: threading.Thread, *, what: str) -> None:
    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    wait(attempt, whom="this process", what=what, timeout_s=COPY_TIMEOUT_S)


def _header(counters: Counters, *, digest: str, serial: int) -> Header:
    return Header(
        counters.step,
        counters.stage,
        counters.updates,
        counters.skipped,
        digest,
        serial,
        counters.reference,
        counters.critic_updates,
        counters.critic_skipped,
    )


def _counters(header: Header) -> Counters:
    return Counters(
        header.step,
        header.stage,
        header.updates,
        header.skipped,
        header.reference,
        header.critic_updates,
        header.critic_skipped,
    )
