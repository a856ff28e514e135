"""Digests that are computed on the card are those that the library computes on the host."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import xxhash

from kintsugi.runtime.digests import PIECE_SLICE_BYTES, piece_digest, slice_digests
from kintsugi.training.digests import ON_DEVICE_BYTES, SLICE_BYTES, digest
from kintsugi.weights.manifest import tensor_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("kintsugi.weights.digest_kernels", reason="needs Triton")

from kintsugi.weights.device_digests import device_slice_digests, piece_digests  # noqa: E402
from kintsugi.weights.transports.device import copies_digested  # noqa: E402

CUDA = torch.device("cuda", 0)


def some_bytes(size: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=CUDA, generator=generator)


@pytest.mark.parametrize("slice_bytes", [SLICE_BYTES, PIECE_SLICE_BYTES])
@pytest.mark.parametrize("num_slices", [1, 7, 8, 9, 1000])
def test_slices_have_the_digests_of_the_library(slice_bytes: int, num_slices: int) -> None:
    content = some_bytes(slice_bytes * num_slices)
    (found,) = device_slice_digests([content], slice_bytes=slice_bytes)
    assert found.tolist() == slice_digests(tensor_bytes(content), slice_bytes=slice_bytes)


@pytest.mark.parametrize("byte", [0, 1, 127, 128, 255])
def test_words_whose_products_and_sums_wrap_around_are_digested_rightly(byte: int) -> None:
    content = torch.full((3 * SLICE_BYTES,), byte, dtype=torch.uint8, device=CUDA)
    (found,) = device_slice_digests([content], slice_bytes=SLICE_BYTES)
    assert found.tolist() == [xxhash.xxh3_64_intdigest(bytes([byte]) * SLICE_BYTES)] * 3


def test_tensors_of_any_size_and_alignment_are_digested_together() -> None:
    sizes = [0, 1, 240, 241, 1023, 1024, 4097, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (40 << 20) + 5]
    tensors = [some_bytes(size, seed=size) for size in sizes]
    tensors += [some_bytes((1 << 20) + shift)[shift:] for shift in (1, 2, 8, 16)]
    assert piece_digests(tensors) == [piece_digest(tensor_bytes(tensor)) for tensor in tensors]


def test_what_is_copied_to_the_host_has_the_digests_that_it_has_on_the_card() -> None:
    tensors = [some_bytes(size, seed=size) for size in (1, 1000, (16 << 20) - 1, (40 << 20) + 6)]
    into = [memoryview(bytearray(tensor.nbytes)) for tensor in tensors]
    assert copies_digested(tensors, into) == piece_digests(tensors)
    assert [bytes(each) for each in into] == [bytes(tensor_bytes(tensor)) for tensor in tensors]


@pytest.mark.parametrize("size", [ON_DEVICE_BYTES - 4, ON_DEVICE_BYTES, 8 * ON_DEVICE_BYTES + 12])
def test_a_state_has_the_same_digest_on_the_card_and_on_the_host(size: int) -> None:
    content = some_bytes(size)
    assert digest(b"step 1", content) == digest(b"step 1", content.cpu())


def test_one_bit_anywhere_changes_the_digest_of_its_slice_only() -> None:
    content = some_bytes(64 * SLICE_BYTES)
    (before,) = device_slice_digests([content], slice_bytes=SLICE_BYTES)
    places = np.random.default_rng(0).integers(0, content.numel(), 64).tolist()
    for place in [0, SLICE_BYTES - 1, SLICE_BYTES, content.numel() - 1, *places]:
        content[place] ^= 1 << (place % 8)
        (after,) = device_slice_digests([content], slice_bytes=SLICE_BYTES)
        assert np.flatnonzero(before != after).tolist() == [place // SLICE_BYTES]
        content[place] ^= 1 << (place % 8)


def test_a_state_of_four_gigabytes_is_digested_at_half_a_terabyte_a_second() -> None:
    content = torch.empty(4 << 30, dtype=torch.uint8, device=CUDA).random_(0, 256)
    digest(b"", content)
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        since = time.perf_counter()
        digest(b"", content)
        times.append(time.perf_counter() - since)
    assert content.nbytes / min(times) > 0.5e12, times
