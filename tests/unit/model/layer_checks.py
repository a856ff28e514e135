"""Checks of the fused parts of a layer against torch in float64, on any device that runs their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.fused_layers import (
    FeedForwardWeights,
    RotatedProjection,
    add_and_normalize,
    feed_forward,
    project_and_rotate,
)
from kintsugi.model.rotary import inverse_frequencies, rotate, rotation_at
from kintsugi.model.transformer import Transformer

EPSILON = 1e-6


class Drawn:
    """Random tensors, the same on every device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, centre: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator) * scale + centre
        return drawn.to(self.device, self.dtype).requires_grad_()


Function = Callable[..., Sequence[Tensor]]


class Result(NamedTuple):
    outputs: list[Tensor]
    gradients: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return self.outputs + self.gradients


def evaluated(function: Function, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Result:
    outputs = list(function(*inputs))
    gradients = torch.autograd.grad(outputs, list(inputs), [each.to(outputs[0].dtype) for each in upstream])
    return Result([each.detach() for each in outputs], list(gradients))


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()).clamp(min=1e-30))


def check(fused: Function, reference: Function, inputs: Sequence[Tensor], *, limit: float) -> None:
    """Outputs and gradients are those of the reference in float64, and the same bits each time."""
    draw = Drawn(inputs[0].device, inputs[0].dtype, seed=1)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    upstream = [draw(*each.shape).detach() for each in reference(*wide)]
    expected = evaluated(reference, wide, upstream)
    found, again = (evaluated(fused, inputs, upstream) for _ in range(2))
    errors = [relative_error(*pair) for pair in zip(found.tensors, expected.tensors, strict=True)]
    assert max(errors) < limit, f"relative errors {errors}, at most {limit} expected"
    assert all(each.dtype == inputs[0].dtype for each in found.tensors)
    assert all(one.equal(other) for one, other in zip(found.tensors, again.tensors, strict=True))


def norm_in_torch(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = residual + update
    return hidden, functional.rms_norm(hidden, weight.shape, weight, EPSILON)


def check_norm(num_rows: int, size: int, *, device: torch.device, dtype: torch.dtype, limit: float) -> None:
    draw = Drawn(device, dtype)
    residual, update, weight = draw(num_rows, size), draw(num_rows, size), draw(size, centre=1.0, scale=0.2)

    def fused(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_normalize(residual, update, weight=weight, epsilon=EPSILON)

    check(fused, norm_in_torch, (residual, update, weight), limit=limit)

    def without_update(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_normalize(hidden, None, weight=weight, epsilon=EPSILON)

    def in_torch(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 1.0, functional.rms_norm(hidden, weight.shape, weight, EPSILON)

    check(without_update, in_torch, (residual, weight), limit=limit)


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_norm: bool
    has_bias: bool


def check_rotation(
    heads: Heads,
    *,
    num_tokens: int,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype,
    limit: float,
) -> None:
    num_heads, num_kv_heads, head_dim, has_norm, has_bias = heads
    config = ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=4096,
    )
    rotation = rotation_at(
        torch.arange(num_tokens, device=device) % 100,
        frequencies=inverse_frequencies(config, device=device),
        config=config,
        dtype=dtype,
    )
    draw = Drawn(device, dtype)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    inputs = [draw(num_tokens, hidden_size)]
    inputs += [draw(size, hidden_size, scale=hidden_size**-0.5) for size in sizes]
    inputs += [draw(size) for size in sizes] if has_bias else []
    inputs += [draw(head_dim, centre=1.0, scale=0.2) for _ in range(2)] if has_norm else []

    def parts(rest: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return rest[: 3 if has_bias else 0], rest[3 if has_bias else 0 :]

    def fused(
        hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        biases, norms = parts(rest)
        projection = RotatedProjection(
            weights=(query, key, value),
            biases=(biases[0], biases[1], biases[2]) if biases else (None, None, None),
            norms=(norms[0], norms[1]) if norms else (None, None),
            epsilon=EPSILON,
            head_dim=head_dim,
        )
        cosine, sine = rotation.cosine[:, 0, 0], rotation.signed_sine[:, 0, 1]
        return project_and_rotate(hidden, projection, cosine=cosine, sine=sine)

    def in_torch(hidden: Tensor, *rest: Tensor) -> list[Tensor]:
        biases, norms = parts(rest[3:])
        wide = rotation._replace(
            cosine=rotation.cosine.to(hidden.dtype), signed_sine=rotation.signed_sine.to(hidden.dtype)
        )
        found = []
        for index, weight in enumerate(rest[:3]):
            projected = functional.linear(hidden, weight, biases[index] if biases else None)
            each = projected.unflatten(1, (-1, head_dim))
            if norms and index < 2:
                each = functional.rms_norm(each, (head_dim,), norms[index], EPSILON)
            found.append(rotate(each, wide) if index < 2 else each)
        return found

    check(fused, in_torch, inputs, limit=limit)


def check_feed_forward(
    num_tokens: int,
    hidden_size: int,
    inner: int,
    *,
    has_bias: bool,
    device: torch.device,
    dtype: torch.dtype,
    limit: float,
) -> None:
    draw = Drawn(device, dtype)
    shapes = [(inner, hidden_size), (inner, hidden_size), (hidden_size, inner)]
    inputs = [draw(num_tokens, hidden_size)]
    inputs += [draw(*shape, scale=2 * shape[1] ** -0.5) for shape in shapes]
    inputs += [draw(shape[0]) for shape in shapes] if has_bias else []

    def fused(hidden: Tensor, *weights: Tensor) -> list[Tensor]:
        biases = weights[3:] if has_bias else (None, None, None)
        return [feed_forward(hidden, FeedForwardWeights(*weights[:3], *biases))]

    def in_torch(hidden: Tensor, *weights: Tensor) -> list[Tensor]:
        biases = weights[3:] if has_bias else (None, None, None)
        gate, up = (functional.linear(hidden, weights[i], biases[i]) for i in range(2))
        return [functional.linear(functional.silu(gate) * up, weights[2], biases[2])]

    check(fused, in_torch, inputs, limit=limit)


def model_result(model: Transformer, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Log-probabilities, and the gradient of every parameter by its name."""
    model.zero_grad(set_to_none=True)
    layout = PackedLayout.from_lengths(lengths, device=model.device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.config.vocab_size, (sum(lengths),), generator=generator).to(model.device)
    hidden = model.forward_packed(tokens, layout.positions, layout)
    logprobs, entropy = model.token_logprobs(hidden, tokens.roll(-1), temperature=0.9)
    steep = torch.linspace(-1, 2, len(tokens), device=model.device)
    (steep * (logprobs + 0.1 * entropy)).mean().backward()
    found = {"logprobs": logprobs.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.detach().clone()
    return found
