"""The model's layers, optimised for inference on the CPU with torch.

The same function as `Transformer.forward_packed`, from the same parameters, with a second copy of the weights in the
block layout of oneDNN: products of few rows are up to twice as fast. In float32, residuals are added inside the
products, and query and key are rotated in place as complex numbers, for which the rows of their projections are
reordered so that the two halves of a rotary pair are adjacent; attention is invariant to that. In bfloat16 every
operation is the trainer's own, to the bit: one entry rounded differently spreads to most entries within thirty layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.model.rotary import Rotation, rotate, rotation_at
from kintsugi.model.torch_internals import (
    blocked_linear,
    blocked_linear_add,
    blocked_weight,
    mkldnn_has_bf16,
)
from kintsugi.model.transformer import DecoderLayer, RMSNorm, Transformer

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rotated heads [rows, heads + 2 kv_heads, head_dim]: query, key, value) to the attention output [rows, heads ×
head_dim]."""
Write = Callable[[int, Tensor], None]
"""Stores key and value of such heads."""
Rotate = Callable[[Tensor], object]
"""Rotates [rows, heads, head_dim] in place."""
_LARGE_PRODUCT = 1 << 18
"""Number of weights from which a float32 product uses the block layout."""


class Product:
    """x @ weightᵀ + bias. Call `refresh` whenever the weight has changed."""

    def __init__(
        self,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        order: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`order` reorders the rows; `dtype` is that of the product, if it is not the weight's."""
        self._source = weight
        self._source_bias = bias
        self._order = order
        self._dtype = weight.dtype if dtype is None else dtype
        self._is_blocked = _has_block_layout(weight.numel(), self._dtype)
        self.refresh()

    def refresh(self) -> None:
        weight, bias = self._source.detach(), self._source_bias
        if self._order is not None:
            weight = weight.index_select(0, self._order)
            bias = None if bias is None else bias.detach().index_select(0, self._order)
        weight = weight.to(self._dtype)
        self._bias = bias
        self._weight = blocked_weight(weight) if self._is_blocked else weight

    def __call__(self, rows: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute the product. A residual is added after rounding, as in the trainer; in float32 there is no
        difference."""
        if self._is_blocked and residual is not None and self._dtype == torch.float32:
            return blocked_linear_add(rows, residual, self._weight, self._bias)
        if self._is_blocked:
            result = blocked_linear(rows, self._weight, self._bias)
        else:
            result = functional.linear(rows, self._weight, self._bias)
        return result if residual is None else result.add_(residual)


def _has_block_layout(num_weights: int, dtype: torch.dtype) -> bool:
    """Whether the block layout is faster: for a small float32 product, choosing the algorithm takes longer than the
    product."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return num_weights >= _LARGE_PRODUCT
    return dtype == torch.bfloat16 and mkldnn_has_bf16()


class Norm:
    """`RMSNorm`; in float32 with fewer operations than torch takes on the CPU."""

    def __init__(self, norm: RMSNorm, *, order: Tensor | None = None) -> None:
        self._source = norm.weight
        self._order = order
        self._epsilon = norm.epsilon
        self._wide_epsilon = torch.tensor(norm.epsilon)
        self._share = 1 / norm.weight.numel()
        self.refresh()

    def refresh(self) -> None:
        weight = self._source.detach()
        self._weight = weight if self._order is None else weight.index_select(0, self._order)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype != torch.float32:
            # The operations below round the last bit of a mean differently from the trainer.
            return functional.rms_norm(hidden, self._weight.shape, self._weight, self._epsilon)
        lengths = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        means = torch.addcmul(self._wide_epsilon, lengths, lengths, value=self._share)
        return hidden.mul(means.rsqrt_()).mul_(self._weight)


class CpuLayer:
    def __init__(self, layer: DecoderLayer, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        entries = torch.arange(head_dim)
        if attention.qkv_weight.dtype == torch.float32:
            # 0, head_dim / 2, 1, head_dim / 2 + 1, …
            entries = entries.view(2, -1).t().flatten()
        self._first_norm = Norm(layer.input_layernorm)
        self._second_norm = Norm(layer.post_attention_layernorm)
        self._head_norms = [
            Norm(norm, order=entries) for norm in (attention.q_norm, attention.k_norm) if norm is not None
        ]
        size = num_heads + num_kv_heads
        rotated = torch.arange(size)[:, None] * head_dim + entries
        values = torch.arange(size * head_dim, (size + num_kv_heads) * head_dim)
        order = torch.cat([rotated.flatten(), values])
        self._qkv = Product(attention.qkv_weight, bias=attention.qkv_bias, order=order)
        self._output = Product(attention.o_proj.weight, bias=attention.o_proj.bias)
        self._gate_up = Product(feed_forward.gate_up_weight, bias=feed_forward.gate_up_bias)
        self._down = Product(feed_forward.down_proj.weight, bias=feed_forward.down_proj.bias)

    def refresh(self) -> None:
        for product in (self._qkv, self._output, self._gate_up, self._down):
            product.refresh()
        for norm in self._head_norms:
            norm.refresh()

    def heads(self, hidden: Tensor, *, rotate: Rotate) -> Tensor:
        """Query, key and value, rotated: [rows, heads + 2 kv_heads, head_dim]."""
        heads = self._qkv(self._first_norm(hidden)).unflatten(-1, (-1, self._head_dim))
        if self._head_norms:
            query_norm, key_norm = self._head_norms
            query, key, _ = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
            query.copy_(query_norm(query))
            key.copy_(key_norm(key))
        rotate(heads.narrow(1, 0, self._num_heads + self._num_kv_heads))
        return heads

    def forward(self, hidden: Tensor, *, layer: int, rotate: Rotate, attend: Attend) -> Tensor:
        hidden = self._output(attend(layer, self.heads(hidden, rotate=rotate)), residual=hidden)
        gate, up = self._gate_up(self._second_norm(hidden)).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up), residual=hidden)


class CpuNetwork:
    def __init__(self, model: Transformer, *, max_length: int) -> None:
        config = model.config
        self._model = model
        self._layers: list[CpuLayer] = []
        for layer in model.model.layers:
            assert isinstance(layer, DecoderLayer)
            self._layers.append(
                CpuLayer(
                    layer,
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                )
            )
        # A bf16 product would round logits to bf16, the main difference between a sampler's and a trainer's
        # log-probabilities; the float32 copy gives the same numbers as `logprobs.project_to_vocabulary`.
        self._last_norm = Norm(model.model.norm)
        self._to_vocabulary = Product(model.output_weight, dtype=torch.float32)
        self._rotation = rotation_at(
            torch.arange(max_length), frequencies=model.frequencies, config=config, dtype=model.dtype
        )
        self._as_complex: Tensor | None = None
        if model.dtype == torch.float32:
            cosine, sine = self._rotation.cosine[:, :, 0], self._rotation.signed_sine[:, :, 1]
            self._as_complex = torch.complex(cosine, sine)

    def _rotate_at(self, positions: Tensor) -> Rotate:
        if self._as_complex is not None:
            turns = self._as_complex.index_select(0, positions)
            return lambda heads: torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(turns)
        rotation = Rotation(*(each.index_select(0, positions) for each in self._rotation))
        return lambda heads: heads.copy_(rotate(heads, rotation))

    def refresh(self) -> None:
        """Update the copies after the model's parameters have changed."""
        for layer in self._layers:
            layer.refresh()
        self._to_vocabulary.refresh()

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [rows, hidden], before the last norm."""
        rotate_rows = self._rotate_at(positions)
        hidden = functional.embedding(tokens, self._model.model.embed_tokens.weight)
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, layer=number, rotate=rotate_rows, attend=attend)
        return hidden

    def fill(self, tokens: Tensor, *, positions: Tensor, attend: Attend, write: Write) -> None:
        """Write the KV cache of all layers; the rest of the last layer is skipped, because its output is not used."""
        rotate_rows = self._rotate_at(positions)
        hidden = functional.embedding(tokens, self._model.model.embed_tokens.weight)
        *layers, last = self._layers
        for number, layer in enumerate(layers):
            hidden = layer.forward(hidden, layer=number, rotate=rotate_rows, attend=attend)
        write(len(layers), last.heads(hidden, rotate=rotate_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._to_vocabulary(self._last_norm(hidden).float())
