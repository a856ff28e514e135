"""State of a rank, independent of the training framework: what is committed, what is prepared, what is half updated.

Weights, optimizer moments and counters are one flat array (`layout.py`). A step moves the state from *committed* to
*prepared* and, by `commit`, to committed again; `rollback` returns to the committed state exactly. Between
`begin_update` and `end_update` the state is neither, which `half_updated` shows. The committed and the prepared step
are also copied out of this process (`snapshots.py`) for a replacement to find.

With several shards the rank holds, updates, copies and restores its box of them (`boxes.py`), and computes with all
weights, which are gathered from the ranks.

A framework derives from `RankState` what computes: the arrays' memory, the models that read the weights, and the
optimizer (`state.py` for PyTorch, `mindspore/state.py` for MindSpore).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kintsugi.checkpoint.snapshot import HeldSnapshots, Snapshots, SnapshotSegments
from kintsugi.config.schema import ActorSection
from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.arrays import Array, copied, dtype_name
from kintsugi.model.partition import ModelPart, is_embedding, local_shapes, part_of, used_shapes
from kintsugi.model.plan import Companions
from kintsugi.model.seats import WHOLE, Mesh, Seat
from kintsugi.model.tensor_file import DTYPES
from kintsugi.model.tensor_slices import ModelSlices, SliceName, slices_of
from kintsugi.protocol.recovery import BoxCopies
from kintsugi.training.boxes import Box
from kintsugi.training.group import Group, Groups
from kintsugi.training.held_boxes import Assembly, BoxForm, BoxReader
from kintsugi.training.layout import ACTOR, CRITIC, Layout, LayoutPart, reference_by_name
from kintsugi.training.peer_replication import StateCopy
from kintsugi.training.reduction import Cut
from kintsugi.training.snapshots import (
    CopyCounters,
    HeldState,
    StateSnapshots,
    StoredState,
    alike,
    reference_digest,
)

RATIO_ELEMENTS = 1 << 16
"""Weights from which the relative change of an update is estimated."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer update."""

    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    applied: bool
    ratio: Any = 0.0
    """Norm of the change of the weights, relative to the norm of the weights. It may be a tensor: reading it here would
    make the host wait for the device."""


class RankState(ABC):
    """A rank's replica, or its box, of the trained models and their optimizers."""

    gradient: Any
    """Flat gradient of all trained models."""

    def __init__(
        self,
        live: Array,
        *,
        layout: Layout,
        config: ModelConfig,
        companions: Companions,
        process: str,
        segments: SnapshotSegments | None,
        seat: Seat = WHOLE,
        mesh: Mesh | None = None,
        slices: ModelSlices | None = None,
    ) -> None:
        """`live` holds the state, or the box of it that `seat` names in `mesh`, which is the configured one by default.
        Snapshots are stored under the name of `process` in the host's `segments`, or in private memory. `slices`: the
        logical slices of the models that this rank has; by default everything."""
        self._slices = slices or ModelSlices()
        self.config = config
        self.companions = companions
        self._layout = layout
        self._box = box = Box(layout, seat, mesh)
        self._live: Any = live
        self._weights, self._moments = box.weights(live), box.moments(live)
        self._process = process
        self._segments = segments
        self._snapshots = Snapshots(process, size=live.nbytes, segments=segments)
        self._copies = StateSnapshots(live, snapshots=self._snapshots, box=seat.box)
        self._counters = self._committed = CopyCounters()
        self._committed_digest = self._prepared_digest = ""
        self._updating = self._between_calls = False
        self._is_gathered = True
        """Whether the weights in the compute type are those of the live state; not after another state was loaded into
        a box, until they are gathered from the ranks, nor is a copy of another stage's embedding."""
        self._stage: Stage | None = None
        self._reference: Any = None
        """Weights of the stage's frozen reference, in the compute dtype; None if it has none."""

    # What a framework adds.

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Compute dtype, in which the model is published and saved."""

    @property
    def gathers_layers(self) -> bool:
        """Whether no rank has whole weights: they are gathered layer by layer while a model is computed."""
        return False

    @property
    def _is_in_place(self) -> bool:
        """Whether the live state is in its memory: not while it is offloaded from a shared device."""
        return True

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Committed weights of the actor by Hugging Face name, in the compute dtype, for publishing and export: views
        of memory that the next update changes."""

    @abstractmethod
    def zero_gradient(self, *parts: str) -> None:
        """Zero the gradients of these models, or of all, including leftovers of an interrupted backward pass."""

    @abstractmethod
    def _companions_of(self, stage: Stage, *, actor: Mapping[str, Any]) -> tuple[Any, Any]:
        """Initial weights, by name, of a stage's critic and reference; None for one that the stage does not have."""

    @abstractmethod
    def _optimize(self, part: str, gradient: Any, *, settings: ActorSection, rate: float, count: int) -> None:
        """Update one model by AdamW; `count` (from 1) is this update's number."""

    @abstractmethod
    def _change(self, before: Any, after: Any) -> Any:
        """Norm of the difference, relative to the norm of `before`."""

    def _take_initial(self, fill: Callable[[Mapping[str, Any]], None]) -> None:
        fill(self._layout.actor.views(self._weights))

    def _actor_weights(self) -> dict[str, Any]:
        """The actor's weights by name, from which a stage's critic and reference may begin."""
        return self._layout.actor.views(self._weights)

    def _fill_critic(self, weights: Mapping[str, Any]) -> None:
        """Set the critic's initial weights."""
        self._layout.parts[CRITIC].fill(self._weights, weights)

    def _complete_update(self, part: str, *, before: Any, groups: Groups | None) -> Any:
        """Return the relative change of a model, once its weights on this rank are complete."""
        return self._change(before, self._some_weights(part))

    def _whole_by_name(self, reference: Any) -> dict[str, Any]:
        """Arrays with names, dtypes and shapes of the whole state, of which this rank may hold a box."""
        return self._by_name(self._live, reference)

    @abstractmethod
    def _new_reference(self) -> Any:
        """Memory for the weights of a frozen reference."""

    @abstractmethod
    def _move_reference(self, step: int) -> None:
        """Update a reference that follows the actor, once the weights of the step are final."""

    def _begin_change(self) -> None:  # noqa: B027 - only an accelerator may share the weights.
        """Announce that the weights in the compute type are about to change."""

    @abstractmethod
    def _weights_changed(self, *, reference: Any) -> None:
        """Refresh what depends on the live state after it was replaced; `reference` is the frozen one."""

    def note_peak(self, part: str = "") -> None:  # noqa: B027 - only an accelerator has something to note.
        """Note the peak of device memory since the last call; `part` is the name of the work that has ended."""

    # Life of the state.

    @property
    def is_fresh(self) -> bool:
        """Whether no stage has begun here and no state was restored: only the initial weights can be in it."""
        return self._committed == CopyCounters()

    @property
    def has_snapshot(self) -> bool:
        """Whether the last process of this name has left a state that this one may be repaired from."""
        return any(slot.header is not None for slot in self._snapshots.slots)

    def begin_load(self) -> None:
        """Begin to load the newest snapshot of the last process of this name, which a repair is about to ask for.
        Until then nothing may use the live state, except `fill_initial`, which waits for the copy."""
        self._copies.begin_load()

    def fill_initial(self, fill: Callable[[Mapping[str, Any]], None]) -> None:
        """Let `fill` write the actor's initial weights, by name; everything else becomes zero."""
        assert self.is_fresh, f"the state of step {self.committed_step} would be lost"
        self._copies.settle()
        self._live[...] = 0
        self._take_initial(fill)
        self._committed_digest = ""
        self._begin_change()
        self._weights_changed(reference=None)

    @property
    def seat(self) -> Seat:
        """Which box of the state this rank holds."""
        return self._box.seat

    @property
    def mesh(self) -> Mesh:
        """Seats of all ranks of the group."""
        return self._box.mesh or self.seat.mesh

    def enter_mesh(self, mesh: Mesh) -> None:
        """Hold the same box in a mesh in which other ranks have other seats."""
        self._box = replace(self._box, mesh=mesh)

    def form_of(self, seat: Seat) -> BoxForm:
        """How the box of any seat lies in memory."""
        slices, count = self._slices, self._slices.count
        if slices.is_cut:
            slices = ModelSlices(slices_of(seat.tensor, tensors=seat.tensors, count=count), count)
        shapes = local_shapes(self.config, seat, with_value_head=self.companions.value_head)
        layout = lay_out(slices.shapes(shapes), self.companions, seat=seat, slices=slices)
        reference = slices.shapes(used_shapes(self._reference_config, seat))
        like: Any = self._live[:0].cpu()
        frozen = LayoutPart.of(reference, is_filled=False)
        return BoxForm(
            Box(layout, seat), frozen, like=like, reference_like=like.new_empty(0, dtype=self.dtype)
        )

    @property
    def free_device_bytes(self) -> int | None:
        """Memory that is free on the device of the state; None where that is the memory of the host."""
        return None

    def release(self) -> Snapshots:
        """End the life of this state, whose process takes another seat: its memory is free, its snapshots stay as long
        as the caller keeps them. This object may live on, in a cycle of references."""
        self._begin_change()
        self._copies.release()
        self._live = self._weights = self._moments = self._reference = self.gradient = None
        snapshots = self._snapshots
        del self._snapshots
        return snapshots

    @property
    def model_part(self) -> ModelPart:
        """Layers of the actor that this rank computes."""
        return part_of(self.config, self.seat)

    def gather(self, groups: Groups) -> None:
        """Complete the weights in the compute type from the boxes of all ranks. A collective; does nothing where every
        rank holds the whole state."""
        assert self._box.is_whole, "a framework that cuts its state gathers it"

    @property
    def committed_step(self) -> int:
        return self._committed.step

    @property
    def committed_digest(self) -> str:
        """Digest of the committed state, computed when the state was copied."""
        if not self._committed_digest:
            self._committed_digest = self.digest()  # A fresh rank: its live state has never changed.
        return self._committed_digest

    @property
    def prepared_digest(self) -> str:
        """Digest of the prepared state, or of the committed one if nothing is prepared."""
        return self.committed_digest if self.prepared_step is None else self._prepared_digest

    @property
    def why_private(self) -> str:
        """Why snapshots of this state end with its process; empty if the host's agent holds them."""
        return self._snapshots.why_private

    @property
    def prepared_step(self) -> int | None:
        """Step that is finished on this rank but not committed, if any."""
        ahead = self._counters.step > self.committed_step and not self._updating
        return self._counters.step if ahead else None

    @property
    def half_updated(self) -> bool:
        """Whether an update began and did not end: the weights belong to no step."""
        return self._updating

    @property
    def is_between_calls(self) -> bool:
        """Whether the state is between two training calls of one step: half updated, but consistent."""
        return self._updating and self._between_calls

    @property
    def counters(self) -> CopyCounters:
        return self._counters

    @property
    def committed_counters(self) -> CopyCounters:
        return self._committed

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise RefusedError("no stage has been started on this rank")
        return self._stage

    def actor_waits(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        stage = self.stage
        return stage.has_critic and step < stage.first_step + stage.critic.warmup_steps

    def start_stage(self, stage: Stage, *, step: int) -> None:
        """Start a stage with a fresh optimizer and schedule on the committed weights. Starting the current stage again
        does nothing.

        A fresh rank of a run that has advanced (to `step`) only remembers the stage. It stays at step 0, where it can
        run no call, until it is repaired: the snapshots of its predecessor must not be overwritten.
        """
        begins_here = self.committed_step == step == stage.first_step - 1
        fresh = self._counters == CopyCounters()
        if self._counters.stage == stage.name or (fresh and not begins_here):
            self._stage = stage
            return
        if self.prepared_step is not None or self._updating:
            raise RefusedError(f"stage {stage.name!r} cannot start on top of a step that is not committed")
        if not begins_here:
            raise RefusedError(
                f"stage {stage.name!r} begins at step {stage.first_step}, this rank stands at {self.committed_step}"
            )
        if not self._is_gathered:
            raise RefusedError(f"stage {stage.name!r} cannot start before the weights have been gathered")
        critic, reference = self._companions_of(stage, actor=self._actor_weights())
        self._stage = stage
        self._copies.settle()
        self._moments[...] = 0
        if critic is not None:
            self._fill_critic(critic)
        if self._layout.has_reference:
            self._layout.actor.fill(self._layout.reference(self._live), reference or {})
        frozen = None
        if reference is not None and not stage.moves_reference:
            frozen = self._new_reference()
            self._reference_part.fill(frozen, reference)
        self._counters = CopyCounters(
            step=self.committed_step, stage=stage.name, reference=reference_digest(frozen)
        )
        self._weights_changed(reference=frozen)
        self._is_gathered = True  # A stage changes the critic only, which was filled on this rank.
        self._copies.keep_reference(self._counters, frozen)
        self._prepared_digest = self._copies.prepare(self._counters)
        self._adopt_prepared()
        self._copies.forget_references(stage.name)

    def gradient_of(self, part: str) -> Any:
        """Slice of the gradient buffer that belongs to one model."""
        return self._part(part, self.gradient)

    def _own_gradient(self, part: str, gradient: Any) -> Any:
        """The box's elements of the gradient of a model."""
        return self._box.own_gradient(part, gradient)

    def cut(self, part: str, group: Group) -> Cut | None:
        """Elements of a model's gradient that each rank of a group needs; None if all need everything."""
        return self._box.cut(part, group)

    def begin_update(self, *, check: Callable[[], None] = lambda: None) -> None:
        """Begin the updates of a call; until `end_update` the state belongs to no step. `check` is called while the
        update waits for a save, and raises if the call has to be given up."""
        assert self.prepared_step is None, f"step {self.prepared_step} is prepared and waits for its commit"
        assert self._copies.committed is not None, "a stage was started"
        self._copies.settle(check)
        self._begin_change()
        self._updating, self._between_calls = True, False

    def pause_update(self) -> None:
        """End the updates of a call that another training call of the same step follows."""
        assert self._updating
        self._between_calls = True

    def end_update(self, step: int) -> None:
        """End the updates of `step`: the rank is prepared, and a copy of its state has been started."""
        assert self._updating and step == self.committed_step + 1
        counters = msgspec.structs.replace(self._counters, step=step)
        self._move_reference(step)
        self._prepared_digest = self._copies.prepare(counters)
        self._counters = counters
        self._updating = self._between_calls = False

    def update(self, gradient: Any, *, part: str = ACTOR, groups: Groups | None = None) -> Update:
        """Clip the gradient of one model, in place, and apply it; one that is not finite is skipped. A rank updates its
        box, and reads only the elements of it; the norm is summed and the new weights are gathered within `groups`."""
        assert self._updating, "updates are made between begin_update and end_update"
        actor, done, num_updates = self._schedule(part)
        rate = learning_rate(actor, update=done, num_updates=num_updates)
        own = self._own_gradient(part, gradient)
        grad_norm = self._box.norm(part, own, groups)
        if not is_finite(grad_norm):
            self._count("critic_skipped" if part == CRITIC else "skipped")
            return Update(grad_norm, rate, applied=False)
        if grad_norm > actor.max_grad_norm:
            own *= actor.max_grad_norm / grad_norm
        self._count("critic_updates" if part == CRITIC else "updates")
        before = copied(self._some_weights(part))
        self._optimize(part, own, settings=actor, rate=rate, count=done + 1)
        ratio = self._complete_update(part, before=before, groups=groups)
        return Update(grad_norm, rate, applied=True, ratio=ratio)

    def _some_weights(self, part: str) -> Any:
        """Evenly spaced weights of a model, of those that this rank updates, few enough to be copied every time."""
        weights = self._box.part(part).within(self._weights)
        return weights[:: max(1, -(-len(weights) // RATIO_ELEMENTS))]

    def _schedule(self, part: str) -> tuple[ActorSection, int, int]:
        """Optimizer settings of a model, its number of updates in this stage so far, and their total number.

        The critic follows the actor's schedule with its own learning rate, also in steps in which the actor waits.
        """
        stage, counters = self.stage, self._counters
        if part == CRITIC:
            settings = msgspec.structs.replace(stage.actor, learning_rate=stage.critic.learning_rate)
            num_updates = stage.algorithm.steps * stage.algorithm.updates_per_step
            return settings, counters.critic_updates, num_updates
        return stage.actor, counters.updates, stage.num_updates

    def _count(self, name: str) -> None:
        number = getattr(self._counters, name) + 1
        self._counters = msgspec.structs.replace(self._counters, **{name: number})

    def commit(self, step: int) -> None:
        """Adopt the prepared step. Committing the committed step again does nothing."""
        if step == self.committed_step and self.prepared_step is None and not self._updating:
            return
        if step != self.prepared_step:
            raise RefusedError(
                f"step {step} cannot be committed: this rank committed {self.committed_step} and prepared "
                f"{self.prepared_step}"
            )
        self._adopt_prepared()

    def rollback(self, step: int) -> None:
        """Return to the committed state of `step`, verified; a rank that prepared it but missed its commit commits it.

        A rank that is at this step already is verified as well: its digest is computed again.
        """
        if step == self.prepared_step:
            self.commit(step)
        if step != self.committed_step:
            raise RefusedError(f"this rank can return to step {self.committed_step} only, not to {step}")
        expected = self.committed_digest
        self._check_reference()
        if self._updating or self.prepared_step is not None:
            self._load_committed()
        found = self.digest()
        if found != expected and self._copies.committed is not None:
            self._load_committed()
            found = self.digest()
        if found != expected:
            raise IntegrityError(f"step {step} hashes to {found} after the rollback, expected {expected}")

    def digest(self) -> str:
        """Digest of the live state as it is now; equal on all ranks after the same steps."""
        return self._copies.digest(self._counters)

    def tensors(self) -> dict[str, Array]:
        """Committed state without its counters, as views: "weights/…", "moment1/…", "moment2/…", …."""
        return self._by_name(self._committed_tensor(), self._reference)

    def hold_committed(self) -> HeldState:
        """Keep the snapshot of the committed state as it is, for a thread that saves it, until it is released."""
        counters = self._committed
        view, await_copy, hold = self._copies.hold_committed(counters.step)
        actor = self._layout.actor
        return HeldState(
            counters=counters,
            tensors=self._by_name(view, self._kept_reference(counters)),
            weights=actor.views(self._layout.weights(view)) if self.seat.is_whole else {},
            dtype=self.dtype,
            await_copy=await_copy,
            hold=hold,
            seat=self.seat,
            copied=self._copied,
        )

    def hold(self, counters: CopyCounters) -> HeldState:
        """Keep the snapshot of a committed state for a thread that saves it; it may be the one before the last."""
        if counters.step == self.prepared_step:
            self.commit(counters.step)  # Only committed steps are saved.
        if alike(counters, self._committed):
            return self.hold_committed()
        view, hold = self._copies.hold(counters)
        tensors = self._by_name(view, self._kept_reference(counters))
        return HeldState(counters, tensors, {}, self.dtype, lambda: None, hold, self.seat, self._copied)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights of the actor by Hugging Face name, of which this rank may hold a part."""
        slots = self._layout.actor.slots
        if self.seat.stages == 1 and not self._slices.is_cut:
            return {slot.name: slot.shape for slot in slots}
        return parameter_shapes(self.config, with_value_head=self.companions.value_head)

    @property
    def slices(self) -> ModelSlices:
        """Logical slices of the models that this rank has."""
        return self._slices

    @property
    def published_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what the ranks of one model publish together: of slices where several ranks share a layer."""
        count = self._slices.count
        if self.seat.tensors == 1:
            return self.weight_shapes
        return ModelSlices(range(count), count).shapes(self.weight_shapes)

    def publishes(self, name: str) -> bool:
        """Whether this rank publishes one of its weights: what all tensor ranks have is published by the first."""
        return self.seat.tensor == 0 or SliceName.parse(name).count > 1

    def part_of_weights(self, name: str) -> int:
        """Stage that holds a weight of the actor."""
        seats = (msgspec.structs.replace(self.seat, stage=stage) for stage in range(self.seat.stages))
        return next(seat.stage for seat in seats if part_of(self.config, seat).has(name))

    def hold_latest(self) -> StateCopy | None:
        """Hold the prepared state, or else the committed one, for a thread that reads it during training; None before
        the first copy, and during an update."""
        latest = None if self._updating else self._copies.hold_latest(self._counters.step)
        if latest is None:
            return None
        view, header, hold = latest
        tensors = self._by_name(view, self._kept_reference(self._counters))
        return StateCopy(self._counters, self.prepared_digest, tensors, header, hold, box=self.seat.box)

    def snapshot_tensors(self) -> dict[str, Array]:
        """Committed state without its counters in host memory, as views; it stays as it is until the step after the
        next is prepared."""
        self._copies.await_copy()
        committed = self._copies.committed
        if committed is None:  # A fresh rank: no step has changed its state.
            return self.tensors()
        return self._by_name(committed, self._kept_reference(self._committed))

    def _kept_reference(self, counters: CopyCounters) -> Array | None:
        """Copy of the frozen reference in host memory."""
        if self._reference is None:
            return None
        return self._copies.reference_copy(counters.stage, like=self._reference)

    def restore(
        self, stored: StoredState, *, counters: CopyCounters, stage: Stage | None, digest: str = ""
    ) -> None:
        """Restore exactly a state that was stored elsewhere, as committed; it is read straight into a snapshot slot.

        A state that does not fit, or does not hash to `digest`, changes nothing.
        """
        assert counters.stage == ("" if stage is None else stage.name)
        places = stored.places
        saved_reference = any(name.startswith("reference/") for name in places)
        is_frozen = saved_reference and not self._layout.has_reference
        # The counters of a checkpoint have the digest of the reference as it was cut over stages and slices there.
        may_differ = stored.has_any_box
        reference = self._new_reference() if is_frozen else None
        if stored.has_any_box:  # Compared as a whole; only the box is read.
            mine = self._whole_by_name(reference)
        elif stored.box != self.seat.box:
            raise IntegrityError(f"expected box {self.seat.box!r} of the state, got {stored.box!r}")
        else:
            mine = self._by_name(self._live, reference)
        if mine.keys() != places.keys():
            odd = ", ".join(sorted(mine.keys() ^ places.keys())[:4])
            raise IntegrityError(f"expected the saved state of this model, got one that differs in {odd}")
        for name, tensor in mine.items():
            dtype, shape = DTYPES.get(places[name].dtype), places[name].shape
            is_flat = stored.has_any_box and shape == (math.prod(tensor.shape),)  # Stored in parts.
            if (shape != tuple(tensor.shape) and not is_flat) or dtype != dtype_name(tensor):
                raise IntegrityError(
                    f"expected {name} as {dtype_name(tensor)} {tuple(tensor.shape)}, got {dtype} {shape}"
                )

        shapes = {name: tuple(tensor.shape) for name, tensor in mine.items()}

        def read(view: Array) -> None:
            self._box.zero_filling(view)
            stored.read(self._by_name(view, reference), shapes=shapes)

        found, counters = self._copies.fill(
            counters,
            read,
            digest=digest,
            reference=reference,
            is_older=reference is not None and (not counters.reference or may_differ),
        )
        self._become(counters, digest=found, stage=stage, reference=reference)

    def assemble(
        self,
        step: int,
        *,
        boxes: Sequence[BoxCopies],
        reader: BoxReader,
        stages: Mapping[str, Stage],
        digest: str = "",
        begun: str = "",
    ) -> None:
        """Restore the committed state of `step` from the boxes of another mesh, each of which is verified. `begun`: the
        stage that has begun at this step, where none has kept the state that was committed."""
        first = reader.load(step, boxes[0], stage=begun)
        stage = stages.get(first.counters.stage)
        if stage is None and first.counters.stage:
            raise IntegrityError(f"the state belongs to stage {first.counters.stage!r}, which is not ours")
        has_reference = stage is not None and stage.has_reference and not stage.moves_reference
        reference = self._new_reference() if has_reference else None

        def read(view: Array) -> None:
            self._box.zero_filling(view)
            assembly = Assembly(self._by_name(view, reference))
            for copies in boxes:
                if not assembly.needs(self.form_of(Seat.of(copies.box))):
                    continue
                held = first if copies is boxes[0] else reader.load(step, copies, stage=begun)
                if not alike(held.counters, first.counters):
                    raise IntegrityError(
                        f"expected box {copies.box!r} at {first.counters}, got it at {held.counters}"
                    )
                assembly.add(held)
            assembly.check()

        # Other layers have another part of the reference, whose digest is in the counters.
        found, counters = self._copies.fill(
            first.counters, read, digest=digest, reference=reference, is_older=reference is not None
        )
        self._become(counters, digest=found, stage=stage, reference=reference)

    def restore_snapshot(
        self, step: int, *, process: str, stages: Mapping[str, Stage], digest: str = ""
    ) -> None:
        """Restore the snapshot of `step` of a process of this host (the predecessor, or another rank), verified."""
        held = None
        if process != self._process:
            if self._segments is None:
                raise RefusedError(f"this host has no segment service that could hold snapshots of {process}")
            held = HeldSnapshots(process, segments=self._segments)
        header = (held or self._snapshots).expect(step, digest=digest)
        if header.box != self.seat.box:
            raise IntegrityError(f"expected a snapshot of box {self.seat.box!r}, got {header.box!r}")
        stage = stages.get(header.stage)
        if stage is None and header.stage:
            raise IntegrityError(f"the snapshot belongs to stage {header.stage!r}, which is not ours")
        reference = None
        if stage is not None and stage.has_reference and not stage.moves_reference:
            reference = self._new_reference()
            self._copies.load_reference(stage.name, into=reference, digest=header.reference, held=held)
        if held is None:
            counters = self._copies.adopt(step, digest=header.digest)
        else:
            counters = self._copies.copy_from(held, step, digest=header.digest, reference=reference)
        self._become(counters, digest=header.digest, stage=stage, reference=reference)

    def _become(
        self, counters: CopyCounters, *, digest: str, stage: Stage | None, reference: Array | None
    ) -> None:
        """Set all bookkeeping after the live tensor has been replaced by a committed state."""
        self._counters = self._committed = counters
        self._committed_digest, self._prepared_digest = digest, ""
        self._stage = stage
        self._updating = self._between_calls = False
        self._begin_change()
        self._weights_changed(reference=reference)

    def _adopt_prepared(self) -> None:
        self._copies.commit()
        self._committed, self._committed_digest = self._counters, self._prepared_digest
        self._prepared_digest = ""

    def _load_committed(self) -> None:
        self._copies.load()
        self._counters = self._committed
        self._updating = self._between_calls = False
        self._begin_change()
        self._weights_changed(reference=self._reference)

    def _committed_tensor(self) -> Any:
        """Array of the committed state; the live one if that is committed, because it can be converted fastest."""
        is_live = self._is_in_place and not self._updating and self.prepared_step is None
        committed = self._copies.committed
        return self._live if is_live or committed is None else committed

    def await_copy(self) -> None:
        """Wait until the background copy of the live state has ended; may be called by any thread."""
        self._copies.await_copy()

    def _check_reference(self) -> None:
        """Verify the frozen reference; a damaged one is reloaded from the snapshots."""
        expected = self._committed.reference
        if self._reference is not None and reference_digest(self._reference) != expected:
            self._copies.load_reference(self._committed.stage, into=self._reference, digest=expected)

    def _by_name(self, state: Array, reference: Array | None) -> dict[str, Any]:
        frozen = {} if reference is None else reference_by_name(self._reference_part, reference)
        return self._box.by_name(state) | frozen

    def _part(self, name: str, flat: Array) -> Any:
        return self._layout.parts[name].within(flat)

    @property
    def _reference_config(self) -> ModelConfig:
        return self.companions.reference or self.config

    @property
    def _reference_part(self) -> LayoutPart:
        """Layout of a frozen reference; one that moves lies like the actor."""
        shapes = self._slices.shapes(used_shapes(self._reference_config, self.seat))
        return LayoutPart.of(shapes, is_filled=False)

    @property
    def _copied(self) -> frozenset[str]:
        """Names of tensors of a frozen reference that the last stage has too, and saves."""
        if self._reference is None or not part_of(self._reference_config, self.seat).has_copy:
            return frozenset()
        names = (slot.name for slot in self._reference_part.slots)
        return frozenset(f"reference/{name}" for name in names if is_embedding(name))


def lay_out(
    shapes: Mapping[str, tuple[int, ...]],
    companions: Companions,
    *,
    seat: Seat = WHOLE,
    slices: ModelSlices | None = None,
) -> Layout:
    """Layout of a state: the actor with these parameters, and what its run needs besides, as far as this rank holds
    it."""
    slices = slices or ModelSlices()
    parts = {ACTOR: LayoutPart.of(shapes)}
    if companions.critic is not None:
        critic = slices.shapes(local_shapes(companions.critic, seat, with_value_head=True))
        parts[CRITIC] = LayoutPart.of(critic, start=parts[ACTOR].stop, prefix="critic.")
    return Layout(parts, has_reference=companions.moving_reference)


def is_finite(value: float) -> bool:
    return value - value == 0.0


def learning_rate(actor: ActorSection, *, update: int, num_updates: int) -> float:
    """Learning rate of update number `update` (from 0) of a stage that makes `num_updates`.

    It depends on applied updates only, not on wall time, retries or restarts.
    """
    if update < actor.warmup_steps:
        return actor.learning_rate * (update + 1) / actor.warmup_steps
    progress = min(1.0, (update - actor.warmup_steps) / max(1, num_updates - actor.warmup_steps))
    match actor.schedule:
        case "constant":
            return actor.learning_rate
        case "linear":
            return actor.learning_rate * (1 - progress)
        case "cosine":
            return actor.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
