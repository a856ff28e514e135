from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kintsugi.config.recipe import load
from kintsugi.errors import DeviceOutOfMemory
from kintsugi.lab.fragile.device import (
    DeviceDemand,
    DeviceOwner,
    SharedDevice,
    allocate_with_retry,
    create_device,
    demand_of,
    device_path,
)

RECIPES = Path(__file__).parents[4] / "kintsugi" / "recipes"


@pytest.fixture
def device(tmp_path: Path) -> SharedDevice:
    path = device_path(tmp_path, 0)
    create_device(path, capacity=DeviceDemand(train=100, rollout=60).capacity)
    return SharedDevice(path)


def test_there_is_room_for_either_and_not_for_both() -> None:
    needs = demand_of(load(RECIPES / "soak.yaml").config)
    assert max(needs.train, needs.rollout) < needs.capacity < needs.train + needs.rollout


def test_what_one_holds_the_other_can_not_have(device: SharedDevice) -> None:
    device.allocate(DeviceOwner.TRAIN, 100)
    with pytest.raises(DeviceOutOfMemory, match="CUDA out of memory"):
        device.allocate(DeviceOwner.ROLLOUT, 60)
    assert device.bookings()[DeviceOwner.ROLLOUT].failed_allocations == 1


def test_what_was_released_can_be_had(device: SharedDevice) -> None:
    device.allocate(DeviceOwner.TRAIN, 100)
    device.release(DeviceOwner.TRAIN)
    device.allocate(DeviceOwner.ROLLOUT, 60)
    assert {owner: booking.held_bytes for owner, booking in device.bookings().items()} == {
        DeviceOwner.TRAIN: 0,
        DeviceOwner.ROLLOUT: 60,
    }


def test_who_is_never_told_to_leave_stays_and_the_other_fails_again_and_again(device: SharedDevice) -> None:
    device.allocate(DeviceOwner.TRAIN, 100)
    with pytest.raises(DeviceOutOfMemory, match="allocations failed"):
        allocate_with_retry(device, DeviceOwner.ROLLOUT, 60, whom="model-0", timeout_s=0.15)
    assert device.bookings()[DeviceOwner.ROLLOUT].failed_allocations > 2


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    path = device_path(tmp_path, 0)
    create_device(path, capacity=130)
    program = (
        "import sys; from pathlib import Path; from kintsugi.lab.fragile.device import DeviceOwner, SharedDevice; "
        "SharedDevice(Path(sys.argv[1])).allocate(DeviceOwner.TRAIN, 100)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=30)
    device = SharedDevice(path)
    assert device.bookings()[DeviceOwner.TRAIN].held_bytes == 100
    device.allocate(DeviceOwner.ROLLOUT, 60)


def test_time_of_computing_is_counted(device: SharedDevice) -> None:
    with device.computing(DeviceOwner.ROLLOUT):
        sum(range(10_000))
    assert device.bookings()[DeviceOwner.ROLLOUT].busy_us > 0
