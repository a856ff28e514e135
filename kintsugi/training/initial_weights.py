"""Initial weights of all models: from a folder, from the run's seed or, for companions of the actor, from the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.partition import part_of
from kintsugi.model.plan import Companions, actor_head, plan_architecture
from kintsugi.model.seats import WHOLE, Seat
from kintsugi.model.sliced_transformer import SlicedTransformer
from kintsugi.model.tensor_group import TensorGroup
from kintsugi.model.tensor_slices import SliceName, view
from kintsugi.model.transformer import Transformer, initialize_parameter
from kintsugi.training.layout import LayoutSlot

Weights = Mapping[str, Tensor]
"""Float32 tensors by Hugging Face name."""


def critic_weights(stage: Stage, *, actor: Weights, companions: Companions) -> Weights | None:
    """Return the critic's initial weights: from its folder, or the actor's; None in a stage without critic. The layout
    fills a missing value head with zeros."""
    if not stage.has_critic:
        return None
    if stage.critic.path is None:
        return actor
    return huggingface.StoredWeights(Path(stage.critic.path), config=companions.critic, head="optional")


def reference_weights(stage: Stage, *, actor: Weights) -> Weights | None:
    """Return the reference weights: from their folder, or the actor's; None in a stage without reference."""
    if not stage.has_reference:
        return None
    if stage.reference.path is None:
        return actor
    return huggingface.StoredWeights(Path(stage.reference.path))


def load_reward_model(
    stage: Stage,
    *,
    companions: Companions,
    dtype: torch.dtype,
    device: torch.device,
    seat: Seat = WHOLE,
    tensors: TensorGroup | None = None,
) -> Transformer:
    """Load the trained reward model of a stage, or this rank's part of it, frozen."""
    assert stage.reward_model is not None and companions.reward_model is not None
    config, folder = companions.reward_model, Path(stage.reward_model.path)
    model = new_model(config, with_value_head=True, dtype=dtype, device=device, seat=seat, tensors=tensors)
    huggingface.load_into(dict(model.named_parameters()), folder, config=config, head="required")
    return model.requires_grad_(requires_grad=False)


def new_model(
    config: ModelConfig,
    *,
    with_value_head: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device,
    seat: Seat = WHOLE,
    tensors: TensorGroup | None = None,
    has_memory: bool = True,
) -> Transformer:
    """Create a model without weights, or the part of it that a rank computes: layers by its seat, slices by
    `tensors`. `has_memory`: whether there is room for the weights."""
    part = part_of(config, seat)
    if tensors is None:
        return Transformer(
            config,
            with_value_head=with_value_head,
            dtype=dtype,
            device=device,
            part=part,
            has_memory=has_memory,
        )
    return SlicedTransformer(
        config,
        group=tensors,
        with_value_head=with_value_head,
        dtype=dtype,
        device=device,
        part=part,
        has_memory=has_memory,
    )


def empty_model(
    config: Config,
    *,
    device: torch.device,
    seat: Seat = WHOLE,
    tensors: TensorGroup | None = None,
    has_memory: bool = True,
) -> Transformer:
    """Create the model, or this rank's part of it, in float32 without weights (`fill_initial`)."""
    has_head = actor_head(config) != "refused"
    return new_model(
        plan_architecture(config),
        with_value_head=has_head,
        device=device,
        seat=seat,
        tensors=tensors,
        has_memory=has_memory,
    )


class PassingParameters(Mapping[str, Tensor]):
    """Parameters of a model that are filled one after the other: each has memory from when it is read until the next
    one is, or until `finish`, when what is needed of it is taken."""

    def __init__(
        self,
        slots: Sequence[LayoutSlot],
        *,
        memory: Callable[[LayoutSlot], Tensor],
        take: Callable[[LayoutSlot, Tensor], None],
        others: Mapping[str, Tensor],
    ) -> None:
        """`memory` of a parameter is asked for when it is read. `others` have memory of their own."""
        self._slots = {slot.name: slot for slot in slots}
        self._memory, self._take, self._others = memory, take, others
        self._filling: tuple[LayoutSlot, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        self.finish()
        if name in self._others:
            return self._others[name]
        slot = self._slots[name]
        memory = self._memory(slot)
        self._filling = slot, memory
        return memory

    def __iter__(self) -> Iterator[str]:
        yield from self._slots
        yield from self._others

    def __len__(self) -> int:
        return len(self._slots) + len(self._others)

    def finish(self) -> None:
        """Take the parameter that was read last."""
        if self._filling is not None:
            filled, self._filling = self._filling, None
            self._take(*filled)


@torch.no_grad()
def fill_initial(parameters: Weights, config: Config) -> None:
    """Fill the model's parameters, or slices of them, in float32, as the run begins: from its folder, or initialised
    from its seed. One after the other: each may get its memory only when it is read."""
    architecture = plan_architecture(config)
    if config.model.path is not None:
        folder = Path(config.model.path)
        huggingface.load_into(parameters, folder, config=architecture, head=actor_head(config))
        return
    new = config.model.new
    assert new is not None
    shapes = parameter_shapes(architecture, with_value_head=actor_head(config) != "refused")
    for name, parameter in parameters.items():
        where = SliceName.parse(name)  # A rank may hold a part.
        whole = parameter if where.count == 1 else parameter.new_empty(shapes[where.name])
        initialize_parameter(where.name, whole, seed=new.seed, num_layers=architecture.num_layers)
        if whole is not parameter:
            parameter.copy_(view(whole, where))


def load_model(config: Config, *, device: torch.device) -> Transformer:
    """Load the model in float32 as the run begins."""
    model = empty_model(config, device=device)
    fill_initial(dict(model.named_parameters()), config)
    return model
