"""Recomputation of activations: a part of the model keeps only its input, and its backward pass runs it again.

`torch.utils.checkpoint` does the same, but its first call imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kintsugi.model.gradient_roots import gradient_root


def recomputed(
    run: Callable[[Tensor], Tensor], hidden: Tensor, *, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """`run(hidden)`, computed again in the backward pass.

    `parameters` are those that `run` uses. Their gradients are results of this step of the backward pass, as without
    recomputation, so hooks on them see the same. `run` must compute the same bits each time.
    """
    result: Tensor = _Recomputed.apply(run, hidden, *parameters)
    return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], hidden: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.parameters = run, parameters
        return run(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        own = hidden.detach().requires_grad_(wanted[0])
        with torch.enable_grad():
            output = ctx.run(own)
        inputs = [each for each, is_wanted in zip((own, *ctx.parameters), wanted, strict=True) if is_wanted]
        found = iter(torch.autograd.grad(gradient_root([output], [gradient]), inputs))
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)
