"""Weights go from a publisher to a fetcher by shared memory or by stream, and arrive as they were or not at all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import torch

from kintsugi.errors import IntegrityError, RefusedError
from kintsugi.protocol.weights import FetchWeights, Publish
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import Alert, Event
from kintsugi.transport import Reply
from kintsugi.types import SegmentSource, StreamSource, WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched, Fetcher
from kintsugi.weights.manifest import build_manifest
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports.shared_memory import WeightSegments
from kintsugi.weights.transports.stream import StreamFetch
from tests.unit.weights.streams import Streams, streams

MESH = {"dp": 0, "tp": 0, "pp": 0}


class MemorySegments:
    """Segments without an agent."""

    def __init__(self) -> None:
        self.descriptors: dict[str, int] = {}
        self.num_created = 0

    def create(self, name: str, size: int) -> int:
        held = self.descriptors.get(name)
        if held is None or os.fstat(held).st_size != size:
            self.remove(name)
            self.descriptors[name] = os.memfd_create("test")
            self.num_created += 1
            os.ftruncate(self.descriptors[name], size)
        return os.dup(self.descriptors[name])

    def open(self, name: str) -> int:
        if name not in self.descriptors:
            raise RefusedError(f"no segment {name}")
        return os.dup(self.descriptors[name])

    def remove(self, name: str) -> None:
        if name in self.descriptors:
            os.close(self.descriptors.pop(name))

    def flip(self, name: str, offset: int) -> None:
        with mmap.mmap(self.descriptors[name], 0) as memory:
            memory[offset] ^= 1


@pytest.fixture
def segments() -> Iterator[MemorySegments]:
    memory = MemorySegments()
    yield memory
    for name in tuple(memory.descriptors):
        memory.remove(name)


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "norm.weight": torch.randn(7, generator=generator),
        "embed.weight": torch.randn(5, 3, generator=generator, dtype=torch.float32).to(torch.bfloat16),
        "head.weight": torch.randn(4, 6, generator=generator).T,
        "scale": torch.tensor(0.5),
        "empty": torch.zeros(0, 4),
        "steps": torch.arange(9, dtype=torch.int64),
    }


@pytest.fixture
def stream() -> Iterator[Streams]:
    with streams() as made:
        yield made


def fetch(
    manifest: WeightManifest,
    sources: Sequence[WeightSource],
    *,
    host: str,
    segments: WeightSegments | None,
    stream: StreamFetch | None = None,
) -> Fetched:
    fetcher = Fetcher(process="server-0", host=host, stream=stream)
    return fetcher.fetch(manifest, sources, segments=segments)


def assert_same(fetched: Fetched, weights: dict[str, torch.Tensor]) -> None:
    tensors = fetched.tensors()
    assert tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor)


def test_weights_arrive_by_shared_memory(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    fetched = fetch(manifest, sources, host="host-0", segments=segments)
    assert isinstance(fetched.source, SegmentSource) and fetched.failures == ()
    assert_same(fetched, some_weights())


def test_weights_arrive_by_stream_on_another_host(segments: MemorySegments, stream: Streams) -> None:
    publisher = stream.publisher(segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    fetched = fetch(manifest, sources, host="host-1", segments=MemorySegments(), stream=stream.fetch())
    assert fetched.source == StreamSource("model-0")
    assert_same(fetched, some_weights())


def test_a_server_that_can_not_stream_does_not_try(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    with pytest.raises(RefusedError, match="no source of version 3 can be reached from host-1"):
        fetch(manifest, sources, host="host-1", segments=None)


def test_without_shared_memory_only_the_stream_is_offered(stream: Streams) -> None:
    publisher = stream.publisher()
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    assert sources == (StreamSource("model-0"),)
    fetched = fetch(manifest, sources, host="host-0", segments=None, stream=stream.fetch())
    assert_same(fetched, some_weights())


def test_a_fetched_version_does_not_change_when_the_model_or_the_versions_move_on(
    segments: MemorySegments,
) -> None:
    weights = some_weights()
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(weights, Publish(1, 1))
    fetched = fetch(manifest, sources, host="host-0", segments=segments)
    weights["norm.weight"].zero_()
    for version in (2, 3, 4):
        publisher.publish(some_weights(version), Publish(version, version))
    assert_same(fetched, some_weights())


def test_at_most_two_versions_are_alive(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    for version in range(6):
        publisher.publish(some_weights(), Publish(version, version))
    assert sorted(segments.descriptors) == ["weights/model-0/0", "weights/model-0/1"]
    with pytest.raises(RefusedError, match=r"no weights of version 3, only \[4, 5\]"):
        publisher.answer(FetchWeights(3))
    publisher.close()
    assert not segments.descriptors


def test_a_replaced_worker_uses_the_memory_that_its_predecessor_left(segments: MemorySegments) -> None:
    for version in (4, 5):
        Publisher(process="model-0", host="host-0", segments=segments).publish(
            some_weights(), Publish(version, version)
        )
    replacement = Publisher(process="model-0", host="host-0", segments=segments)
    for version in (6, 7):
        replacement.publish(some_weights(), Publish(version, version))
    assert sorted(segments.descriptors) == ["weights/model-0/0", "weights/model-0/1"]


def test_publishing_again_after_a_rollback_withdraws_the_undone_versions(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    for version in (4, 5):
        publisher.publish(some_weights(1), Publish(version, version))
    manifest, sources = publisher.publish(some_weights(2), Publish(4, 4))
    with pytest.raises(RefusedError, match=r"no weights of version 5, only \[4\]"):
        publisher.answer(FetchWeights(5))
    assert_same(fetch(manifest, sources, host="host-0", segments=segments), some_weights(2))


def test_a_wrong_byte_in_shared_memory_is_found_and_named(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    for piece in manifest.pieces:
        for offset in range(piece.offset, piece.offset + piece.size):
            segments.flip("weights/model-0/1", offset)
            with pytest.raises(
                IntegrityError, match=f"^{piece.name} of version 3 from segment weights/model-0/1"
            ):
                fetch(manifest, sources[:1], host="host-0", segments=segments)
            segments.flip("weights/model-0/1", offset)


def test_a_wrong_byte_in_the_publishers_memory_is_found_and_named(
    segments: MemorySegments, stream: Streams
) -> None:
    publisher = stream.publisher(segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    segments.flip("weights/model-0/1", manifest.pieces[-1].offset)
    with pytest.raises(IntegrityError, match="steps of version 3 from model-0: expected xxh3"):
        fetch(manifest, sources, host="host-1", segments=None, stream=stream.fetch())


def test_another_version_than_the_one_asked_for_is_refused(stream: Streams) -> None:
    publisher = stream.publisher()
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))

    def older(process: str, request: FetchWeights) -> Reply:
        return Reply(msgspec.structs.replace(publisher.answer(request), version=2))

    with pytest.raises(RefusedError, match="expected an offer of version 3, got"):
        fetch(manifest, sources, host="host-0", segments=None, stream=stream.fetch(older))


def test_pieces_of_another_size_are_refused_before_any_byte(stream: Streams) -> None:
    publisher = stream.publisher()
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    longer = [msgspec.structs.replace(piece, size=piece.size + 64) for piece in manifest.pieces]
    other = msgspec.structs.replace(manifest, pieces=tuple(longer), size=manifest.size + 64)
    with pytest.raises(RefusedError, match="bytes, not"):
        fetch(other, sources, host="host-0", segments=None, stream=stream.fetch())


def test_the_stream_takes_over_when_shared_memory_fails_and_says_why(
    segments: MemorySegments, stream: Streams
) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    segments.flip("weights/model-0/1", manifest.pieces[-1].offset)
    stream.publisher().publish(some_weights(), Publish(3, 3))
    fetched = fetch(manifest, sources, host="host-0", segments=segments, stream=stream.fetch())
    assert_same(fetched, some_weights())
    (failure,) = fetched.failures
    assert isinstance(failure, IntegrityError)


def test_the_first_failure_is_the_one_that_is_raised(segments: MemorySegments, stream: Streams) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    segments.flip("weights/model-0/1", 0)
    stream.publisher()
    with pytest.raises(IntegrityError) as caught:
        fetch(manifest, sources, host="host-0", segments=segments, stream=stream.fetch())
    assert any("no weights of version 3" in note for note in caught.value.__notes__)


def test_a_version_that_cannot_be_reached_names_what_there_is() -> None:
    manifest = build_manifest(some_weights(), version=3, step=3, mesh=MESH)
    with pytest.raises(RefusedError, match="from host-1; there are: segment s on host-0"):
        fetch(manifest, [SegmentSource("host-0", "s")], host="host-1", segments=None)


class FlakySegments(MemorySegments):
    """Shared memory of an agent that may be gone."""

    is_gone = False

    def create(self, name: str, size: int) -> int:
        if self.is_gone:
            raise RefusedError("the agent of host-0 is gone")
        return super().create(name, size)


def test_a_fall_back_to_private_memory_is_counted_and_alerted_once() -> None:
    segments, events = FlakySegments(), list[Event]()
    publisher = Publisher(process="model-0", host="host-0", segments=segments, emit=events.append)
    before = COUNTERS.snapshot().counters.get("weights_in_private_memory", 0)
    publisher.publish(some_weights(), Publish(1, 1))
    assert events == []
    segments.is_gone = True
    for version in (2, 3):
        _, sources = publisher.publish(some_weights(), Publish(version, version))
        assert sources == (StreamSource("model-0"),)
    assert COUNTERS.snapshot().counters["weights_in_private_memory"] == before + 2
    (alert,) = events
    assert isinstance(alert, Alert) and alert.values["version"] == 2
    assert "private memory" in alert.message and "the agent of host-0 is gone" in alert.message
