"""Values of quantised blocks, against the library that defines them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kintsugi.model.gguf_blocks import DEQUANTISE, FLOATS, values_of

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block of each kind has its float16 numbers."""


@pytest.mark.parametrize("kind", list(DEQUANTISE))
def test_blocks_of_any_bytes_have_bit_by_bit_the_values_of_the_gguf_library(kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
    stream = np.random.default_rng(0)
    raw = stream.integers(0, 256, (37, 2 * 256 // block * block_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        numbers = stream.standard_normal(raw.size // block_bytes).astype(np.float16)
        raw.reshape(-1, block_bytes)[:, start : start + 2] = numbers.view(np.uint8).reshape(-1, 2)
    expected = torch.from_numpy(gguf.dequantize(raw, quantised)).view(37, -1)
    found = values_of(torch.from_numpy(raw), kind, block_bytes=block_bytes)
    assert found is not None and torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", list(FLOATS))
def test_floats_are_their_bytes(kind: str) -> None:
    values = torch.randn(3, 8).to(FLOATS[kind])
    raw = values.view(torch.uint8)
    found = values_of(raw, kind, block_bytes=raw.shape[1] // 8)
    assert found is not None and torch.equal(found, values)


def test_a_rare_kind_is_left_to_the_library() -> None:
    assert values_of(torch.zeros(1, 84, dtype=torch.uint8), "Q2_K", block_bytes=84) is None
