"""Digests of large contents, by slices that are independent of each other.

    bytes ──► slices of equal size ──► xxh3-64 of each ──► xxh3-64 of all of these, or the digest of the only slice

One xxh3 over everything runs at the speed of one core. Slices can be hashed in parallel: an accelerator hashes all of
them where they are (`weights/device_digests.py`), with the same result as the library on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

PIECE_SLICE_BYTES = 256 << 10
"""Slices of a piece of the weights or of a state in transfer. Part of the definition. They fit the cache of a CPU, so
that a slice is hashed right after it was copied, and are large enough for the library to release the interpreter's
lock."""


def slice_digests(content: memoryview, *, slice_bytes: int) -> list[int]:
    """xxh3-64 of every slice; the last one may be shorter."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(content[start : start + slice_bytes]) for start in range(0, len(content), slice_bytes)]


def joined(digests: Sequence[int]) -> bytes:
    """Digests of slices as the bytes over which the digest of the whole is computed."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def piece_digest(content: memoryview) -> str:
    """Digest of one piece, given as bytes."""
    return piece_digest_of(slice_digests(content.cast("B"), slice_bytes=PIECE_SLICE_BYTES))


def piece_digest_of(digests: Sequence[int]) -> str:
    """Digest of one piece from those of its slices.

    >>> piece_digest_of([0x9f]), piece_digest_of([]) == xxhash.xxh3_64_hexdigest(b"")
    ('000000000000009f', True)
    """
    if len(digests) == 1:
        return f"{digests[0]:016x}"
    return xxhash.xxh3_64_hexdigest(joined(digests))


class PieceDigest:
    """Digest of a piece that arrives in parts, cut anywhere."""

    def __init__(self) -> None:
        self._digests: list[int] = []
        self._slice = xxhash.xxh3_64()
        self._num_bytes = 0
        """Bytes of the current slice."""

    def update(self, content: memoryview) -> None:
        start = 0
        while start < len(content):
            part = content[start : start + PIECE_SLICE_BYTES - self._num_bytes]
            self._slice.update(part)
            start += len(part)
            self._num_bytes += len(part)
            if self._num_bytes == PIECE_SLICE_BYTES:
                self._end_slice()

    def hexdigest(self) -> str:
        """Digest of everything so far; nothing may be added afterwards."""
        if self._num_bytes:
            self._end_slice()
        return piece_digest_of(self._digests)

    def _end_slice(self) -> None:
        self._digests.append(self._slice.intdigest())
        self._slice.reset()
        self._num_bytes = 0
