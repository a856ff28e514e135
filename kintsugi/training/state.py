"""What a rank trains: weights, optimizer moments and counters, as a few flat tensors.

Flat, because everything done to all parameters at once (zeroing, adding, reducing, clipping, stepping, copying,
hashing) is then one operation over one tensor, in one fixed order. Parameters are views: those with weight decay
first, then norms and biases.

A step moves the state from *committed* to *prepared* and, by `commit`, to committed again; `rollback` returns to the
committed state exactly. Between `begin_update` and `end_update` the state is neither, which `half_updated` shows. The
committed step and the prepared one lie outside of this process as well (`copies.py`), where a replacement finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from kintsugi.checkpoint.snapshot import HeldSnapshots, Segments, Snapshots
from kintsugi.config import ActorSection, Stage
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.transformer import Transformer
from kintsugi.training.buddy import StateCopy
from kintsugi.training.copies import Counters, StateCopies, reference_digest
from kintsugi.training.schedule import learning_rate


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat tensors."""

    name: str
    shape: torch.Size
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)


@dataclass(frozen=True)
class Update:
    """What one optimizer update did."""

    grad_norm: float
    """Before clipping."""
    learning_rate: float
    applied: bool


class TrainingState:
    """One rank's replica of the trained model and its optimizer."""

    def __init__(
        self,
        model: Transformer,
        *,
        compute_dtype: torch.dtype = torch.float32,
        process: str = "model-0",
        segments: Segments | None = None,
    ) -> None:
        """Takes `model` (fp32) over: its parameters become views of the flat weights. Snapshots of the state lie
        under the name of `process` in the host's `segments`, or in private memory."""
        assert model.dtype == torch.float32, f"master weights are float32, got {model.dtype}"
        self._slots, self._num_decayed = _lay_out(model)
        self._live = _flatten(model, self._slots)
        self._weights, self._moments = self._live[0], self._live[1:]
        self._process = process
        self._segments = segments
        self._snapshots = Snapshots(process, size=self._live.nbytes, segments=segments)
        self._copies = StateCopies(self._live, snapshots=self._snapshots)
        self.gradient = torch.zeros_like(self._weights)
        self.model = model
        if compute_dtype != torch.float32:
            self.model = Transformer(model.config, dtype=compute_dtype, device=model.device)
        self._compute_weights = self._weights.to(compute_dtype)
        self._compute_gradient = self.gradient.to(compute_dtype)
        _point_at(self.model, self._slots, weights=self._compute_weights, gradient=self._compute_gradient)
        self._counters = self._committed = Counters()
        self._committed_digest = self._prepared_digest = ""
        self._updating = False
        self._stage: Stage | None = None
        self._reference: Tensor | None = None
        self._reference_model: Transformer | None = None

    @property
    def committed_step(self) -> int:
        return self._committed.step

    @property
    def committed_digest(self) -> str:
        """Of the committed state, as it was taken when the state was copied."""
        if not self._committed_digest:
            self._committed_digest = self.digest()  # Of a fresh rank, whose live state has never changed.
        return self._committed_digest

    @property
    def prepared_digest(self) -> str:
        """Of the prepared state, or of the committed one where nothing is prepared."""
        return self.committed_digest if self.prepared_step is None else self._prepared_digest

    @property
    def why_private(self) -> str:
        """Why snapshots of this state end with its process; empty where the host's agent holds them."""
        return self._snapshots.why_private

    @property
    def prepared_step(self) -> int | None:
        """The step that is finished here but not committed, if any."""
        ahead = self._counters.step > self.committed_step and not self._updating
        return self._counters.step if ahead else None

    @property
    def half_updated(self) -> bool:
        """An update began and did not end: these weights belong to no step."""
        return self._updating

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def committed_counters(self) -> Counters:
        return self._committed

    @property
    def stage(self) -> Stage:
        if self._stage is None:
            raise RefusedError("no stage has been started on this rank")
        return self._stage

    @property
    def reference_model(self) -> Transformer:
        """The stage's initial weights, frozen; only stages with a KL penalty keep them."""
        if self._reference is None:
            raise RefusedError(f"stage {self._counters.stage!r} keeps no reference model (its `beta` is 0)")
        if self._reference_model is None:
            model = Transformer(self.model.config, dtype=self.model.dtype, device=self.model.device)
            _point_at(model, self._slots, weights=self._reference, gradient=None)
            self._reference_model = model
        return self._reference_model

    def start_stage(self, stage: Stage, *, step: int) -> None:
        """A fresh optimizer and schedule on the committed weights. Starting the current stage again does nothing.

        A fresh rank of a run that is further on (at `step`) only takes note: it stays at step 0, where it can run no
        call, until it is repaired; what its predecessor left must not be overwritten.
        """
        begins_here = self.committed_step == step == stage.first_step - 1
        fresh = self._counters == Counters()
        if self._counters.stage == stage.name or (fresh and not begins_here):
            self._stage = stage
            return
        if self.prepared_step is not None or self._updating:
            raise RefusedError(f"stage {stage.name!r} cannot start on top of a step that is not committed")
        if not begins_here:
            raise RefusedError(
                f"stage {stage.name!r} begins at step {stage.first_step}, this rank stands at {self.committed_step}"
            )
        self._stage = stage
        self._copies.settle()
        self._moments.zero_()
        self._set_reference(self._compute_weights.clone() if stage.algorithm.beta > 0 else None)
        self._counters = Counters(
            step=self.committed_step, stage=stage.name, reference=reference_digest(self._reference)
        )
        self._copies.keep_reference(self._counters, self._reference)
        self._prepared_digest = self._copies.prepare(self._counters)
        self._adopt_prepared()
        self._copies.forget_references(stage.name)

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def collect_gradient(self) -> None:
        """Call after each backward pass: low-precision gradients are added up in fp32."""
        if self._compute_gradient is not self.gradient:
            self.gradient += self._compute_gradient
            self._compute_gradient.zero_()

    def begin_update(self) -> None:
        """The first update of a step follows; until `end_update` the state belongs to no step."""
        assert self.prepared_step is None, f"step {self.prepared_step} is prepared and waits for its commit"
        assert self._copies.committed is not None, "a stage was started"
        self._copies.settle()
        self._updating = True

    def end_update(self, step: int) -> None:
        """All updates of `step` are made: the rank is prepared, and a copy of it under way."""
        assert self._updating and step == self.committed_step + 1
        counters = msgspec.structs.replace(self._counters, step=step)
        self._prepared_digest = self._copies.prepare(counters)
        self._counters = counters
        self._updating = False

    def update(self, gradient: Tensor) -> Update:
        """Clip and apply the batch's gradient, equal on all ranks, so that all of them decide alike."""
        assert self._updating, "updates are made between begin_update and end_update"
        actor = self.stage.actor
        rate = learning_rate(actor, update=self._counters.updates, num_updates=_num_updates(self.stage))
        grad_norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not _is_finite(grad_norm):
            self._counters = msgspec.structs.replace(self._counters, skipped=self._counters.skipped + 1)
            return Update(grad_norm, rate, applied=False)
        if grad_norm > actor.max_grad_norm:
            gradient = gradient * (actor.max_grad_norm / grad_norm)
        self._counters = msgspec.structs.replace(self._counters, updates=self._counters.updates + 1)
        self._adam(gradient, actor=actor, rate=rate)
        if self._compute_weights is not self._weights:
            self._compute_weights.copy_(self._weights)
        return Update(grad_norm, rate, applied=True)

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
        """Return to the committed state of `step`, verified; a rank that prepared it but missed its commit adopts it.

        A rank that stands there already is verified as well: its digest is measured, not remembered.
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
        """Of the live state as it is now; equal on all ranks after the same steps."""
        return self._copies.digest(self._counters)

    def weights(self) -> dict[str, Tensor]:
        """The committed weights by Hugging Face name, in the type they are used in: what is published and exported."""
        weights = self._committed_tensor()[0].to(self.model.dtype)
        return {slot.name: slot.view(weights) for slot in self._slots}

    def tensors(self) -> dict[str, Tensor]:
        """The committed state, all but `committed_counters`, as views: "weights/…", "moment1/…", "moment2/…", …."""
        return self._by_name(self._committed_tensor(), self._reference)

    def latest_copy(self) -> StateCopy | None:
        """The prepared state, or else the committed one, where a thread can read it while training goes on; None
        before the first copy, and while the counters are those of neither."""
        latest = self._copies.latest()
        if latest is None or self._updating:
            return None
        view, header = latest
        return StateCopy(self._counters, self.prepared_digest, self._by_name(view, self._reference), header)

    def restore(
        self, tensors: Mapping[str, Tensor], *, counters: Counters, stage: Stage | None, digest: str = ""
    ) -> None:
        """Become exactly the state that `tensors` and `counters` were taken from, committed.

        What does not fit, or does not hash to `digest`, changes nothing.
        """
        assert counters.stage == ("" if stage is None else stage.name)
        with_reference = any(name.startswith("reference/") for name in tensors)
        reference = torch.empty_like(self._compute_weights) if with_reference else None
        mine = self._by_name(self._live, reference)
        if mine.keys() != tensors.keys():
            odd = ", ".join(sorted(mine.keys() ^ tensors.keys())[:4])
            raise IntegrityError(f"expected the saved state of this model, got one that differs in {odd}")
        for name, tensor in mine.items():
            saved = tensors[name]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise IntegrityError(
                    f"expected {name} as {tensor.dtype} {tuple(tensor.shape)}, "
                    f"got {saved.dtype} {tuple(saved.shape)}"
                )

        def write(into: Tensor) -> None:
            for name, tensor in self._by_name(into, None).items():
                tensor.copy_(tensors[name])

        if reference is not None:
            for slot in self._slots:
                slot.view(reference).copy_(tensors[f"reference/{slot.name}"])
            if not counters.reference:  # Saved before counters said what the reference is.
                counters = msgspec.structs.replace(counters, reference=reference_digest(reference))
        found = self._copies.fill(counters, write, digest=digest, reference=reference)
        self._become(counters, digest=found, stage=stage, reference=reference)

    def restore_snapshot(
        self, step: int, *, process: str, stages: Mapping[str, Stage], digest: str = ""
    ) -> None:
        """Become what a process of this host (this one's predecessor, or another rank) left of `step`, verified."""
        held = None
        if process != self._process:
            if self._segments is None:
                raise RefusedError(f"this host has no segment service that could hold snapshots of {process}")
            held = HeldSnapshots(process, segments=self._segments)
        header = (held or self._snapshots).expect(step, digest=digest)
        stage = stages.get(header.stage)
        if stage is None and header.stage:
            raise IntegrityError(f"the snapshot belongs to stage {header.stage!r}, which is not ours")
        reference = None
        if stage is not None and stage.algorithm.beta > 0:
            reference = torch.empty_like(self._compute_weights)
            self._copies.load_reference(stage.name, into=reference, digest=header.reference, held=held)
        if held is None:
            counters = self._copies.adopt(step, digest=header.digest)
        else:
            counters = self._copies.copy_from(held, step, digest=header.digest, reference=reference)
        self._become(counters, digest=header.digest, stage=stage, reference=reference)

    def _become(
        self, counters: Counters, *, digest: str, stage: Stage | None, reference: Tensor | None
    ) -> None:
        """The live tensor has been replaced; this is what it is."""
        self._counters = self._committed = counters
        self._committed_digest, self._prepared_digest = digest, ""
        self._stage, self._updating = stage, False
        self._compute_weights.copy_(self._weights)
        self._set_reference(reference)

    def _adopt_prepared(self) -> None:
        self._copies.commit()
        self._committed, self._committed_digest = self._counters, self._prepared_digest
        self._prepared_digest = ""

    def _load_committed(self) -> None:
        self._copies.load()
        self._counters, self._updating = self._committed, False
        if self._compute_weights is not self._weights:
            self._compute_weights.copy_(self._weights)

    def _committed_tensor(self) -> Tensor:
        """The live one where that is committed: it lies where it can be converted fastest."""
        is_live = not self._updating and self.prepared_step is None
        committed = self._copies.committed
        return self._live if is_live or committed is None else committed

    def _check_reference(self) -> None:
        """Measured like the rest of the state; what lies beside the snapshots replaces a damaged one."""
        expected = self._committed.reference
        if self._reference is not None and reference_digest(self._reference) != expected:
            self._copies.load_reference(self._committed.stage, into=self._reference, digest=expected)

    def _by_name(self, state: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        flat_tensors = {"weights": state[0], "moment1": state[1], "moment2": state[2]}
        if reference is not None:
            flat_tensors["reference"] = reference
        return {
            f"{kind}/{slot.name}": slot.view(flat)
            for kind, flat in flat_tensors.items()
            for slot in self._slots
        }

    def _set_reference(self, reference: Tensor | None) -> None:
        self._reference = reference
        self._reference_model = None

    def _adam(self, gradient: Tensor, *, actor: ActorSection, rate: float) -> None:
        """AdamW by the operator behind `torch.optim.AdamW(fused=True)`.

        The optimizer class itself would import torch's compiler (over a second at every start and restart) and keep
        a second book of steps and moments.
        """
        count = torch.tensor(float(self._counters.updates), device=gradient.device)
        for part, weight_decay in (
            (slice(0, self._num_decayed), actor.weight_decay),
            (slice(self._num_decayed, None), 0.0),
        ):
            torch._fused_adamw_(
                [self._weights[part]],
                [gradient[part]],
                [self._moments[0, part]],
                [self._moments[1, part]],
                [],
                [count],
                lr=rate,
                beta1=actor.beta1,
                beta2=actor.beta2,
                weight_decay=weight_decay,
                eps=actor.epsilon,
                amsgrad=False,
                maximize=False,
            )


def _num_updates(stage: Stage) -> int:
    return stage.algorithm.steps * stage.algorithm.updates_per_step


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _lay_out(model: Transformer) -> tuple[list[Slot], int]:
    """Places for all parameters, matrices first: only they are decayed, not norms and biases."""
    parameters = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
    slots, start = [], 0
    for name, parameter in parameters:
        slots.append(Slot(name, parameter.shape, start))
        start += parameter.numel()
    num_decayed = sum(parameter.numel() for _, parameter in parameters if parameter.dim() >= 2)
    return slots, num_decayed


def _flatten(model: Transformer, slots: list[Slot]) -> Tensor:
    """Three rows: the weights, and moments that are still zero."""
    by_name = dict(model.named_parameters())
    flat = torch.zeros(3, sum(slot.shape.numel() for slot in slots), device=model.device)
    for slot in slots:
        slot.view(flat[0]).copy_(by_name[slot.name].detach())
    return flat


def _point_at(model: Transformer, slots: list[Slot], *, weights: Tensor, gradient: Tensor | None) -> None:
    """Make a model's parameters (and their gradients) views of flat tensors; without gradients they are frozen."""
    by_name = dict(model.named_parameters())
    for slot in slots:
        parameter = by_name[slot.name]
        parameter.data = slot.view(weights)
        parameter.requires_grad_(gradient is not None)
        if gradient is not None:
            parameter.grad = slot.view(gradient)
