"""A packed model's layers over a paged KV cache, with all activations in preallocated memory.

The same function as `Transformer.forward_packed`, from the same parameters: matrix products by the library, except
where it is slow, and fused kernels between them. Because memory is allocated once, a decode step can be captured and
replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.generation.cuda import matmul
from kintsugi.generation.cuda.attention import PagedAttention
from kintsugi.generation.cuda.layers import (
    CachePositions,
    RotaryTables,
    add_and_normalize,
    begin_rows,
    rotate_and_store,
    silu_and_multiply,
)
from kintsugi.generation.cuda.prefill_inputs import PrefillInputs
from kintsugi.model.logprobs import project_to_vocabulary
from kintsugi.model.transformer import DecoderLayer, RMSNorm, Transformer

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(qkv with rotated queries, key pages, value pages, output)."""


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    def into(self, output: Tensor, rows: Tensor) -> None:
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=output)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=output)

    def into_parts(self, parts: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Compute the product, or parts that sum up to it, into one of the two tensors, and return that."""
        num_columns, depth = self.weight.shape
        tiling = matmul.split_tiling(rows.shape[0], num_columns=num_columns, depth=depth, dtype=rows.dtype)
        if tiling is None or self.bias is not None:
            self.into(output, rows)
            return output
        shape = (tiling.num_splits, *output.shape)
        parts = parts[: math.prod(shape)].view(shape)
        matmul.multiply_in_parts(rows, self.weight, parts=parts, tiling=tiling)
        return parts


class _Layer:
    """Views of one layer's parameters; a new version is copied into the same memory."""

    def __init__(self, layer: DecoderLayer) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.qkv = _Linear(attention.qkv_weight, attention.qkv_bias)
        self.attended = _linear(attention.o_proj)
        self.gate_up = _Linear(feed_forward.gate_up_weight, feed_forward.gate_up_bias)
        self.down = _linear(feed_forward.down_proj)
        self.query_weight = None if attention.q_norm is None else attention.q_norm.weight.detach()
        self.key_weight = None if attention.k_norm is None else attention.k_norm.weight.detach()
        self.second_norm = layer.post_attention_layernorm.weight.detach()


def _linear(module: torch.nn.Linear) -> _Linear:
    bias: Tensor | None = module.bias
    return _Linear(module.weight.detach(), None if bias is None else bias.detach())


class Activations(NamedTuple):
    """[rows, …] each, except the first."""

    parts: Tensor
    """Parts of the update, flat and in fp32, where its product is split."""
    residual: Tensor
    normalized: Tensor
    qkv: Tensor
    attended: Tensor
    update: Tensor
    gate_up: Tensor
    inner: Tensor

    def first(self, num_rows: int) -> Activations:
        return Activations(self.parts, *(each[:num_rows] for each in self[1:]))


class PagedNetwork:
    """`model` is packed. Allocates the KV cache: `kv_pages` [layers, 2, pages, kv_heads, page_size, head_dim]."""

    def __init__(
        self, model: Transformer, *, num_pages: int, page_size: int, max_rows: int, max_length: int
    ) -> None:
        self._model = model
        config, device, dtype = model.config, model.device, model.dtype
        layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
        self._layers = [_Layer(layer) for layer in layers]
        self._first_norms = [layer.input_layernorm.weight.detach() for layer in layers]
        """Norm after each layer: the first norm of the next layer, or the final norm."""
        final_norm = model.model.norm
        assert isinstance(final_norm, RMSNorm)
        self._first_norms.append(final_norm.weight.detach())
        self._epsilon = config.rms_norm_eps
        self._embedding = model.model.embed_tokens.weight.detach()
        self._output_weight = model.output_weight.detach()
        self.attention = PagedAttention(
            config, page_size=page_size, max_rows=max_rows, max_length=max_length, dtype=dtype, device=device
        )
        self._rotary = RotaryTables.of(config, max_length=max_length, dtype=dtype, device=device)
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        self.kv_pages = torch.zeros(shape, dtype=dtype, device=device)
        self._decoding = self._activations(max_rows)
        cache_positions = torch.zeros(3, max_rows, dtype=torch.int32, device=device)
        self._decoding_positions = CachePositions(*cache_positions)
        self._logits = torch.empty(max_rows, config.vocab_size, dtype=torch.float32, device=device)
        # Inactive rows never write their attention output, which must stay finite.
        self._decoding.attended.zero_()

    def _activations(self, num_rows: int) -> Activations:
        config = self._model.config
        sizes = (
            config.hidden_size,
            config.hidden_size,
            config.query_size + 2 * config.kv_size,
            config.query_size,
            config.hidden_size,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        dtype, device = self._model.dtype, self._model.device
        num_parts = matmul.MAX_SPLITS * min(num_rows, matmul.MAX_SPLIT_ROWS) * config.hidden_size
        return Activations(
            torch.empty(num_parts, dtype=torch.float32, device=device),
            *(torch.empty(num_rows, size, dtype=dtype, device=device) for size in sizes),
        )

    def decode(self, slots: Tensor, *, state: Tensor, tables: Tensor, num_splits: int) -> Tensor:
        """Feed each slot its next token; return logits [rows, vocabulary] in fp32, overwritten by the next call.

        No row attends to more keys than `num_splits` splits of the attention hold.
        """
        num_rows = slots.shape[0]
        activations = self._decoding.first(num_rows)
        cache_positions = CachePositions(*(each[:num_rows] for each in self._decoding_positions))
        begin_rows(
            slots,
            state=state,
            tables=tables,
            embedding=self._embedding,
            weight=self._first_norms[0],
            epsilon=self._epsilon,
            page_size=self.kv_pages.shape[-2],
            cache_positions=cache_positions,
            residual=activations.residual,
            output=activations.normalized,
        )

        def attend(qkv: Tensor, key_pages: Tensor, value_pages: Tensor, output: Tensor) -> None:
            self.attention.decode(
                qkv,
                key_pages=key_pages,
                value_pages=value_pages,
                tables=tables,
                slots=slots,
                lengths=cache_positions.lengths,
                output=output,
                num_splits=num_splits,
            )

        for index in range(len(self._layers)):
            self._store_keys(index, activations, cache_positions)
            self._finish_layer(index, activations, attend)
        logits = self._logits[:num_rows]
        self._project(activations.normalized, logits)
        return logits

    def prefill(self, inputs: PrefillInputs) -> None:
        """Write the KV cache of prompt chunks."""
        tokens, cache_positions, tables, chunks, max_tokens = inputs
        activations = self._activations(tokens.shape[0])
        # Padding tokens belong to no chunk and attend to nothing.
        activations.attended.zero_()
        torch.index_select(self._embedding, 0, tokens, out=activations.residual)
        add_and_normalize(
            activations.residual,
            None,
            weight=self._first_norms[0],
            epsilon=self._epsilon,
            output=activations.normalized,
        )

        def attend(qkv: Tensor, key_pages: Tensor, value_pages: Tensor, output: Tensor) -> None:
            self.attention.prefill(
                qkv,
                key_pages=key_pages,
                value_pages=value_pages,
                tables=tables,
                chunks=chunks,
                max_tokens=max_tokens,
                output=output,
            )

        for index in range(len(self._layers) - 1):
            self._store_keys(index, activations, cache_positions)
            self._finish_layer(index, activations, attend)
        # Nothing is sampled here, so the last layer ends with its keys and values.
        self._store_keys(len(self._layers) - 1, activations, cache_positions)

    def _store_keys(self, index: int, activations: Activations, cache_positions: CachePositions) -> None:
        layer = self._layers[index]
        layer.qkv.into(activations.qkv, activations.normalized)
        rotate_and_store(
            activations.qkv,
            cache_positions=cache_positions,
            rotary=self._rotary,
            query_weight=layer.query_weight,
            key_weight=layer.key_weight,
            epsilon=self._epsilon,
            key_pages=self.kv_pages[index, 0],
            value_pages=self.kv_pages[index, 1],
        )

    def _finish_layer(self, index: int, activations: Activations, attend: Attend) -> None:
        """Attention and feed-forward, up to the input of the next layer."""
        layer = self._layers[index]
        parts, residual, normalized, qkv, attended, update, gate_up, inner = activations
        attend(qkv, self.kv_pages[index, 0], self.kv_pages[index, 1], attended)
        added = layer.attended.into_parts(parts, update, attended)
        add_and_normalize(residual, added, weight=layer.second_norm, epsilon=self._epsilon, output=normalized)
        layer.gate_up.into(gate_up, normalized)
        silu_and_multiply(gate_up, output=inner)
        added = layer.down.into_parts(parts, update, inner)
        following = self._first_norms[index + 1]
        add_and_normalize(residual, added, weight=following, epsilon=self._epsilon, output=normalized)

    def _project(self, hidden: Tensor, logits: Tensor) -> None:
        """`project_to_vocabulary`, into preallocated memory where the library supports that."""
        weight = self._output_weight
        if hidden.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=logits)
        elif hidden.is_cuda:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=logits)
        else:
            logits.copy_(project_to_vocabulary(hidden, weight))
