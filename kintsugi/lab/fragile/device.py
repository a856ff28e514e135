"""Device shared by a train worker and a rollout worker, without enough memory for both.

On an accelerator, memory runs out without help. On a host without one, this module simulates it: both workers register
their allocation in a page of shared memory before they load, and are refused when the sum exceeds the device's
capacity. The registered sizes are real (weights, gradients, moments; weights and KV cache); the bytes are in host
memory, which does not run out. A process that has ended holds nothing.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import DeadlineExceeded, DeviceOutOfMemory
from kintsugi.model.architecture import parameter_shapes
from kintsugi.model.plan import plan_model
from kintsugi.runtime.waits import wait

log = logging.getLogger("device")

DEVICES_FOLDER = "devices"
_FLOAT_BYTES = 4
_COPIES_IN_TRAINING = 4
"""Weights, their gradient and two moments."""
_PAGE = 4096
_CAPACITY, _OWNER = struct.Struct("<q"), struct.Struct("<qqqq")
_LOCK_S = 10.0
_LOCK_POLL_S = 0.0005
_ALLOCATE_AGAIN_S = 0.02
_LOG_EVERY = 50
"""Failed allocations between two log lines."""


class DeviceOwner(IntEnum):
    TRAIN = 0
    ROLLOUT = 1


class Booking(msgspec.Struct):
    """Allocation of one owner, and its counters."""

    pid: int = 0
    held_bytes: int = 0
    failed_allocations: int = 0
    busy_us: int = 0
    """Time spent computing, in microseconds."""


class DeviceDemand(msgspec.Struct, frozen=True):
    """Bytes that each owner needs while it computes."""

    train: int
    rollout: int

    @property
    def capacity(self) -> int:
        """Capacity of the device: enough for either owner, not for both."""
        return max(self.train, self.rollout) + min(self.train, self.rollout) // 2


def demand_of(config: Config) -> DeviceDemand:
    architecture, _ = plan_model(config)
    num_weights = 0
    for shape in parameter_shapes(architecture).values():
        size = 1
        for length in shape:
            size *= length
        num_weights += size
    cache = (
        config.generation.slots
        * config.generation.max_length
        * architecture.num_layers
        * 2
        * architecture.kv_size
    )
    return DeviceDemand(
        train=_COPIES_IN_TRAINING * num_weights * _FLOAT_BYTES, rollout=(num_weights + cache) * _FLOAT_BYTES
    )


def device_path(run_dir: Path, index: int) -> Path:
    return run_dir / DEVICES_FOLDER / f"device-{index}"


def create_device(path: Path, *, capacity: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_CAPACITY.pack(capacity).ljust(_PAGE, b"\0"))


class SharedDevice:
    """Access to the shared page for one owner."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._page = mmap.mmap(self._descriptor, _PAGE)
        (self.capacity,) = _CAPACITY.unpack_from(self._page, 0)

    def close(self) -> None:
        self._page.close()
        os.close(self._descriptor)

    def bookings(self) -> dict[DeviceOwner, Booking]:
        with self._locked():
            return {owner: self._read(owner) for owner in DeviceOwner}

    def allocate(self, owner: DeviceOwner, size: int) -> None:
        """Register an allocation of this process; DeviceOutOfMemory when the capacity is exceeded."""
        with self._locked():
            mine = self._read(owner)
            others = sum(_held(self._read(other)) for other in DeviceOwner if other is not owner)
            if others + size > self.capacity:
                mine.failed_allocations += 1
                self._write(owner, mine)
                raise DeviceOutOfMemory(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB "
                    f"({self.capacity / 2**20:.2f} MiB total capacity; {others / 2**20:.2f} MiB already allocated)"
                )
            mine.pid, mine.held_bytes = os.getpid(), size
            self._write(owner, mine)

    def release(self, owner: DeviceOwner) -> None:
        with self._locked():
            mine = self._read(owner)
            mine.held_bytes = 0
            self._write(owner, mine)

    @contextmanager
    def computing(self, owner: DeviceOwner) -> Iterator[None]:
        """Count the time inside as time in which the device is busy."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._locked():
                mine = self._read(owner)
                mine.busy_us += int(1e6 * (time.perf_counter() - start))
                self._write(owner, mine)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        def attempt(remaining_s: float) -> bool | None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(min(_LOCK_POLL_S, remaining_s))
                return None
            return True

        wait(attempt, whom="the other owner", what="the device's page", timeout_s=_LOCK_S)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _read(self, owner: DeviceOwner) -> Booking:
        return Booking(*_OWNER.unpack_from(self._page, _place(owner)))

    def _write(self, owner: DeviceOwner, booking: Booking) -> None:
        _OWNER.pack_into(self._page, _place(owner), *msgspec.structs.astuple(booking))


def allocate_with_retry(
    device: SharedDevice, owner: DeviceOwner, size: int, *, whom: str, timeout_s: float
) -> None:
    """Retry an allocation; DeviceOutOfMemory after `timeout_s`."""
    failures = 0
    last = DeviceOutOfMemory("nothing was tried")

    def attempt(remaining_s: float) -> bool | None:
        nonlocal failures, last
        try:
            device.allocate(owner, size)
        except DeviceOutOfMemory as error:
            failures, last = failures + 1, error
            if failures % _LOG_EVERY == 1:
                log.error("%s (attempt %d)", error, failures)
            time.sleep(min(_ALLOCATE_AGAIN_S, remaining_s))
            return None
        return True

    try:
        wait(attempt, whom=whom, what="memory of the device", timeout_s=timeout_s)
    except DeadlineExceeded as error:
        raise DeviceOutOfMemory(f"{last}; {failures} allocations failed") from error


def _place(owner: DeviceOwner) -> int:
    return _CAPACITY.size + owner * _OWNER.size


def _held(booking: Booking) -> int:
    return booking.held_bytes if booking.pid and Path(f"/proc/{booking.pid}").exists() else 0
