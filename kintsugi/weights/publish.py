"""The publishing side: a model worker lays a version out, says where it can be had, and answers who asks for it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from kintsugi.errors import RefusedError, WorldError
from kintsugi.messages import FetchWeights, WeightsFetched
from kintsugi.transport import chunks
from kintsugi.types import SegmentSource, StreamSource, WeightManifest, WeightSource
from kintsugi.weights.manifest import build_manifest, layout_size

if TYPE_CHECKING:
    from torch import Tensor

VERSIONS_KEPT = 2
"""The current one, and the one before it for whoever is still loading that."""

WHOLE_MODEL: Mapping[str, int] = {"dp": 0, "tp": 0, "pp": 0}


class Segments(Protocol):
    """Shared memory of this host (`cluster.segments.SegmentClient`)."""

    def create(self, name: str, size: int) -> int: ...

    def open(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...


class Publisher:
    """Keeps at most two versions, each in memory of its own, from which both ways of fetching are served.

    Memory is never reused for another version: a server that is still reading an old one keeps that memory alive and
    can not see it change. The node agent holds it too, so a version outlives the worker that published it.
    """

    def __init__(self, *, process: str, host: str, segments: Segments | None) -> None:
        self._process = process
        self._host = host
        self._segments = segments
        self._versions: dict[int, tuple[WeightManifest, memoryview]] = {}
        self._shared: set[int] = set()
        """Versions that lie in memory of the agent."""

    def publish(
        self, named: Mapping[str, Tensor], *, version: int, step: int, mesh: Mapping[str, int] = WHOLE_MODEL
    ) -> tuple[WeightManifest, tuple[WeightSource, ...]]:
        """Copy the weights out and describe them; the model may change as soon as this returns.

        Versions from this one on, which a rollback may have left, are withdrawn first.
        """
        withdrawn = [old for old in self._versions if old >= version or old <= version - VERSIONS_KEPT]
        for old in {*withdrawn, version, version - VERSIONS_KEPT}:
            self._withdraw(old)
        buffer = self._memory(version, size=max(1, layout_size(named)))
        manifest = build_manifest(named, version=version, step=step, mesh=mesh, into=buffer)
        self._versions[version] = (manifest, buffer)
        return manifest, self._sources(version)

    def answer(self, request: FetchWeights) -> tuple[WeightsFetched, list[memoryview]]:
        """The reply to a fetch by stream: the bytes of the pieces asked for, in order, without gaps."""
        if request.version not in self._versions:
            raise RefusedError(
                f"{self._process} has no weights of version {request.version}, only {sorted(self._versions)}"
            )
        manifest, buffer = self._versions[request.version]
        frames: list[memoryview] = []
        for index in request.pieces or range(len(manifest.pieces)):
            if not 0 <= index < len(manifest.pieces):
                raise RefusedError(
                    f"version {request.version} has {len(manifest.pieces)} pieces, not one {index}"
                )
            piece = manifest.pieces[index]
            frames += chunks(buffer[piece.offset : piece.offset + piece.size])
        return WeightsFetched(request.version), frames

    def close(self) -> None:
        """Withdraw everything."""
        for version in tuple(self._versions):
            self._withdraw(version)

    def _sources(self, version: int) -> tuple[WeightSource, ...]:
        stream = StreamSource(self._process)
        if version not in self._shared:
            return (stream,)
        return SegmentSource(self._host, self._segment(version)), stream

    def _memory(self, version: int, *, size: int) -> memoryview:
        """Of the agent; while it is gone or has none left, our own, from which the weights go out by stream."""
        if self._segments is not None:
            with suppress(WorldError):
                descriptor = self._segments.create(self._segment(version), size)
                try:
                    buffer = memoryview(mmap.mmap(descriptor, size))
                finally:
                    os.close(descriptor)
                self._shared.add(version)
                return buffer
        return memoryview(mmap.mmap(-1, size))

    def _withdraw(self, version: int) -> None:
        """Forget a version, also one that a previous incarnation of this process left with the agent."""
        self._versions.pop(version, None)
        self._shared.discard(version)
        if self._segments is not None and version >= 0:
            self._segments.remove(self._segment(version))

    def _segment(self, version: int) -> str:
        return f"weights/{self._process}/{version}"
