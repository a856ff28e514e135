"""The publishing side: a model worker copies a version, reports its sources, and serves fetches by stream."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from kintsugi.bulk.exports import ViewExport
from kintsugi.bulk.server import BulkServer
from kintsugi.errors import RefusedError, WorldError
from kintsugi.model.arrays import Array
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.weights import FetchWeights, Publish, WeightsFetched
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import Alert, Event
from kintsugi.types import FolderSource, Piece, SegmentSource, StreamSource, WeightManifest, WeightSource
from kintsugi.weights.manifest import describe_pieces, layout, manifest_of, tensor_bytes
from kintsugi.weights.transports.disk import remove_folders, write_folder
from kintsugi.weights.transports.shared_memory import (
    VERSIONS_KEPT,
    WeightSegments,
    WritableSegments,
    segment_name,
    unlock,
)

PIECES_COPIED = 2
"""Pieces on an accelerator that are copied to host memory while they are sent."""
WHOLE_MODEL: Mapping[str, int] = {"dp": 0, "tp": 0, "pp": 0}


@dataclass(frozen=True, slots=True)
class VersionLayout:
    """A version, or this rank's share of one, as bytes in memory."""

    manifest: WeightManifest
    """Manifest of the share."""
    pieces: Mapping[int, Piece]
    """By their index among all pieces of the version."""
    buffer: memoryview | None
    tensors: Mapping[str, Array]
    """Tensors in the accelerator's memory, if there is no buffer."""
    size: int = 0
    """Size of the whole version."""
    segment: str = ""
    """Shared memory of this host with the whole version; empty if it is elsewhere or only a share."""
    offer: BulkOffer | None = None
    """Offer of the pieces to other processes."""

    def bytes_of(self, index: int) -> memoryview:
        piece = self.pieces[index]
        if self.buffer is None:
            return tensor_bytes(self.tensors[piece.name])
        return self.buffer[piece.offset : piece.offset + piece.size]


class PublishTransport(Protocol):
    """A further transport of this process: a collective, a meta-server. It works in the background."""

    @property
    def name(self) -> str: ...

    def publish(self, version_layout: VersionLayout, order: Publish) -> Sequence[WeightSource]:
        """Start to publish this version, and return its sources."""
        ...

    def close(self) -> None: ...


class DevicePublisher(Protocol):
    """Memory of the accelerator that other processes can map (`device.DeviceSlots`)."""

    @property
    def versions_kept(self) -> int:
        """Versions that are in the memory at the same time: one or two."""
        ...

    def before_change(self, withdraw: Callable[[], object]) -> None:
        """Call a function before a version changes that `hold` did not copy."""
        ...

    def hold(
        self,
        named: Mapping[str, Array],
        *,
        version: int,
        places: Sequence[tuple[str, int, int]] | None = None,
    ) -> tuple[Mapping[str, Array], WeightSource]:
        """Copy the weights into memory that does not change until `versions_kept` versions later, unless they are in
        such memory already; return what is there and its source. Weights are read in the order of their `places`."""
        ...


class Publisher:
    """Keeps at most two versions, which all transports serve.

    Memory with readers is never written to (`shared_memory`). The node agent holds it too, so a version outlives the
    worker that published it.
    """

    def __init__(
        self,
        *,
        process: str,
        host: str,
        segments: WeightSegments | None,
        folder: Path | None = None,
        device: DevicePublisher | None = None,
        bulk: BulkServer | None = None,
        transports: Sequence[PublishTransport] = (),
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """`bulk` offers versions to other processes, for `stream`; `folder` holds versions for `disk`; `device` is used
        for `in_place`; `emit` records events."""
        self._process = process
        self._host = host
        self._segments = None if segments is None else WritableSegments(segments)
        self._folder = folder
        self._device = device
        self._bulk = bulk
        self._transports = transports
        self._emit = emit
        self._has_shared_memory = True
        """False after the last version fell back to private memory."""
        self._versions: dict[int, VersionLayout] = {}
        if device is not None:
            device.before_change(self._withdraw_held)

    def publish(
        self,
        named: Mapping[str, Array],
        order: Publish,
        *,
        mesh: Mapping[str, int] = WHOLE_MODEL,
        places: Sequence[tuple[str, int, int]] | None = None,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> tuple[WeightManifest, tuple[WeightSource, ...]]:
        """Copy the weights and describe them; the model may change as soon as this returns, or after `before_change`
        where the device's memory has them already. `places`: the layout of all weights, where these are the share of
        this rank. `shapes` are those of whole weights, of which these may be slices.

        Versions from this one on, which a rollback may have left, are withdrawn first.
        """
        version = order.version
        for old in [old for old in self._versions if self._is_over(old, version=version)]:
            self._withdraw(old)
        sources: list[WeightSource] = []
        if self._device is not None and "in_place" in order.transports:
            named, source = self._device.hold(named, version=version, places=places)
            sources.append(source)
        version_layout, is_shared = self._copy_version(
            named, order, mesh=mesh, is_held=bool(sources), places=places, shapes=shapes
        )
        self._versions[version] = version_layout
        for transport in self._transports:
            if transport.name in order.transports:
                sources += transport.publish(version_layout, order)
        if is_shared:
            sources.append(SegmentSource(self._host, self._segment(version)))
        if "disk" in order.transports:
            sources += self._store(version_layout, order)
        return version_layout.manifest, (*sources, StreamSource(self._process))

    def _is_over(self, old: int, *, version: int) -> bool:
        """Whether nothing may be read from an old version any more once this one is published."""
        kept = VERSIONS_KEPT
        if self._device is not None and self._versions[old].buffer is None:
            kept = self._device.versions_kept
        return old >= version or old <= version - kept

    def _copy_version(
        self,
        named: Mapping[str, Array],
        order: Publish,
        *,
        mesh: Mapping[str, int],
        is_held: bool,
        places: Sequence[tuple[str, int, int]] | None,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[VersionLayout, bool]:
        """Copy and digest a version; also return whether servers of this host may read it in place. Weights that the
        accelerator holds, and that no other transport needs, are only digested."""
        index, count = order.share
        if places is None:
            whole = list(layout(named))
            chosen = share_of([size for _, _, size in whole], index=index, count=count)
        else:
            whole = list(places)
            chosen = frozenset(number for number, (name, _, _) in enumerate(whole) if name in named)
        total = max(1, *(offset + size for _, offset, size in whole))
        buffer, descriptor = None, None
        if not (is_held and order.transports == ("in_place",)):
            buffer, descriptor = self._memory(order.version, size=total)
        try:
            own = {number: place for number, place in enumerate(whole) if number in chosen}
            found = describe_pieces(
                named, own.values(), mesh={**mesh, "dp": index}, into=buffer, shapes=shapes
            )
            pieces = dict(zip(own, found, strict=True))
        finally:
            if descriptor is not None:
                unlock(descriptor)
        manifest = manifest_of(pieces.values(), version=order.version, step=order.step)
        is_whole = descriptor is not None and count == 1
        version_layout = VersionLayout(
            manifest,
            pieces,
            buffer,
            tensors=named if buffer is None else {},
            size=total,
            segment=self._segment(order.version) if is_whole else "",
        )
        return self._offered(version_layout), is_whole and "shared_memory" in order.transports

    def _offered(self, version_layout: VersionLayout) -> VersionLayout:
        """Offer a version over the bulk channel; its bytes are read when they are asked for."""
        if self._bulk is None:
            return version_layout
        manifest, bytes_of = version_layout.manifest, version_layout.bytes_of
        if version_layout.buffer is None:
            bytes_of = lru_cache(maxsize=PIECES_COPIED)(bytes_of)
        sizes = {index: piece.size for index, piece in version_layout.pieces.items()}
        offer = self._bulk.offer(f"weights-{manifest.version}", ViewExport(sizes, bytes_of))
        return replace(version_layout, offer=offer)

    def _withdraw(self, version: int) -> None:
        """Forget a version; nothing is sent from its memory any more when this returns."""
        version_layout = self._versions.pop(version)
        if self._bulk is not None and version_layout.offer is not None:
            self._bulk.withdraw(version_layout.offer.export)

    def _withdraw_held(self) -> None:
        """Forget the versions that are only in the accelerator's memory: it changes."""
        for version in [old for old, each in self._versions.items() if each.buffer is None]:
            self._withdraw(version)

    def answer(self, request: FetchWeights) -> WeightsFetched:
        """Reply to a fetch by stream with the offer of the version."""
        version_layout = self._versions.get(request.version)
        if version_layout is None:
            raise RefusedError(
                f"{self._process} has no weights of version {request.version}, only {sorted(self._versions)}"
            )
        return WeightsFetched(request.version, version_layout.offer)

    def close(self) -> None:
        """Withdraw everything."""
        for version in tuple(self._versions):
            self._withdraw(version)
        for transport in self._transports:
            transport.close()
        if self._segments is not None:
            for slot in range(VERSIONS_KEPT):
                self._segments.remove(self._segment(slot))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _store(self, version_layout: VersionLayout, order: Publish) -> Sequence[WeightSource]:
        if self._folder is None or version_layout.buffer is None or order.share != (0, 1):
            return ()
        folder = self._folder / f"version-{order.version}"
        write_folder(version_layout.manifest, version_layout.buffer, folder)
        remove_folders(self._folder, but=[f"version-{kept}" for kept in self._versions])
        return (FolderSource(str(folder)),)

    def _memory(self, version: int, *, size: int) -> tuple[memoryview, int | None]:
        """Shared memory of the host's agent and its descriptor. When the agent is gone or has no memory left: private
        memory of this process, which servers fetch by stream only."""
        if self._segments is not None:
            try:
                shared = self._segments.begin(self._segment(version), size=size)
            except WorldError as error:
                self._report_fallback(version, size=size, error=error)
            else:
                self._has_shared_memory = True
                return shared
        return memoryview(mmap.mmap(-1, size)), None

    def _report_fallback(self, version: int, *, size: int, error: WorldError) -> None:
        """Count every version in private memory; alert when the first of several in a row falls back."""
        COUNTERS.add("weights_in_private_memory")
        if self._has_shared_memory:
            self._emit(
                Alert(
                    f"version {version} is published from private memory, by stream only: {error}",
                    {"version": version, "bytes": size},
                )
            )
        self._has_shared_memory = False

    def _segment(self, version: int) -> str:
        return segment_name(self._process, version)


def share_of(sizes: Sequence[int], *, index: int, count: int) -> frozenset[int]:
    """Indices of the pieces of one of `count` shares of about equal size.

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
