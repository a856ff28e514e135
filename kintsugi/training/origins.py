"""Where models begin: in a folder, in the run's seed, or, for those beside the actor, in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kintsugi.config import Config
from kintsugi.model import huggingface
from kintsugi.model.plan import Companions, actor_head, plan_model
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.stages import Stage

Weights = Mapping[str, Tensor]
"""By Hugging Face name, float32."""


def critic_weights(stage: Stage, *, actor: Weights, companions: Companions) -> Weights | None:
    """Those of its folder, or the actor's, to which a head of zeros is added; None in a stage without critic."""
    if not stage.has_critic:
        return None
    if stage.critic.path is None:
        return actor
    folder = Path(stage.critic.path)
    model = huggingface.load(folder, config=companions.critic, dtype=torch.float32, head="optional")
    return dict(model.named_parameters())


def reference_weights(stage: Stage, *, actor: Weights) -> Weights | None:
    """Those of its folder, or the actor's; None in a stage without reference."""
    if not stage.has_reference:
        return None
    if stage.reference.path is None:
        return actor
    model = huggingface.load(Path(stage.reference.path), dtype=torch.float32)
    return dict(model.named_parameters())


def load_reward_model(
    stage: Stage, *, companions: Companions, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """The trained reward model that a stage asks for scores, frozen."""
    assert stage.reward_model is not None and companions.reward_model is not None
    folder = Path(stage.reward_model.path)
    model = huggingface.load(
        folder, config=companions.reward_model, dtype=dtype, head="required", device=device
    )
    return model.requires_grad_(requires_grad=False)


def load_model(config: Config, *, device: torch.device) -> Transformer:
    """The model as the run begins: read from its folder, or initialised from the run's seed; float32."""
    head = actor_head(config)
    if config.model.path is not None:
        return huggingface.load(Path(config.model.path), dtype=torch.float32, head=head, device=device)
    model_config, _ = plan_model(config)
    model = Transformer(model_config, with_value_head=head != "refused", device=device)
    assert config.model.new is not None
    initialize(model, config.model.new.seed)
    return model
