"""The fetching side: a generation server gets a published version by the fastest way that both sides share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kintsugi.errors import IntegrityError, RefusedError, WorldError
from kintsugi.messages import FetchWeights, WeightsFetched
from kintsugi.transport import Reply
from kintsugi.types import FolderSource, SegmentSource, StreamSource, WeightManifest, WeightSource
from kintsugi.weights.folder import read_folder
from kintsugi.weights.manifest import tensor_views, verify
from kintsugi.weights.publish import Segments

if TYPE_CHECKING:
    from torch import Tensor

FetchStream = Callable[[str, FetchWeights], Reply]
"""Sends the request to a process and waits, with a deadline, for its reply."""

STREAM_BYTES = 64 << 20
"""Asked for at once, so that a lost reply costs little and both sides hold little beside the weights."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that was verified, in memory that nobody else writes to."""

    manifest: WeightManifest
    buffer: memoryview
    source: WeightSource
    failures: tuple[WorldError, ...] = ()
    """What went wrong with the sources that were tried before; for the log."""

    def tensors(self) -> dict[str, Tensor]:
        """Name → view into the buffer."""
        return tensor_views(self.manifest, self.buffer)


def fetch(
    manifest: WeightManifest,
    sources: Sequence[WeightSource],
    *,
    host: str,
    segments: Segments | None,
    fetch_stream: FetchStream,
) -> Fetched:
    """Get and verify a version: from shared memory of this host if there is any, else by stream or from a folder.

    When a source fails, the next is tried. When all have failed, the first failure is raised, the others as notes.
    """
    local = [source for source in sources if isinstance(source, SegmentSource) and source.host == host]
    others = [source for source in sources if not isinstance(source, SegmentSource)]
    candidates: list[WeightSource] = [*(local if segments is not None else ()), *others]
    failures: list[WorldError] = []
    for source in candidates:
        try:
            if isinstance(source, SegmentSource):
                assert segments is not None
                buffer = _map_segment(source, segments=segments)
            elif isinstance(source, FolderSource):
                buffer = read_folder(manifest, Path(source.path))
            else:
                buffer = _stream(manifest, source, fetch_stream=fetch_stream)
            verify(manifest, buffer, source=describe(source))
        except WorldError as error:
            failures.append(error)
        else:
            return Fetched(manifest, buffer, source, tuple(failures))
    if not failures:
        named = ", ".join(describe(source) for source in sources) or "none"
        raise RefusedError(
            f"no source of version {manifest.version} can be reached from {host}; there are: {named}"
        )
    first, *later = failures
    for other in later:
        first.add_note(f"then: {other}")
    raise first


def describe(source: WeightSource) -> str:
    """For people: `describe(StreamSource("model-0")) == "stream of model-0"`."""
    if isinstance(source, SegmentSource):
        return f"segment {source.name} on {source.host}"
    if isinstance(source, FolderSource):
        return f"folder {source.path}"
    return f"stream of {source.process}"


def _map_segment(source: SegmentSource, *, segments: Segments) -> memoryview:
    """Map it privately: the pages are shared until somebody writes, and nobody else sees what we write."""
    descriptor = segments.open(source.name)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE))
    finally:
        os.close(descriptor)


def _stream(manifest: WeightManifest, source: StreamSource, *, fetch_stream: FetchStream) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, max(1, manifest.size)))
    for indices in _requests(manifest):
        reply = fetch_stream(source.process, FetchWeights(manifest.version, indices))
        got = reply.expect(WeightsFetched)
        if got.version != manifest.version:
            raise RefusedError(f"{describe(source)}: expected version {manifest.version}, got {got.version}")
        stream = b"".join(reply.blobs)
        expected = sum(manifest.pieces[index].size for index in indices)
        if len(stream) != expected:
            names = ", ".join(manifest.pieces[index].name for index in indices)
            raise IntegrityError(
                f"{describe(source)}: expected {expected} bytes of {names}, got {len(stream)}"
            )
        start = 0
        for index in indices:
            piece = manifest.pieces[index]
            buffer[piece.offset : piece.offset + piece.size] = stream[start : start + piece.size]
            start += piece.size
    return buffer


def _requests(manifest: WeightManifest) -> Iterator[tuple[int, ...]]:
    """Consecutive pieces of about `STREAM_BYTES` together; never none, which would mean all."""
    indices: list[int] = []
    size = 0
    for index, piece in enumerate(manifest.pieces):
        if indices and size + piece.size > STREAM_BYTES:
            yield tuple(indices)
            indices, size = [], 0
        indices.append(index)
        size += piece.size
    if indices:
        yield tuple(indices)
