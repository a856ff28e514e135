"""Digest of a state: a function of its bytes, computed on the device that holds them.

    bytes ──► slices of 32 KiB ──► xxh3-64 of each ──► xxh3-64 of prefix and all of these

Slices are independent of each other, so an accelerator hashes all of them in parallel, with the same result as the
library on the CPU.
"""

from __future__ import annotations

import xxhash

from kintsugi.model.arrays import Array, flat_bytes, is_on_accelerator, is_tensor, view_of
from kintsugi.runtime.digests import joined, slice_digests

SLICE_BYTES = 32 << 10
"""Part of the definition: other slices give other digests."""
ON_DEVICE_BYTES = 4 << 20
"""Smaller tensors are copied to the host and hashed by the CPU: they need no kernel, which takes a second to compile on
a new host."""


def digest(prefix: bytes, array: Array) -> str:
    """Digest of `prefix` and the bytes of a contiguous array on any device."""
    content = flat_bytes(array)
    together = xxhash.xxh3_64(prefix)
    if is_on_accelerator(array) and content.nbytes >= ON_DEVICE_BYTES:
        from kintsugi.weights.device_digests import device_slice_digests

        (found,) = device_slice_digests([content], slice_bytes=SLICE_BYTES)
        together.update(found.astype("<u8", copy=False).tobytes())
    else:
        host = content.cpu() if is_tensor(array) else content
        together.update(joined(slice_digests(view_of(host), slice_bytes=SLICE_BYTES)))
    return together.hexdigest()
