"""Sums over the logical tensor slices of a model, in an order that no number of tensor ranks changes.

Each layer part is computed slice by slice between `enter` and `summed_products`:

                 ┌ slice 0: x ──► … ──► y0 · W0 ┐
    x ── enter ──┤                              ├── ordered sum in float32 ──► residual stream
                 └ slice 1: x ──► … ──► y1 · W1 ┘

The sum is a fixed binary tree: ((0 + 1) + (2 + 3)). A tensor rank has a subtree of it, adds that up, gathers the sums
of the other ranks and completes the tree itself. So each rank has the same residual stream, bit for bit, and the same
bits as a rank that computes all slices. The backward pass mirrors it: gradients that enter a part are added likewise.

The residual stream is whole on every tensor rank: there is no sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kintsugi.model.logprobs import project_to_vocabulary as float32_product


class TensorGroup(Protocol):
    """The ranks that compute the logical slices of one model together."""

    @property
    def slices(self) -> range:
        """Logical slices of this rank (`tensor_slices.slices_of`)."""
        ...

    @property
    def num_slices(self) -> int: ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks of the group, stacked in the order of their slices.

        On an accelerator it is only enqueued: the pass goes on, and later operations wait for it on the device.
        """
        ...


@dataclass(frozen=True)
class OneRank:
    """A rank that computes all slices itself."""

    num_slices: int

    @property
    def slices(self) -> range:
        return range(self.num_slices)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor[None]


def ordered_sum(parts: Sequence[Tensor], group: TensorGroup) -> Tensor:
    """Sum over all slices of the group; `parts` are those of this rank."""
    own = _tree(parts)
    if len(parts) == group.num_slices:
        return own
    return _tree(group.all_gather(own).unbind())


def _tree(parts: Sequence[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def enter(group: TensorGroup, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The same tensors for each slice of this rank; their gradients are summed over all slices, in float32.

    The first is the input of a part; the others are weights that each slice uses whole.
    """
    found: tuple[Tensor, ...] = _Enter.apply(group, *tensors)
    count = len(tensors)
    return [found[first : first + count] for first in range(0, len(found), count)]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.like = group, [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(tensor.view_as(tensor) for _ in group.slices for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.like)
        parts = [
            torch.cat([each.float().flatten() for each in gradients[first : first + count]])
            for first in range(0, len(gradients), count)
        ]
        sizes = [shape.numel() for shape, _ in ctx.like]
        sums = ordered_sum(parts, ctx.group).split(sizes)
        return None, *(
            total.view(shape).to(dtype) for total, (shape, dtype) in zip(sums, ctx.like, strict=True)
        )


def summed_products(rows: Sequence[Tensor], weights: Sequence[Tensor], group: TensorGroup) -> Tensor:
    """Sum over all slices of `rows @ weight.T`, in float32 until it is complete."""
    result: Tensor = _SummedProducts.apply(group, *rows, *weights)
    return result


class _SummedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        rows, weights = _halves(operands)
        parts = [float32_product(row, weight) for row, weight in zip(rows, weights, strict=True)]
        return ordered_sum(parts, group).to(rows[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = _halves(ctx.saved_tensors)
        wants_rows, wants_weights = _halves(ctx.needs_input_grad[1:])
        gradient = gradient.contiguous()
        return (
            None,
            *(
                gradient @ weight if wanted else None
                for weight, wanted in zip(weights, wants_rows, strict=True)
            ),
            *(
                gradient.t() @ row if wanted else None
                for row, wanted in zip(rows, wants_weights, strict=True)
            ),
        )


def _halves(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(operands) // 2
    return operands[:middle], operands[middle:]


def joined_rows(parts: Sequence[Tensor], group: TensorGroup) -> Tensor:
    """Sum over all slices of parts of which at most one is not zero in any row: exact in every type."""
    result: Tensor = _JoinedRows.apply(group, *parts)
    return result


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return ordered_sum(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient for _ in range(ctx.count))
