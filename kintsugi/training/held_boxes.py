"""Boxes of a state that are not this rank's own: how they are found, and how a state is assembled from them.

When a group goes on with another mesh each rank gets another box, of which no copy exists yet. It is assembled from the
boxes of the mesh before: from snapshots in the memory of this host, of this rank or of a lost one, and from other ranks
and agents, which hold or keep them. Each box is verified by its digest in the journal before any of it is used.

Snapshots of a box that this rank held before the change stay for `KEPT_STEPS` committed steps, as the group may have to
return to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kintsugi.checkpoint.snapshot import HeldSnapshots, Snapshots, SnapshotSegments, SnapshotSlot, find_slot
from kintsugi.checkpoint.store import PART_MARK, tensor_of
from kintsugi.errors import GroupBroken, IntegrityError, RefusedError, WorldError, no_source
from kintsugi.model.arrays import Array
from kintsugi.model.seats import Seat
from kintsugi.protocol.recovery import BoxCopies
from kintsugi.recovery.rank import SNAPSHOT_PREFIX
from kintsugi.training.boxes import Box
from kintsugi.training.digests import digest as digest_bytes
from kintsugi.training.layout import LayoutPart, reference_by_name
from kintsugi.training.snapshots import CopyCounters, StoredState, counters_in, digest_of, slot_view

KEPT_STEPS = 2
"""As many as a rank has slots for steps."""


class BoxSnapshots(Protocol):
    """Snapshots of one box, in the memory of this host or of this process."""

    @property
    def slots(self) -> tuple[SnapshotSlot, ...]: ...

    def stored_reference(self, stage: str) -> SnapshotSlot:
        """Slot with the frozen reference weights of a stage; RefusedError if there is none."""
        ...


@dataclass(frozen=True)
class BoxForm:
    """Form of a box in memory."""

    box: Box
    reference: LayoutPart
    like: Any
    """Array in host memory, of the type of the state."""
    reference_like: Any
    """Array in host memory, of the type of reference weights."""

    @property
    def seat(self) -> Seat:
        return self.box.seat

    def num_bytes(self, *, gathers_layers: bool) -> int:
        """Memory of the state, the gradient and the weights that are computed with. A rank that gathers weights layer
        by layer has the gradient of its box alone, and no weights to compute with, unless it holds everything."""
        is_cut = gathers_layers and self.seat.shards > 1
        gradient = self.box.num_parameters if is_cut else self.box.layout.num_parameters
        weights = 0 if is_cut else self.box.layout.num_parameters
        return (self.box.size + gradient) * int(self.like.itemsize) + weights * int(
            self.reference_like.itemsize
        )

    def by_name(self, flat: Array, reference: Array | None) -> dict[str, Any]:
        frozen = {} if reference is None else reference_by_name(self.reference, reference)
        return self.box.by_name(flat) | frozen


@dataclass(frozen=True)
class HeldBox:
    """One verified box of a state in host memory."""

    seat: Seat
    counters: CopyCounters
    tensors: Mapping[str, Array]


class KeptSnapshots:
    """Snapshots on this host that are not of this rank's box."""

    def __init__(self, segments: SnapshotSegments | None) -> None:
        self._segments = segments
        self._own: dict[str, tuple[Snapshots, int]] = {}
        """Name → snapshots of a box that this rank held, and the step after which it had another one."""

    def keep(self, snapshots: Snapshots, *, step: int) -> None:
        self._own[snapshots.owner] = snapshots, step

    def take_back(self, owner: str) -> None:
        """The rank has the box of this name again."""
        self._own.pop(owner, None)

    def find(self, owner: str) -> BoxSnapshots:
        """Snapshots under a name; RefusedError if this host has none."""
        if owner in self._own:
            return self._own[owner][0]
        if self._segments is None:
            raise RefusedError(f"this host has no segment service that could hold snapshots of {owner}")
        return HeldSnapshots(owner, segments=self._segments)

    def forget_before(self, step: int) -> None:
        """Drop the snapshots that no step to which the group may return needs."""
        for owner, (snapshots, last) in list(self._own.items()):
            if step >= last + KEPT_STEPS:
                del self._own[owner]
                snapshots.remove()


def read_box(
    snapshots: BoxSnapshots, form: BoxForm, *, step: int, digest: str = "", stage: str = ""
) -> HeldBox:
    """The box of a step in these snapshots; with a stage only one that has begun it."""
    slot, header = find_slot(snapshots.slots, step, digest=digest)
    if header.box != form.seat.box:
        raise IntegrityError(f"expected a snapshot of box {form.seat.box!r}, got {header.box!r}")
    if stage not in ("", header.stage):
        raise RefusedError(f"the snapshot of step {step} is of stage {header.stage!r}, not of {stage!r}")
    counters = counters_in(header)
    flat = slot_view(slot, form.box.size, like=form.like)
    _check(counters, flat, box=header.box, digest=header.digest)
    reference = None
    if counters.reference:
        stored = snapshots.stored_reference(counters.stage)
        reference = slot_view(stored, form.reference.size, like=form.reference_like)
        found = digest_bytes(b"", reference)
        if found != counters.reference:
            raise IntegrityError(
                f"the reference weights of stage {counters.stage!r} hash to {found}, "
                f"expected {counters.reference}"
            )
    return HeldBox(form.seat, counters, form.by_name(flat, reference))


def fetch_box(
    stored: StoredState, counters: CopyCounters, form: BoxForm, *, digest: str = "", stage: str = ""
) -> HeldBox:
    """The box that another process offers, in memory of its own. `stage` as for `read_box`."""
    if stored.box != form.seat.box:
        raise IntegrityError(f"expected box {form.seat.box!r} of the state, got {stored.box!r}")
    if stage not in ("", counters.stage):
        raise RefusedError(
            f"the state of step {counters.step} is of stage {counters.stage!r}, not of {stage!r}"
        )
    flat = form.like.new_zeros(form.box.size)
    has_reference = any(name.startswith("reference/") for name in stored.places)
    reference = form.reference_like.new_zeros(form.reference.size) if has_reference else None
    tensors = form.by_name(flat, reference)
    if tensors.keys() != stored.places.keys():
        odd = ", ".join(sorted(tensors.keys() ^ stored.places.keys())[:4])
        raise IntegrityError(f"expected the state of this model, got one that differs in {odd}")
    stored.read(tensors)
    if reference is not None and digest_bytes(b"", reference) != counters.reference:
        raise IntegrityError(f"the reference weights of stage {counters.stage!r} are not those of the state")
    _check(counters, flat, box=stored.box, digest=digest)
    return HeldBox(form.seat, counters, tensors)


def _check(counters: CopyCounters, flat: Array, *, box: str, digest: str) -> None:
    found = digest_of(counters, flat, box=box)
    if digest not in ("", found):
        raise IntegrityError(f"box {box!r} of step {counters.step} hashes to {found}, expected {digest}")


Fetch = Callable[[int, str, str, str], tuple[StoredState, CopyCounters]]
"""(step, process, name of the snapshots, box) → the box at a rank or an agent."""


@dataclass(frozen=True)
class BoxReader:
    """Finds the boxes of a committed step."""

    kept: KeptSnapshots
    fetch: Fetch
    form: Callable[[Seat], BoxForm]

    def load(self, step: int, copies: BoxCopies, *, stage: str = "") -> HeldBox:
        """The box from the first place that has it. With `stage` it is not the one that was committed but the one with
        which this stage has begun."""
        form, digest = self.form(Seat.of(copies.box)), "" if stage else copies.digest
        failures: list[tuple[str, WorldError]] = []
        for copy in copies.copies:
            try:
                if copy.source.startswith(SNAPSHOT_PREFIX):
                    held = self.kept.find(copy.owner)
                    return read_box(held, form, step=step, digest=digest, stage=stage)
                stored, counters = self.fetch(step, copy.source, copy.owner, copies.box)
                return fetch_box(stored, counters, form, digest=digest, stage=stage)
            except GroupBroken:
                raise
            except WorldError as error:
                failures.append((copy.source, error))
        tried = "; ".join(f"{source}: {error}" for source, error in failures) or "no place is known"
        what = f"box {copies.box or 'with everything'} of step {step} is nowhere: {tried}"
        raise no_source(what, [error for _, error in failures])


class Assembly:
    """Fills tensors of a box from those of other boxes of the same state. What several of them have (a frozen reference
    in every shard, what is whole in each tensor slice) is taken from the first."""

    def __init__(self, into: Mapping[str, Array]) -> None:
        self._targets: dict[str, tuple[int, Any]] = {}
        self._open: dict[str, list[range]] = {}
        """Tensor → its elements that are not filled yet."""
        for name, array in into.items():
            flat: Any = array
            base, first = tensor_of(name), first_of(name)
            self._targets[base] = first, flat.reshape(-1)
            self._open[base] = [range(first, first + len(self._targets[base][1]))]

    def needs(self, form: BoxForm) -> bool:
        """Whether a box has any of the elements that are open."""
        reference = form.reference_like.new_empty(form.reference.size, device="meta")
        names = form.by_name(form.like.new_empty(form.box.size, device="meta"), reference)
        return any(self._wanted(name, math.prod(each.shape)) for name, each in names.items())

    def add(self, held: HeldBox) -> None:
        for name, tensor in held.tensors.items():
            flat: Any = tensor
            flat = flat.reshape(-1)
            base, first = tensor_of(name), first_of(name)
            for part in self._wanted(name, len(flat)):
                at, target = self._targets[base]
                target[part.start - at : part.stop - at] = flat[part.start - first : part.stop - first]
            self._fill(base, range(first, first + len(flat)))

    def check(self) -> None:
        """Raise IntegrityError unless every element has been filled."""
        num_left = sum(len(part) for parts in self._open.values() for part in parts)
        if num_left:
            raise IntegrityError(f"the boxes leave {num_left} elements of the state open")

    def _wanted(self, name: str, size: int) -> list[range]:
        first = first_of(name)
        shared = (
            range(max(first, part.start), min(first + size, part.stop))
            for part in self._open.get(tensor_of(name), ())
        )
        return [part for part in shared if part]

    def _fill(self, base: str, filled: range) -> None:
        rest = (
            each
            for part in self._open.get(base, ())
            for each in (
                range(part.start, min(part.stop, filled.start)),
                range(max(part.start, filled.stop), part.stop),
            )
        )
        self._open[base] = [part for part in rest if part]


def first_of(name: str) -> int:
    """`first_of("weights/lm_head.weight@4096") == 4096`: the first element of a part of a tensor."""
    return int(name.partition(PART_MARK)[2] or 0)
