"""The digest of a piece depends on its bytes and on nothing else: not on how they arrive."""

from __future__ import annotations

import random

import pytest
import xxhash

from kintsugi.runtime.digests import PIECE_SLICE_BYTES, PieceDigest, piece_digest, slice_digests

SIZES = [
    0, 1, PIECE_SLICE_BYTES - 1, PIECE_SLICE_BYTES, PIECE_SLICE_BYTES + 1, 3 * PIECE_SLICE_BYTES + 17,
]  # fmt: skip


def some_bytes(size: int, *, seed: int = 0) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_piece_that_arrives_in_parts_has_the_digest_of_the_whole(size: int) -> None:
    content, random_cuts = some_bytes(size), random.Random(1)
    digest = PieceDigest()
    start = 0
    while start < size:
        stop = start + random_cuts.randint(1, 2 * PIECE_SLICE_BYTES)
        digest.update(content[start:stop])
        start = stop
    assert digest.hexdigest() == piece_digest(content)


@pytest.mark.parametrize("size", SIZES[:4])
def test_a_piece_of_one_slice_has_the_digest_of_the_library(size: int) -> None:
    content = some_bytes(size)
    assert piece_digest(content) == xxhash.xxh3_64_hexdigest(content)


def test_a_piece_of_several_slices_has_the_digest_of_their_digests() -> None:
    content = some_bytes(2 * PIECE_SLICE_BYTES + 5)
    slices = [
        content[start : start + PIECE_SLICE_BYTES] for start in range(0, len(content), PIECE_SLICE_BYTES)
    ]
    numbers = b"".join(xxhash.xxh3_64_intdigest(each).to_bytes(8, "little") for each in slices)
    assert piece_digest(content) == xxhash.xxh3_64_hexdigest(numbers)


def test_every_byte_and_the_order_of_slices_change_the_digest() -> None:
    content = bytearray(some_bytes(3 * PIECE_SLICE_BYTES + 9))
    before = piece_digest(memoryview(content))
    for place in (0, PIECE_SLICE_BYTES, len(content) - 1):
        content[place] ^= 1
        assert piece_digest(memoryview(content)) != before
        content[place] ^= 1
    first, second = content[:PIECE_SLICE_BYTES], content[PIECE_SLICE_BYTES : 2 * PIECE_SLICE_BYTES]
    swapped = second + first + content[2 * PIECE_SLICE_BYTES :]
    assert piece_digest(memoryview(swapped)) != before


def test_the_last_slice_may_be_shorter() -> None:
    content = some_bytes(70)
    assert slice_digests(content, slice_bytes=32) == [
        xxhash.xxh3_64_intdigest(content[start:stop]) for start, stop in ((0, 32), (32, 64), (64, 70))
    ]
