"""Training state of a rank on PyTorch: its flat tensor, the models that read it, and the optimizer.

A stage may have a critic, trained by an optimizer of its own in the same step, and a reference model, which is frozen
or follows the actor as a part of the state. `rank_state.py` has the life of the state; the optimizer (`adamw`, on
slices of the flat state) is at the end of this module. Only this framework cuts the state into boxes.

Where weights are gathered layer by layer, there are no whole weights and no whole gradient: trained models are computed
by a `UnitPass`, from the weights of the boxes, and the gradient is that of this rank's box.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from kintsugi.checkpoint.snapshot import Snapshots, SnapshotSegments
from kintsugi.config.schema import ActorSection
from kintsugi.config.stages import Stage
from kintsugi.errors import RefusedError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.partition import is_embedding, local_shapes
from kintsugi.model.plan import ACTOR_ALONE, Companions
from kintsugi.model.seats import WHOLE, Mesh, Seat
from kintsugi.model.tensor_group import TensorGroup
from kintsugi.model.tensor_slices import ModelSlices, join_all
from kintsugi.model.torch_internals import fused_adamw
from kintsugi.model.transformer import Transformer
from kintsugi.runtime.peak_memory import PARAMETERS, PEAKS
from kintsugi.training.boxes import GATHER_TIMEOUT_S, Box
from kintsugi.training.gathered_weights import GatheredWeights
from kintsugi.training.group import Group, Groups
from kintsugi.training.initial_weights import (
    PassingParameters,
    Weights,
    critic_weights,
    new_model,
    reference_weights,
)
from kintsugi.training.layout import ACTOR, CRITIC, LayoutPart, LayoutSlot, reference_by_name
from kintsugi.training.rank_state import RankState, lay_out
from kintsugi.training.tensor_row import TensorRow
from kintsugi.training.tied_embedding import TiedGradient, copy_embedding
from kintsugi.training.unit_gradients import UnitGradients
from kintsugi.training.unit_pass import UnitPass
from kintsugi.training.unit_weights import UnitWeights
from kintsugi.training.units import units_of
from kintsugi.weights.transports.device import SharedWeights


class TrainingState(RankState):
    """A rank's replica, or its box, of the trained models and their optimizers, as tensors."""

    gradient: Tensor

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
        mesh: Mesh | None = None,
        tensors: TensorGroup | None = None,
        gathers_layers: bool = False,
        shares_weights: bool = False,
        keeps_initial: bool = True,
    ) -> None:
        """Take over `model` (fp32): its parameters become views of the flat weights; it may have no memory, where
        `fill_initial` or a repair follows. Snapshots of the state are stored
        under the name of `process` in the host's `segments`, or in private memory. With `recompute` the trained models
        keep no activations within their layers. `seat` tells which box of the state this rank holds in `mesh`. With
        `tensors` all models are computed in its logical slices, of which `model` has this rank's. With `gathers_layers`
        this rank has no whole weights of its own (`unit_pass.py`). With `shares_weights` the weights that it computes
        with are in memory that servers on the device can read, where they are apart from the state. `keeps_initial`:
        whether the first stage may begin with initial weights of the actor, where no rank keeps whole weights."""
        assert model.dtype == torch.float32, f"master weights are float32, got {model.dtype}"
        assert not gathers_layers or (seat.shards > 1 and seat.mesh.model_ranks == 1 and tensors is None)
        self._tensors, self._gathers_layers = tensors, gathers_layers
        slices = ModelSlices() if tensors is None else ModelSlices(tensors.slices, tensors.num_slices)
        shapes = local_shapes(model.config, seat, with_value_head=model.value_head is not None)
        layout = lay_out(slices.shapes(shapes), companions, seat=seat, slices=slices)
        super().__init__(
            torch.zeros(Box(layout, seat).size, device=model.device),
            layout=layout,
            config=model.config,
            companions=companions,
            process=process,
            segments=segments,
            seat=seat,
            mesh=mesh,
            slices=slices,
        )
        initial = dict(model.named_parameters()) if model.has_memory else {}
        self._make_models(model, initial, critic=companions.critic, dtype=compute_dtype)
        self._initial: Tensor | None = None
        """Initial weights of the actor in the compute type, where no whole weights are kept: until the first stage has
        begun, whose reference and critic may begin with them."""
        self._tied: dict[str, TiedGradient] = {}
        self._passes: dict[str, UnitPass] = {}
        self.shared_weights: SharedWeights | None = None
        """Memory of the weights in the compute type, where servers on the device can read them there."""
        if shares_weights and seat.is_whole and compute_dtype != torch.float32:
            size = self._layout.num_parameters * compute_dtype.itemsize
            self.shared_weights = SharedWeights(size, device=self._live.device)
        if gathers_layers and keeps_initial:
            self._initial = self._weights.new_zeros(self._layout.num_parameters, dtype=compute_dtype)
        self._compute_weights = self._whole_weights(compute_dtype)
        if not self._box.is_whole:
            for slot in layout.actor.slots if initial else ():
                self._take_parameter(slot, initial[slot.name].detach())
        if gathers_layers:
            self.gradient = self._weights.new_zeros(self._box.num_parameters)
            self._passes = {name: self._unit_pass(name, each) for name, each in self._trained.items()}
        else:
            self._attach_models(recompute=recompute)
        if self._live.is_cuda:
            torch.cuda.empty_cache()
        self._reference_model: Transformer | None = None

    def _make_models(
        self,
        model: Transformer,
        initial: Mapping[str, Tensor],
        *,
        critic: ModelConfig | None,
        dtype: torch.dtype,
    ) -> None:
        """Take over the actor, and make the models that compute in `dtype`."""
        actor = self._layout.actor
        if self._box.is_whole:
            if initial:
                actor.fill(self._weights, initial)
            point(model, actor, weights=self._weights)
        self.model = model
        if dtype != torch.float32:
            has_head = model.value_head is not None
            self.model = self._new_model(model.config, dtype=dtype, with_value_head=has_head)
        self._critic: Transformer | None = None
        if critic is not None:
            self._critic = self._new_model(critic, dtype=dtype, with_value_head=True)
        self._trained = (
            {ACTOR: self.model} if self._critic is None else {ACTOR: self.model, CRITIC: self._critic}
        )
        self._copy = _embedding_of(self.model) if self.model_part.has_copy else {}
        for name, parameter in self._copy.items():
            memory = parameter.data.new_zeros(parameter.shape)
            parameter.data = memory.copy_(initial[name].data) if initial else memory
            parameter.requires_grad = False

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def _attach_models(self, *, recompute: bool) -> None:
        """Make the trained models compute with the whole weights, and add to the whole gradient."""
        parts = self._layout.parts
        for name, each in self._trained.items():
            point(each, parts[name], weights=self._compute_weights)
        # Last, when the models' own memory is free again: together they would need more than any step does.
        self.gradient = self._weights.new_zeros(self._layout.num_parameters)
        for name, each in self._trained.items():
            is_tied = each.part.is_tied and each.part.is_last
            apart = _embedding_of(each) if is_tied else {}
            learn(each, parts[name], gradient=self.gradient, apart=apart)
            each.recompute = recompute
            if is_tied:
                totals = parts[name].views(self.gradient)
                self._tied[name] = TiedGradient(each, [(apart[own], totals[own]) for own in apart])

    def _whole_weights(self, dtype: torch.dtype) -> Tensor:
        """Memory of the whole weights of all models in the compute type, with those of the state if that is whole."""
        if self.shared_weights is not None:
            return self.shared_weights.flat(dtype).copy_(self._weights)
        if self._box.is_whole:
            return self._weights.to(dtype)
        size = 0 if self._gathers_layers else self._layout.num_parameters
        return self._weights.new_zeros(size, dtype=dtype)

    def _take_parameter(self, slot: LayoutSlot, whole: Tensor, *, part: str = ACTOR) -> None:
        """Take one initial parameter of a model: the elements of the box, and all of it in the compute type."""
        self._box.take_parameter(self._weights, slot, whole, part=part)
        if not self._gathers_layers:
            slot.view(self._compute_weights).copy_(whole)
        elif self._initial is not None and part == ACTOR:
            slot.view(self._initial).copy_(whole)

    def enter_mesh(self, mesh: Mesh) -> None:
        super().enter_mesh(mesh)
        for each in self._passes.values():
            each.enter(self._box)

    def _unit_pass(self, part: str, model: Transformer) -> UnitPass:
        units = units_of(self._box, part)
        gradient = self._box.part(part).within(self.gradient)
        return UnitPass(
            model,
            units,
            weights=UnitWeights(model, units, box=self._box, weights=self._weights),
            gradients=UnitGradients(model, box=self._box, part=part, gradient=gradient),
            is_tied=part == ACTOR and model.config.tie_embeddings,
        )

    def tied_gradient(self, part: str) -> TiedGradient | None:
        """Gradient of an embedding whose rows another stage looks up; None where there is no such embedding."""
        return self._tied.get(part)

    def _new_model(
        self, config: ModelConfig, *, dtype: torch.dtype, with_value_head: bool = False
    ) -> Transformer:
        return new_model(
            config,
            with_value_head=with_value_head,
            dtype=dtype,
            device=self._live.device,
            seat=self.seat,
            tensors=self._tensors,
            has_memory=False,
        )

    def trained(self, part: str) -> Transformer:
        """Model of a part of the layout: actor or critic."""
        return self._trained[part]

    def unit_pass(self, model: Transformer) -> UnitPass | None:
        """Pass that gathers the weights of a model unit by unit; None for one whose weights are here."""
        return (
            next((self._passes[name] for name, each in self._trained.items() if each is model), None)
            if self._passes
            else None
        )

    @property
    def gathers_layers(self) -> bool:
        return self._gathers_layers

    @property
    def _is_in_place(self) -> bool:
        is_here: bool = self._live.untyped_storage().nbytes() > 0
        return is_here

    @property
    def tensor_group(self) -> TensorGroup | None:
        """Ranks that compute the models' logical slices together; None for models that are not cut."""
        return self._tensors

    def enter(self, groups: Groups) -> None:
        """Compute with the ranks of these groups from now on."""
        if isinstance(self._tensors, TensorRow):
            self._tensors.enter(groups.tensors)

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
            weights, part = self._reference, self._reference_part
            if weights is None:
                weights, part = self._layout.reference(self._live).to(self.model.dtype), self._layout.actor
            model = self._new_model(self._reference_config, dtype=self.model.dtype)
            point(model, part, weights=weights)
            self._reference_model = model
        return self._reference_model

    def zero_gradient(self, *parts: str) -> None:
        """Zero the gradients of these models, or of all, including leftovers of an interrupted backward pass."""
        for part in parts or self._layout.parts:
            self.gradient_of(part).zero_()
            if self._gathers_layers or self._compute_weights.dtype != self.gradient.dtype:
                self._trained[part].zero_grad(set_to_none=True)
            if (tied := self.tied_gradient(part)) is not None:
                tied.clear()

    def weights(self) -> dict[str, Tensor]:
        """Committed weights of the actor by Hugging Face name, in the compute dtype, for publishing and export: views
        of memory that the next update changes."""
        actor, committed = self._layout.actor, self._committed_tensor()
        if self._gathers_layers:
            raise RefusedError("this rank has no whole weights: they are gathered where they are read")
        if not self._box.is_whole and (committed is not self._live or not self._is_gathered):
            raise RefusedError(f"the weights of step {self.committed_step} are not complete on this rank now")
        if committed is self._live:
            found = actor.views(self._compute_weights)
        else:
            found = actor.views(actor.within(self._layout.weights(committed)).to(self.model.dtype))
        if self._slices.is_cut and self.seat.tensors == 1:
            return join_all(found, shapes=self.weight_shapes)
        return found

    def gathered_weights(self, group: Group) -> GatheredWeights:
        """The same where no rank has them, whole but gathered one by one. All ranks of the group read them in one
        order."""
        if self._committed_tensor() is not self._live:
            raise RefusedError(f"the weights of step {self.committed_step} are not complete on the ranks now")
        return GatheredWeights(
            self._layout.actor.slots,
            box=self._box,
            part=ACTOR,
            weights=self._weights,
            dtype=self.dtype,
            group=group,
        )

    def gradient_of(self, part: str) -> Tensor:
        if self._gathers_layers:
            return cast(Tensor, self._box.part(part).within(self.gradient))
        return cast(Tensor, super().gradient_of(part))

    def _own_gradient(self, part: str, gradient: Tensor) -> Tensor:
        return gradient if self._gathers_layers else cast(Tensor, super()._own_gradient(part, gradient))

    def resident(self) -> list[Tensor]:
        """All tensors that stay on the device between calls; several may share a storage."""
        frozen = [] if self._reference is None else [self._reference]
        return [self._live, self.gradient, *self._parameters(), *frozen]

    def _parameters(self) -> list[Parameter]:
        models = (self.model, self._critic, self._reference_model)
        return [each for model in models if model is not None for each in model.parameters()]

    @property
    def free_device_bytes(self) -> int | None:
        """Memory that is free on the device, with what the allocator keeps; None on a CPU."""
        if not self._live.is_cuda:
            return None
        device = self._live.device
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    def release(self) -> Snapshots:
        """End the life of this state: the memory that it has on the device, and on the host, is free at once."""
        tensors, snapshots = self.resident(), super().release()
        self._initial = None
        self._compute_weights = self._compute_weights.new_empty(0)
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.resizable():
                storage.resize_(0)
        # A storage of which numpy has had a view can not be resized: it is free when no tensor has it any more.
        for parameter in self._parameters():
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
        return snapshots

    def note_peak(self, part: str = "") -> None:
        """Note the peak of device memory since the last call; `part` is the name of the work that has ended."""
        if self._live.is_cuda:
            PEAKS.note(PARAMETERS, self._layout.num_parameters)
            PEAKS.note_device(torch.cuda, self._live.device, part=part)

    def _companions_of(
        self, stage: Stage, *, actor: Mapping[str, Tensor]
    ) -> tuple[Weights | None, Weights | None]:
        if self._gathers_layers and self._initial is None and stage.begins_as_actor:
            raise RefusedError(
                f"stage {stage.name!r} begins with whole weights of the actor, which no rank has"
            )
        critic = critic_weights(stage, actor=actor, companions=self.companions)
        reference = reference_weights(stage, actor=actor)
        return (
            None if critic is None else self._slices.cut(critic),
            None if reference is None else self._slices.cut(reference),
        )

    # Boxes.

    def fill_initial(self, fill: Callable[[Mapping[str, Tensor]], None]) -> None:
        super().fill_initial(fill)
        self._is_gathered = True

    def _take_initial(self, fill: Callable[[Mapping[str, Tensor]], None]) -> None:
        if self._box.is_whole:
            fill(self._layout.actor.views(self._weights) | self._copy)
            return
        self._compute_weights.zero_()
        slots = list(self._layout.actor.slots)
        if self._gathers_layers and self._initial is None:
            slots = [slot for slot in slots if self._box.own_elements(slot, ACTOR)[0]]

        def memory(slot: LayoutSlot) -> Tensor:
            # A whole gradient is free memory.
            return self._weights.new_empty(slot.shape) if self._gathers_layers else slot.view(self.gradient)

        parameters = PassingParameters(slots, memory=memory, take=self._take_parameter, others=self._copy)
        fill(parameters)
        parameters.finish()
        self.gradient.zero_()

    def start_stage(self, stage: Stage, *, step: int) -> None:
        super().start_stage(stage, step=step)
        if not self.is_fresh:
            self._initial = None

    def gather(self, groups: Groups) -> None:
        self._gather(groups, *self._layout.parts)

    def _gather(self, groups: Groups, *parts: str) -> None:
        self._is_gathered = False  # If the others do not come, a rollback follows.
        if not self._box.is_whole and not self._gathers_layers:
            self._box.gather(self._weights, into=self._compute_weights, group=groups.data, parts=parts)
        if ACTOR in parts and groups.embedding is not None:
            embedding = list(_embedding_of(self.model).values())
            copy_embedding(embedding, edge=groups.embedding, is_first=self.seat.is_first)
        self._is_gathered = True

    def _actor_weights(self) -> dict[str, Tensor]:
        # Equal to the master weights where they matter: a critic that begins as the actor needs float32 (`validation`).
        if self._gathers_layers:
            return {} if self._initial is None else self._layout.actor.views(self._initial)
        row = self._weights if self._box.is_whole else self._compute_weights
        return self._layout.actor.views(row) | self._copy

    def _fill_critic(self, weights: Mapping[str, Tensor]) -> None:
        if self._box.is_whole:
            super()._fill_critic(weights)
            return
        for slot in self._layout.parts[CRITIC].slots:
            given = weights.get(slot.name)
            whole = self._weights.new_zeros(slot.shape) if given is None else given.detach()
            self._take_parameter(slot, whole, part=CRITIC)

    def _complete_update(self, part: str, *, before: Tensor, groups: Groups | None) -> Tensor:
        if self.seat.is_whole:
            return self._change(before, self._some_weights(part))
        assert groups is not None, "the weights of several boxes are gathered after an update"
        self._gather(groups, part)
        squares = torch.stack((_norm(self._some_weights(part) - before), _norm(before))).square()
        world = groups.world
        gathered = world.all_gather(squares, timeout_s=GATHER_TIMEOUT_S)[self._box.counted(world)]
        changed, held = gathered.sum(dim=0).sqrt()
        return _relative(changed, held)

    def _whole_by_name(self, reference: Tensor | None) -> dict[str, Tensor]:
        if self.seat.is_whole and not self._slices.is_cut:
            return self._by_name(self._live, reference)
        layout = self._layout
        if self.seat.stages > 1 or self._slices.is_cut:
            layout = lay_out(self.weight_shapes, self.companions)
        whole = layout.by_name(torch.empty(layout.size, device="meta"))
        if reference is None:
            return whole
        part = LayoutPart.of(parameter_shapes(self._reference_config), is_filled=False)
        return whole | reference_by_name(part, torch.empty(part.size, dtype=reference.dtype, device="meta"))

    def _change(self, before: Tensor, after: Tensor) -> Tensor:
        return _relative(_norm(after - before), _norm(before))

    def _optimize(
        self, part: str, gradient: Tensor, *, settings: ActorSection, rate: float, count: int
    ) -> None:
        adamw(
            self._box.part(part),
            weights=self._weights,
            moments=self._moments,
            gradient=gradient,
            actor=settings,
            rate=rate,
            count=count,
        )
        if self._box.is_whole and self._compute_weights is not self._weights:
            self._part(part, self._compute_weights).copy_(self._part(part, self._weights))

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

    def _begin_change(self) -> None:
        if self.shared_weights is not None:
            self.shared_weights.begin_change()

    def _weights_changed(self, *, reference: Tensor | None) -> None:
        """Refresh the compute weights after the live tensor was replaced; `reference` is the frozen one."""
        if self._gathers_layers and not self.is_fresh:
            self._initial = None
        if self._box.is_whole and self._compute_weights is not self._weights:
            self._compute_weights.copy_(self._weights)
        self._is_gathered = (self._box.is_whole or self._gathers_layers) and not self._copy
        if reference is not self._reference:
            self._reference, self._reference_model = reference, None
        self._refresh_reference()

    def _refresh_reference(self) -> None:
        """Drop the copy of a moving reference in another dtype; it is made again when it is next used."""
        if self._reference is None and self._compute_weights is not self._weights:
            self._reference_model = None


def point(model: Transformer, part: LayoutPart, *, weights: Tensor) -> None:
    """Make a model's parameters views of flat weights, frozen; the memory that they had is released."""
    for slot, parameter in _parameters(model, part):
        parameter.data = slot.view(weights)
        parameter.requires_grad = False


def learn(model: Transformer, part: LayoutPart, *, gradient: Tensor, apart: Collection[str] = ()) -> None:
    """Make backward passes through a model add its gradients to a flat tensor, except for the parameters `apart`.

    Gradients of the tensor's own type are views of it. Others are added as soon as autograd has finished one of
    them, which is then dropped, so that a second gradient of the whole model never exists.
    """
    for slot, parameter in _parameters(model, part):
        parameter.requires_grad = True
        if slot.name in apart:
            continue
        if parameter.dtype == gradient.dtype:
            parameter.grad = slot.view(gradient)
        else:
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, slot.view(gradient)))


def _embedding_of(model: Transformer) -> dict[str, Tensor]:
    """Parameters of the embedding, of which there is one for each slice, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if is_embedding(name)}


def _parameters(model: Transformer, part: LayoutPart) -> Iterator[tuple[LayoutSlot, Tensor]]:
    by_name = dict(model.named_parameters())
    return ((slot, by_name[slot.name]) for slot in part.slots)


def _move_gradient(total: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None, "called after a gradient was accumulated"
    total.add_(parameter.grad)
    parameter.grad = None


def _norm(weights: Tensor) -> Tensor:
    """Euclidean norm of some weights, for the ratio of an update."""
    return torch.linalg.vector_norm(weights, dtype=torch.float64)


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
