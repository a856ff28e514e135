"""What a rank trains: weights, optimizer moments and counters, as one flat tensor (`layout.py`).

A step moves the state from *committed* to *prepared* and, by `commit`, to committed again; `rollback` returns to the
committed state exactly. Between `begin_update` and `end_update` the state is neither, which `half_updated` shows. The
committed step and the prepared one lie outside of this process as well (`copies.py`), where a replacement finds them.

Beside the actor there may be a critic, trained by an optimizer of its own in the same step, and a reference model:
frozen, or moving behind the actor as a part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from kintsugi.checkpoint.snapshot import HeldSnapshots, Segments, Snapshots
from kintsugi.config import ActorSection
from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.plan import ACTOR_ALONE, Companions
from kintsugi.model.transformer import Transformer
from kintsugi.stages import Stage
from kintsugi.training.buddy import StateCopy
from kintsugi.training.copies import Counters, StateCopies, reference_digest
from kintsugi.training.layout import ACTOR, CRITIC, Layout, Part, reference_by_name
from kintsugi.training.optimizer import adamw, is_finite
from kintsugi.training.origins import critic_weights, reference_weights
from kintsugi.training.schedule import learning_rate


@dataclass(frozen=True)
class Update:
    """What one optimizer update did."""

    grad_norm: float
    """Before clipping."""
    learning_rate: float
    applied: bool


class TrainingState:
    """One rank's replica of the trained models and their optimizers."""

    def __init__(
        self,
        model: Transformer,
        *,
        companions: Companions = ACTOR_ALONE,
        compute_dtype: torch.dtype = torch.float32,
        process: str = "model-0",
        segments: Segments | None = None,
    ) -> None:
        """Takes `model` (fp32) over: its parameters become views of the flat weights. Snapshots of the state lie
        under the name of `process` in the host's `segments`, or in private memory."""
        assert model.dtype == torch.float32, f"master weights are float32, got {model.dtype}"
        self.companions = companions
        self._layout = layout = _lay_out(model, companions)
        self._live = torch.zeros(layout.size, device=model.device)
        self._weights, self._moments = layout.weights(self._live), layout.moments(self._live)
        layout.actor.fill(self._weights, dict(model.named_parameters()))
        self._process = process
        self._segments = segments
        self._snapshots = Snapshots(process, size=self._live.nbytes, segments=segments)
        self._copies = StateCopies(self._live, snapshots=self._snapshots)
        self.gradient = torch.zeros_like(self._weights)
        self._compute_weights = self._weights.to(compute_dtype)
        self._compute_gradient = self.gradient.to(compute_dtype)
        self.model = model
        if compute_dtype != torch.float32:
            self.model = _empty_twin(model, dtype=compute_dtype)
        self._critic: Transformer | None = None
        if companions.critic is not None:
            self._critic = Transformer(
                companions.critic, with_value_head=True, dtype=compute_dtype, device=model.device
            )
        for name, each in ((ACTOR, self.model), (CRITIC, self._critic)):
            if each is not None:
                layout.parts[name].point(each, weights=self._compute_weights, gradient=self._compute_gradient)
        self._counters = self._committed = Counters()
        self._committed_digest = self._prepared_digest = ""
        self._updating = self._between_calls = False
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
    def is_between_calls(self) -> bool:
        """Half updated, but in good order: the step's next training call goes on from here."""
        return self._updating and self._between_calls

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
    def critic(self) -> Transformer:
        """The value model; only stages of PPO have one."""
        if self._critic is None or not self.stage.has_critic:
            raise RefusedError(f"stage {self._counters.stage!r} has no critic")
        return self._critic

    @property
    def reference_model(self) -> Transformer:
        """What the KL is measured against; only stages that do so keep one."""
        if self._stage is None or not self._stage.has_reference or not self._counters.stage:
            raise RefusedError(f"stage {self._counters.stage!r} keeps no reference model (its `beta` is 0)")
        if self._reference_model is None:
            weights = self._reference
            if weights is None:
                weights = self._layout.reference(self._live).to(self.model.dtype)
            model = Transformer(self._reference_config, dtype=self.model.dtype, device=self.model.device)
            self._reference_part.point(model, weights=weights, gradient=None)
            self._reference_model = model
        return self._reference_model

    def actor_waits(self, step: int) -> bool:
        """Whether only the critic learns in this step."""
        stage = self.stage
        return stage.has_critic and step < stage.first_step + stage.critic.warmup_steps

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
        actor = self._layout.actor.views(self._weights)
        critic = critic_weights(stage, actor=actor, companions=self.companions)
        reference = reference_weights(stage, actor=actor)
        self._stage = stage
        self._copies.settle()
        self._moments.zero_()
        if critic is not None:
            self._layout.parts[CRITIC].fill(self._weights, critic)
        if self._layout.has_reference:
            self._layout.actor.fill(self._layout.reference(self._live), reference or {})
        frozen = None
        if reference is not None and not stage.moves_reference:
            frozen = self._new_reference()
            self._reference_part.fill(frozen, reference)
        self._counters = Counters(
            step=self.committed_step, stage=stage.name, reference=reference_digest(frozen)
        )
        self._weights_changed(reference=frozen)
        self._copies.keep_reference(self._counters, frozen)
        self._prepared_digest = self._copies.prepare(self._counters)
        self._adopt_prepared()
        self._copies.forget_references(stage.name)

    def gradient_of(self, part: str) -> Tensor:
        """The part's share of the gradient buffer."""
        return self._part(part, self.gradient)

    def zero_gradient(self, *parts: str) -> None:
        """Of these models or of all, also what a backward pass left that did not end."""
        for part in parts or self._layout.parts:
            self.gradient_of(part).zero_()
            if self._compute_gradient is not self.gradient:
                self._part(part, self._compute_gradient).zero_()

    def collect_gradient(self, part: str) -> None:
        """Call after each backward pass: low-precision gradients are added up in fp32."""
        if self._compute_gradient is not self.gradient:
            found = self._part(part, self._compute_gradient)
            self.gradient_of(part).add_(found)
            found.zero_()

    def begin_update(self) -> None:
        """The first update of a call follows; until `end_update` the state belongs to no step."""
        assert self.prepared_step is None, f"step {self.prepared_step} is prepared and waits for its commit"
        assert self._copies.committed is not None, "a stage was started"
        self._copies.settle()
        self._updating, self._between_calls = True, False

    def pause_update(self) -> None:
        """All updates of a call are made, and another training call of the same step follows."""
        assert self._updating
        self._between_calls = True

    def end_update(self, step: int) -> None:
        """All updates of `step` are made: the rank is prepared, and a copy of it under way."""
        assert self._updating and step == self.committed_step + 1
        counters = msgspec.structs.replace(self._counters, step=step)
        self._move_reference(step)
        self._prepared_digest = self._copies.prepare(counters)
        self._counters = counters
        self._updating = self._between_calls = False

    def update(self, gradient: Tensor, *, part: str = ACTOR) -> Update:
        """Clip and apply the batch's gradient of one model, equal on all ranks, so that all of them decide alike."""
        assert self._updating, "updates are made between begin_update and end_update"
        actor, done, num_updates = self._schedule(part)
        rate = learning_rate(actor, update=done, num_updates=num_updates)
        grad_norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not is_finite(grad_norm):
            self._count("critic_skipped" if part == CRITIC else "skipped")
            return Update(grad_norm, rate, applied=False)
        if grad_norm > actor.max_grad_norm:
            gradient = gradient * (actor.max_grad_norm / grad_norm)
        self._count("critic_updates" if part == CRITIC else "updates")
        adamw(
            self._layout.parts[part],
            weights=self._weights,
            moments=self._moments,
            gradient=gradient,
            actor=actor,
            rate=rate,
            count=done + 1,
        )
        if self._compute_weights is not self._weights:
            self._part(part, self._compute_weights).copy_(self._part(part, self._weights))
        return Update(grad_norm, rate, applied=True)

    def _schedule(self, part: str) -> tuple[ActorSection, int, int]:
        """A model's optimizer settings, the updates it has made in this stage, and how many it is to make.

        The critic follows the actor's schedule at a rate of its own, also through the steps in which the actor waits.
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
        """The actor's committed weights by Hugging Face name, in the type they are used in: what is published and
        exported."""
        actor = self._layout.actor
        return actor.views(actor.within(self._layout.weights(self._committed_tensor())).to(self.model.dtype))

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
        saved_reference = any(name.startswith("reference/") for name in tensors)
        is_frozen = saved_reference and not self._layout.has_reference
        reference = self._new_reference() if is_frozen else None
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
            for name, tensor in reference_by_name(self._reference_part, reference).items():
                tensor.copy_(tensors[name])
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
        if stage is not None and stage.has_reference and not stage.moves_reference:
            reference = self._new_reference()
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
        """The live one where that is committed: it lies where it can be converted fastest."""
        is_here = self._live.untyped_storage().nbytes() > 0  # Not while another has its turn there.
        is_live = is_here and not self._updating and self.prepared_step is None
        committed = self._copies.committed
        return self._live if is_live or committed is None else committed

    def resident(self) -> list[Tensor]:
        """All that it keeps on the device from one call to the next; several may share a storage."""
        models = (self.model, self._critic, self._reference_model)
        parameters = [each for model in models if model is not None for each in model.parameters()]
        frozen = [] if self._reference is None else [self._reference]
        return [self._live, self.gradient, self._compute_gradient, *parameters, *frozen]

    def await_copy(self) -> None:
        """Until nobody reads the live state behind the back of who trains it; from any thread."""
        self._copies.await_copy()

    def _check_reference(self) -> None:
        """Measured like the rest of the state; what lies beside the snapshots replaces a damaged one."""
        expected = self._committed.reference
        if self._reference is not None and reference_digest(self._reference) != expected:
            self._copies.load_reference(self._committed.stage, into=self._reference, digest=expected)

    def _by_name(self, state: Tensor, reference: Tensor | None) -> dict[str, Tensor]:
        frozen = {} if reference is None else reference_by_name(self._reference_part, reference)
        return self._layout.by_name(state) | frozen

    def _part(self, name: str, flat: Tensor) -> Tensor:
        return self._layout.parts[name].within(flat)

    @property
    def _reference_config(self) -> ModelConfig:
        return self.companions.reference or self.model.config

    @property
    def _reference_part(self) -> Part:
        return Part.of(parameter_shapes(self._reference_config))

    def _new_reference(self) -> Tensor:
        return self._compute_weights.new_empty(self._reference_part.size)

    def _move_reference(self, step: int) -> None:
        """The step's weights are final: a reference that follows the actor takes its share of them."""
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
        """The live tensor was replaced, and with it what the models compute with; `reference` is the frozen one."""
        if self._compute_weights is not self._weights:
            self._compute_weights.copy_(self._weights)
        if reference is not self._reference:
            self._reference, self._reference_model = reference, None
        self._refresh_reference()

    def _refresh_reference(self) -> None:
        """A moving reference in another type than the state's is a copy, which is made when it is next asked for."""
        if self._reference is None and self._compute_weights is not self._weights:
            self._reference_model = None


def _lay_out(model: Transformer, companions: Companions) -> Layout:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = {ACTOR: Part.of(shapes)}
    if companions.critic is not None:
        critic = parameter_shapes(companions.critic, with_value_head=True)
        parts[CRITIC] = Part.of(critic, start=parts[ACTOR].stop, prefix="critic.")
    return Layout(parts, has_reference=companions.moving_reference)


def _empty_twin(model: Transformer, *, dtype: torch.dtype) -> Transformer:
    has_head = model.value_head is not None
    return Transformer(model.config, with_value_head=has_head, dtype=dtype, device=model.device)
