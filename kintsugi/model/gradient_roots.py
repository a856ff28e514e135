"""The begin of a backward pass at tensors whose gradients are known.

`tensor.backward(gradient)` does the same, but its first call in a process imports torch's symbolic shapes and with them
sympy, which takes two seconds: the first step of a rank that takes the place of a lost one would be that much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gradient_root(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradient with respect to each of `outputs` is the tensor at the same place in `gradients`.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> gradient_root([weight * 3], [torch.tensor([1.0, 10.0])]).backward()
    >>> weight.grad
    tensor([ 3., 30.])
    """
    for output, gradient in zip(outputs, gradients, strict=True):
        assert output.shape == gradient.shape, f"{tuple(output.shape)} and {tuple(gradient.shape)}"
    with torch.enable_grad():  # Also in the backward pass of another function.
        root: Tensor = _Root.apply(len(outputs), *outputs, *gradients)
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """`gradient` is one: nothing follows the root."""
        found = ctx.saved_tensors
        return None, *found, *(None for _ in found)
