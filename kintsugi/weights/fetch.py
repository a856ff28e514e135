"""The fetching side: a generation server gets a published version by the fastest way that both sides share."""

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
from kintsugi.weights.folder import read_folder
from kintsugi.weights.manifest import tensor_views, verify
from kintsugi.weights.memory import ReadableSegments, Segments, SpareMemory, unlock
from kintsugi.weights.stream import Ask, Pull, Say

if TYPE_CHECKING:
    from torch import Tensor


class Card(Protocol):
    """This process's way to what others hold on its accelerator (`device.MappedSlots`)."""

    @property
    def chip(self) -> str: ...

    def take(self, manifest: WeightManifest, source: DeviceSource) -> Mapping[str, Tensor]: ...


Join = Callable[[WeightManifest, CollectiveSource, memoryview], None]
"""Takes part in a collective and leaves what was broadcast in the memory, not verified yet (`collective.receive`)."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that was verified, in memory that nobody writes to until `release`."""

    manifest: WeightManifest
    source: WeightSource
    buffer: memoryview | None = None
    on_card: Mapping[str, Tensor] = field(default_factory=dict)
    """Where there is no buffer."""
    failures: tuple[WorldError, ...] = ()
    """What went wrong with the sources that were tried before; for the log."""
    let_go: Callable[[], None] = lambda: None

    def tensors(self) -> Mapping[str, Tensor]:
        """Name → tensor; views into the buffer where there is one."""
        return self.on_card if self.buffer is None else tensor_views(self.manifest, self.buffer)

    def release(self) -> None:
        """Nobody reads it any more; to be called once."""
        self.let_go()


class Fetcher:
    """What a process keeps from one version to the next: mappings and memory, which cost more than the copying."""

    def __init__(
        self,
        *,
        process: str,
        host: str,
        ask: Ask,
        say: Say = lambda message: None,
        card: Card | None = None,
        join: Join | None = None,
    ) -> None:
        """`say` is told who is slow, while it happens."""
        self._process, self._host = process, host
        self._ask, self._say = ask, say
        self._card, self._join = card, join
        self._readable, self._spare = ReadableSegments(), SpareMemory()

    def fetch(
        self,
        manifest: WeightManifest,
        sources: Sequence[WeightSource],
        *,
        segments: Segments | None = None,
    ) -> Fetched:
        """Get and verify a version from the first source that can be reached from here and gives it.

        When a source fails, the next is tried. When all have failed, the first failure is raised, the others as notes.
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

    def _reaches(self, source: WeightSource, *, segments: Segments | None) -> bool:
        match source:
            case DeviceSource():
                return self._card is not None and (source.host, source.chip) == (self._host, self._card.chip)
            case SegmentSource():
                return segments is not None and source.host == self._host
            case CollectiveSource():
                return self._join is not None and self._process in source.servers
            case _:
                return True

    def _fetch(
        self,
        manifest: WeightManifest,
        source: WeightSource,
        *,
        segments: Segments | None,
        failures: tuple[WorldError, ...],
    ) -> Fetched:
        if isinstance(source, DeviceSource):
            assert self._card is not None
            return Fetched(manifest, source, on_card=self._card.take(manifest, source), failures=failures)
        if isinstance(source, SegmentSource):
            assert segments is not None
            return self._read(manifest, source, segments=segments, failures=failures)
        # Memory of a fetch that fails is not used again: a broadcast that was given up may still write to it.
        buffer = self._spare.take(manifest.size)
        self._fill(manifest, source, into=buffer)
        return Fetched(
            manifest,
            source,
            buffer,
            failures=failures,
            let_go=lambda: self._spare.give_back(buffer),
        )

    def _read(
        self,
        manifest: WeightManifest,
        source: SegmentSource,
        *,
        segments: Segments,
        failures: tuple[WorldError, ...],
    ) -> Fetched:
        """Where it lies: it can not change while it is locked, so what was verified is what will be loaded."""
        buffer, descriptor = self._readable.read(source.name, segments=segments)
        try:
            verify(manifest, buffer, source=describe(source))
        except WorldError:
            unlock(descriptor)
            raise
        return Fetched(manifest, source, buffer, failures=failures, let_go=lambda: unlock(descriptor))

    def _fill(self, manifest: WeightManifest, source: WeightSource, *, into: memoryview) -> None:
        match source:
            case FolderSource(path=path):
                read_folder(manifest, Path(path), into=into)
            case CollectiveSource():
                assert self._join is not None
                self._join(manifest, source, into)
                verify(manifest, into, source=describe(source))
            case StreamSource():
                Pull(manifest, source, into=into, ask=self._ask, say=self._say).run()
            case _:
                raise AssertionError(f"{source} is not brought into memory of ours")


def _distance(source: WeightSource) -> int:
    """What lies near is tried first, whoever published it; the others in the order in which they were named."""
    return 0 if isinstance(source, DeviceSource) else 1 if isinstance(source, SegmentSource) else 2


def describe(source: WeightSource) -> str:
    """For people: `describe(StreamSource("model-0")) == "stream of model-0"`."""
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
