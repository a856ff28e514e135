"""Rotary position embedding: frequencies, their scalings for long contexts, and the rotation itself."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.model.architecture import LinearRope, Llama3Rope, ModelConfig, YarnRope


class Rotation(NamedTuple):
    """Cosine and signed sine per token, shaped [tokens, 1, 2, head_dim / 2] to broadcast over heads."""

    cosine: Tensor
    signed_sine: Tensor


def inverse_frequencies(config: ModelConfig, *, device: torch.device) -> Tensor:
    """Radians per position of each of the `head_dim / 2` pairs, in fp32, after scaling."""
    if device.type == "meta":
        # Arithmetic there would import torch's compiler, in more than a second of processor time.
        return torch.empty(config.head_dim // 2, device=device)
    exponents = (
        torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    )
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRope(factor=factor):
            return frequencies / factor
        case Llama3Rope() as scaling:
            return _llama3_frequencies(frequencies, scaling)
        case YarnRope() as scaling:
            return _yarn_frequencies(frequencies, scaling, config=config)


def rotation_at(
    positions: Tensor, *, frequencies: Tensor, config: ModelConfig, dtype: torch.dtype
) -> Rotation:
    """Cosine and sine at these positions. Angles are computed in fp32 whatever the model's type: bf16 can not
    distinguish adjacent positions."""
    angles = positions.float()[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    if isinstance(config.rope_scaling, YarnRope):
        cosine = cosine * config.rope_scaling.attention_scale
        sine = sine * config.rope_scaling.attention_scale
    return Rotation(
        torch.stack((cosine, cosine), dim=1)[:, None].to(dtype),
        torch.stack((-sine, sine), dim=1)[:, None].to(dtype),
    )


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [tokens, heads, head_dim]; pair i is (i, i + head_dim / 2) as in Hugging Face checkpoints."""
    pairs = heads.unflatten(-1, (2, -1))
    return torch.addcmul(pairs * rotation.cosine, pairs.flip(-2), rotation.signed_sine).flatten(-2)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    stretched = frequencies / scaling.factor
    smooth = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * stretched + smooth * frequencies
    outer = torch.where(wavelengths > shortest_stretched, stretched, frequencies)
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, outer)


def _yarn_frequencies(frequencies: Tensor, scaling: YarnRope, *, config: ModelConfig) -> Tensor:
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
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32, device=frequencies.device)
    stretched_share = ((pairs - low) / width).clamp(0, 1)
    return (frequencies / scaling.factor) * stretched_share + frequencies * (1 - stretched_share)
