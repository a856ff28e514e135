"""Selection and identity of a worker's device, and the settings that equal bits need there."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from kintsugi.errors import DeviceError
from kintsugi.model.memory import device_index

CPU_IDENTITY = "cpu"


def choose_device(process: str, *, broken: tuple[str, ...] = ()) -> torch.device:
    """Assign the host's accelerators: to ranks from the first on, to generation servers from the last one back.

    A host with enough of them gives every process its own, and a single GPU is shared by all. Accelerators with an
    identity in `broken` are left out; there must be another.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = usable_gpus(broken)
    if not gpus:
        raise DeviceError(f"{process} can see no accelerator that is not broken: {', '.join(broken)}")
    return gpus[device_index(process, num_devices=len(gpus))]


def usable_gpus(broken: tuple[str, ...]) -> list[torch.device]:
    """Accelerators that this process can see, without the broken ones."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [gpu for gpu in gpus if identity(gpu) not in broken] if broken else gpus


class Prepared(Protocol):
    """The part of a spare process's bootstrap that `prepare` uses."""

    @property
    def broken_chips(self) -> tuple[str, ...]: ...


def prepare(bootstrap: Prepared) -> int:
    """Prepare a spare process for the first needs of a worker: the driver, and a context on the GPU.

    With several GPUs it is not known yet which one the worker will use, and a context on another would only take its
    memory: there only the driver is loaded. Computes nothing, because the first computation selects kernels.
    """
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.init()
        gpus = usable_gpus(bootstrap.broken_chips)
        if len(gpus) == 1:
            initialize(gpus[0])
    return 0


def initialize(device: torch.device) -> None:
    """Create this process's context on an accelerator, which takes tenths of a second; does nothing on a CPU."""
    if device.type == "cuda":
        torch.empty(1, device=device)
        torch.cuda.synchronize(device)


def identity(device: torch.device) -> str:
    """Equal for two processes if, and only if, they share an accelerator; all CPUs count as the same."""
    if device.type != "cuda":
        return CPU_IDENTITY
    return str(torch.cuda.get_device_properties(device).uuid)


def use_deterministic_kernels() -> None:
    """Make equal inputs give equal bits on an accelerator, also in backward passes; call before its first use.

    CPU kernels are deterministic already. Set by the debug mode because `torch.use_deterministic_algorithms` imports
    torch's compiler, which takes seconds.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
