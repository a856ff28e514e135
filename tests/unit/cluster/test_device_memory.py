from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kintsugi.cluster import device_memory
from kintsugi.cluster.device_memory import read_devices, visible
from kintsugi.model.memory import DeviceReading

GIB = 2**30
FOUND = [DeviceReading(f"uuid-{index}", "A Card", 80 * GIB, 79 * GIB) for index in range(4)]


class Driver:
    """NVML as far as it is used: two cards, the second of which is lost."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = not self.broken
        return 999 if self.broken else 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 80 * GIB, 79 * GIB
        return 0 if handle.value == 100 else 15

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> int:
        name.value = b"A Card"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, identity: Any, size: Any) -> int:
        identity.value = b"GPU-uuid-0"
        return 0


def test_cards_are_read_and_one_that_can_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert read_devices({}) == (FOUND[0],)
    assert not driver.is_open
    assert read_devices({device_memory.VISIBLE: ""}) == ()


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "LIBRARY", "libno-such-driver.so")
    assert read_devices({}) == ()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(broken=True))
    assert read_devices({}) == ()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("GPU-uuid-3", [3]),
        ("-1", []),
    ],
)
def test_only_the_cards_that_the_environment_names_count(chosen: str | None, expected: list[int]) -> None:
    assert visible(FOUND, chosen) == tuple(FOUND[index] for index in expected)
