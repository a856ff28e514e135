"""Weights in an accelerator's memory: digested there, held for other processes on the same accelerator, and read from
there.

Versions are held in memory that is allocated once and never freed, because the publisher does not know when the last
reader in another process is done: the two latest ones, or the latest alone where the next one is published only after
every server has it, as in a synchronous run. There the weights with which a rank computes can be the published version
themselves (`SharedWeights`): they do not change from one update to the next. A reader verifies a version where it is
held and copies it straight into place, so it needs no memory of its own. Since the publisher does not wait for readers,
its memory carries a number that changes before a version is overwritten: a reader that finds another number after its
copy has copied parts of two versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kintsugi.errors import IntegrityError, Overwritten, RefusedError
from kintsugi.model.device import identity
from kintsugi.model.torch_internals import SharedGpuMemory, copy_all, map_gpu_memory, share_gpu_memory
from kintsugi.runtime.digests import PieceDigest
from kintsugi.types import DeviceSource, WeightManifest
from kintsugi.weights.device_digests import piece_digests, to_host, wait_for
from kintsugi.weights.manifest import ALIGNMENT, aligned, check_digest, check_whole, copied_together, layout
from kintsugi.weights.transports.shared_memory import VERSIONS_KEPT

PINNED_BYTES = 16 << 20
"""Bytes that are copied to the host together to be digested."""
NUM_PINNED = 4
"""Number of copies in flight while one is digested: most tensors are small, and waiting for each would take longer than
copying it."""
_BEING_WRITTEN = 0
"""Number of memory while a version is copied into it, or computed in it."""


def copies_digested(tensors: Sequence[Tensor], into: Sequence[memoryview]) -> list[str]:
    """Copy tensors of a device to host memory; return the digests of the copies."""
    digests = [PieceDigest() for _ in tensors]
    for index, offset, data in _brought_to_host(tensors):
        target = np.frombuffer(into[index][offset : offset + data.nbytes], np.uint8)
        target[...] = data
        digests[index].update(target.data)
    return [digest.hexdigest() for digest in digests]


def _brought_to_host(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Index of the tensor, offset in it, and the bytes there, valid until the next iteration."""
    pinned = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_PINNED)]
    on_their_way: deque[tuple[int, int, Tensor, torch.cuda.Event]] = deque()
    slots = cycle(pinned)

    def arrived() -> tuple[int, int, npt.NDArray[np.uint8]]:
        index, offset, part, event = on_their_way.popleft()
        wait_for(event, what="weights on their way to the host")
        return index, offset, part.numpy()

    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        stream = torch.cuda.current_stream(flat.device)
        for offset in range(0, flat.numel(), PINNED_BYTES):
            if len(on_their_way) == NUM_PINNED:
                yield arrived()
            part = flat[offset : offset + PINNED_BYTES]
            target = next(slots)[: part.numel()]
            target.copy_(part, non_blocking=True)
            on_their_way.append((index, offset, target, stream.record_event()))
    while on_their_way:
        yield arrived()


class SharedWeights:
    """Weights with which a rank computes, in memory that servers on its accelerator read as the published version.

    Before they change, the number of the memory says so, and until they are published again: as the next version, or
    as the same one after a rollback. No number is used twice, so a reader never takes weights that have changed and
    changed back for those that it began to copy.
    """

    def __init__(self, size: int, *, device: torch.device) -> None:
        """`size`: bytes of the weights."""
        self._device, self._size = device, size
        self._memory = torch.empty(aligned(size) + ALIGNMENT, dtype=torch.uint8, device=device)
        self._exported: SharedGpuMemory | None = None
        self._number, self._is_changing = _BEING_WRITTEN, True
        self._withdraw: Callable[[], object] = lambda: None
        _number_of(self._memory).fill_(_BEING_WRITTEN)

    def flat(self, dtype: torch.dtype) -> Tensor:
        """The memory of the weights, as one flat tensor."""
        return self._memory[: self._size].view(dtype)

    def before_change(self, withdraw: Callable[[], object]) -> None:
        """Call a function before weights that are published change: nothing may be sent from them any more then."""
        self._withdraw = withdraw

    def begin_change(self) -> None:
        """The weights change from now on; until they are published again no reader accepts them."""
        if self._is_changing:
            return
        with torch.no_grad():  # Before the change, because it is enqueued on the same stream.
            _number_of(self._memory).fill_(_BEING_WRITTEN)
        self._is_changing = True
        self._withdraw()

    def publish(self, named: Mapping[str, Tensor], *, version: int, host: str) -> DeviceSource | None:
        """Let readers accept the weights as they are; return their source, or None if these tensors are others."""
        offsets = self._offsets(named)
        if offsets is None:
            return None
        if self._is_changing:
            self._number += 1
            number = _number_of(self._memory)
            with torch.no_grad():
                number.fill_(self._number)
            # Readers in other processes are not ordered after this stream.
            to_host([number], what=f"weights that become version {version}")
            self._is_changing = False
        if self._exported is None:
            self._exported = share_gpu_memory(self._memory)
        source = DeviceSource(host, identity(self._device), *self._exported)
        return msgspec.structs.replace(source, number=self._number, offsets=offsets)

    def _offsets(self, named: Mapping[str, Tensor]) -> tuple[int, ...] | None:
        """Where the tensors begin in this memory, in the order of a manifest; None unless all of them are in it."""
        first = self._memory.data_ptr()
        tensors = [named[name] for name, _, _ in layout(named)]
        offsets = tuple(tensor.data_ptr() - first if tensor.numel() else 0 for tensor in tensors)
        is_within = all(
            tensor.device == self._memory.device
            and tensor.is_contiguous()
            and 0 <= offset <= self._size - tensor.nbytes
            for offset, tensor in zip(offsets, tensors, strict=True)
        )
        return offsets if is_within else None


class DeviceSlots:
    """The publisher's memory: each version takes the place of the last but one, or of the last one."""

    def __init__(
        self,
        device: torch.device,
        *,
        host: str,
        versions_kept: int = VERSIONS_KEPT,
        shared: SharedWeights | None = None,
    ) -> None:
        """`shared`: weights that are not copied while they are where the rank computes with them."""
        assert shared is None or versions_kept == 1, "weights that a rank computes with are one version"
        self._device = device
        self.versions_kept = versions_kept
        self._host = host
        self._shared = shared
        self._slots: dict[int, tuple[Tensor, DeviceSource]] = {}
        self._number = _BEING_WRITTEN

    def before_change(self, withdraw: Callable[[], object]) -> None:
        """Call a function before a version that was not copied changes."""
        if self._shared is not None:
            self._shared.before_change(withdraw)

    def hold(
        self,
        named: Mapping[str, Tensor],
        *,
        version: int,
        places: Sequence[tuple[str, int, int]] | None = None,
    ) -> tuple[Mapping[str, Tensor], DeviceSource]:
        """Copy the weights, unless they are shared; return the copies and their source. Where two versions are kept,
        one that is published again does not overwrite itself, because it may be read meanwhile. Weights whose `places`
        are given are read in that order, some at a time: reading them may take memory."""
        if self._shared is not None:
            found = self._shared.publish(named, version=version, host=self._host)
            if found is not None:
                return named, found
        self._number += 1
        own = [place for place in places or layout(named) if place[0] in named]
        end = max((offset + size for _, offset, size in own), default=0)
        memory, source = self._slot(self._number, size=aligned(end) + ALIGNMENT)
        held: dict[str, Tensor] = {}
        with torch.no_grad():
            number = _number_of(memory)
            number.fill_(_BEING_WRITTEN)
            for together in copied_together(own):
                tensors = [named[name].detach() for name, _, _ in together]
                copies = [
                    memory[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                    for (_, offset, size), tensor in zip(together, tensors, strict=True)
                ]
                copy_all(copies, tensors)
                held |= {name: copy for (name, _, _), copy in zip(together, copies, strict=True)}
            number.fill_(self._number)
        # Readers in other processes are not ordered after this stream.
        to_host([number], what=f"a copy of version {version}")
        return held, msgspec.structs.replace(source, number=self._number)

    def _slot(self, number: int, *, size: int) -> tuple[Tensor, DeviceSource]:
        slot = self._slots.get(number % self.versions_kept)
        if slot is None or slot[0].numel() != size:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            slot = self._slots[number % self.versions_kept] = (memory, self._exported(memory))
        return slot

    def _exported(self, memory: Tensor) -> DeviceSource:
        return DeviceSource(self._host, identity(self._device), *share_gpu_memory(memory))


def _checked_offsets(
    manifest: WeightManifest, source: DeviceSource, *, memory: Tensor, where: str
) -> tuple[int, ...]:
    """Where the pieces begin in the memory; IntegrityError unless all of them fit into it."""
    pieces, offsets = manifest.pieces, source.offsets
    if offsets and len(offsets) != len(pieces):
        raise IntegrityError(
            f"version {manifest.version} in {where}: expected offsets of {len(pieces)} pieces, got {len(offsets)}"
        )
    offsets = offsets or tuple(piece.offset for piece in pieces)
    ends = (offset + piece.size for piece, offset in zip(pieces, offsets, strict=True))
    size = max(ends, default=0) if source.offsets else manifest.size
    if memory.numel() < size + ALIGNMENT:
        raise IntegrityError(
            f"version {manifest.version} in {where}: expected {size} bytes, got {memory.numel() - ALIGNMENT}"
        )
    return offsets


def _number_of(memory: Tensor) -> Tensor:
    return memory[-ALIGNMENT:].view(torch.int64)[:1]


class MappedSlots:
    """The fetching side: each slot is mapped once, and everything runs on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.chip = identity(device)
        self._mapped: dict[tuple[bytes, int], Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(
        self, manifest: WeightManifest, source: DeviceSource
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Verify a version where it is held. Return its tensors, which are not copied, and a function that raises
        IntegrityError if they have been overwritten since; it is to be called after they have been copied."""
        memory = self._memory(source)
        where = f"the memory of {source.chip}"
        offsets = _checked_offsets(manifest, source, memory=memory, where=where)
        with self._on_stream(), torch.no_grad():
            number = self._number(memory)
            if source.number not in (0, number):
                raise IntegrityError(
                    f"version {manifest.version} from {where} was overwritten before it was read: expected number "
                    f"{source.number}, got {number}",
                    detail=Overwritten(manifest.version),
                )
            found = {
                piece.name: memory[offset : offset + piece.size]
                .view(getattr(torch, piece.dtype))
                .view(piece.shape)
                for piece, offset in zip(manifest.pieces, offsets, strict=True)
            }
            digests = piece_digests(list(found.values()))

        def check() -> None:
            with self._on_stream():
                now = self._number(memory)
            if now != number or number == _BEING_WRITTEN:
                raise IntegrityError(
                    f"version {manifest.version} from {where} was overwritten while it was copied: expected "
                    f"number {number}, got {now}",
                    detail=Overwritten(manifest.version),
                )

        for piece, digest in zip(manifest.pieces, digests, strict=True):
            if digest != piece.digest:
                check()  # Bytes that have changed since are not damaged.
            check_digest(manifest, piece, found=digest, source=where)
        check_whole(manifest, source=where)
        return found, check

    def _number(self, memory: Tensor) -> int:
        (number,) = to_host([_number_of(memory)], what="the number of a version")
        return int(number[0])

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

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
        shared = SharedGpuMemory(
            source.handle,
            source.size,
            source.offset,
            source.counter,
            source.counter_offset,
            source.event,
            source.event_is_needed,
        )
        try:
            return map_gpu_memory(shared, device=self._device)
        except RuntimeError as error:
            # The publisher is gone, and its memory with it: not fatal, there are other sources.
            reason = str(error).partition("\n")[0]
            raise RefusedError(f"the memory of {source.chip} can not be mapped: {reason}") from error
