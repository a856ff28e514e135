"""The publishing side: a model worker lays a version out, says where it can be had, and answers who asks for it."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kintsugi.errors import RefusedError, WorldError
from kintsugi.messages import FetchWeights, Publish, WeightsFetched
from kintsugi.transport import chunks
from kintsugi.types import FolderSource, Piece, SegmentSource, StreamSource, WeightManifest, WeightSource
from kintsugi.weights.folder import remove_folders, write_folder
from kintsugi.weights.manifest import describe_pieces, layout, layout_size, manifest_of, tensor_bytes
from kintsugi.weights.memory import VERSIONS_KEPT, Segments, WritableSegments, unlock

if TYPE_CHECKING:
    from torch import Tensor

WHOLE_MODEL: Mapping[str, int] = {"dp": 0, "tp": 0, "pp": 0}


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A version, or this rank's share of one, as bytes in memory."""

    manifest: WeightManifest
    """Of the share."""
    pieces: Mapping[int, Piece]
    """By their index among all pieces of the version."""
    buffer: memoryview | None
    tensors: Mapping[str, Tensor]
    """What the accelerator's memory keeps, where there is no buffer."""

    def bytes_of(self, index: int) -> memoryview:
        piece = self.pieces[index]
        if self.buffer is None:
            return tensor_bytes(self.tensors[piece.name])
        return self.buffer[piece.offset : piece.offset + piece.size]


class Outlet(Protocol):
    """A further way out of this process: a collective, a meta-server. Carried out beside what the process does."""

    @property
    def transport(self) -> str: ...

    def offer(self, laid_out: LaidOut, order: Publish) -> Sequence[WeightSource]:
        """Where this version can be had from now on."""
        ...

    def close(self) -> None: ...


class Card(Protocol):
    """Memory of the accelerator that other processes can map (`device.DeviceSlots`)."""

    def hold(self, named: Mapping[str, Tensor], *, version: int) -> tuple[Mapping[str, Tensor], WeightSource]:
        """A copy that stays as it is until two versions later, and where it can be had."""
        ...


class Publisher:
    """Keeps at most two versions, from which all ways of fetching are served.

    Memory that somebody still reads is never written to (`memory`). The node agent holds it too, so a version outlives
    the worker that published it.
    """

    def __init__(
        self,
        *,
        process: str,
        host: str,
        segments: Segments | None,
        folder: Path | None = None,
        card: Card | None = None,
        outlets: Sequence[Outlet] = (),
    ) -> None:
        """`folder` is where versions for the transport `disk` go; `card` is for `in_place`."""
        self._process = process
        self._host = host
        self._segments = None if segments is None else WritableSegments(segments)
        self._folder = folder
        self._card = card
        self._outlets = outlets
        self._versions: dict[int, LaidOut] = {}

    def publish(
        self,
        named: Mapping[str, Tensor],
        order: Publish,
        *,
        mesh: Mapping[str, int] = WHOLE_MODEL,
    ) -> tuple[WeightManifest, tuple[WeightSource, ...]]:
        """Copy the weights out and describe them; the model may change as soon as this returns.

        Versions from this one on, which a rollback may have left, are withdrawn first.
        """
        version = order.version
        for old in [old for old in self._versions if old >= version or old <= version - VERSIONS_KEPT]:
            del self._versions[old]
        sources: list[WeightSource] = []
        if self._card is not None and "in_place" in order.transports:
            named, source = self._card.hold(named, version=version)
            sources.append(source)
        laid_out, is_shared = self._lay_out(named, order, mesh=mesh, is_held=bool(sources))
        self._versions[version] = laid_out
        for outlet in self._outlets:
            if outlet.transport in order.transports:
                sources += outlet.offer(laid_out, order)
        if is_shared:
            sources.append(SegmentSource(self._host, self._segment(version)))
        if "disk" in order.transports:
            sources += self._store(laid_out, order)
        return laid_out.manifest, (*sources, StreamSource(self._process))

    def _lay_out(
        self, named: Mapping[str, Tensor], order: Publish, *, mesh: Mapping[str, int], is_held: bool
    ) -> tuple[LaidOut, bool]:
        """Copy and digest, and whether servers of this host may read it where it lies. What the accelerator holds, and
        nobody needs elsewhere, is only digested."""
        index, count = order.share
        chosen = share_of([size for _, _, size in layout(named)], index=index, count=count)
        buffer, descriptor = None, None
        if not (is_held and order.transports == ("in_place",)):
            buffer, descriptor = self._memory(order.version, size=max(1, layout_size(named)))
        try:
            places = {number: place for number, place in enumerate(layout(named)) if number in chosen}
            found = describe_pieces(named, places.values(), mesh={**mesh, "dp": index}, into=buffer)
            pieces = dict(zip(places, found, strict=True))
        finally:
            if descriptor is not None:
                unlock(descriptor)
        manifest = manifest_of(pieces.values(), version=order.version, step=order.step)
        tensors = named if buffer is None else {}
        is_shared = descriptor is not None and count == 1 and "shared_memory" in order.transports
        return LaidOut(manifest, pieces, buffer, tensors), is_shared

    def answer(self, request: FetchWeights) -> tuple[WeightsFetched, list[memoryview]]:
        """The reply to a fetch by stream: the bytes of the pieces asked for, in order, without gaps."""
        laid_out = self._versions.get(request.version)
        if laid_out is None:
            raise RefusedError(
                f"{self._process} has no weights of version {request.version}, only {sorted(self._versions)}"
            )
        frames: list[memoryview] = []
        for index in request.pieces or laid_out.pieces:
            if index not in laid_out.pieces:
                raise RefusedError(
                    f"version {request.version} has {len(laid_out.pieces)} pieces here, not one {index}"
                )
            frames += chunks(laid_out.bytes_of(index))
        return WeightsFetched(request.version), frames

    def close(self) -> None:
        """Withdraw everything."""
        self._versions.clear()
        for outlet in self._outlets:
            outlet.close()
        if self._segments is not None:
            for slot in range(VERSIONS_KEPT):
                self._segments.remove(self._segment(slot))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _store(self, laid_out: LaidOut, order: Publish) -> Sequence[WeightSource]:
        if self._folder is None or laid_out.buffer is None or order.share != (0, 1):
            return ()
        folder = self._folder / f"version-{order.version}"
        write_folder(laid_out.manifest, laid_out.buffer, folder)
        remove_folders(self._folder, but=[f"version-{kept}" for kept in self._versions])
        return (FolderSource(str(folder)),)

    def _memory(self, version: int, *, size: int) -> tuple[memoryview, int | None]:
        """Of the agent; while it is gone or has none left, our own, from which the weights go out by stream."""
        if self._segments is not None:
            with suppress(WorldError):
                return self._segments.begin(self._segment(version), size=size)
        return memoryview(mmap.mmap(-1, size)), None

    def _segment(self, version: int) -> str:
        return f"weights/{self._process}/{version % VERSIONS_KEPT}"


def share_of(sizes: Sequence[int], *, index: int, count: int) -> frozenset[int]:
    """The pieces of one of `count` parts that are about equally large.

    >>> [sorted(share_of([4, 4, 4, 4], index=index, count=2)) for index in range(2)]
    [[0, 1], [2, 3]]
    """
    total, start, chosen = sum(sizes), 0, set()
    for number, size in enumerate(sizes):
        middle = start + size / 2
        if min(count - 1, int(middle * count / max(1, total))) == index:
            chosen.add(number)
        start += size
    return frozenset(chosen)
