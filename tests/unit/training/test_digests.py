"""A digest depends on the bytes and on nothing else, least of all on where it is computed."""

from __future__ import annotations

import pytest
import torch
import xxhash

from kintsugi.training import digests as module
from kintsugi.training.digests import SLICE_BYTES, device_slices, digest


def some_bytes(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def test_slices_hashed_side_by_side_are_what_the_library_makes_of_them() -> None:
    content = some_bytes(5 * SLICE_BYTES)
    found = device_slices(content).numpy().astype("<i8").tobytes()
    expected = [xxhash.xxh3_64_intdigest(piece.numpy().data) for piece in content.split(SLICE_BYTES)]
    assert found == b"".join(number.to_bytes(8, "little") for number in expected)


def test_how_many_slices_are_hashed_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    content = some_bytes(5 * SLICE_BYTES, seed=1)
    expected = device_slices(content)
    monkeypatch.setattr(module, "GROUP_SLICES", 2)
    assert torch.equal(device_slices(content), expected)


@pytest.mark.parametrize("size", [0, 4, SLICE_BYTES, 3 * SLICE_BYTES + 4])
def test_any_bit_and_the_prefix_change_the_digest(size: int) -> None:
    content = some_bytes(size)
    before = digest(b"step 1", content)
    assert digest(b"step 1", content.clone()) == before != digest(b"step 2", content)
    for place in {0, size // 2, size - 1} if size else ():
        content[place] ^= 1
        assert digest(b"step 1", content) != before
        content[place] ^= 1


def test_two_slices_that_change_places_change_the_digest() -> None:
    content = some_bytes(2 * SLICE_BYTES)
    assert digest(b"", content) != digest(b"", torch.cat(content.split(SLICE_BYTES)[::-1]))
