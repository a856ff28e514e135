"""Which device a worker computes on, how ranks tell devices apart, and what equal bits take there."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from kintsugi.errors import DeviceError
from kintsugi.types import Role, role_of

CPU_IDENTITY = "cpu"


def choose_device(process: str, *, broken: tuple[str, ...] = ()) -> torch.device:
    """Ranks take the host's accelerators from the first on, generation servers from the last one back.

    So a host with enough of them gives every process its own, and one with a single card shares it among all. Those
    whose identity is among `broken` are left out, and there must be another.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    cards = usable_cards(broken)
    if not cards:
        raise DeviceError(f"{process} can see no accelerator that is not broken: {', '.join(broken)}")
    return cards[device_index(process, num_devices=len(cards))]


def usable_cards(broken: tuple[str, ...]) -> list[torch.device]:
    """Those that this process can see, without the broken ones."""
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [card for card in cards if identity(card) not in broken] if broken else cards


def device_index(process: str, *, num_devices: int) -> int:
    """`[device_index(name, num_devices=4) for name in ("model-0", "model-1", "server-0")] == [0, 1, 3]`."""
    number = int(process.rpartition("-")[2])
    if role_of(process) is Role.SERVER:
        number = -1 - number
    return number % num_devices


class Prepared(Protocol):
    """What a spare knows of itself."""

    @property
    def broken_chips(self) -> tuple[str, ...]: ...


def prepare(bootstrap: Prepared) -> int:
    """Get a spare process ready for what a worker meets first: the driver, and a context on the card.

    Where there are several cards nobody knows yet which one it will be, and a context on another would only take its
    memory: there it is the driver alone. Computes nothing, as kernels are chosen by the first who does.
    """
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.init()
        cards = usable_cards(bootstrap.broken_chips)
        if len(cards) == 1:
            torch.empty(1, device=cards[0])
            torch.cuda.synchronize(cards[0])
    return 0


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
