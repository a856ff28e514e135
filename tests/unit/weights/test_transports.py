"""Ways of weights between two processes' worth of objects: memory that is used again, the disk, a collective."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kintsugi.errors import DeadlineExceeded, IntegrityError, WorldError
from kintsugi.protocol.weights import Publish
from kintsugi.telemetry.events import OperationFailed
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer
from kintsugi.types import (
    CollectiveSource,
    DeviceSource,
    FolderSource,
    SegmentSource,
    StreamSource,
    WeightManifest,
    WeightSource,
)
from kintsugi.weights.fetch import Fetched, Fetcher
from kintsugi.weights.manifest import build_manifest
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports import collective
from kintsugi.weights.transports.collective import CollectiveTransport, receive
from kintsugi.weights.transports.device import MappedSlots
from tests.unit.weights.streams import Streams, streams
from tests.unit.weights.test_publish_and_fetch import MemorySegments

KEYS = new_key_pair()


@pytest.fixture
def segments() -> Iterator[MemorySegments]:
    memory = MemorySegments()
    yield memory
    for name in tuple(memory.descriptors):
        memory.remove(name)


@pytest.fixture
def stream() -> Iterator[Streams]:
    with streams() as made:
        yield made


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large.weight": torch.randn(300, 700, generator=generator),
        "norm.weight": torch.randn(7, generator=generator),
        "half.weight": torch.randn(9, 5, generator=generator).to(torch.bfloat16),
    }


def assert_same(fetched: Fetched, weights: dict[str, torch.Tensor]) -> None:
    tensors = fetched.tensors()
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


def test_memory_is_used_again_once_nobody_reads_it(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    fetcher = Fetcher(process="server-0", host="host-0")
    for version in range(1, 6):
        manifest, sources = publisher.publish(some_weights(version), Publish(version, version))
        fetched = fetcher.fetch(manifest, sources, segments=segments)
        assert_same(fetched, some_weights(version))
        fetched.release()
    assert segments.num_created == 2


def test_what_is_being_read_is_left_alone_and_its_name_gets_other_memory(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    slow = Fetcher(process="server-0", host="host-0")
    held = slow.fetch(*publisher.publish(some_weights(1), Publish(1, 1)), segments=segments)
    for version in (2, 3):
        last = publisher.publish(some_weights(version), Publish(version, version))
    assert_same(held, some_weights(1))
    fast = Fetcher(process="server-1", host="host-0")
    assert_same(fast.fetch(*last, segments=segments), some_weights(3))
    assert segments.num_created == 3


def test_who_comes_too_late_for_a_version_gets_none_of_a_later_one(
    segments: MemorySegments, stream: Streams
) -> None:
    publisher = stream.publisher(segments=segments)
    manifest, sources = publisher.publish(some_weights(1), Publish(1, 1))
    for version in (2, 3):
        publisher.publish(some_weights(version), Publish(version, version))
    late = Fetcher(
        process="server-0",
        host="host-0",
        stream=stream.fetch(),
    )
    with pytest.raises(IntegrityError, match="of version 1 from segment") as caught:
        late.fetch(manifest, sources, segments=segments)
    assert any("no weights of version 1, only [2, 3]" in note for note in caught.value.__notes__)


def test_weights_arrive_by_disk_and_only_two_versions_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model-0"
    publisher = Publisher(process="model-0", host="host-0", segments=None, folder=folder)
    fetcher = Fetcher(process="server-0", host="host-9")
    for version in range(1, 5):
        order = Publish(version, version, transports=("disk",))
        manifest, sources = publisher.publish(some_weights(version), order)
        fetched = fetcher.fetch(manifest, sources)
        assert isinstance(fetched.source, FolderSource)
        assert_same(fetched, some_weights(version))
        fetched.release()
    assert sorted(each.name for each in folder.iterdir()) == ["version-3", "version-4"]
    publisher.close()
    assert not folder.exists()


def test_a_wrong_byte_on_the_disk_is_found_and_the_rank_asked_instead(
    tmp_path: Path, stream: Streams
) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=None, folder=tmp_path)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3, transports=("disk",)))
    stream.publisher().publish(some_weights(), Publish(3, 3))
    path = tmp_path / "version-3" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fetcher = Fetcher(
        process="server-0",
        host="host-9",
        stream=stream.fetch(),
    )
    fetched = fetcher.fetch(manifest, sources)
    assert_same(fetched, some_weights())
    (failure,) = fetched.failures
    assert isinstance(failure, IntegrityError) and "norm.weight of version 3 from folder" in str(failure)


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with closing(StoreServer(keys=KEYS)) as server:
        yield server


def broadcast(store: StoreServer, *, said: list[OperationFailed], servers: tuple[str, ...]) -> Publisher:
    transport = CollectiveTransport(process="model-0", store=store.address, keys=KEYS, emit=said.append)
    return Publisher(process="model-0", host="host-0", segments=None, transports=(transport,))


def test_all_servers_get_a_broadcast(store: StoreServer) -> None:
    said: list[OperationFailed] = []
    names = ("server-0", "server-1")
    publisher = broadcast(store, said=said, servers=names)
    found: dict[str, Fetched] = {}

    def fetch(name: str, manifest: WeightManifest, sources: Sequence[WeightSource]) -> None:
        fetcher = Fetcher(process=name, host="host-9", join=partial(receive, keys=KEYS))
        found[name] = fetcher.fetch(manifest, sources)

    for version in (1, 2):
        order = Publish(version, version, transports=("collective",), servers=names)
        manifest, sources = publisher.publish(some_weights(version), order)
        threads = [threading.Thread(target=fetch, args=(name, manifest, sources)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for name in names:
            assert isinstance(found[name].source, CollectiveSource)
            assert_same(found.pop(name), some_weights(version))
    assert not said


def test_a_server_that_does_not_come_costs_the_others_the_deadline_and_no_more(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, stream: Streams
) -> None:
    monkeypatch.setattr(collective, "COLLECTIVE_TIMEOUT_S", 0.5)
    said: list[OperationFailed] = []
    names = ("server-0", "server-1")
    publisher = broadcast(store, said=said, servers=names)
    order = Publish(1, 1, transports=("collective",), servers=names)
    manifest, sources = publisher.publish(some_weights(), order)
    stream.publisher().publish(some_weights(), Publish(1, 1))
    fetcher = Fetcher(
        process="server-0",
        host="host-9",
        stream=stream.fetch(),
        join=partial(receive, keys=KEYS),
    )
    fetched = fetcher.fetch(manifest, sources)
    assert_same(fetched, some_weights())
    (failure,) = fetched.failures
    assert "model-0, server-0, server-1" in str(failure)


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("rank 3 of 3")])
def test_a_broadcast_that_ends_in_any_error_has_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(source: CollectiveSource, keys: tuple[bytes, bytes]) -> NoReturn:
        raise error

    monkeypatch.setattr(collective, "_open_store", broken)
    source = CollectiveSource("model-0", "127.0.0.1:1", "key", ("server-0",))
    manifest = build_manifest(some_weights(), version=3, step=3, mesh={})
    with pytest.raises(WorldError, match=f"broadcast of version 3 .* failed: {error}"):
        receive(manifest, source, memoryview(bytearray(manifest.size)), keys=KEYS)


def test_who_writes_late_writes_to_nothing_that_was_verified(stream: Streams) -> None:
    written: list[memoryview] = []

    def given_up(manifest: WeightManifest, source: CollectiveSource, into: memoryview) -> NoReturn:
        written.append(into)
        raise DeadlineExceeded(whom="server-1", what="broadcast", waited_s=20.0)

    publisher = stream.publisher()
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    fetcher = Fetcher(
        process="server-0",
        host="host-9",
        stream=stream.fetch(),
        join=given_up,
    )
    broadcast = CollectiveSource("model-0", "127.0.0.1:1", "key", ("server-0", "server-1"))
    fetched = fetcher.fetch(manifest, [broadcast, *sources])
    (late,) = written
    late[:] = bytes(late.nbytes)
    assert_same(fetched, some_weights())


def test_memory_of_an_accelerator_whose_owner_is_gone_is_one_source_less(
    monkeypatch: pytest.MonkeyPatch, stream: Streams
) -> None:
    def gone(*handle: object) -> NoReturn:
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", gone)
    device = MappedSlots(torch.device("cpu"))
    publisher = stream.publisher()
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    fetcher = Fetcher(
        process="server-0",
        host="host-0",
        stream=stream.fetch(),
        device=device,
    )
    held = DeviceSource("host-0", device.chip, b"handle", manifest.size, 0, b"", 0, b"", False)
    fetched = fetcher.fetch(manifest, [held, *sources])
    assert_same(fetched, some_weights())
    (failure,) = fetched.failures
    assert "can not be mapped: CUDA error: invalid argument" in str(failure)


KILLED = """
import os, signal, sys
from kintsugi.weights.transports.shared_memory import ReadableSegments, WritableSegments

class Given:
    def create(self, name, size):
        return os.dup(int(sys.argv[2]))
    open = lambda self, name: self.create(name, 0)

if sys.argv[1] == "reads":
    ReadableSegments().read("a", segments=Given())
else:
    memory, _ = WritableSegments(Given()).begin("a", size=os.fstat(int(sys.argv[2])).st_size)
    memory[:64] = bytes(64)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that is killed while it reads, or writes, the memory of this descriptor."""


def kill_while_it(does: str, descriptor: int) -> None:
    argv = [sys.executable, "-c", KILLED, does, str(descriptor)]
    ended = subprocess.run(argv, pass_fds=[descriptor], timeout=20, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_reader_that_was_killed_holds_no_memory_back(segments: MemorySegments) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    for version in (1, 2):
        publisher.publish(some_weights(version), Publish(version, version))
    kill_while_it("reads", segments.descriptors["weights/model-0/1"])
    publisher.publish(some_weights(3), Publish(3, 3))
    assert segments.num_created == 2


def test_what_a_publisher_was_killed_in_the_middle_of_is_refused_and_written_anew(
    segments: MemorySegments,
) -> None:
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    manifest, sources = publisher.publish(some_weights(1), Publish(1, 1))
    kill_while_it("writes", segments.descriptors["weights/model-0/1"])
    fetcher = Fetcher(process="server-0", host="host-0")
    with pytest.raises(IntegrityError, match=r"half\.weight of version 1 from segment"):
        fetcher.fetch(manifest, sources[:1], segments=segments)
    successor = Publisher(process="model-0", host="host-0", segments=segments)
    again = successor.publish(some_weights(1), Publish(1, 1))
    assert_same(fetcher.fetch(*again, segments=segments), some_weights(1))
    assert segments.num_created == 1


class OpenedAtOnce(MemorySegments):
    """Somebody reads each segment as soon as it is made."""

    def create(self, name: str, size: int) -> int:
        descriptor = super().create(name, size)
        reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        fcntl.flock(reader, fcntl.LOCK_SH)
        self.descriptors[f"reader {self.num_created}"] = reader
        return descriptor


def test_memory_that_a_late_reader_takes_at_once_is_done_without() -> None:
    segments = OpenedAtOnce()
    publisher = Publisher(process="model-0", host="host-0", segments=segments)
    _, sources = publisher.publish(some_weights(), Publish(3, 3))
    assert sources == (StreamSource("model-0"),)
    for name in tuple(segments.descriptors):
        segments.remove(name)


def test_no_memory_or_descriptor_is_left_behind_by_many_versions(segments: MemorySegments) -> None:
    fetcher = Fetcher(process="server-0", host="host-0")
    held: list[tuple[int, int]] = []
    for version in range(200):
        # Ranks come and go, and with them the names of what they published.
        name = f"model-{version // 10}"
        publisher = Publisher(process=name, host="host-0", segments=segments)
        fetched = fetcher.fetch(
            *publisher.publish({"a": torch.ones(9)}, Publish(version, version)), segments=segments
        )
        fetched.release()
        publisher.close()
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert all(last <= early for last, early in zip(held[-1], held[9], strict=True))


def test_a_source_of_another_host_is_not_mapped(segments: MemorySegments, stream: Streams) -> None:
    publisher = stream.publisher(segments=segments)
    manifest, sources = publisher.publish(some_weights(), Publish(3, 3))
    fetcher = Fetcher(
        process="server-0",
        host="host-1",
        stream=stream.fetch(),
    )
    fetched = fetcher.fetch(manifest, sources, segments=segments)
    assert not isinstance(fetched.source, SegmentSource)
