"""Programs of a run in the laboratory: the usual ones, each beside a thread that can make its process grow.

A process is asked to grow by a file, `/dev/shm/kintsugi-grow-<pid>` (`lab/faults/memory.py`): the thread takes memory
at the rate that the file names, of its accelerator if it uses one, and gives it back when the file is gone. So the
growth is the process's own, as that of a program that forgets to free something.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kintsugi.cluster.handover import PROGRAMS, Programs
from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import WaitTable, wait
from kintsugi.types import Role

FOLDER = Path("/dev/shm")
POLL_S = 0.25
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, of malloc.h."""
KEPT_BYTES = 131072
MOST_POLLS_BEHIND = 4
"""Time that is made up for at once after a pause, in polls."""
ROLES = (Role.MODEL, Role.SERVER, Role.ROLLOUT)
"""Roles that can be made to grow."""


class GrowthOrder(msgspec.Struct, frozen=True):
    """Contents of the file."""

    rate: float
    """Bytes a second."""
    limit: float
    """Bytes at which it stops."""


def order_file(pid: int, *, folder: Path = FOLDER) -> Path:
    return folder / f"kintsugi-grow-{pid}"


def with_growth(programs: Programs, *, gives_back: bool = False) -> Programs:
    """Return the same programs, which can be made to grow; with `gives_back` they return freed memory to the kernel."""
    entry = f"{__name__}:{'main_giving_back' if gives_back else 'main'}"
    return msgspec.structs.replace(
        programs,
        entries={**programs.entries, **dict.fromkeys(ROLES, entry)},
        preload=(*programs.preload, __name__) if programs.preload else (),
    )


def main_giving_back(bootstrap: Bootstrap) -> int:
    """Body of a process whose C library returns freed memory immediately, also where the environment does not say so:
    memory that it keeps could not be refused to the process."""
    library = ctypes.CDLL(None)
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        library.mallopt(parameter, KEPT_BYTES)
    return main(bootstrap)


def main(bootstrap: Bootstrap) -> int:
    """Body of a process: its usual program, beside the thread."""
    growth = Growth(order_file(os.getpid()))
    threading.Thread(target=growth.run, name="growth", daemon=True).start()
    module, _, function = PROGRAMS.entries[bootstrap.role].partition(":")
    program: Callable[[Bootstrap], int] = getattr(importlib.import_module(module), function)
    return program(bootstrap)


class Growth:
    """Takes and gives back memory as the file says; `step` is one look at it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[object] = []
        self.size = 0.0
        self._looked_at = 0.0

    def run(self) -> None:
        """Look at the file for as long as the process lives; declared in a table of its own, since it is no wait of
        the process."""
        waits, never = WaitTable(), threading.Event()
        while True:
            self.step(SYSTEM_CLOCK.monotonic())
            with suppress(DeadlineExceeded):
                wait(
                    lambda remaining_s: never.wait(remaining_s) or None,
                    whom="itself",
                    what="the next look",
                    timeout_s=POLL_S,
                    waits=waits,
                )

    def step(self, now: float) -> None:
        try:
            order = msgspec.json.decode(self._path.read_bytes(), type=GrowthOrder)
        except (OSError, msgspec.MsgspecError):
            if self._kept:
                self._kept, self.size = [], 0.0
                _give_back()
            self._looked_at = now
            return
        seconds = min(now - self._looked_at, MOST_POLLS_BEHIND * POLL_S)
        self._looked_at = now
        piece = int(min(order.rate * seconds, order.limit - self.size))
        if piece > 0:
            self._kept.append(_allocate(piece))
            self.size += piece


def _allocate(size: int) -> object:
    """Take memory of the accelerator that this process uses; otherwise of the host, with every page in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.zeros(size, dtype=torch.uint8, device="cuda")
    return bytearray(b"\1") * size


def _give_back() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
