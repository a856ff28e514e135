"""The fetching side: a generation server gets a published version by the fastest transport that both sides support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kintsugi.errors import RefusedError, WorldError
from kintsugi.types import (
    CollectiveSource,
    DeviceSource,
    FolderSource,
    SegmentSource,
    StreamSource,
    WeightManifest,
    WeightSource,
)
from kintsugi.weights.manifest import tensor_views, verify
from kintsugi.weights.transports.disk import read_folder
from kintsugi.weights.transports.shared_memory import (
    ReadableSegments,
    SpareMemory,
    WeightSegments,
    segment_owner,
    unlock,
)
from kintsugi.weights.transports.stream import StreamFetch

if TYPE_CHECKING:
    from torch import Tensor


class DeviceFetch(Protocol):
    """Access of this process to weights that other processes hold on its accelerator (`device.MappedSlots`)."""

    @property
    def chip(self) -> str: ...

    def take(
        self, manifest: WeightManifest, source: DeviceSource
    ) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
        """Verified tensors, and a function that raises if they were overwritten since."""
        ...


Join = Callable[[WeightManifest, CollectiveSource, memoryview], None]
"""Joins a collective and leaves the broadcast bytes, unverified, in the memory (`collective.receive`)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified version, in memory that does not change until `release`. Only memory that another process holds on a
    device can change: there `check` shows that it has not so far."""

    manifest: WeightManifest
    source: WeightSource
    buffer: memoryview | None = None
    on_device: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors on the device, if there is no buffer."""
    failures: tuple[WorldError, ...] = ()
    """Failures of the sources that were tried before, for the log."""
    on_release: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    """Raises IntegrityError if the memory has changed since it was verified; to be called after the tensors have been
    copied."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Name → tensor; views into the buffer if there is one."""
        return self.on_device if self.buffer is None else tensor_views(self.manifest, self.buffer)

    def release(self) -> None:
        """Free the memory; call once."""
        self.on_release()


class Fetcher:
    """Fetches versions, and keeps mappings and memory from one version to the next, because creating them costs more
    than copying."""

    def __init__(
        self,
        *,
        process: str,
        host: str,
        stream: StreamFetch | None = None,
        device: DeviceFetch | None = None,
        join: Join | None = None,
    ) -> None:
        self._process = process
        self._host = host
        self._stream = stream
        self._device = device
        self._join = join
        self._readable = ReadableSegments()
        self._spare = SpareMemory()

    def fetch(
        self,
        manifest: WeightManifest,
        sources: Sequence[WeightSource],
        *,
        segments: WeightSegments | None = None,
    ) -> Fetched:
        """Fetch and verify a version from the first source that is reachable and has it.

        When a source fails, the next is tried. When all have failed, the first failure is raised, with the others as
        notes.
        """
        failures: list[WorldError] = []
        reachable = [source for source in sources if self._reaches(source, segments=segments)]
        for source in sorted(reachable, key=_distance):
            try:
                return self._fetch(manifest, source, segments=segments, failures=tuple(failures))
            except WorldError as error:
                failures.append(error)
        if not failures:
            named = ", ".join(describe(source) for source in sources) or "none"
            raise RefusedError(
                f"no source of version {manifest.version} can be reached from {self._host}; there are: {named}"
            )
        first, *later = failures
        for other in later:
            first.add_note(f"then: {other}")
        raise first

    @property
    def _has_agent(self) -> bool:
        return self._stream is not None and bool(self._stream.agent)

    def _reaches(self, source: WeightSource, *, segments: WeightSegments | None) -> bool:
        match source:
            case DeviceSource():
                return self._device is not None and (source.host, source.chip) == (
                    self._host,
                    self._device.chip,
                )
            case SegmentSource():
                return segments is not None and source.host == self._host
            case CollectiveSource():
                return self._join is not None and self._process in source.servers
            case StreamSource():
                return self._stream is not None
            case _:
                return True

    def _fetch(
        self,
        manifest: WeightManifest,
        source: WeightSource,
        *,
        segments: WeightSegments | None,
        failures: tuple[WorldError, ...],
    ) -> Fetched:
        if isinstance(source, DeviceSource):
            assert self._device is not None
            tensors, check = self._device.take(manifest, source)
            return Fetched(manifest, source, on_device=tensors, failures=failures, check=check)
        if isinstance(source, SegmentSource):
            assert segments is not None
            return self._read(manifest, source, segments=segments, failures=failures)
        if isinstance(source, StreamSource) and source.owners and self._has_agent and segments is not None:
            try:
                return self._read_held(manifest, source, segments=segments, failures=failures)
            except WorldError as error:
                failures = (*failures, error)  # This process can fetch for itself.
        # Memory of a failed fetch is not reused: an abandoned broadcast may still write to it.
        buffer = self._spare.take(manifest.size)
        self._fill(manifest, source, into=buffer)
        return Fetched(
            manifest,
            source,
            buffer,
            failures=failures,
            on_release=lambda: self._spare.give_back(buffer),
        )

    def _read(
        self,
        manifest: WeightManifest,
        source: SegmentSource,
        *,
        segments: WeightSegments,
        failures: tuple[WorldError, ...],
    ) -> Fetched:
        """Read the version in shared memory without a copy: it can not change while it is locked, so the verified bytes
        are those that will be loaded."""
        buffer, release = self._verified(manifest, source.name, source=source, segments=segments)
        return Fetched(manifest, source, buffer, failures=failures, on_release=release)

    def _read_held(
        self,
        manifest: WeightManifest,
        source: StreamSource,
        *,
        segments: WeightSegments,
        failures: tuple[WorldError, ...],
    ) -> Fetched:
        """Let the agent of this host fetch the version, once for all servers, and read it in the host's memory."""
        assert self._stream is not None
        name = self._stream.hold(manifest, source)
        buffer, release = self._verified(manifest, name, source=source, segments=segments)
        return Fetched(manifest, source, buffer, failures=failures, on_release=release)

    def _verified(
        self, manifest: WeightManifest, name: str, *, source: WeightSource, segments: WeightSegments
    ) -> tuple[memoryview, Callable[[], None]]:
        buffer, descriptor = self._readable.read(name, segments=segments)
        try:
            verify(manifest, buffer, source=describe(source), origin=origin_of(source))
        except WorldError:
            unlock(descriptor)
            raise
        return buffer, lambda: unlock(descriptor)

    def _fill(self, manifest: WeightManifest, source: WeightSource, *, into: memoryview) -> None:
        match source:
            case FolderSource(path=path):
                read_folder(manifest, Path(path), into=into)
            case CollectiveSource():
                assert self._join is not None
                self._join(manifest, source, into)
                verify(manifest, into, source=describe(source), origin=source.process)
            case StreamSource():
                assert self._stream is not None
                self._stream.fill(manifest, source, into)
            case _:
                raise AssertionError(f"{source} is not brought into memory of ours")


def _distance(source: WeightSource) -> int:
    """Near sources are tried first, the others in the given order."""
    return 0 if isinstance(source, DeviceSource) else 1 if isinstance(source, SegmentSource) else 2


def origin_of(source: WeightSource) -> str:
    """Return the process that a source is of; empty where the source does not name it."""
    match source:
        case SegmentSource():
            return segment_owner(source.name)
        case CollectiveSource() | StreamSource():
            return source.process
        case FolderSource() | DeviceSource():
            return ""


def describe(source: WeightSource) -> str:
    """Text for the log: `describe(StreamSource("model-0")) == "stream of model-0"`."""
    match source:
        case SegmentSource():
            return f"segment {source.name} on {source.host}"
        case FolderSource():
            return f"folder {source.path}"
        case DeviceSource():
            return f"the memory of {source.chip} on {source.host}"
        case CollectiveSource():
            return f"broadcast of {source.process}"
        case StreamSource():
            return f"stream of {source.process}"
