"""The model's layers as the CPU computes them fastest without gradients.

The same function as `Transformer.forward_packed`, from the same parameters, with weights kept once more in the block
layout of the processor's matrix library: products of few rows are up to twice as fast. Residuals are added inside the
products, and query and key are rotated in place as complex numbers, for which the rows of their projections are
reordered so that the two halves of a rotary pair are neighbours; attention does not see the difference.

Whatever the model's type, heads are rotated and attended to in float32, and logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.model.rotary import rotation_at
from kintsugi.model.transformer import DecoderLayer, RMSNorm, Transformer

Attend = Callable[[int, Tensor], Tensor]
"""(layer, rotated heads [rows, heads + 2 kv_heads, head_dim] in float32: query, key, value) to what each query attended
to, [rows, heads × head_dim] in float32."""


class Product:
    """x @ weightᵀ + bias. `refresh` must be called whenever the weight has changed."""

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
        self._is_blocked = _has_block_layout(self._dtype)
        self.refresh()

    def refresh(self) -> None:
        weight, bias = self._source.detach(), self._source_bias
        if self._order is not None:
            weight = weight.index_select(0, self._order)
            bias = None if bias is None else bias.detach().index_select(0, self._order)
        weight = weight.to(self._dtype)
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_blocked else weight

    def __call__(self, rows: Tensor, *, residual: Tensor | None = None) -> Tensor:
        if not self._is_blocked:
            product = functional.linear(rows, self._weight, self._bias)
            return product if residual is None else product.add_(residual)
        if residual is None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._weight, self._bias, "none", [], ""
            )
        else:
            result = torch.ops.mkldnn._linear_pointwise.binary(
                rows, residual, self._weight, self._bias, "add"
            )
        return result


def _has_block_layout(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Norm:
    """What `RMSNorm` computes, in fewer steps than torch takes on the CPU."""

    def __init__(self, norm: RMSNorm, *, order: Tensor | None = None) -> None:
        self._source = norm.weight
        self._order = order
        self._epsilon = torch.tensor(norm.epsilon)
        self.refresh()

    def refresh(self) -> None:
        weight = self._source.detach()
        self._weight = weight if self._order is None else weight.index_select(0, self._order)

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        means = torch.addcmul(self._epsilon, lengths, lengths, value=1 / len(self._weight))
        return wide.mul(means.rsqrt_()).mul_(self._weight).to(hidden.dtype)


class CpuLayer:
    def __init__(self, layer: DecoderLayer, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        neighbours = torch.arange(head_dim).view(2, -1).t().flatten()
        """Which entries of a head stand side by side: 0, head_dim / 2, 1, head_dim / 2 + 1, …"""
        self._first_norm = Norm(layer.input_layernorm)
        self._second_norm = Norm(layer.post_attention_layernorm)
        self._head_norms = [
            Norm(norm, order=neighbours) for norm in (attention.q_norm, attention.k_norm) if norm is not None
        ]
        size = num_heads + num_kv_heads
        rotated = torch.arange(size)[:, None] * head_dim + neighbours
        values = torch.arange(size * head_dim, (size + num_kv_heads) * head_dim)
        order = torch.cat([rotated.flatten(), values])
        self._qkv = Product(attention.qkv_weight, bias=attention.qkv_bias, order=order)
        self._output = Product(attention.o_proj.weight, bias=attention.o_proj.bias)
        self._gate_up = Product(feed_forward.gate_up_weight, bias=feed_forward.gate_up_bias)
        self._down = Product(feed_forward.down_proj.weight, bias=feed_forward.down_proj.bias)

    def refresh(self) -> None:
        for part in (self._qkv, self._output, self._gate_up, self._down, *self._head_norms):
            part.refresh()

    def forward(self, hidden: Tensor, *, layer: int, rotation: Tensor, attend: Attend) -> Tensor:
        heads = self._qkv(self._first_norm(hidden)).unflatten(-1, (-1, self._head_dim))
        if self._head_norms:
            query_norm, key_norm = self._head_norms
            query, key, _ = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
            query.copy_(query_norm(query))
            key.copy_(key_norm(key))
        heads = heads.float()
        pairs = heads.narrow(1, 0, self._num_heads + self._num_kv_heads).unflatten(-1, (-1, 2))
        torch.view_as_complex(pairs).mul_(rotation)
        attended = attend(layer, heads).to(hidden.dtype)
        hidden = self._output(attended, residual=hidden)
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
        # log-probabilities; the float32 copy makes the same numbers as `logprobs.project_to_vocabulary`.
        self._last_norm = Norm(model.model.norm)
        self._to_vocabulary = Product(model.output_weight, dtype=torch.float32)
        rotation = rotation_at(
            torch.arange(max_length), frequencies=model.frequencies, config=config, dtype=torch.float32
        )
        self._rotations = torch.complex(rotation.cosine[:, :, 0], rotation.signed_sine[:, :, 1])

    def refresh(self) -> None:
        """Take over what has been copied into the model's parameters."""
        for layer in self._layers:
            layer.refresh()
        self._to_vocabulary.refresh()

    def forward(self, tokens: Tensor, *, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [rows, hidden], before the last norm."""
        rotation = self._rotations.index_select(0, positions)
        hidden = functional.embedding(tokens, self._model.model.embed_tokens.weight)
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, layer=number, rotation=rotation, attend=attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._to_vocabulary(self._last_norm(hidden).float())
