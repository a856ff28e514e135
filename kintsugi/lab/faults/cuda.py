"""NVIDIA GPU with full memory, or busy with other work: through the driver library, without torch."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from kintsugi.lab.faults.mechanism import TICK_S, FaultImpossible, FaultMechanism
from kintsugi.lab.testbed.ports import opened

MIB = 1 << 20
LIBRARY = "libcuda.so.1"
GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")
"""Folder with one entry per GPU, named by its PCI address."""
DEFAULT_SHARE = 1.0
DEFAULT_FACTOR = 4.0
LEFT_BYTES = 2 * MIB
"""Allocation granularity of the driver."""
SPIN_S = 0.005
NUM_BLOCKS, NUM_THREADS = 4096, 256
"""More blocks than any GPU runs concurrently, so that other work on it has to wait."""

SPIN = b"""
.version 6.4
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %now, %end, %length;
    .reg .pred %over;
    ld.param.u64 %length, [nanoseconds];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %length;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %over, %now, %end;
    @%over bra again;
    ret;
}
\0"""
"""PTX kernel in which every thread reads the clock until its time is over."""


class Driver:
    """The few driver calls that are needed, on one GPU."""

    def __init__(self, address: str | None) -> None:
        """Open the GPU at this PCI address; None when there is only one."""
        self._library = ctypes.CDLL(LIBRARY)
        self._call("cuInit", 0)
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        if address is not None:
            self._call("cuDeviceGetByPCIBusId", ctypes.byref(number), address.encode())
        else:
            count = ctypes.c_int()
            self._call("cuDeviceGetCount", ctypes.byref(count))
            if count.value != 1:
                raise OSError(
                    f"expected one GPU, or {GPUS_FOLDER} to tell them apart; there are {count.value}"
                )
            self._call("cuDeviceGet", ctypes.byref(number), 0)
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, number)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            message = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(message))
            raise OSError(f"{name}: {(message.value or b'unknown error').decode()}")

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def load_spin(self) -> None:
        module, self._spin = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), SPIN)
        self._call("cuModuleGetFunction", ctypes.byref(self._spin), module, b"spin")

    def spin(self, seconds: float) -> None:
        """Keep every unit of the GPU busy for `seconds`, and wait for that."""
        length = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(length))
        blocks = (ctypes.c_uint(each) for each in (NUM_BLOCKS, 1, 1, NUM_THREADS, 1, 1, 0))
        self._call("cuLaunchKernel", self._spin, *blocks, None, arguments, None)
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Destroy the context; its allocations are freed with it."""
        self._call("cuCtxDestroy_v2", self._context)


def gpus_of(pid: int) -> frozenset[int]:
    """Return the GPUs that a process has open: N of `/dev/nvidiaN`."""
    found = (re.fullmatch(r"/dev/nvidia(\d+)", target) for _, target in opened(pid))
    return frozenset(int(match[1]) for match in found if match is not None)


def address_of(gpu: int, *, gpus: Path = GPUS_FOLDER) -> str | None:
    """Return the PCI address of a GPU; the device indices of the driver library can differ from N of `/dev/nvidiaN`."""
    for information in gpus.glob("*/information"):
        if re.search(rf"^Device Minor:\s*{gpu}\s*$", information.read_text(), re.MULTILINE):
            return information.parent.name
    return None


class _CudaFault(FaultMechanism):
    """Base class: selects the GPU of the target, whose other users are affected as well; where the target has several
    open, `amount.device` is N of `/dev/nvidiaN`."""

    shares_device = True

    @classmethod
    def missing(cls) -> str | None:
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            return f"no NVIDIA driver here ({LIBRARY})"
        return None if Path("/dev/nvidiactl").exists() else "no NVIDIA GPU here (/dev/nvidiactl)"

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        if any(target.startswith("/dev/nvidia") for _, target in opened(pid)):
            return None
        return f"process {pid} uses no NVIDIA GPU"

    def prepare(self) -> None:
        gpus = gpus_of(self.pid)
        if "device" in self.injection.amount:
            gpus = frozenset({int(self.injection.amount["device"])})
        if len(gpus) > 1:
            raise FaultImpossible(
                f"process {self.pid} has the GPUs {', '.join(map(str, sorted(gpus)))} open: "
                "name one of them as `amount.device`"
            )
        try:
            self._driver = Driver(next(map(address_of, gpus), None))
        except OSError as error:
            raise FaultImpossible(f"the GPU can not be used: {error}") from error

    def end(self) -> None:
        super().end()
        if hasattr(self, "_driver"):
            self._driver.close()


class FullGpuMemory(_CudaFault):
    """Takes all free memory of the GPU, including memory that is freed later."""

    name = "a neighbour that takes the card's memory (CUDA)"
    supported_parameters = frozenset({"share", "device"})
    ramps = True

    def begin(self) -> None:
        self._taken = 0
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        free, total = self._driver.memory()
        keep = max(LEFT_BYTES, round(total * (1 - strength * self.parameter("share", DEFAULT_SHARE))))
        chunk = (free - keep) // LEFT_BYTES * LEFT_BYTES
        while chunk >= LEFT_BYTES:
            try:
                self._driver.allocate(chunk)
                self._taken += chunk
                break
            except OSError:  # Not in one piece.
                chunk = chunk // 2 // LEFT_BYTES * LEFT_BYTES
        self.measured["taken_bytes"] = float(self._taken)
        return TICK_S / 5


class BusyGpu(_CudaFault):
    """Runs a kernel that time-slices with the target's work, so that the target slows down by `factor`."""

    name = "a neighbour that keeps the card busy (CUDA)"
    supported_parameters = frozenset({"factor", "device"})
    ramps = True

    def prepare(self) -> None:
        super().prepare()
        self._driver.load_spin()

    def begin(self) -> None:
        self.measured["spun_s"] = 0.0

    def tick(self, strength: float) -> float:
        factor = 1 + strength * (max(1.0, self.parameter("factor", DEFAULT_FACTOR)) - 1)
        spin_s = SPIN_S * (factor - 1)
        if spin_s > 0:
            self._driver.spin(spin_s)
            self.measured["spun_s"] += spin_s
        return 0.0 if spin_s > 0 else TICK_S
