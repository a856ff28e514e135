"""Training state of a rank: weights, optimizer moments and counters, as one flat tensor (`layout.py`).

With several shards the rank holds, updates, copies and restores its box of them (`boxes.py`), and computes with all
weights, which are gathered from the ranks.

A step moves the state from *committed* to *prepared* and, by `commit`, to committed again; `rollback` returns to the
committed state exactly. Between `begin_update` and `end_update` the state is neither, which `half_updated` shows. The
committed and the prepared step are also copied out of this process (`snapshots.py`) for a replacement to find.

A stage may have a critic, trained by an optimizer of its own in the same step, and a reference model, which is frozen
or follows the actor as a part of the state.

The optimizer (`adamw`, on slices of the flat state) and the learning-rate schedule are at the end of this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from kintsugi.checkpoint.snapshot import HeldSnapshots, Snapshots, SnapshotSegments
from kintsugi.config.schema import ActorSection
from kintsugi.config.stages import Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.plan import ACTOR_ALONE, Companions
from kintsugi.model.seats import WHOLE, Seat
from kintsugi.model.tensor_file import DTYPES
from kintsugi.model.torch_internals import fused_adamw
from kintsugi.model.transformer import Transformer
from kintsugi.runtime.peak_memory import PARAMETERS, PEAKS
from kintsugi.training.boxes import GATHER_TIMEOUT_S, Box
from kintsugi.training.initial_weights import critic_weights, reference_weights
from kintsugi.training.layout import ACTOR, CRITIC, Layout, LayoutPart, reference_by_name
from kintsugi.training.peer_replication import StateCopy
from kintsugi.training.process_group import ProcessGroup
from kintsugi.training.snapshots import (
    CopyCounters,
    HeldState,
    StateSnapshots,
    StoredState,
    reference_digest,
)


@dataclass(frozen=True)
class Update:
    """Result of one optimizer update."""

    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    applied: bool
    ratio: Tensor | float = 0.0
    """Norm of the change of the weights, relative to the norm of the weights. A tensor: reading it here would make the
    host wait for the device."""


class TrainingState:
    """A rank's replica, or its box, of the trained models and their optimizers."""

    def __init__(
        self,
        model: Transformer,
        *,
        companions: Companions = ACTOR_ALONE,
        compute_dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        process: str = "model-0",
        segments: SnapshotSegments | None = None,
        seat: Seat = WHOLE,
    ) -> None:
        """Take over `model` (fp32): its parameters become views of the flat weights. Snapshots of the state are stored
        under the name of `process` in the host's `segments`, or in private memory. With `recompute` the trained models
        keep no activations within their layers. `seat` tells which box of the state this rank holds."""
        assert model.dtype == torch.float32, f"master weights are float32, got {model.dtype}"
        self.companions = companions
        self._layout = layout = _lay_out(model, companions)
        self._box = box = Box(layout, seat)
        self._live = torch.zeros(box.size, device=model.device)
        self._weights, self._moments = box.weights(self._live), box.moments(self._live)
        if box.is_whole:
            layout.actor.fill(self._weights, dict(model.named_parameters()))
            layout.actor.point(model, weights=self._weights)
        self._process = process
        self._segments = segments
        self._snapshots = Snapshots(process, size=self._live.nbytes, segments=segments)
        self._copies = StateSnapshots(self._live, snapshots=self._snapshots, box=seat.box)
        self.model = model
        if compute_dtype != torch.float32:
            self.model = _empty_twin(model, dtype=compute_dtype)
        self._critic: Transformer | None = None
        if companions.critic is not None:
            self._critic = Transformer(
                companions.critic, with_value_head=True, dtype=compute_dtype, device=model.device
            )
        self._trained = (
            {ACTOR: self.model} if self._critic is None else {ACTOR: self.model, CRITIC: self._critic}
        )
        if box.is_whole:
            self._compute_weights = self._weights.to(compute_dtype)
        else:
            whole = self._weights.new_zeros(layout.num_parameters)
            layout.actor.fill(whole, dict(model.named_parameters()))
            box.take(self._weights, whole)
            self._compute_weights = whole.to(compute_dtype)
            del whole
        for name, each in self._trained.items():
            layout.parts[name].point(each, weights=self._compute_weights)
        # Last, when the models' own memory is free again: together they would need more than any step does.
        self.gradient = self._weights.new_zeros(layout.num_parameters)
        for name, each in self._trained.items():
            layout.parts[name].learn(each, gradient=self.gradient)
            each.recompute = recompute
        if self._live.is_cuda:
            torch.cuda.empty_cache()
        self._counters = self._committed = CopyCounters()
        self._committed_digest = self._prepared_digest = ""
        self._updating = self._between_calls = False
        self._is_gathered = True
        """Whether the weights in the compute type are those of the live state; not after another state was loaded into
        a box, until they are gathered from the ranks."""
        self._stage: Stage | None = None
        self._reference: Tensor | None = None
        self._reference_model: Transformer | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether no stage has begun here and no state was restored: only the initial weights can be in it."""
        return self._committed == CopyCounters()

    @property
    def has_snapshot(self) -> bool:
        """Whether the last process of this name has left a state that this one may be repaired from."""
        return any(slot.header is not None for slot in self._snapshots.slots)

    def fill_initial(self, fill: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Let `fill` write the actor's initial weights, by name; everything else becomes zero."""
        assert self.is_fresh, f"the state of step {self.committed_step} would be lost"
        self._live.zero_()
        self._committed_digest = ""
        if self._box.is_whole:
            fill(self._layout.actor.views(self._weights))
        else:  # The gradient is free memory, of the right size and type.
            self.gradient.zero_()
            fill(self._layout.actor.views(self.gradient))
            self._box.take(self._weights, self.gradient)
        self._weights_changed(reference=None)
        if not self._box.is_whole:
            self._compute_weights.copy_(self.gradient)
            self.gradient.zero_()
            self._is_gathered = True

    @property
    def seat(self) -> Seat:
        """Which box of the state this rank holds."""
        return self._box.seat

    def gather(self, group: ProcessGroup) -> None:
        """Complete the weights in the compute type from the boxes of all ranks. A collective; does nothing where every
        rank holds the whole state."""
        if self._box.is_whole:
            return
        parts = tuple(self._layout.parts)
        self._box.gather(self._weights, into=self._compute_weights, group=group, parts=parts)
        self._is_gathered = True

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

    @property
    def critic(self) -> Transformer:
        """Value model; only PPO stages have one."""
        if self._critic is None or not self.stage.has_critic:
            raise RefusedError(f"stage {self._counters.stage!r} has no critic")
        return self._critic

    @property
    def reference_model(self) -> Transformer:
        """Reference model of the KL divergence; only stages that use it keep one."""
        if self._stage is None or not self._stage.has_reference or not self._counters.stage:
            raise RefusedError(f"stage {self._counters.stage!r} keeps no reference model (its `beta` is 0)")
        if self._reference_model is None:
            weights = self._reference
            if weights is None:
                weights = self._layout.reference(self._live).to(self.model.dtype)
            model = Transformer(self._reference_config, dtype=self.model.dtype, device=self.model.device)
            self._reference_part.point(model, weights=weights)
            self._reference_model = model
        return self._reference_model

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
        # Equal to the master weights where they matter: a critic that begins as the actor needs float32 (`validation`).
        actor = self._layout.actor.views(self._weights if self._box.is_whole else self._compute_weights)
        critic = critic_weights(stage, actor=actor, companions=self.companions)
        reference = reference_weights(stage, actor=actor)
        self._stage = stage
        self._copies.settle()
        self._moments.zero_()
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

    def _fill_critic(self, weights: Mapping[str, Tensor]) -> None:
        part = self._layout.parts[CRITIC]
        if self._box.is_whole:
            part.fill(self._weights, weights)
            return
        part.fill(self.gradient, weights)  # Free memory between two steps.
        self._box.take(self._weights, self.gradient, CRITIC)
        part.within(self._compute_weights).copy_(part.within(self.gradient))
        part.within(self.gradient).zero_()

    def gradient_of(self, part: str) -> Tensor:
        """Slice of the gradient buffer that belongs to one model."""
        return self._part(part, self.gradient)

    def zero_gradient(self, *parts: str) -> None:
        """Zero the gradients of these models, or of all, including leftovers of an interrupted backward pass."""
        for part in parts or self._layout.parts:
            self.gradient_of(part).zero_()
            if self._compute_weights.dtype != self.gradient.dtype:
                self._trained[part].zero_grad(set_to_none=True)

    def begin_update(self, *, check: Callable[[], None] = lambda: None) -> None:
        """Begin the updates of a call; until `end_update` the state belongs to no step. `check` is called while the
        update waits for a save, and raises if the call has to be given up."""
        assert self.prepared_step is None, f"step {self.prepared_step} is prepared and waits for its commit"
        assert self._copies.committed is not None, "a stage was started"
        self._copies.settle(check)
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

    def update(self, gradient: Tensor, *, part: str = ACTOR, group: ProcessGroup | None = None) -> Update:
        """Clip the gradient of one model, in place, and apply it; one that is not finite is skipped. It is equal on all
        ranks. Each rank of several shards updates its box; the new weights are gathered within `group`."""
        assert self._updating, "updates are made between begin_update and end_update"
        actor, done, num_updates = self._schedule(part)
        rate = learning_rate(actor, update=done, num_updates=num_updates)
        grad_norm = float(_norm(gradient))
        if not is_finite(grad_norm):
            self._count("critic_skipped" if part == CRITIC else "skipped")
            return Update(grad_norm, rate, applied=False)
        own = self._box.own_gradient(part, gradient)
        if grad_norm > actor.max_grad_norm:
            own.mul_(actor.max_grad_norm / grad_norm)
        self._count("critic_updates" if part == CRITIC else "updates")
        before = self._some_weights(part).clone()
        adamw(
            self._box.part(part),
            weights=self._weights,
            moments=self._moments,
            gradient=own,
            actor=actor,
            rate=rate,
            count=done + 1,
        )
        after = self._some_weights(part)
        if self._box.is_whole:
            if self._compute_weights is not self._weights:
                self._part(part, self._compute_weights).copy_(self._part(part, self._weights))
            return Update(grad_norm, rate, applied=True, ratio=_change(before, after))
        assert group is not None, "the weights of several shards are gathered after an update"
        self._is_gathered = False  # If the others do not come, a rollback follows.
        self._box.gather(self._weights, into=self._compute_weights, group=group, parts=(part,))
        self._is_gathered = True
        squares = torch.stack((_norm(after - before), _norm(before))).square()
        changed, held = group.all_gather(squares, timeout_s=GATHER_TIMEOUT_S).sum(dim=0).sqrt()
        return Update(grad_norm, rate, applied=True, ratio=_relative(changed, held))

    def _some_weights(self, part: str) -> Tensor:
        """Evenly spaced weights of a model, of those that this rank updates, few enough to be copied every time."""
        weights = self._box.part(part).within(self._weights)
        return weights[:: max(1, -(-weights.numel() // RATIO_ELEMENTS))]

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

    def weights(self) -> dict[str, Tensor]:
        """Committed weights of the actor by Hugging Face name, in the compute dtype, for publishing and export: views
        of memory that the next update changes."""
        actor, committed = self._layout.actor, self._committed_tensor()
        if not self._box.is_whole and (committed is not self._live or not self._is_gathered):
            raise RefusedError(f"the weights of step {self.committed_step} are not complete on this rank now")
        if committed is self._live:
            return actor.views(self._compute_weights)
        return actor.views(actor.within(self._layout.weights(committed)).to(self.model.dtype))

    def tensors(self) -> dict[str, Tensor]:
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
            weights=actor.views(self._layout.weights(view)) if self._box.is_whole else {},
            dtype=self.model.dtype,
            await_copy=await_copy,
            hold=hold,
            seat=self.seat,
        )

    def hold(self, counters: CopyCounters) -> HeldState:
        """Keep the snapshot of a committed state for a thread that saves it; it may be the one before the last."""
        if counters.step == self.prepared_step:
            self.commit(counters.step)  # Only committed steps are saved.
        if counters == self._committed:
            return self.hold_committed()
        view, hold = self._copies.hold(counters)
        tensors = self._by_name(view, self._kept_reference(counters))
        return HeldState(counters, tensors, {}, self.model.dtype, lambda: None, hold, self.seat)

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the actor's weights by Hugging Face name."""
        return {slot.name: slot.shape for slot in self._layout.actor.slots}

    def hold_latest(self) -> StateCopy | None:
        """Hold the prepared state, or else the committed one, for a thread that reads it during training; None before
        the first copy, and during an update."""
        latest = None if self._updating else self._copies.hold_latest(self._counters.step)
        if latest is None:
            return None
        view, header, hold = latest
        tensors = self._by_name(view, self._kept_reference(self._counters))
        return StateCopy(self._counters, self.prepared_digest, tensors, header, hold, box=self.seat.box)

    def snapshot_tensors(self) -> dict[str, Tensor]:
        """Committed state without its counters in host memory, as views; it stays as it is until the step after the
        next is prepared."""
        self._copies.await_copy()
        committed = self._copies.committed
        if committed is None:  # A fresh rank: no step has changed its state.
            return self.tensors()
        return self._by_name(committed, self._kept_reference(self._committed))

    def _kept_reference(self, counters: CopyCounters) -> Tensor | None:
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
        reference = self._new_reference() if is_frozen else None
        layout = self._layout
        if stored.has_any_box and not self._box.is_whole:  # Compared as a whole; only the box is read.
            mine = layout.by_name(torch.empty(layout.size, device="meta"))
            mine |= {} if reference is None else reference_by_name(self._reference_part, reference)
        else:
            mine = self._by_name(self._live, reference)
        if not stored.has_any_box and stored.box != self.seat.box:
            raise IntegrityError(f"expected box {self.seat.box!r} of the state, got {stored.box!r}")
        if mine.keys() != places.keys():
            odd = ", ".join(sorted(mine.keys() ^ places.keys())[:4])
            raise IntegrityError(f"expected the saved state of this model, got one that differs in {odd}")
        for name, tensor in mine.items():
            dtype, shape = DTYPES.get(places[name].dtype), places[name].shape
            is_flat = stored.has_any_box and shape == (tensor.numel(),)  # Stored in parts.
            if (shape != tuple(tensor.shape) and not is_flat) or f"torch.{dtype}" != str(tensor.dtype):
                raise IntegrityError(
                    f"expected {name} as {tensor.dtype} {tuple(tensor.shape)}, got torch.{dtype} {shape}"
                )
        found, counters = self._copies.fill(
            counters,
            lambda view: stored.read(self._by_name(view, reference)),
            digest=digest,
            reference=reference,
            is_older=reference is not None and not counters.reference,
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
        self, counters: CopyCounters, *, digest: str, stage: Stage | None, reference: Tensor | None
    ) -> None:
        """Set all bookkeeping after the live tensor has been replaced by a committed state."""
        self._counters = self._committed = counters
        self._committed_digest, self._prepared_digest = digest, ""
        self._stage = stage
        self._updating = self._between_calls = False
        self._weights_changed(reference=reference)

    def _adopt_prepared(self) -> None:
        self._copies.commit()
        self._committed, self._committed_digest = self._counters, self._prepared_digest
        self._prepared_digest = ""

    def _load_committed(self) -> None:
        self._copies.load()
        self._counters = self._committed
        self._updating = self._between_calls = False
        self._weights_changed(reference=self._reference)

    def _committed_tensor(self) -> Tensor:
        """Tensor of the committed state; the live one if that is committed, because it can be converted fastest."""
        is_here = self._live.untyped_storage().nbytes() > 0  # Not while it is offloaded from a shared device.
        is_live = is_here and not self._updating and self.prepared_step is None
        committed = self._copies.committed
        return self._live if is_live or committed is None else committed

    def resident(self) -> list[Tensor]:
        """All tensors that stay on the device between calls; several may share a storage."""
        models = (self.model, self._critic, self._reference_model)
        parameters = [each for model in models if model is not None for each in model.parameters()]
        frozen = [] if self._reference is None else [self._reference]
        return [self._live, self.gradient, *parameters, *frozen]

    def note_peak(self, part: str = "") -> None:
        """Note the peak of device memory since the last call; `part` is the name of the work that has ended."""
        if self._live.is_cuda:
            PEAKS.note(PARAMETERS, self._layout.num_parameters)
            PEAKS.note_device(torch.cuda, self._live.device, part=part)

    def await_copy(self) -> None:
        """Wait until the background copy of the live state has ended; may be called by any thread."""
        self._copies.await_copy()

    def _check_reference(self) -> None:
        """Verify the frozen reference; a damaged one is reloaded from the snapshots."""
        expected = self._committed.reference
        if self._reference is not None and reference_digest(self._reference) != expected:
            self._copies.load_reference(self._committed.stage, into=self._reference, digest=expected)

    def _by_name(self, state: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        frozen = {} if reference is None else reference_by_name(self._reference_part, reference)
        return self._box.by_name(state) | frozen

    def _part(self, name: str, flat: Tensor) -> Tensor:
        return self._layout.parts[name].within(flat)

    @property
    def _reference_config(self) -> ModelConfig:
        return self.companions.reference or self.model.config

    @property
    def _reference_part(self) -> LayoutPart:
        return LayoutPart.of(parameter_shapes(self._reference_config))

    def _new_reference(self) -> Tensor:
        return self._compute_weights.new_empty(self._reference_part.size)

    def _move_reference(self, step: int) -> None:
        """Update a reference that follows the actor, once the weights of the step are final."""
        stage = self.stage
        if not stage.moves_reference:
            return
        settings, number = stage.reference, step - stage.first_step + 1
        reference, actor = self._layout.reference(self._live), self._part(ACTOR, self._weights)
        if settings.moving_average > 0:
            reference.mul_(settings.moving_average).add_(actor, alpha=1 - settings.moving_average)
        elif number % settings.copy_every == 0:
            reference.copy_(actor)
        self._refresh_reference()

    def _weights_changed(self, *, reference: Tensor | None) -> None:
        """Refresh the compute weights after the live tensor was replaced; `reference` is the frozen one."""
        if not self._box.is_whole:
            self._is_gathered = False
        elif self._compute_weights is not self._weights:
            self._compute_weights.copy_(self._weights)
        if reference is not self._reference:
            self._reference, self._reference_model = reference, None
        self._refresh_reference()

    def _refresh_reference(self) -> None:
        """Drop the copy of a moving reference in another dtype; it is made again when it is next used."""
        if self._reference is None and self._compute_weights is not self._weights:
            self._reference_model = None


def _lay_out(model: Transformer, companions: Companions) -> Layout:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = {ACTOR: LayoutPart.of(shapes)}
    if companions.critic is not None:
        critic = parameter_shapes(companions.critic, with_value_head=True)
        parts[CRITIC] = LayoutPart.of(critic, start=parts[ACTOR].stop, prefix="critic.")
    return Layout(parts, has_reference=companions.moving_reference)


def _empty_twin(model: Transformer, *, dtype: torch.dtype) -> Transformer:
    has_head = model.value_head is not None
    return Transformer(model.config, with_value_head=has_head, dtype=dtype, device=model.device)


NORM_ELEMENTS, CPU_NORM_ELEMENTS = 16 << 20, 256 << 20
"""Elements whose norm is taken at once, on an accelerator and on a CPU: torch copies them to float64 for it."""


def _norm(gradient: Tensor) -> Tensor:
    """Euclidean norm, in float64; of a large gradient piece by piece, in a fixed order."""
    most = NORM_ELEMENTS if gradient.is_cuda else CPU_NORM_ELEMENTS
    pieces = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in gradient.split(most)]
    return pieces[0] if len(pieces) == 1 else torch.linalg.vector_norm(torch.stack(pieces))


RATIO_ELEMENTS = 1 << 16
"""Weights from which the relative change of an update is estimated."""


def _change(before: Tensor, after: Tensor) -> Tensor:
    """Norm of the difference, relative to the norm of `before`."""
    return _relative(_norm(after - before), _norm(before))


def _relative(changed: Tensor, held: Tensor) -> Tensor:
    return (changed / held).nan_to_num(nan=0.0, posinf=0.0)


def adamw(
    part: LayoutPart,
    *,
    weights: Tensor,
    moments: Tensor,
    gradient: Tensor,
    actor: ActorSection,
    rate: float,
    count: int,
) -> None:
    """Update one model in place from its gradient; `count` (from 1) is this update's number, for the bias correction.

    Uses the operator behind `torch.optim.AdamW(fused=True)`. The optimizer class itself would import torch's compiler
    (over a second at every start and restart) and keep its own step counts and moments.
    """
    number = torch.tensor(float(count), device=gradient.device)
    for where, weight_decay in (
        (slice(part.start, part.decayed_stop), actor.weight_decay),
        (slice(part.decayed_stop, part.stop), 0.0),
    ):
        if where.start == where.stop:
            continue
        fused_adamw(
            weights[where],
            gradient[where.start - part.start : where.stop - part.start],
            first_moment=moments[0, where],
            second_moment=moments[1, where],
            count=number,
            learning_rate=rate,
            beta1=actor.beta1,
            beta2=actor.beta2,
            weight_decay=weight_decay,
            epsilon=actor.epsilon,
        )


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
