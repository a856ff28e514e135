"""GRPO written down again as a custom algorithm: its own advantages on the master and its own loss on the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kintsugi import CustomAlgorithm
from kintsugi.graph.advantages import group_advantages

if TYPE_CHECKING:
    from torch import Tensor

    from kintsugi.config.schema import Algorithm
    from kintsugi.training.objectives import PolicyTokens


def clipped_loss(tokens: PolicyTokens, settings: Algorithm) -> Tensor:
    import torch

    ratio = (tokens.logprobs - tokens.proximal_logprobs).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)


grpo_again = CustomAlgorithm(base="grpo", group_advantages=group_advantages, token_loss=clipped_loss)
