"""AdamW on a slice of the flat state."""

from __future__ import annotations

import torch
from torch import Tensor

from kintsugi.config import ActorSection
from kintsugi.training.layout import Part


def adamw(
    part: Part,
    *,
    weights: Tensor,
    moments: Tensor,
    gradient: Tensor,
    actor: ActorSection,
    rate: float,
    count: int,
) -> None:
    """Update one model in place from its gradient; `count` (from 1) is this update's number, for the bias correction.

    By the operator behind `torch.optim.AdamW(fused=True)`: the optimizer class itself would import torch's compiler
    (over a second at every start and restart) and keep a second book of steps and moments.
    """
    number = torch.tensor(float(count), device=gradient.device)
    for where, weight_decay in (
        (slice(part.start, part.decayed_stop), actor.weight_decay),
        (slice(part.decayed_stop, part.stop), 0.0),
    ):
        torch._fused_adamw_(
            [weights[where]],
            [gradient[where.start - part.start : where.stop - part.start]],
            [moments[0, where]],
            [moments[1, where]],
            [],
            [number],
            lr=rate,
            beta1=actor.beta1,
            beta2=actor.beta2,
            weight_decay=weight_decay,
            eps=actor.epsilon,
            amsgrad=False,
            maximize=False,
        )


def is_finite(value: float) -> bool:
    return value - value == 0.0
