"""Weights in an accelerator's memory: digested there, held for other processes on the same one, and taken from there.

Two versions are held in memory that is made once and never given back, because nobody knows when the last reader of
another process is done. Who reads copies first and verifies its copy: one that was overtaken by a later version does
not match, and is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.model.device import identity
from kintsugi.runtime import wait
from kintsugi.types import DeviceSource, WeightManifest
from kintsugi.weights.manifest import check_digest, check_whole, layout, layout_size
from kintsugi.weights.memory import VERSIONS_KEPT

PINNED_BYTES = 16 << 20
"""Brought to the host at once to be digested."""
NUM_PINNED = 4
"""So many are on their way while one is digested: most tensors are small, and to wait for each would take longer than
to copy it."""

DEVICE_TIMEOUT_S = 60.0
"""Copies take milliseconds, also where others share the device; one that hangs ends here."""
_POLL_S = 1e-4


def digest_of_device(tensor: Tensor, *, into: memoryview | None = None) -> str:
    """xxh3-64 of the bytes, which are also left in host memory `into`."""
    return digests_of_device([tensor], into=[into])[0]


def digests_of_device(
    tensors: Sequence[Tensor], *, into: Sequence[memoryview | None] | None = None
) -> list[str]:
    """Of each tensor. Waits for the device, not for its other streams but the current one."""
    if not tensors:
        return []
    device = tensors[0].device
    targets = [None] * len(tensors) if into is None else into
    digests = [xxhash.xxh3_64() for _ in tensors]
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for index, offset, data in _brought_to_host(tensors, stream):
                target = targets[index]
                if target is not None:
                    np.frombuffer(target[offset : offset + data.nbytes], np.uint8)[...] = data
                digests[index].update(data.data)
    return [digest.hexdigest() for digest in digests]


def _brought_to_host(
    tensors: Sequence[Tensor], stream: torch.cuda.Stream
) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Which tensor, where in it, and the bytes there, until the next is asked for."""
    pinned = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_PINNED)]
    on_their_way: deque[tuple[int, int, Tensor, torch.cuda.Event]] = deque()
    slots = cycle(pinned)

    def arrived() -> tuple[int, int, npt.NDArray[np.uint8]]:
        index, offset, part, event = on_their_way.popleft()
        _wait_for(event, what="weights to digest")
        return index, offset, part.numpy()

    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat.record_stream(stream)
        for offset in range(0, flat.numel(), PINNED_BYTES):
            if len(on_their_way) == NUM_PINNED:
                yield arrived()
            part = flat[offset : offset + PINNED_BYTES]
            target = next(slots)[: part.numel()]
            target.copy_(part, non_blocking=True)
            on_their_way.append((index, offset, target, stream.record_event()))
    while on_their_way:
        yield arrived()


class DeviceSlots:
    """The publisher's: version v lies in slot v modulo 2."""

    def __init__(self, device: torch.device, *, host: str) -> None:
        self._device = device
        self._host = host
        self._slots: dict[int, tuple[Tensor, DeviceSource]] = {}

    def hold(self, named: Mapping[str, Tensor], *, version: int) -> tuple[dict[str, Tensor], DeviceSource]:
        """Copy the weights; gives the copies and where they can be had."""
        memory, source = self._slot(version, size=layout_size(named))
        held = {}
        with torch.no_grad():
            for name, offset, size in layout(named):
                tensor = named[name].detach()
                held[name] = memory[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                held[name].copy_(tensor)
        # A reader of another process does not see this stream.
        _wait_for(torch.cuda.current_stream(self._device).record_event(), what="a copy of the weights")
        return held, source

    def _slot(self, version: int, *, size: int) -> tuple[Tensor, DeviceSource]:
        slot = self._slots.get(version % VERSIONS_KEPT)
        if slot is None or slot[0].numel() != size:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            slot = self._slots[version % VERSIONS_KEPT] = (memory, self._exported(memory))
        return slot

    def _exported(self, memory: Tensor) -> DeviceSource:
        _, handle, size, offset, counter, counter_offset, event, event_is_needed = (
            memory.untyped_storage()._share_cuda_()
        )
        return DeviceSource(
            self._host,
            identity(self._device),
            bytes(handle),
            int(size),
            int(offset),
            bytes(counter),
            int(counter_offset),
            bytes(event or b""),
            bool(event_is_needed),
        )


class MappedSlots:
    """The fetching side's: each slot is mapped once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.chip = identity(device)
        self._mapped: dict[tuple[bytes, int], Tensor] = {}

    def take(self, manifest: WeightManifest, source: DeviceSource) -> dict[str, Tensor]:
        """A verified copy of the version, in memory of this process on the same accelerator."""
        memory = self._memory(source)
        if memory.numel() < manifest.size:
            raise IntegrityError(
                f"version {manifest.version} on {source.chip}: expected {manifest.size} bytes, got {memory.numel()}"
            )
        where = f"the memory of {source.chip}"
        taken = {}
        with torch.cuda.device(self._device), torch.no_grad():
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                for piece in manifest.pieces:
                    data = memory[piece.offset : piece.offset + piece.size].clone()
                    taken[piece.name] = data.view(getattr(torch, piece.dtype)).view(piece.shape)
                found = digests_of_device([taken[piece.name] for piece in manifest.pieces])
                for piece, digest in zip(manifest.pieces, found, strict=True):
                    check_digest(manifest, piece, found=digest, source=where)
        check_whole(manifest, source=where)
        return taken

    def _memory(self, source: DeviceSource) -> Tensor:
        key = (source.handle, source.offset)
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = self._map(source)
            while len(self._mapped) >= VERSIONS_KEPT:
                self._mapped.pop(next(iter(self._mapped)))
            self._mapped[key] = mapped
        return mapped

    def _map(self, source: DeviceSource) -> Tensor:
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index or 0,
                source.handle,
                source.size,
                source.offset,
                source.counter,
                source.counter_offset,
                source.event,
                source.event_is_needed,
            )
        except RuntimeError as error:
            # Who published it is gone, and its memory with it: no reason to end, there are other sources.
            why = str(error).partition("\n")[0]
            raise RefusedError(f"the memory of {source.chip} can not be mapped: {why}") from error
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (source.size,), (1,))


def _wait_for(event: torch.cuda.Event, *, what: str) -> None:
    """Look at it now and then, as to synchronize with a device that hangs has no end."""
    pause = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if not event.query():
            pause.wait(min(_POLL_S, remaining_s))
        return event.query() or None

    wait(attempt, whom="the device", what=what, timeout_s=DEVICE_TIMEOUT_S)
