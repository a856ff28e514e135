"""Digests of tensors in an accelerator's memory: computed there, with the result of `runtime/digests.py`.

Whole slices are hashed on the device, where only their digests leave it. What is left at the ends of tensors is short
and takes other paths of XXH3: it is copied to the host together and hashed by the library.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kintsugi.runtime.digests import PIECE_SLICE_BYTES, piece_digest_of
from kintsugi.runtime.waits import wait

DEVICE_TIMEOUT_S = 60.0
"""Copies and digests take milliseconds, also on a shared device; a device that hangs is an error after this time."""
_POLL_S = 1e-4
_UNIT_BYTES = 16


def wait_for(event: torch.cuda.Event, *, what: str) -> None:
    """Poll the event, because synchronising with a hung device never returns."""
    pause = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if not event.query():
            pause.wait(min(_POLL_S, remaining_s))
        return event.query() or None

    wait(attempt, whom="the device", what=what, timeout_s=DEVICE_TIMEOUT_S)


def to_host(tensors: Sequence[Tensor], *, what: str) -> list[Tensor]:
    """Copy small tensors through pinned memory, which torch keeps and reuses; waits for the current stream only."""
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(
            tensor, non_blocking=True
        )
        for tensor in tensors
    ]
    if any(tensor.is_cuda for tensor in tensors):
        wait_for(torch.cuda.current_stream(tensors[0].device).record_event(), what=what)
    return copies


def piece_digests(tensors: Sequence[Tensor]) -> list[str]:
    """Digest of each tensor as a piece; all of them are on one device."""
    every = device_slice_digests(tensors, slice_bytes=PIECE_SLICE_BYTES)
    return [piece_digest_of(digests.tolist()) for digests in every]


def device_slice_digests(tensors: Sequence[Tensor], *, slice_bytes: int) -> list[NDArray[np.uint64]]:
    """xxh3-64 of every slice of each contiguous tensor, in one launch on the current stream."""
    flats = [_aligned_bytes(tensor) for tensor in tensors]
    counts = [flat.numel() // slice_bytes for flat in flats]
    tails = [
        flat[count * slice_bytes :]
        for flat, count in zip(flats, counts, strict=True)
        if flat.numel() % slice_bytes
    ]
    found = [_whole_slices(flats, counts, slice_bytes=slice_bytes)] if any(counts) else []
    if tails:
        found.append(torch.cat(tails))
    brought = [each.numpy() for each in to_host(found, what="digests")] if found else []
    whole = brought[0].view(np.uint64) if any(counts) else np.empty(0, np.uint64)
    ends = iter(_host_digests(brought[-1], [tail.numel() for tail in tails]) if tails else ())
    every, start = [], 0
    for flat, count in zip(flats, counts, strict=True):
        own = whole[start : start + count]
        every.append(np.append(own, next(ends)) if flat.numel() % slice_bytes else own)
        start += count
    return every


def _whole_slices(flats: Sequence[Tensor], counts: Sequence[int], *, slice_bytes: int) -> Tensor:
    # Imported here: Triton comes with builds of torch for accelerators only.
    from kintsugi.weights.digest_kernels import hash_slices

    flat = flats[next(index for index, count in enumerate(counts) if count)]
    base, device = flat[:slice_bytes].view(torch.int64), flat.device
    step = slice_bytes // _UNIT_BYTES
    if len(flats) == 1:
        starts = torch.arange(0, counts[0] * step, step, device=device)
    else:
        firsts = [(each.data_ptr() - base.data_ptr()) // _UNIT_BYTES for each in flats]
        ranges = [np.arange(count, dtype=np.int64) * step for count in counts]
        table = np.concatenate([first + own for first, own in zip(firsts, ranges, strict=True)])
        host = torch.from_numpy(table)
        starts = (host.pin_memory() if flat.is_cuda else host).to(device, non_blocking=True)
    # Triton launches on the current device.
    with torch.cuda.device(device) if flat.is_cuda else nullcontext():
        return hash_slices(base, starts, slice_bytes=slice_bytes)


def _host_digests(content: NDArray[np.uint8], sizes: Sequence[int]) -> list[np.uint64]:
    ends = np.cumsum(sizes).tolist()
    return [
        np.uint64(xxhash.xxh3_64_intdigest(content[end - size : end].data))
        for end, size in zip(ends, sizes, strict=True)
    ]


def _aligned_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, at an address that the kernel can read from: a copy if it has another."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return flat if flat.data_ptr() % _UNIT_BYTES == 0 else flat.clone()
