"""Digest of a state: a function of its bytes, computed on the device that holds them.

    bytes ──► slices of 32 KiB ──► xxh3-64 of each ──► xxh3-64 of prefix and all of these

Slices are independent of each other, so an accelerator hashes all of them in parallel, with the same result as the
library on the CPU.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from kintsugi.runtime.digests import joined, slice_digests
from kintsugi.weights.device_digests import device_slice_digests

SLICE_BYTES = 32 << 10
"""Part of the definition: other slices give other digests."""
ON_DEVICE_BYTES = 4 << 20
"""Smaller tensors are copied to the host and hashed by the CPU: they need no kernel, which takes a second to compile on
a new host."""


def digest(prefix: bytes, tensor: Tensor) -> str:
    """Digest of `prefix` and the bytes of a contiguous tensor on any device."""
    content = tensor.detach().reshape(-1).view(torch.uint8)
    together = xxhash.xxh3_64(prefix)
    if content.is_cuda and content.nbytes >= ON_DEVICE_BYTES:
        (found,) = device_slice_digests([content], slice_bytes=SLICE_BYTES)
        together.update(found.astype("<u8", copy=False).tobytes())
    else:
        together.update(joined(slice_digests(content.cpu().numpy().data, slice_bytes=SLICE_BYTES)))
    return together.hexdigest()
