"""Translation of fatal errors of a training framework and the system to the package's own error types.

No framework is imported here: an error of one can only occur where it has been imported already.
"""

from __future__ import annotations

import errno
import sys

from kintsugi.errors import DeviceError, DeviceOutOfMemory, Unfit

OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate", "Memory not enough")
"""Words of the host allocators of torch and MindSpore, whose errors have no type of their own."""


def as_world_error(error: Exception) -> Exception:
    """The device's error if it caused this one; else the error unchanged.

    An illegal access is reported by the next operation on the device, perhaps a collective, which is not the cause. The
    result has no traceback, because its frames would keep the memory of the failed operation.

    >>> import torch
    >>> as_world_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."))
    DeviceOutOfMemory('CUDA out of memory. Tried to allocate 2 GiB.')
    >>> as_world_error(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    DeviceError('Triton Error [CUDA]: an illegal memory access was encountered')

    Memory that torch does not manage, as that of a graph or of a kernel's code, has another message:

    >>> as_world_error(RuntimeError("CUDA error: out of memory"))
    DeviceOutOfMemory('CUDA error: out of memory')

    Without an accelerator the host's memory is the device's:

    >>> as_world_error(RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"))
    DeviceOutOfMemory("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    MindSpore's allocator has messages of its own:

    >>> as_world_error(RuntimeError("Allocate memory failed: Memory not enough, size: 8589934592"))
    DeviceOutOfMemory('Allocate memory failed: Memory not enough, size: 8589934592')

    A process without free descriptors can open nothing, and does not know what has failed already:

    >>> as_world_error(OSError(errno.EMFILE, "Too many open files"))
    Unfit('no descriptor is left to this process: [Errno 24] Too many open files')
    """
    torch = sys.modules.get("torch")
    out_of_memory = () if torch is None else torch.OutOfMemoryError
    accelerator_error = () if torch is None else torch.AcceleratorError
    link: BaseException | None = error
    while link is not None:
        text = str(link).partition("\n")[0]
        if isinstance(link, out_of_memory) or any(words in text for words in OUT_OF_MEMORY):
            return DeviceOutOfMemory(text)
        if isinstance(link, OSError) and link.errno == errno.EMFILE:
            return Unfit(f"no descriptor is left to this process: {text}")
        if isinstance(link, accelerator_error) or (
            isinstance(link, RuntimeError) and text.startswith(("CUDA error", "Triton Error [CUDA]"))
        ):
            return DeviceOutOfMemory(text) if "out of memory" in text else DeviceError(text)
        link = link.__cause__
    return error
