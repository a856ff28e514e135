"""What torch and the system raise when a process can not go on, under the names that the rest of it all knows."""

from __future__ import annotations

import errno

import torch

from kintsugi.errors import DeviceError, DeviceOutOfMemory, Unfit


def as_world_error(error: Exception) -> Exception:
    """The device's own fault where there is one behind this error; else the error as it is.

    An illegal access is reported by whatever looks at the device next, perhaps a collective, which must not be blamed.
    The result holds no trace: with it go the frames that keep the memory of what failed.

    >>> as_world_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    DeviceOutOfMemory('CUDA out of memory. Tried to allocate 2 GiB.')
    >>> as_world_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    DeviceError('Triton Error [CUDA]: an illegal memory access was encountered')

    Memory that torch does not manage, as that of a graph or of a kernel's code, is missed in other words:

    >>> as_world_error(RuntimeError("CUDA error: out of memory"))
    DeviceOutOfMemory('CUDA error: out of memory')

    Without an accelerator the host's memory is the device's:

    >>> as_world_error(RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"))
    DeviceOutOfMemory("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    Whoever has no descriptor left can open nothing any more, and does not know what has failed for it already:

    >>> as_world_error(OSError(errno.EMFILE, "Too many open files"))
    Unfit('no descriptor is left to this process: [Errno 24] Too many open files')
    """
    link: BaseException | None = error
    while link is not None:
        text = str(link).partition("\n")[0]
        if isinstance(link, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in text:
            return DeviceOutOfMemory(text)
        if isinstance(link, OSError) and link.errno == errno.EMFILE:
            return Unfit(f"no descriptor is left to this process: {text}")
        if isinstance(link, torch.AcceleratorError) or (
            isinstance(link, RuntimeError) and text.startswith(("CUDA error", "Triton Error [CUDA]"))
        ):
            return DeviceOutOfMemory(text) if "out of memory" in text else DeviceError(text)
        link = link.__cause__
    return error
