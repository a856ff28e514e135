"""Initial weights of all models: from a folder, from the run's seed or, for companions of the actor, from the actor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.model import huggingface
from kintsugi.model.partition import part_of
from kintsugi.model.plan import Companions, actor_head, plan_architecture
from kintsugi.model.seats import WHOLE, Seat
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
    stage: Stage, *, companions: Companions, dtype: torch.dtype, device: torch.device, seat: Seat = WHOLE
) -> Transformer:
    """Load the trained reward model of a stage, or this rank's part of it, frozen."""
    assert stage.reward_model is not None and companions.reward_model is not None
    config, folder = companions.reward_model, Path(stage.reward_model.path)
    part = part_of(config, seat)
    model = Transformer(config, with_value_head=True, dtype=dtype, device=device, part=part)
    huggingface.load_into(dict(model.named_parameters()), folder, config=config, head="required")
    return model.requires_grad_(requires_grad=False)


def empty_model(config: Config, *, device: torch.device, seat: Seat = WHOLE) -> Transformer:
    """Create the model, or this rank's part of it, in float32 without weights (`fill_initial`)."""
    architecture, with_head = plan_architecture(config), actor_head(config) != "refused"
    part = part_of(architecture, seat)
    return Transformer(architecture, with_value_head=with_head, device=device, part=part)


@torch.no_grad()
def fill_initial(parameters: Weights, config: Config) -> None:
    """Fill the model's parameters, in float32, as the run begins: from its folder, or initialised from its seed."""
    if config.model.path is not None:
        folder = Path(config.model.path)
        huggingface.load_into(parameters, folder, config=plan_architecture(config), head=actor_head(config))
        return
    assert config.model.new is not None
    device = next(iter(parameters.values())).device
    model = empty_model(config, device=device)
    initialize(model, config.model.new.seed)
    for name, parameter in model.named_parameters():
        if name in parameters:  # A rank may hold a part.
            parameters[name].copy_(parameter)


def load_model(config: Config, *, device: torch.device) -> Transformer:
    """Load the model in float32 as the run begins."""
    model = empty_model(config, device=device)
    fill_initial(dict(model.named_parameters()), config)
    return model
