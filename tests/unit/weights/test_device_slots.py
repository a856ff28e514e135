"""Versions in a device's memory: their memory is allocated once, read in place, and an overwritten one is noticed.

The memory is the host's here, and 'sharing' it means finding it again; `tests/gpu` has a device and two processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.errors import IntegrityError
from kintsugi.types import DeviceSource, WeightManifest
from kintsugi.weights import manifest as manifest_module
from kintsugi.weights.manifest import aligned, build_manifest, layout_of
from kintsugi.weights.transports.device import DeviceSlots, MappedSlots
from tests.unit.weights.shared_memories import SharedMemories

CPU = torch.device("cpu")


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> SharedMemories:
    return SharedMemories.in_place_of_the_device(monkeypatch)


def weights_of(version: int) -> dict[str, Tensor]:
    return {
        "head": torch.full((3, 5), float(version), dtype=torch.bfloat16),
        "norm": torch.arange(7, dtype=torch.float32) + version,
        "none": torch.empty(0),
    }


def published(slots: DeviceSlots, version: int) -> tuple[WeightManifest, DeviceSource]:
    held, source = slots.hold(weights_of(version), version=version)
    return build_manifest(held, version=version, step=version, mesh={}), source


def test_two_hundred_versions_are_held_and_read_in_the_memory_of_two(memories: SharedMemories) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    for version in range(200):
        manifest, source = published(slots, version)
        found, check = reader.take(manifest, source)
        check()
        expected = weights_of(version)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype
            shared = {each.untyped_storage().data_ptr() for each in memories.exported}
            assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in shared, f"{name} was copied"
    assert len(memories.exported) == memories.num_mapped == 2


def test_a_version_that_is_overwritten_after_it_was_verified_is_noticed(memories: SharedMemories) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    manifest, source = published(slots, 1)
    _, check = reader.take(manifest, source)
    published(slots, 2)
    check()
    published(slots, 3)
    with pytest.raises(IntegrityError, match=r"version 1 from the memory of .* was overwritten while"):
        check()


def test_a_version_that_is_published_again_does_not_overwrite_the_one_that_is_read(
    memories: SharedMemories,
) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    manifest, source = published(slots, 1)
    _, check = reader.take(manifest, source)
    published(slots, 1)
    check()


def test_a_version_is_refused_while_another_is_copied_over_it(memories: SharedMemories) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    manifest, source = published(slots, 1)
    memories.exported[0][-64:] = 0  # As the publisher leaves it before its first byte.
    with pytest.raises(IntegrityError, match="was overwritten before it was read: expected number 1, got 0"):
        reader.take(manifest, source)


def test_a_reader_that_comes_too_late_for_a_version_gets_none_of_a_later_one(
    memories: SharedMemories,
) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    manifest, source = published(slots, 1)
    published(slots, 2)
    published(slots, 3)
    with pytest.raises(
        IntegrityError, match=r"^version 1 from the memory of .* was overwritten before it was read"
    ):
        reader.take(manifest, source)


def test_a_synchronous_run_holds_its_versions_in_the_memory_of_one(memories: SharedMemories) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0", versions_kept=1), MappedSlots(CPU)
    for version in range(5):
        manifest, source = published(slots, version)
        found, check = reader.take(manifest, source)
        check()
        assert all(torch.equal(found[name], each) for name, each in weights_of(version).items())
    assert len(memories.exported) == memories.num_mapped == 1
    published(slots, 5)
    with pytest.raises(IntegrityError, match=r"version 4 from the memory of .* was overwritten while"):
        check()
    with pytest.raises(
        IntegrityError, match=r"version 4 .* was overwritten before it was read: expected number 5"
    ):
        reader.take(manifest, source)


def test_memory_that_is_too_small_for_the_version_is_refused(memories: SharedMemories) -> None:
    manifest, source = published(DeviceSlots(CPU, host="host-0"), 1)
    larger = msgspec.structs.replace(manifest, size=aligned(manifest.size) + 64)
    expected = f"expected {larger.size} bytes, got {aligned(manifest.size)}"
    with pytest.raises(IntegrityError, match=expected):
        MappedSlots(CPU).take(larger, source)


def test_a_model_of_another_size_gets_other_memory(memories: SharedMemories) -> None:
    slots, reader = DeviceSlots(CPU, host="host-0"), MappedSlots(CPU)
    published(slots, 1)
    held, source = slots.hold({"wide": torch.ones(100)}, version=2)
    manifest = build_manifest(held, version=2, step=2, mesh={})
    found, check = reader.take(manifest, source)
    check()
    assert torch.equal(found["wide"], torch.ones(100)) and len(memories.exported) == 2


class MadeWhenRead(Mapping[str, Tensor]):
    """Weights that are made when they are read, as those that are gathered from other ranks."""

    def __init__(self, shapes: dict[str, int]) -> None:
        self.shapes = shapes
        self.read: list[str] = []
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.full((self.shapes[name],), float(len(self.read)))
        self.read.append(name)
        self.made.append(weakref.ref(tensor))
        self.most = max(self.most, sum(each() is not None for each in self.made))
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def test_weights_that_take_memory_when_they_are_read_are_copied_some_at_a_time(
    memories: SharedMemories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "MOST_COPIED_BYTES", 64)
    weights = MadeWhenRead({f"weight-{number}": 16 for number in range(6)})
    places = list(layout_of({name: (size,) for name, size in weights.shapes.items()}, itemsize=4))
    held, source = DeviceSlots(CPU, host="host-0").hold(weights, version=1, places=places)
    assert weights.read == [name for name, _, _ in places], "once each, in their order"
    assert weights.most == 1
    manifest = build_manifest(held, version=1, step=1, mesh={})
    found, check = MappedSlots(CPU).take(manifest, source)
    check()
    assert [float(found[name][0]) for name in weights.shapes] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
