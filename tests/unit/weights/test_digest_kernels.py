"""The kernel that digests memory of a device, run by Triton's interpreter on few slices; `tests/gpu` has the device."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import xxhash

if torch.cuda.is_available():
    pytest.skip("the interpreter would replace the device for every test", allow_module_level=True)
if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter needs numpy below 2.4", allow_module_level=True)
# Triton looks at this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed: kernels are tested with it and on a device")

from kintsugi.runtime.digests import piece_digest, slice_digests
from kintsugi.weights import device_digests
from kintsugi.weights.device_digests import device_slice_digests, piece_digests
from kintsugi.weights.digest_kernels import BLOCK_BYTES, hash_slices

pytestmark = [
    pytest.mark.slow,
    # The interpreter computes with arrays where the device has numbers; products wrap around.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]


def some_bytes(size: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("slice_bytes", "num_slices"), [(BLOCK_BYTES, 1), (2 * BLOCK_BYTES, 9), (32 << 10, 3)]
)
def test_slices_have_the_digests_of_the_library(slice_bytes: int, num_slices: int) -> None:
    content = some_bytes(slice_bytes * num_slices)
    starts = torch.arange(num_slices) * (slice_bytes // 16)
    found = hash_slices(content.view(torch.int64), starts, slice_bytes=slice_bytes)
    expected = [xxhash.xxh3_64_intdigest(part.numpy().data) for part in content.split(slice_bytes)]
    assert found.numpy().view(np.uint64).tolist() == expected


@pytest.mark.parametrize("byte", [0, 255])
def test_words_whose_products_and_sums_wrap_around_are_digested_rightly(byte: int) -> None:
    content = torch.full((4 * BLOCK_BYTES,), byte, dtype=torch.uint8)
    (found,) = device_slice_digests([content], slice_bytes=4 * BLOCK_BYTES)
    assert found.tolist() == [xxhash.xxh3_64_intdigest(content.numpy().data)]


def test_tensors_of_any_size_and_alignment_are_digested_together() -> None:
    sizes = [0, 1, 240, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 5, 8]
    tensors = [some_bytes(size, seed=size) for size in sizes]
    tensors.append(some_bytes(2 * BLOCK_BYTES + 3)[3:])
    found = device_slice_digests(tensors, slice_bytes=BLOCK_BYTES)
    expected = [slice_digests(tensor.numpy().data, slice_bytes=BLOCK_BYTES) for tensor in tensors]
    assert [each.tolist() for each in found] == expected


def test_pieces_have_the_digests_that_they_have_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digests, "PIECE_SLICE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("kintsugi.runtime.digests.PIECE_SLICE_BYTES", BLOCK_BYTES)
    tensors = [some_bytes(size, seed=size).view(torch.bfloat16) for size in (2, 2048, 5000)]
    expected = [piece_digest(tensor.view(torch.uint8).numpy().data) for tensor in tensors]
    assert piece_digests(tensors) == expected


def test_nothing_has_no_digests() -> None:
    assert device_slice_digests([], slice_bytes=BLOCK_BYTES) == []
