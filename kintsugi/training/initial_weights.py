"""Initial weights of all models: from a folder, from the run's seed or, for companions of the actor, from the actor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.partition import part_of
from kintsugi.model.plan import Companions, actor_head, plan_architecture
from kintsugi.model.seats import WHOLE, Seat
from kintsugi.model.sliced_transformer import SlicedTransformer
from kintsugi.model.tensor_group import TensorGroup
from kintsugi.model.tensor_slices import SliceName, view
from kintsugi.model.transformer import Transformer, initialize

Weights = Mapping[str, Tensor]
"""Float32 tensors by Hugging Face name."""


def critic_weights(stage: Stage, *, actor: Weights, companions: Companions) -> Weights | None:
    """Return the critic's initial weights: from its folder, or the actor's; None in a stage without critic. The layout
    fills a missing value head with zeros."""
    if not stage.has_critic:
        return None
    if stage.critic.path is None:
        return actor
    folder = Path(stage.critic.path)
    model = huggingface.load(folder, config=companions.critic, dtype=torch.float32, head="optional")
    return dict(model.named_parameters())


def reference_weights(stage: Stage, *, actor: Weights) -> Weights | None:
    """Return the reference weights: from their folder, or the actor's; None in a stage without reference."""
    if not stage.has_reference:
        return None
    if stage.reference.path is None:
        return actor
    model = huggingface.load(Path(stage.reference.path), dtype=torch.float32)
    return dict(model.named_parameters())


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
) -> Transformer:
    """Create a model without weights, or the part of it that a rank computes: layers by its seat, slices by
    `tensors`."""
    part = part_of(config, seat)
    if tensors is None:
        return Transformer(config, with_value_head=with_value_head, dtype=dtype, device=device, part=part)
    return SlicedTransformer(
        config, group=tensors, with_value_head=with_value_head, dtype=dtype, device=device, part=part
    )


def empty_model(
    config: Config, *, device: torch.device, seat: Seat = WHOLE, tensors: TensorGroup | None = None
) -> Transformer:
    """Create the model, or this rank's part of it, in float32 without weights (`fill_initial`)."""
    has_head = actor_head(config) != "refused"
    architecture = plan_architecture(config)
    return new_model(architecture, with_value_head=has_head, device=device, seat=seat, tensors=tensors)


@torch.no_grad()
def fill_initial(parameters: Weights, config: Config) -> None:
    """Fill the model's parameters, or slices of them, in float32, as the run begins: from its folder, or initialised
    from its seed."""
    if config.model.path is not None:
        folder = Path(config.model.path)
        huggingface.load_into(parameters, folder, config=plan_architecture(config), head=actor_head(config))
        return
    assert config.model.new is not None
    device = next(iter(parameters.values())).device
    model = empty_model(config, device=device)
    initialize(model, config.model.new.seed)
    whole = dict(model.named_parameters())
    for name, parameter in parameters.items():
        where = SliceName.parse(name)  # A rank may hold a part.
        parameter.copy_(view(whole[where.name], where))


def load_model(config: Config, *, device: torch.device) -> Transformer:
    """Load the model in float32 as the run begins."""
    model = empty_model(config, device=device)
    fill_initial(dict(model.named_parameters()), config)
    return model
