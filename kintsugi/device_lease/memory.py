"""Accelerator memory of a process, and its offloading between two turns on a shared device.

Tensors of a trainer are moved: their storages are emptied and filled again under the same tensors and views. Memory of
a captured CUDA graph cannot move, because the graph contains addresses: the addresses stay reserved, and the memory
behind them is unmapped.

On a host without an accelerator there is nothing to offload: `check_policy` refuses it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kintsugi.config.schema import ShareDevice
from kintsugi.errors import ConfigError, DeviceError, DeviceOutOfMemory
from kintsugi.runtime.waits import wait

DEVICE_TIMEOUT_S = 120.0


def check_policy(policy: ShareDevice, *, device: torch.device) -> None:
    if policy == "offload" and device.type == "cpu":
        raise ConfigError(
            "`cluster.share_device`: expected `keep` or `no` on a host without an accelerator, as what is in the "
            "host's memory already can not be moved there, got `offload`"
        )


class KeptMemory:
    """Policy `keep`: memory stays on the device, which is only idle between turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def leave(self) -> None:
        _until_idle(self._device, what="what runs there before its turn is over")

    def enter(self) -> None:
        pass


class MovedMemory:
    """Policy `offload`: the storages of these tensors are in host memory between two turns."""

    def __init__(
        self, device: torch.device, *, tensors: Callable[[], Iterable[Tensor]], settle: Callable[[], object]
    ) -> None:
        """`settle` waits for background readers of the tensors."""
        self._device = device
        self._tensors = tensors
        self._settle = settle
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def leave(self) -> None:
        self._settle()
        with torch.cuda.device(self._device), torch.no_grad():
            _until_idle(self._device, what="what runs there before its turn is over")
            if not self._away:  # Else it was not restored since, or not completely.
                self._copy_all()
            for storage, _ in self._away:
                storage.resize_(0)
            torch.cuda.empty_cache()

    def _copy_all(self) -> None:
        every = (tensor.untyped_storage() for tensor in self._tensors())
        for storage in {storage.data_ptr(): storage for storage in every}.values():
            flat = _bytes_of(storage, device=self._device)
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            self._away.append((storage, host.copy_(flat, non_blocking=True)))
        _until_idle(self._device, what="copies to the host")

    def enter(self) -> None:
        if not self._away:
            return
        with torch.cuda.device(self._device), torch.no_grad():
            for storage, host in self._away:
                storage.resize_(host.numel())
                _bytes_of(storage, device=self._device).copy_(host, non_blocking=True)
            _until_idle(self._device, what="copies from the host")
            # Pinned memory is kept by torch and serves the next turn.
            self._away.clear()


def _until_idle(device: torch.device, *, what: str) -> None:
    """Wait until nothing of this process runs on the device, on any stream."""

    def attempt(remaining_s: float) -> bool:
        torch.cuda.synchronize(device)
        return True

    wait(attempt, whom="the device", what=what, timeout_s=DEVICE_TIMEOUT_S)


def _bytes_of(storage: torch.UntypedStorage, *, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_AND_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


class MappedMemory:
    """Accelerator memory with fixed addresses: it can be unmapped and mapped again. The device must be in use already.

    `tensor` may be used between `map` and `unmap` only; its contents are undefined after `map`.
    """

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._location = _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0
        )
        self._size = ctypes.c_size_t(-(-size // granularity.value) * granularity.value)
        self._address = ctypes.c_uint64()
        alignment = ctypes.c_size_t(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(self._address), self._size, alignment, _none(), _none()
        )
        self._handle = ctypes.c_uint64()
        self.is_mapped = False
        self.map()
        self.tensor: Tensor = torch.as_tensor(_Array(self._address.value, size), device=self._device)
        assert self.tensor.data_ptr() == self._address.value, "torch made a copy"

    def map(self) -> None:
        self._call(
            "cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), _none()
        )
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, _none())
        access = _Access(self._location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.is_mapped = True

    def unmap(self) -> None:
        """Release the memory; nothing may be using it."""
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self.is_mapped = False

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise DeviceOutOfMemory(f"{name}: no memory left for {self._size.value / 2**30:.2f} GiB")
        if code != 0:
            raise DeviceError(f"{name} failed with code {code} on {self._device}")


def _none() -> ctypes.c_uint64:
    return ctypes.c_uint64(0)


class _Array:
    """Bytes at an address, which torch adopts without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class MovedPages:
    """KV-cache pages at addresses that captured graphs contain: between two turns the used pages are in host memory,
    the others are dropped."""

    def __init__(
        self, pages: MappedMemory, view: Tensor, *, used: Callable[[], list[int]], device: torch.device
    ) -> None:
        """`view` is [layers, 2, pages, …] of the memory; `used` returns the pages in use."""
        self._pages = pages
        self._view = view
        self._used = used
        self._device = device
        self._away: tuple[Tensor, list[Tensor]] | None = None

    def leave(self) -> None:
        if not self._pages.is_mapped:
            return
        with torch.cuda.device(self._device), torch.no_grad():
            _until_idle(self._device, what="what runs there before its turn is over")
            if self._away is None:  # Else it was not restored completely.
                self._away = self._copies()
            self._pages.unmap()
            torch.cuda.empty_cache()

    def _copies(self) -> tuple[Tensor, list[Tensor]]:
        """Copy the pages in use, for each layer, to the host."""
        used = torch.tensor(self._used(), dtype=torch.int64, device=self._device)
        halves = [half for layer in self._view for half in layer] if used.numel() else []
        copies = [_pinned(half.index_select(0, used)) for half in halves]
        _until_idle(self._device, what="copies to the host")
        return used.cpu(), copies

    def enter(self) -> None:
        if self._away is None:
            return
        used, copies = self._away
        with torch.cuda.device(self._device), torch.no_grad():
            self._pages.map()
            # Positions that are masked are multiplied with zero, and must be finite.
            self._view.zero_()
            index = used.to(self._device)
            halves = [half for layer in self._view for half in layer]
            for half, copy in zip(halves, copies, strict=False):
                half.index_copy_(0, index, copy.to(self._device, non_blocking=True))
            _until_idle(self._device, what="copies from the host")
        self._away = None


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
