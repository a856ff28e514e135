"""A process whose memory runs out: killed for it, or refused more."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import struct
import time
from pathlib import Path
from typing import NoReturn

from kintsugi.lab.abilities.fault import TICK_S, Fault, Impossible, end_with_parent
from kintsugi.lab.abilities.grouped import GroupedFault
from kintsugi.lab.undo import Limit, Score
from kintsugi.runtime import SYSTEM_CLOCK, wait

MIB = 1 << 20
DEFAULT_RATE = 256.0 * MIB
DEFAULT_LIMIT = 256.0 * MIB
SMALLEST_LIMIT = 4 * MIB
ROOM_BYTES = 256 * 1024
"""Above what a process has, so that it fails at an allocation of its own and not at once."""


class MemoryHog(GroupedFault):
    """In one control group with the target: memory grows at a rate up to the group's limit, then the kernel kills.

    What grows is ours, as a neighbour's in the same container would be; the kernel is told to kill the target first.
    """

    name = "growing neighbour in a memory control group"
    controller = "memory"
    words = frozenset({"rate", "limit"})

    def set_up(self) -> None:
        limit = int(self.amount("limit", DEFAULT_LIMIT))
        if limit < SMALLEST_LIMIT:
            raise Impossible(f"expected a memory `limit` of at least {SMALLEST_LIMIT} bytes, got {limit}")
        self.say("memory.max" if self.version == 2 else "memory.limit_in_bytes", str(limit))
        self._prefer_target()
        self._grown = mmap.mmap(-1, mmap.PAGESIZE)
        rate, culprit = self.amount("rate", DEFAULT_RATE), os.getpid()
        self._hog = os.fork()
        if self._hog == 0:
            try:
                _grow(self._grown, group=self.group, rate=rate, limit=limit, culprit=culprit)
            finally:
                # Whatever becomes of it, it must not go on as a second culprit.
                os._exit(1)

    def _prefer_target(self) -> None:
        """The kernel kills the one with the highest score first."""
        score = Path(f"/proc/{self.pid}/oom_score_adj")
        try:
            self.before(Score(self.scene.target, score.read_text().strip()))
            score.write_text("1000")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise Impossible(f"process {self.pid} had ended before the fault could begin") from error

    def tick(self, strength: float) -> float:
        self.measured["grown_bytes"] = float(struct.unpack_from("=Q", self._grown)[0])
        return TICK_S

    def end(self) -> None:
        hog, self._hog = getattr(self, "_hog", 0), 0
        if hog:
            os.kill(hog, signal.SIGKILL)
            os.waitpid(hog, 0)
        super().end()


def _grow(grown: mmap.mmap, *, group: Path, rate: float, limit: int, culprit: int) -> NoReturn:
    """The neighbour: takes memory at a rate until there is none, and then keeps it until it is ended."""
    end_with_parent(culprit)
    Path("/proc/self/oom_score_adj").write_text("900")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard, size, began = os.memfd_create("hoard"), 0, SYSTEM_CLOCK.monotonic()
    while True:
        wanted = min(limit, int((SYSTEM_CLOCK.monotonic() - began) * rate))
        with contextlib.suppress(OSError):
            while size < wanted:
                os.posix_fallocate(hoard, size, min(MIB, wanted - size))
                size += min(MIB, wanted - size)
                struct.pack_into("=Q", grown, 0, size)
        _nap(TICK_S / 5)


def _nap(seconds: float) -> None:
    def attempt(remaining_s: float) -> bool | None:
        time.sleep(min(remaining_s, seconds))
        return True

    wait(attempt, whom="nobody", what="a moment", timeout_s=1.0)


class AllocationLimit(Fault):
    """No more memory of its own than it has: its next large allocation fails, and nobody kills it.

    The limit is that of data. One of the address space would not do: what the C library has reserved beforehand is
    address space already, and a process over that limit may even turn it into data beyond the other.
    """

    name = "limit of its data"
    words = frozenset({"room"})

    @property
    def room(self) -> int:
        """Bytes that it may still allocate."""
        return int(self.amount("room", ROOM_BYTES))

    def prepare(self) -> None:
        self._before = resource.prlimit(self.pid, resource.RLIMIT_DATA)
        self.before(Limit(self.scene.target, "DATA", *self._before))

    def begin(self) -> None:
        self._end: int | None = None
        self.tick(1.0)
        if self._end is None:
            raise Impossible(f"process {self.pid} had ended before the fault could begin")

    def tick(self, strength: float) -> float:
        """Pages that it gives back are not given again."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            used = _data_of(self.pid)
            if used is not None:
                end = used + self.room
                self._end = end if self._end is None else min(self._end, end)
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (self._end, self._before[1]))
                self.measured["limit_bytes"] = float(self._end)
        return TICK_S


def _data_of(pid: int) -> int | None:
    """Bytes of memory that is a process's own; None when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None
