"""Memory of this machine's accelerators, read through the driver's own library: no torch, no context on a device.

The agents' monitor (`accelerators.py`) reads much more, but needs the extra `nvidia`; what a run needs before its start
must be known everywhere.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from kintsugi.model.memory import DeviceReading

LIBRARY = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_devices(environment: Mapping[str, str] = os.environ) -> tuple[DeviceReading, ...]:
    """Return the accelerators that this process can see, in its order; none without a driver."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = [_read(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()
    return visible([each for each in found if each is not None], environment.get(VISIBLE))


def visible(devices: list[DeviceReading], chosen: str | None) -> tuple[DeviceReading, ...]:
    """Return the devices that `CUDA_VISIBLE_DEVICES` names, by number or identity, up to the first that does not exist;
    all without it."""
    if chosen is None:
        return tuple(devices)
    found: list[DeviceReading] = []
    for name in chosen.split(","):
        wanted = name.strip()
        matching = [
            device
            for number, device in enumerate(devices)
            if wanted == str(number)
            or (wanted.startswith("GPU-") and device.identity.startswith(wanted.removeprefix("GPU-")))
        ]
        if not matching:
            break
        found.append(matching[0])
    return tuple(found)


def _read(nvml: ctypes.CDLL, index: int) -> DeviceReading | None:
    handle, memory = ctypes.c_void_p(), _Memory()
    name, identity = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
    calls = (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_NAME_BYTES)),
        nvml.nvmlDeviceGetUUID(handle, identity, ctypes.c_uint(_NAME_BYTES)),
    )
    if any(calls):
        return None
    uuid = identity.value.decode(errors="replace").removeprefix("GPU-")
    return DeviceReading(
        uuid, name.value.decode(errors="replace"), total_bytes=memory.total, free_bytes=memory.free
    )
