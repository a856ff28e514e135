"""Forward pass of the Llama/Qwen definition (`model.transformer`) in MindSpore, in float32.

A function of the parameters, by Hugging Face name: MindSpore differentiates it by them. Sequences are packed; attention
alone sees padding, and its causal mask keeps real tokens from attending to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, mint, ops
from numpy.typing import NDArray

from kintsugi.model.architecture import LinearRope, Llama3Rope, ModelConfig, YarnRope
from kintsugi.training.mindspore.device import DeviceRuntime
from kintsugi.training.packing import PackedArrays

Parameters = Mapping[str, Tensor]
"""Weights by Hugging Face name, on the device."""

MASKED = -1e30
"""Score of a key that must not be attended to; its exponential is 0."""


@dataclass(frozen=True, eq=False)
class PackedPass:
    """Everything that the layers of one forward pass share, on the device."""

    tokens: Tensor
    cosine: Tensor
    """[tokens, 1, head_dim / 2], as is `sine`."""
    sine: Tensor
    padded: Tensor
    """Row of each place of the padded layout; the row after the last one is zero."""
    unpadded: Tensor
    """Place of each row in the padded layout."""
    num_sequences: int
    length: int
    """Places of each sequence in the padded layout."""
    mask: Tensor
    """[length, length], added to the scores."""
    sources: Tensor
    targets: Tensor
    """[loss tokens, 1]."""


def packed_pass(arrays: PackedArrays, config: ModelConfig, *, runtime: DeviceRuntime) -> PackedPass:
    """Bring the indices of a micro-batch to the device."""
    lengths, length = np.array(arrays.lengths), max(arrays.lengths)
    starts = np.cumsum([0, *lengths[:-1]])
    within = np.concatenate([np.arange(each) for each in lengths])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    padded = np.full((len(lengths), length), len(within), dtype=np.int32)
    padded[sequence, within] = starts[sequence] + within
    angles = within.astype(np.float32)[:, None] * inverse_frequencies(config)
    scaling = config.rope_scaling
    scale = np.float32(scaling.attention_scale if isinstance(scaling, YarnRope) else 1.0)
    device = runtime.to_device
    return PackedPass(
        tokens=device(arrays.tokens.astype(np.int32)),
        cosine=device((np.cos(angles) * scale)[:, None]),
        sine=device((np.sin(angles) * scale)[:, None]),
        padded=device(padded.reshape(-1)),
        unpadded=device((sequence * length + within).astype(np.int32)),
        num_sequences=len(lengths),
        length=length,
        mask=device(np.triu(np.full((length, length), MASKED, dtype=np.float32), k=1)),
        sources=device(arrays.sources.astype(np.int32)),
        targets=device(arrays.targets.astype(np.int32)[:, None]),
    )


def token_logprobs(
    parameters: Parameters, shared: PackedPass, config: ModelConfig, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy at every loss token of a micro-batch."""
    hidden = ops.gather(_hidden(parameters, shared, config), shared.sources, 0)
    output = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    logits = _linear(hidden, parameters[output]) / temperature
    logits = logits - ops.stop_gradient(mint.amax(logits, -1, True))
    log_distribution = logits - _log_of_sum(mint.exp(logits))
    logprobs = ops.gather_elements(log_distribution, 1, shared.targets).reshape(-1)
    return logprobs, -mint.sum(mint.exp(log_distribution) * log_distribution, -1)


def _log_of_sum(exponentials: Tensor) -> Tensor:
    """Logarithm of the sum over the last axis, of which one element is 1.

    Not by `log`: MindSpore's CPU kernel computes it in vectors of several elements but those after the last whole
    vector of a thread one by one, with other last bits, and which elements a thread gets changes after the first five
    executions of a shape, and then by measured times. `log1p` computes every element alike.
    """
    return mint.log1p(mint.sum(exponentials, -1, True) - 1.0)


def _hidden(parameters: Parameters, shared: PackedPass, config: ModelConfig) -> Tensor:
    hidden = ops.gather(parameters["model.embed_tokens.weight"], shared.tokens, 0)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normalized = _normalized(hidden, parameters[f"{prefix}.input_layernorm.weight"], config)
        hidden = hidden + _attention(parameters, f"{prefix}.self_attn", normalized, shared, config)
        normalized = _normalized(hidden, parameters[f"{prefix}.post_attention_layernorm.weight"], config)
        hidden = hidden + _feed_forward(parameters, f"{prefix}.mlp", normalized)
    return _normalized(hidden, parameters["model.norm.weight"], config)


def _attention(
    parameters: Parameters, name: str, hidden: Tensor, shared: PackedPass, config: ModelConfig
) -> Tensor:
    def heads(projection: str) -> Tensor:
        return _project(parameters, f"{name}.{projection}", hidden).reshape(
            hidden.shape[0], -1, config.head_dim
        )

    query, key, value = heads("q_proj"), heads("k_proj"), heads("v_proj")
    if config.qk_norm:
        query = _normalized(query, parameters[f"{name}.q_norm.weight"], config)
        key = _normalized(key, parameters[f"{name}.k_norm.weight"], config)
    query, key = _padded(_rotated(query, shared), shared), _padded(_rotated(key, shared), shared)
    value = _padded(value, shared)
    group_size = config.num_heads // config.num_kv_heads
    if group_size > 1:
        key, value = _repeated(key, group_size), _repeated(value, group_size)
    scores = ops.BatchMatMul(transpose_b=True)(query, key) * (1 / math.sqrt(config.head_dim)) + shared.mask
    attended = ops.BatchMatMul()(mint.nn.functional.softmax(scores, dim=-1), value)
    rows = attended.swapaxes(1, 2).reshape(shared.num_sequences * shared.length, -1)
    return _project(parameters, f"{name}.o_proj", ops.gather(rows, shared.unpadded, 0))


def _feed_forward(parameters: Parameters, name: str, hidden: Tensor) -> Tensor:
    gate = _project(parameters, f"{name}.gate_proj", hidden)
    inner = gate * mint.sigmoid(gate) * _project(parameters, f"{name}.up_proj", hidden)
    return _project(parameters, f"{name}.down_proj", inner)


def _project(parameters: Parameters, name: str, hidden: Tensor) -> Tensor:
    projected = _linear(hidden, parameters[f"{name}.weight"])
    bias = parameters.get(f"{name}.bias")
    return projected if bias is None else projected + bias


def _linear(hidden: Tensor, weight: Tensor) -> Tensor:
    return ops.MatMul(transpose_b=True)(hidden, weight)


def _normalized(hidden: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """Root-mean-square norm over the last axis."""
    mean_square = ops.ReduceMean(keep_dims=True)(hidden * hidden, -1)
    return hidden * mint.rsqrt(mean_square + config.rms_norm_eps) * weight


def _rotated(heads: Tensor, shared: PackedPass) -> Tensor:
    """Rotate [tokens, heads, head_dim]; pair i is (i, i + head_dim / 2) as in Hugging Face checkpoints."""
    half = heads.shape[2] // 2
    first, second = heads[:, :, :half], heads[:, :, half:]
    return mint.concat(
        (first * shared.cosine - second * shared.sine, second * shared.cosine + first * shared.sine), -1
    )


def _padded(heads: Tensor, shared: PackedPass) -> Tensor:
    """[tokens, heads, head_dim] to [sequences, heads, length, head_dim], zeros after each sequence."""
    num_heads, head_dim = heads.shape[1:]
    nothing = mint.zeros((1, num_heads * head_dim))
    rows = mint.concat((heads.reshape(-1, num_heads * head_dim), nothing), 0)
    placed = ops.gather(rows, shared.padded, 0)
    return placed.reshape(shared.num_sequences, shared.length, num_heads, head_dim).swapaxes(1, 2)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Each key head `times` in a row, for the query heads that share it."""
    sequences, num_heads, length, head_dim = heads.shape
    wide = mint.broadcast_to(
        heads.reshape(sequences, num_heads, 1, length, head_dim),
        (sequences, num_heads, times, length, head_dim),
    )
    return wide.reshape(sequences, num_heads * times, length, head_dim)


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Radians per position of each of the `head_dim / 2` pairs, as `model.rotary` computes them."""
    exponents = np.arange(0, config.head_dim, 2).astype(np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    match config.rope_scaling:
        case None:
            found = frequencies
        case LinearRope(factor=factor):
            found = frequencies / np.float32(factor)
        case Llama3Rope() as scaling:
            found = _llama3_frequencies(frequencies, scaling)
        case YarnRope() as scaling:
            found = _yarn_frequencies(frequencies, scaling, config=config)
    return found.astype(np.float32)


def _llama3_frequencies(frequencies: NDArray[np.float32], scaling: Llama3Rope) -> NDArray[np.float32]:
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    stretched = frequencies / scaling.factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched + smooth * frequencies
    outer = np.where(wavelengths > shortest_stretched, stretched, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return np.where(between, blended, outer)


def _yarn_frequencies(
    frequencies: NDArray[np.float32], scaling: YarnRope, *, config: ModelConfig
) -> NDArray[np.float32]:
    def pair_turning(rotations: float) -> float:
        """Index of the pair that turns `rotations` times within the original context."""
        return (
            config.head_dim
            * math.log(scaling.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), config.head_dim - 1)
    width = high - low if high != low else 0.001
    stretched_share = ((np.arange(config.head_dim // 2, dtype=np.float32) - low) / width).clip(0, 1)
    return (frequencies / scaling.factor) * stretched_share + frequencies * (1 - stretched_share)
