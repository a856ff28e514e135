"""Parts of a layer as single differentiable functions, for training on an accelerator in half precision.

Each joins what `transformer` computes with several of torch's operations; its kernels are in `layer_kernels`. Compared
with those operations a part also keeps less for its backward pass: the activation of the feed-forward part is computed
again, and neither a sum before a norm nor a rotation keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable


class FusedParts(NamedTuple):
    """Parts for which the functions of this module are used; benchmarks and tests switch them off to compare."""

    norm: bool = True
    rotary: bool = True
    feed_forward: bool = True
    attention: bool = True


UNFUSED = FusedParts(norm=False, rotary=False, feed_forward=False, attention=False)


def has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after another along their first dimension: a view where they lie so in memory, otherwise a copy.

    A rank's parameters lie so: they are views of one flat tensor, in the model's order.
    """
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != end
            or not part.is_contiguous()
        ):
            return torch.cat(list(parts))
        end += part.numel()
    num_rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((num_rows, *first.shape[1:]), first.stride())


def _joined_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    assert len(given) in (0, len(biases)), "projections of one input have biases together or not at all"
    return joined(given) if given else None


def _weight_gradients(
    gradient: Tensor,
    inputs: Tensor,
    *,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of projections of one input, computed together: of all weights, then of all biases."""
    sizes = [weight.shape[0] for weight in weights]
    found: list[Tensor | None] = [None] * len(wanted)
    if any(wanted[: len(weights)]):
        found[: len(weights)] = torch.mm(gradient.t(), inputs).split(sizes)
    if biases[0] is not None and any(wanted[len(weights) :]):
        found[len(weights) :] = gradient.sum(0).split(sizes)
    return [each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)]


def add_and_normalize(
    residual: Tensor, update: Tensor | None, *, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`hidden = residual + update` and its RMS norm; without an update `hidden` is `residual`."""
    result: tuple[Tensor, Tensor] = _AddAndNormalize.apply(residual, update, weight, epsilon)
    return result


class _AddAndNormalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        from kintsugi.model import layer_kernels

        hidden, normalized, inverses = layer_kernels.add_and_normalize(
            residual.contiguous(),
            None if update is None else update.contiguous(),
            weight=weight,
            epsilon=epsilon,
        )
        ctx.save_for_backward(hidden, inverses, weight)
        ctx.set_materialize_grads(False)
        # Also without an update, so that both gradients of `hidden` are added here, before they are rounded.
        return (hidden.view_as(hidden) if update is None else hidden), normalized

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, hidden_gradient: Tensor | None, normalized_gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        from kintsugi.model import layer_kernels

        if normalized_gradient is None:
            return hidden_gradient, hidden_gradient if ctx.needs_input_grad[1] else None, None, None
        hidden, inverses, weight = ctx.saved_tensors
        gradient, weight_gradient = layer_kernels.gradient_of_norm(
            hidden,
            inverses=inverses,
            weight=weight,
            normalized_gradient=normalized_gradient.contiguous(),
            hidden_gradient=None if hidden_gradient is None else hidden_gradient.contiguous(),
        )
        wants_residual, wants_update, wants_weight, _ = ctx.needs_input_grad
        return (
            gradient if wants_residual else None,
            gradient if wants_update else None,
            weight_gradient if wants_weight else None,
            None,
        )


class RotatedProjection(NamedTuple):
    """The parts of an attention layer before attention, apart from their input."""

    weights: tuple[Tensor, Tensor, Tensor]
    """Matrices of queries, keys and values."""
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    norms: tuple[Tensor | None, Tensor | None]
    """Weights of the norms of queries and keys, if the model has them."""
    epsilon: float
    head_dim: int


def project_and_rotate(
    hidden: Tensor, projection: RotatedProjection, *, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, heads, head_dim] of one product; the first two normalised, where the model
    does, and rotated."""
    result: tuple[Tensor, Tensor, Tensor] = _ProjectAndRotate.apply(
        hidden,
        cosine,
        sine,
        projection.epsilon,
        projection.head_dim,
        *projection.norms,
        *projection.weights,
        *projection.biases,
    )
    return result


class _ProjectAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cosine: Tensor,
        sine: Tensor,
        epsilon: float,
        head_dim: int,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        *projections: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from kintsugi.model import layer_kernels

        weights, biases = _weights_and_biases(projections)
        shape = layer_kernels.HeadShape(
            weights[0].shape[0] // head_dim, weights[1].shape[0] // head_dim, head_dim
        )
        qkv = functional.linear(hidden, joined(weights), _joined_biases(biases))
        rotated = layer_kernels.rotate(
            qkv,
            shape=shape,
            cosine=cosine,
            sine=sine,
            query_weight=query_norm,
            key_weight=key_norm,
            epsilon=epsilon,
        )
        ctx.save_for_backward(
            hidden, cosine, sine, query_norm, key_norm, None if query_norm is None else qkv, *projections
        )
        ctx.shape, ctx.epsilon = shape, epsilon
        first_key, first_value = shape.num_heads, shape.num_heads + shape.num_kv_heads
        turned = rotated.unflatten(1, (-1, head_dim))
        value = qkv.unflatten(1, (-1, head_dim))[:, first_value:]
        return turned[:, :first_key], turned[:, first_key:first_value], value

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query_gradient: Tensor, key_gradient: Tensor, value_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        from kintsugi.model import layer_kernels

        hidden, cosine, sine, query_norm, key_norm, qkv, *projections = ctx.saved_tensors
        gradient, norm_gradients = layer_kernels.gradient_of_rotation(
            query_gradient,
            key_gradient=key_gradient,
            value_gradient=value_gradient,
            qkv=qkv,
            shape=ctx.shape,
            cosine=cosine,
            sine=sine,
            query_weight=query_norm,
            key_weight=key_norm,
            epsilon=ctx.epsilon,
        )
        weights, biases = _weights_and_biases(projections)
        wants_hidden, *_ = ctx.needs_input_grad
        found = _weight_gradients(
            gradient, hidden, weights=weights, biases=biases, wanted=ctx.needs_input_grad[7:]
        )
        wants_norms = ctx.needs_input_grad[5:7]
        return (
            torch.mm(gradient, joined(weights)) if wants_hidden else None,
            *(None,) * 4,
            *(
                norm_gradients[index] if norm_gradients is not None and is_wanted else None
                for index, is_wanted in enumerate(wants_norms)
            ),
            *found,
        )


def _weights_and_biases(
    projections: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Split the weights of projections from their biases, which follow in the same order."""
    count = len(projections) // 2
    weights = [weight for weight in projections[:count] if weight is not None]
    assert len(weights) == count
    return weights, list(projections[count:])


class FeedForwardWeights(NamedTuple):
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def feed_forward(hidden: Tensor, weights: FeedForwardWeights) -> Tensor:
    """`down(silu(gate(hidden)) × up(hidden))`, gate and up by one product."""
    result: Tensor = _FeedForward.apply(hidden, *weights)
    return result


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        from kintsugi.model import layer_kernels

        gate_up = functional.linear(hidden, joined((gate, up)), _joined_biases((gate_bias, up_bias)))
        ctx.save_for_backward(hidden, gate_up, gate, up, down, gate_bias, up_bias, down_bias)
        return functional.linear(layer_kernels.activate(gate_up), down, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from kintsugi.model import layer_kernels

        hidden, gate_up, gate, up, down, gate_bias, up_bias, down_bias = ctx.saved_tensors
        wants_hidden, *wanted = ctx.needs_input_grad
        wants_gate, wants_up, wants_down, *wants_biases = wanted
        gradient = gradient.contiguous()
        activated = torch.mm(gradient, down)
        inner_gradient = layer_kernels.gradient_of_activation(gate_up, activated)
        down_gradient = torch.mm(gradient.t(), activated) if wants_down else None
        del activated
        gate_gradient, up_gradient, *bias_gradients = _weight_gradients(
            inner_gradient,
            hidden,
            weights=(gate, up),
            biases=(gate_bias, up_bias),
            wanted=(wants_gate, wants_up, *wants_biases[:2]),
        )
        return (
            torch.mm(inner_gradient, joined((gate, up))) if wants_hidden else None,
            gate_gradient,
            up_gradient,
            down_gradient,
            *bias_gradients,
            gradient.sum(0) if down_bias is not None and wants_biases[2] else None,
        )
