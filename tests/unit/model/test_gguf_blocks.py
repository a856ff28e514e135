"""Values of quantised blocks, against the library that defines them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kintsugi.model.gguf_blocks import BFLOAT16, BLOCK_SIZES, KINDS, NUMBERS, Scratch, bfloat16_of, rounded

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block of each kind has its float16 numbers."""


def test_numbers_and_sizes_of_the_kinds_are_those_of_the_gguf_library() -> None:
    for number, name in NUMBERS.items():
        assert gguf.GGMLQuantizationType[name] == number
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == BLOCK_SIZES[number]


@pytest.mark.parametrize("kind", list(HALVES))
def test_blocks_of_any_bytes_have_bit_by_bit_the_values_of_the_gguf_library_in_bfloat16(kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
    stream = np.random.default_rng(0)
    raw = stream.integers(0, 256, (37, 2 * 256 // block * block_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        numbers = stream.standard_normal(raw.size // block_bytes).astype(np.float16)
        raw.reshape(-1, block_bytes)[:, start : start + 2] = numbers.view(np.uint8).reshape(-1, 2)
    expected = torch.from_numpy(gguf.dequantize(raw, quantised)).to(torch.bfloat16).view(torch.int16)
    scratch = Scratch(raw.size // block_bytes * block + 5)
    for _ in range(2):  # The second time the scratch is not empty.
        found = bfloat16_of(raw.reshape(-1), kind, scratch=scratch)
        assert found is not None and np.array_equal(found.view(np.int16), expected.numpy().reshape(-1))


def test_any_finite_number_is_rounded_to_nearest_even() -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halfway = (drawn & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    bits = np.concatenate([drawn, halfway, halfway - np.uint32(1), halfway + np.uint32(1)])
    # Numbers below the smallest normal one are left out: torch makes them zero on some processors.
    exponents = bits & np.uint32(0x7F800000)
    values = bits[(exponents != 0) & (exponents != 0x7F800000)].view(np.float32)
    found = rounded(values.copy(), scratch=Scratch(len(values)))
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert found is not None and np.array_equal(found.view(np.int16), expected)


def test_bfloat16_is_its_bytes() -> None:
    values = torch.randn(24).to(torch.bfloat16).view(torch.uint8).numpy()
    found = bfloat16_of(values, BFLOAT16, scratch=Scratch(24))
    assert found is not None and found.tobytes() == values.tobytes()


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F800001])
def test_a_float32_number_that_is_not_finite_is_noticed(bits: int) -> None:
    values = np.full(300, 0x3F800000, np.uint32)
    values[123] = bits
    assert bfloat16_of(values.view(np.uint8), "F32", scratch=Scratch(300)) is None


@pytest.mark.parametrize(("kind", "infinity"), [("F16", 0x7C00), ("BF16", 0x7F80)])
@pytest.mark.parametrize("more", [0, 1, 0x8000, 0x7F])
def test_a_number_of_two_bytes_that_is_not_finite_is_noticed(kind: str, infinity: int, more: int) -> None:
    values = np.full(300, 0x3C00, np.uint16)
    assert bfloat16_of(values.view(np.uint8), kind, scratch=Scratch(300)) is not None
    values[123] = infinity | more
    assert bfloat16_of(values.view(np.uint8), kind, scratch=Scratch(300)) is None


def test_every_finite_float16_number_is_rounded_as_torch_does() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = every[np.isfinite(every.view(np.float16))]
    found = bfloat16_of(values.view(np.uint8), "F16", scratch=Scratch(len(values)))
    expected = torch.from_numpy(values.view(np.float16)).to(torch.bfloat16).view(torch.int16).numpy()
    assert found is not None and np.array_equal(found.view(np.int16), expected)


@pytest.mark.parametrize("kind", list(HALVES))
def test_a_block_with_a_scale_that_is_not_finite_is_noticed(kind: str) -> None:
    raw = np.ones(3 * KINDS[kind].size, np.uint8)
    start = KINDS[kind].size + HALVES[kind][0]
    raw[start : start + 2] = np.array([np.inf], np.float16).view(np.uint8)
    assert bfloat16_of(raw, kind, scratch=Scratch(3 * KINDS[kind].elements)) is None
