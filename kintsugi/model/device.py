"""Which device a worker computes on, how ranks tell devices apart, and what equal bits take there."""

from __future__ import annotations

import os

import torch

from kintsugi.types import Role, role_of

CPU_IDENTITY = "cpu"


def choose_device(process: str) -> torch.device:
    """Ranks take the host's accelerators from the first on, generation servers from the last one back.

    So a host with enough of them gives every process its own, and one with a single card shares it among all.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(process, num_devices=torch.cuda.device_count()))


def device_index(process: str, *, num_devices: int) -> int:
    """`[device_index(name, num_devices=4) for name in ("model-0", "model-1", "server-0")] == [0, 1, 3]`."""
    number = int(process.rpartition("-")[2])
    if role_of(process) is Role.SERVER:
        number = -1 - number
    return number % num_devices


def identity(device: torch.device) -> str:
    """The same for two processes if, and only if, they share an accelerator; every CPU counts as the same."""
    if device.type != "cuda":
        return CPU_IDENTITY
    return str(torch.cuda.get_device_properties(device).uuid)


def use_deterministic_kernels() -> None:
    """From now on equal inputs give equal bits on an accelerator, also in backward passes; call before its first use.

    CPU kernels are deterministic by themselves. Set by the debug mode because `torch.use_deterministic_algorithms`
    imports torch's compiler, which takes seconds.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
