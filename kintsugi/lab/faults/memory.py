"""Memory: a process that is killed by the kernel for it, whose allocations fail, or that grows without end."""

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

import msgspec

from kintsugi.lab.faults.cgroup import GroupedFault
from kintsugi.lab.faults.mechanism import TICK_S, FaultImpossible, FaultMechanism, end_with_parent
from kintsugi.lab.injector.undo_log import RemovePath, RestoreLimit, RestoreOomScore
from kintsugi.lab.testbed.growth import GrowthOrder, order_file
from kintsugi.lab.testbed.process_tags import carries
from kintsugi.lab.testbed.run import MARK
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.waits import wait

MIB = 1 << 20
DEFAULT_RATE = 256.0 * MIB
DEFAULT_LIMIT = 256.0 * MIB
SMALLEST_LIMIT = 4 * MIB
DEFAULT_GROWTH_LIMIT = 2048.0 * MIB
ROOM_BYTES = 256 * 1024
"""Bytes above the current usage, so that the process fails at an allocation of its own and not immediately."""


class MemoryHog(GroupedFault):
    """Grows a second process in the target's memory control group until the kernel kills the target.

    The growing process belongs to the laboratory, like a neighbour in the same container. The target has the higher OOM
    score, so the kernel kills it first.
    """

    name = "growing neighbour in a memory control group"
    controller = "memory"
    supported_parameters = frozenset({"rate", "limit"})

    def set_up(self) -> None:
        limit = int(self.parameter("limit", DEFAULT_LIMIT))
        if limit < SMALLEST_LIMIT:
            raise FaultImpossible(
                f"expected a memory `limit` of at least {SMALLEST_LIMIT} bytes, got {limit}"
            )
        self.write_control("memory.max" if self.version == 2 else "memory.limit_in_bytes", str(limit))
        self._prefer_target()
        self._grown = mmap.mmap(-1, mmap.PAGESIZE)
        rate, parent = self.parameter("rate", DEFAULT_RATE), os.getpid()
        self._hog = os.fork()
        if self._hog == 0:
            try:
                _grow(self._grown, group=self.group, rate=rate, limit=limit, parent=parent)
            finally:
                # The forked child must never continue as a second injector process.
                os._exit(1)

    def _prefer_target(self) -> None:
        """Raise the target's OOM score: the kernel kills the process with the highest score first."""
        score = Path(f"/proc/{self.pid}/oom_score_adj")
        try:
            self.before(RestoreOomScore(self.context.target, score.read_text().strip()))
            score.write_text("1000")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise FaultImpossible(f"process {self.pid} had ended before the fault could begin") from error

    def tick(self, strength: float) -> float:
        self.measured["grown_bytes"] = float(struct.unpack_from("=Q", self._grown)[0])
        return TICK_S

    def end(self) -> None:
        hog, self._hog = getattr(self, "_hog", 0), 0
        if hog:
            os.kill(hog, signal.SIGKILL)
            os.waitpid(hog, 0)
        super().end()


def _grow(grown: mmap.mmap, *, group: Path, rate: float, limit: int, parent: int) -> NoReturn:
    """Body of the growing process: takes memory at a rate up to the limit, and keeps it until it is killed."""
    end_with_parent(parent)
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
        _pause(TICK_S / 5)


def _pause(seconds: float) -> None:
    def attempt(remaining_s: float) -> bool | None:
        time.sleep(min(remaining_s, seconds))
        return True

    wait(attempt, whom="timer", what="a moment", timeout_s=1.0)


class AllocationLimit(FaultMechanism):
    """Limits the data segment to its current size: the next large allocation fails, and the process is not killed.

    The limit is RLIMIT_DATA. A limit of the address space (RLIMIT_AS) would not work: memory that the C library has
    reserved beforehand already counts as address space.
    """

    name = "limit of its data"
    supported_parameters = frozenset({"room"})

    @property
    def room(self) -> int:
        """Bytes that the process may still allocate."""
        return int(self.parameter("room", ROOM_BYTES))

    def prepare(self) -> None:
        self._before = resource.prlimit(self.pid, resource.RLIMIT_DATA)
        self.before(RestoreLimit(self.context.target, "DATA", *self._before))

    def begin(self) -> None:
        self._end: int | None = None
        self.tick(1.0)
        if self._end is None:
            raise FaultImpossible(f"process {self.pid} had ended before the fault could begin")

    def tick(self, strength: float) -> float:
        """Lower the limit when the process frees memory, so that it can not allocate that memory again."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            used = _data_of(self.pid)
            if used is not None:
                end = used + self.room
                self._end = end if self._end is None else min(self._end, end)
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (self._end, self._before[1]))
                self.measured["limit_bytes"] = float(self._end)
        return TICK_S


def _data_of(pid: int) -> int | None:
    """Return the bytes of private memory of a process; None when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None


class GrowingProcess(FaultMechanism):
    """The process itself takes more and more memory, of its accelerator if it uses one, and gives it back at the end.

    Programs of a run in the laboratory have a thread for it (`lab/testbed/growth.py`).
    """

    name = "memory that it does not give back"
    supported_parameters = frozenset({"rate", "limit"})

    @classmethod
    def unsupported_for(cls, pid: int, *, may_share_network: bool = False) -> str | None:
        return None if carries(pid, MARK) else "expected a process of a run that the laboratory has started"

    def prepare(self) -> None:
        self.before(RemovePath(str(order_file(self.pid))))

    def begin(self) -> None:
        order = GrowthOrder(
            self.parameter("rate", DEFAULT_RATE), self.parameter("limit", DEFAULT_GROWTH_LIMIT)
        )
        write_atomically(order_file(self.pid), msgspec.json.encode(order), durable=False)
        self._began = SYSTEM_CLOCK.monotonic()

    def tick(self, strength: float) -> float:
        taken = (SYSTEM_CLOCK.monotonic() - self._began) * self.parameter("rate", DEFAULT_RATE)
        self.measured["grown_bytes"] = min(taken, self.parameter("limit", DEFAULT_GROWTH_LIMIT))
        return TICK_S
