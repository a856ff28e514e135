"""The transformer of training and generation.

`forward_packed` takes many tokens of many sequences. Generation runs the same layers without gradients, over a KV cache
(`kintsugi.generation`). Parameter names are Hugging Face's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout, packed_attention
from kintsugi.model.fused_layers import (
    UNFUSED,
    FeedForwardWeights,
    FusedParts,
    RotatedProjection,
    add_and_normalize,
    feed_forward,
    has_kernels,
    project_and_rotate,
)
from kintsugi.model.logprobs import project_to_vocabulary, token_logprobs
from kintsugi.model.partition import ModelPart, part_of
from kintsugi.model.recompute import recomputed
from kintsugi.model.rotary import Rotation, inverse_frequencies, rotate, rotation_at


class PackedPass(NamedTuple):
    """Everything that the layers of one forward pass share."""

    rotation: Rotation
    layout: PackedLayout
    fused: FusedParts


class RMSNorm(nn.Module):
    def __init__(self, size: int, *, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, residual: Tensor, update: Tensor | None, *, fused: bool) -> tuple[Tensor, Tensor]:
        """The sum of both, or the residual alone, and its norm."""
        if fused:
            return add_and_normalize(residual, update, weight=self.weight, epsilon=self.epsilon)
        hidden = residual if update is None else residual + update
        return hidden, self.normalize(hidden)

    def normalize(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    qkv_weight: Tensor
    """In a packed model: the three projections in one matrix; their own weights are views of it."""
    qkv_bias: Tensor | None

    def __init__(self, config: ModelConfig, *, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.query_size, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(
            config.query_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, dtype=dtype)

    def forward(self, hidden: Tensor, shared: PackedPass) -> Tensor:
        output: Tensor = self.o_proj(attend(hidden, self._projection, shared))
        return output

    @property
    def _projection(self) -> RotatedProjection:
        query, key, value = self.q_proj, self.k_proj, self.v_proj
        return RotatedProjection(
            weights=(query.weight, key.weight, value.weight),
            biases=(query.bias, key.bias, value.bias),
            norms=(
                None if self.q_norm is None else self.q_norm.weight,
                None if self.k_norm is None else self.k_norm.weight,
            ),
            epsilon=0.0 if self.q_norm is None else self.q_norm.epsilon,
            head_dim=self.head_dim,
        )


def attend(hidden: Tensor, projection: RotatedProjection, shared: PackedPass) -> Tensor:
    """An attention layer before its output projection: [tokens, heads x head_dim]."""
    project = _project_and_rotate if shared.fused.rotary else _project
    query, key, value = project(hidden, projection, shared.rotation)
    attended = packed_attention(
        query, key=key, value=value, layout=shared.layout, repeat_keys=not shared.fused.attention
    )
    return attended.flatten(-2)


def _project(
    hidden: Tensor, projection: RotatedProjection, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        functional.linear(hidden, weight, bias).unflatten(-1, (-1, projection.head_dim))
        for weight, bias in zip(projection.weights, projection.biases, strict=True)
    )
    query_norm, key_norm = projection.norms
    if query_norm is not None and key_norm is not None:
        query = functional.rms_norm(query, query_norm.shape, query_norm, projection.epsilon)
        key = functional.rms_norm(key, key_norm.shape, key_norm, projection.epsilon)
    return rotate(query, rotation), rotate(key, rotation), value


def _project_and_rotate(
    hidden: Tensor, projection: RotatedProjection, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by one product and one kernel."""
    return project_and_rotate(
        hidden, projection, cosine=rotation.cosine[:, 0, 0], sine=rotation.signed_sine[:, 0, 1]
    )


class FeedForward(nn.Module):
    gate_up_weight: Tensor
    """In a packed model: both projections in one matrix; their own weights are views of it."""
    gate_up_bias: Tensor | None

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias, dtype=dtype)
        self.up_proj = nn.Linear(hidden, inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, hidden, bias=bias, dtype=dtype)

    def forward(self, hidden: Tensor, *, fused: bool) -> Tensor:
        if fused:
            projections = (self.gate_proj, self.up_proj, self.down_proj)
            weights, biases = (each.weight for each in projections), (each.bias for each in projections)
            return feed_forward(hidden, FeedForwardWeights(*weights, *biases))
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer=layer, dtype=dtype)
        self.mlp = FeedForward(config, dtype=dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)

    def forward(self, residual: Tensor, update: Tensor | None, shared: PackedPass) -> tuple[Tensor, Tensor]:
        """The residual stream within this layer and the update that the next one adds to it."""
        fused = shared.fused
        hidden, normalized = self.input_layernorm(residual, update, fused=fused.norm)
        update = self.self_attn(normalized, shared)
        hidden, normalized = self.post_attention_layernorm(hidden, update, fused=fused.norm)
        return hidden, self.mlp(normalized, fused=fused.feed_forward)

    def whole(self, hidden: Tensor, shared: PackedPass) -> Tensor:
        """The residual stream after this layer."""
        hidden, update = self(hidden, None, shared)
        return hidden + update


class Decoder(nn.Module):
    """Layers of one pipeline stage."""

    embed_tokens: nn.Embedding
    """In the first stage, and in the last one where it is the output projection."""
    norm: RMSNorm
    """In the last stage."""

    def __init__(self, config: ModelConfig, *, part: ModelPart, dtype: torch.dtype) -> None:
        super().__init__()
        self.part = part
        if part.uses_embedding:
            # Not by its constructor: its random numbers import torch's compiler (seconds) on the meta device.
            self.embed_tokens = nn.Embedding.from_pretrained(
                torch.empty(config.vocab_size, config.hidden_size, dtype=dtype), freeze=False
            )
        self.layers = nn.ModuleList()
        for layer in part.layers:  # By the numbers that they have in the whole model.
            self.layers.add_module(str(layer), DecoderLayer(config, layer=layer, dtype=dtype))
        if part.is_last:
            self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)

    def forward(
        self, tokens: Tensor, shared: PackedPass, *, recompute: bool, incoming: Tensor | None = None
    ) -> Tensor:
        """Final hidden states, or the residual stream after the last layer of this stage. `incoming` is that of the
        stage before, or in the first one the embedded tokens, if they exist already."""
        if incoming is None:
            assert self.part.is_first, "a stage begins with the activations of the one before"
            incoming = self.embed_tokens(tokens)
        hidden: Tensor = incoming
        update: Tensor | None = None
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if recompute:
                run = partial(layer.whole, shared=shared)
                hidden = recomputed(run, hidden, parameters=layer.parameters())
            else:
                hidden, update = layer(hidden, update, shared)
        if not self.part.is_last:
            return hidden if update is None else hidden + update
        _, output = self.norm(hidden, update, fused=shared.fused.norm)
        normalized: Tensor = output
        return normalized


class Transformer(nn.Module):
    """A decoder-only language model, optionally with a value head.

    Its memory is allocated but not filled: call `initialize`, or use `huggingface.load`. Weights never move afterwards,
    so a new version is an in-place copy into `named_parameters()`.

    `packed` stores a layer's query, key and value projections in one matrix, and gate and up in another, so that
    generation computes one product of each; names and shapes of the parameters do not change.
    """

    recompute: bool = False
    """Whether a backward pass computes the activations within each layer again instead of keeping them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        with_value_head: bool = False,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        part: ModelPart | None = None,
        has_memory: bool = True,
    ) -> None:
        """`part`: the layers that this process computes, by default all. Without memory its parameters have shapes
        only, until they are given other memory."""
        super().__init__()
        self.config, self.has_memory = config, has_memory
        self.part = part or part_of(config)
        self.incoming: Tensor | None = None
        """Activations of the stage before, with which the next forward pass begins; None in the first stage, unless the
        tokens are embedded already."""
        self.residual: Tensor | None = None
        """Residual stream after the last layer, where the layers have been computed one at a time: the next forward
        pass only normalizes it. None otherwise."""
        with torch.device("meta"):
            self.model = Decoder(config, part=self.part, dtype=dtype)
            self.lm_head: nn.Linear | None = None
            if not config.tie_embeddings and self.part.is_last:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
            self.value_head: nn.Linear | None = None
            if with_value_head and self.part.is_last:
                self.value_head = nn.Linear(config.hidden_size, 1, dtype=dtype)
        allocate(self, device=torch.device(device), has_memory=has_memory)
        if packed:
            for layer in self.model.layers:
                assert isinstance(layer, DecoderLayer)
                _pack(layer)
        self.frequencies = inverse_frequencies(config, device=torch.device(device))
        """Frequencies of the rotary embedding, in fp32."""
        self.recompute = False
        """Whether training keeps only the input of each layer and computes the rest again in the backward pass: the
        same bits from a fraction of the memory, for about a third more time."""
        self.fused = FusedParts()
        """Parts with kernels of their own where there are such kernels."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def output_weight(self) -> Tensor:
        """The [vocabulary, hidden] matrix that computes logits."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward_packed(self, tokens: Tensor, positions: Tensor, layout: PackedLayout) -> Tensor:
        """Final hidden states [tokens, hidden] of packed sequences, or those after this stage; differentiable."""
        if self.residual is not None:
            _, output = self.model.norm(self.residual, None, fused=self._used.norm)
            normalized: Tensor = output
            return normalized
        recompute = self.recompute and torch.is_grad_enabled()
        shared = self.shared_pass(positions, layout)
        hidden: Tensor = self.model(tokens, shared, recompute=recompute, incoming=self.incoming)
        return hidden

    def shared_pass(self, positions: Tensor, layout: PackedLayout) -> PackedPass:
        """Everything that the layers share in a forward pass of these sequences."""
        rotation = rotation_at(positions, frequencies=self.frequencies, config=self.config, dtype=self.dtype)
        return PackedPass(rotation, layout, self._used)

    @property
    def _used(self) -> FusedParts:
        """Parts that are computed by kernels of their own."""
        return self.fused if has_kernels(next(self.parameters())) else UNFUSED

    def embedded(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, [tokens, hidden]."""
        rows: Tensor = self.model.embed_tokens(tokens)
        return rows

    def embedded_parts(self, tokens: Tensor) -> list[Tensor]:
        """The summands of `embedded` that this process computes: one for each of its slices of the embedding."""
        return [self.embedded(tokens)]

    @torch.no_grad()
    def copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a version into the parameters' memory; nothing is changed unless all of it fits."""
        self.check_weights(tensors)
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def check_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise an error unless these are a whole version of the parameters, by name and shape."""
        parameters = dict(self.named_parameters())
        if parameters.keys() != tensors.keys():
            different = sorted(parameters.keys() ^ tensors.keys())
            raise ModelError(
                f"expected weights of exactly the model's parameters, got a difference in {different[:4]}"
            )
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ModelError(
                    f"expected weight `{name}` of shape {tuple(parameter.shape)}, got {tuple(tensors[name].shape)}"
                )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in fp32, for sampling and without gradient; training uses `token_logprobs`."""
        return project_to_vocabulary(hidden, self.output_weight)

    def values(self, hidden: Tensor) -> Tensor:
        """The value head's estimate per token, [tokens] in fp32: rounded to bf16, close scores would be equal."""
        head = self.value_head
        assert head is not None, "values of a model that was made without a value head"
        return functional.linear(hidden.float(), head.weight.float(), head.bias.float()).squeeze(-1)

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy at each token; see `logprobs.token_logprobs`."""
        return token_logprobs(
            hidden,
            weight=self.output_weight,
            targets=targets,
            temperature=temperature,
            chunk_size=chunk_size,
        )


def allocate(model: nn.Module, *, device: torch.device, has_memory: bool = True) -> None:
    """Give parameters on the meta device real memory, as `to_empty` does, but without importing torch's compiler;
    without memory, one element each, which is shown in the parameter's shape."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            size = parameter.shape if has_memory else (1,)
            memory = torch.empty(size, dtype=parameter.dtype, device=device).expand(parameter.shape)
            setattr(module, name, nn.Parameter(memory))


def _pack(layer: DecoderLayer) -> None:
    attention, feed_forward = layer.self_attn, layer.mlp
    attention.qkv_weight, attention.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    feed_forward.gate_up_weight, feed_forward.gate_up_bias = _joined(
        feed_forward.gate_proj, feed_forward.up_proj
    )


def _joined(*projections: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Join weights and biases; the originals become views."""
    sizes = [projection.out_features for projection in projections]
    first = projections[0]
    weight = first.weight.new_empty(sum(sizes), first.in_features, requires_grad=False)
    for projection, rows in zip(projections, weight.split(sizes), strict=True):
        projection.weight = nn.Parameter(rows)
    own_bias: Tensor | None = first.bias
    if own_bias is None:
        return weight, None
    bias = own_bias.new_empty(sum(sizes), requires_grad=False)
    for projection, entries in zip(projections, bias.split(sizes), strict=True):
        projection.bias = nn.Parameter(entries)
    return weight, bias


def initialize(model: Transformer, seed: int) -> None:
    """Fill every parameter from `seed` alone: each has its own generator, so neither order nor global state matters.

    Matrices are normal with standard deviation 0.55 / sqrt(inputs), which is the usual 0.02 at width 768 and keeps a
    tiny model's signal alive; those that write to the residual stream are divided by sqrt(2 × layers). Norms start at
    one, biases and the value head at zero.
    """
    for name, parameter in model.named_parameters():
        initialize_parameter(name, parameter, seed=seed, num_layers=model.config.num_layers)


@torch.no_grad()
def initialize_parameter(name: str, parameter: Tensor, *, seed: int, num_layers: int) -> None:
    """Fill one parameter as `initialize` does."""
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith(".bias") or name.startswith("value_head."):
        parameter.zero_()
    else:
        deviation = 0.55 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation *= 1 / math.sqrt(2 * num_layers)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(std=deviation, generator=generator)
        parameter.copy_(noise)
