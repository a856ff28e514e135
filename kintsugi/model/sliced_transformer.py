"""The transformer of training, computed in logical tensor slices by one rank or several (`tensor_group`).

Its parameters are the slices of this rank and what is whole in each slice, by the names of `tensor_slices`. Weights and
gradients of what is whole are equal on all tensor ranks, bit for bit. The norms of queries and keys are whole too, but
each slice uses them for its own heads; so their gradients are summed over the slices.

Of the kernels in `layer_kernels` the one of the feed-forward part is not used: its last product is to stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.fused_layers import RotatedProjection
from kintsugi.model.partition import ModelPart
from kintsugi.model.rotary import inverse_frequencies
from kintsugi.model.sliced_logprobs import sliced_token_logprobs, token_bounds
from kintsugi.model.tensor_group import TensorGroup, enter, joined_rows, summed_products
from kintsugi.model.tensor_slices import check_slices, slice_shapes
from kintsugi.model.transformer import DecoderLayer, PackedPass, RMSNorm, Transformer, allocate, attend

Shapes = Mapping[str, tuple[int, ...]]


class Slices(nn.Module):
    """Weights and biases of a linear layer or embedding: a parameter for each slice of this rank, or a whole one."""

    def __init__(self, shapes: Shapes, *, layer: str, dtype: torch.dtype) -> None:
        """`shapes` are those of all parameters of this rank, by name; those of `layer` are used."""
        super().__init__()
        for name, shape in shapes.items():
            owner, _, kind = name.rpartition(".")
            if owner == layer:
                self.register_parameter(kind, nn.Parameter(torch.empty(shape, dtype=dtype)))

    @property
    def weights(self) -> list[Tensor]:
        return [parameter for name, parameter in self.named_parameters() if name.startswith("weight")]

    @property
    def biases(self) -> list[Tensor]:
        return [parameter for name, parameter in self.named_parameters() if name.startswith("bias")]


class SlicedAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, *, layer: str, shapes: Shapes, dtype: torch.dtype, group: TensorGroup
    ) -> None:
        super().__init__()
        self.group = group
        self.head_dim, self.epsilon = config.head_dim, config.rms_norm_eps
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, Slices(shapes, layer=f"{layer}.{name}", dtype=dtype))
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                self.add_module(name, RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, dtype=dtype))

    def forward(self, hidden: Tensor, shared: PackedPass) -> Tensor:
        query, key, value, output = (_slices(self, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        norms = [norm.weight for norm in self.children() if isinstance(norm, RMSNorm)]
        attended = []
        for number, (own, *own_norms) in enumerate(enter(self.group, hidden, *norms)):
            projection = RotatedProjection(
                weights=(query.weights[number], key.weights[number], value.weights[number]),
                biases=(_bias(query, number), _bias(key, number), _bias(value, number)),
                norms=(own_norms[0], own_norms[1]) if own_norms else (None, None),
                epsilon=self.epsilon,
                head_dim=self.head_dim,
            )
            attended.append(attend(own, projection, shared))
        return _sum(attended, output, self.group)


class SlicedFeedForward(nn.Module):
    def __init__(self, *, layer: str, shapes: Shapes, dtype: torch.dtype, group: TensorGroup) -> None:
        super().__init__()
        self.group = group
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, Slices(shapes, layer=f"{layer}.{name}", dtype=dtype))

    def forward(self, hidden: Tensor, *, fused: bool) -> Tensor:
        gate, up, down = (_slices(self, name) for name in ("gate_proj", "up_proj", "down_proj"))
        inner = [
            functional.silu(functional.linear(own, gate.weights[number], _bias(gate, number)))
            * functional.linear(own, up.weights[number], _bias(up, number))
            for number, (own,) in enumerate(enter(self.group, hidden))
        ]
        return _sum(inner, down, self.group)


class SlicedEmbedding(Slices):
    def __init__(
        self, shapes: Shapes, *, layer: str, dtype: torch.dtype, vocab_size: int, group: TensorGroup
    ) -> None:
        super().__init__(shapes, layer=layer, dtype=dtype)
        self.group = group
        self.bounds = token_bounds(vocab_size, group.num_slices)

    def forward(self, tokens: Tensor) -> Tensor:
        return joined_rows(self.parts(tokens), self.group)

    def parts(self, tokens: Tensor) -> list[Tensor]:
        """Rows from each slice of this rank, which are zero where a token is in another one."""
        parts = []
        for index, weight in zip(self.group.slices, self.weights, strict=True):
            first, stop = self.bounds[index : index + 2]
            is_own = (tokens >= first) & (tokens < stop)
            rows = functional.embedding(torch.where(is_own, tokens - first, 0), weight)
            parts.append(torch.where(is_own[:, None], rows, 0.0))
        return parts


class SlicedTransformer(Transformer):
    """A model of which this rank computes the slices of `group`; only for training."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        group: TensorGroup,
        with_value_head: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: ModelPart | None = None,
        has_memory: bool = True,
    ) -> None:
        assert group.num_slices > 1, "a model of one slice is a `Transformer`"
        check_slices(config, group.num_slices)
        super().__init__(config, with_value_head=with_value_head, dtype=dtype, device="meta", part=part)
        self.has_memory = has_memory
        self.group = group
        whole = parameter_shapes(config, with_value_head=with_value_head)
        shapes = slice_shapes(whole, slices=group.slices, count=group.num_slices)
        with torch.device("meta"):
            if self.part.uses_embedding:
                name = "model.embed_tokens"
                embedding = SlicedEmbedding(
                    shapes, layer=name, dtype=dtype, vocab_size=config.vocab_size, group=group
                )
                self.model.add_module("embed_tokens", embedding)
            for number, layer in self.model.layers.named_children():
                assert isinstance(layer, DecoderLayer)
                name = f"model.layers.{number}"
                attention = SlicedAttention(
                    config, layer=f"{name}.self_attn", shapes=shapes, dtype=dtype, group=group
                )
                layer.add_module("self_attn", attention)
                feed_forward = SlicedFeedForward(layer=f"{name}.mlp", shapes=shapes, dtype=dtype, group=group)
                layer.add_module("mlp", feed_forward)
            if self.lm_head is not None:
                self.add_module("lm_head", Slices(shapes, layer="lm_head", dtype=dtype))
        allocate(self, device=torch.device(device), has_memory=has_memory)
        self.frequencies = inverse_frequencies(config, device=torch.device(device))

    @property
    def output_weight(self) -> Tensor:
        raise NotImplementedError("the slices of a model have no common output projection")

    def embedded_parts(self, tokens: Tensor) -> list[Tensor]:
        embedding = _slices(self.model, "embed_tokens")
        assert isinstance(embedding, SlicedEmbedding)
        return embedding.parts(tokens)

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        owner = self.model if self.config.tie_embeddings else self
        return sliced_token_logprobs(
            hidden,
            weights=_slices(owner, "embed_tokens" if self.config.tie_embeddings else "lm_head").weights,
            vocab_size=self.config.vocab_size,
            targets=targets,
            group=self.group,
            temperature=temperature,
            chunk_size=chunk_size,
        )


def _slices(owner: nn.Module, name: str) -> Slices:
    found = owner.get_submodule(name)
    assert isinstance(found, Slices)
    return found


def _bias(layer: Slices, number: int) -> Tensor | None:
    biases = layer.biases
    return biases[number] if biases else None


def _sum(rows: list[Tensor], layer: Slices, group: TensorGroup) -> Tensor:
    """The last product of a part, over all slices, and its bias."""
    total = summed_products(rows, layer.weights, group)
    biases = layer.biases
    return total + biases[0] if biases else total
