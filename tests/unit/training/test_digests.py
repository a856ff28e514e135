"""A digest of a state depends on its bytes and on nothing else; its definition does not change."""

from __future__ import annotations

import pytest
import torch
import xxhash

from kintsugi.training.digests import SLICE_BYTES, digest


def some_bytes(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("size", [0, 4, SLICE_BYTES, 3 * SLICE_BYTES + 4])
def test_a_digest_is_that_of_the_prefix_and_the_digests_of_slices_of_32_kib(size: int) -> None:
    content = some_bytes(size)
    numbers = [xxhash.xxh3_64_intdigest(part.numpy().data) for part in content.split(32768) if len(part)]
    together = b"step 1" + b"".join(number.to_bytes(8, "little") for number in numbers)
    assert digest(b"step 1", content) == xxhash.xxh3_64_hexdigest(together)


def test_the_digest_of_known_bytes_is_the_one_that_older_checkpoints_have() -> None:
    content = torch.arange(20_000, dtype=torch.float32)
    assert digest(b"step 1", content) == "7848f0f8c5a527d1"


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
