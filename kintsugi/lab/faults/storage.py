"""Disk faults: full, busy with other writes, or failing."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.faults.cgroup import GroupedFault
from kintsugi.lab.faults.mechanism import TICK_S, FaultImpossible, FaultMechanism, end_with_parent
from kintsugi.lab.injector.undo_log import RemovePath
from kintsugi.lab.testbed import cgroups, tools
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import join, wait

MIB = 1 << 20
LARGEST_DISK_BYTES = 8 << 30
"""Largest disk that is filled when it does not belong to the laboratory: a larger one is shared, and takes long to
fill."""
DEFAULT_SHARE = 1.0
DEFAULT_BLOCK_BYTES = 1 * MIB
DEFAULT_LIMIT = 256.0 * 1024
DEFAULT_RATE = 512.0 * MIB
LOAD_FILE_BYTES = 64 * MIB
NUM_WRITERS = 4
SMALLEST_CHUNK_BYTES = 4096
MOST_SMALL_FILES = 200_000
"""Limit of files: more would take longer to create and remove than a fault lasts."""
END_TIMEOUT_S = 5.0


class _DiskFault(FaultMechanism):
    """Base class: works on the disk of the run folder, in a file next to the folder."""

    def prepare(self) -> None:
        self.disk = Path(self.context.disk or self.context.run_dir)
        size = os.statvfs(self.disk).f_blocks * os.statvfs(self.disk).f_frsize
        if self.context.disk is None and size > LARGEST_DISK_BYTES:
            raise FaultImpossible(
                f"the run's folder is on a disk of {size >> 30} GiB that others use too: "
                "run it on a testbed with its own disk"
            )
        self.path = self.disk / f".{uuid4().hex[:12]}"
        self.before(RemovePath(str(self.path)))


class DiskFiller(_DiskFault):
    """Fills the disk with one file, and fills space that is freed later."""

    name = "a file that takes the room"
    supported_parameters = frozenset({"share"})
    ramps = True

    def begin(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        found = os.statvfs(self.disk)
        total = found.f_blocks * found.f_frsize
        keep = round(total * (1 - strength * self.parameter("share", DEFAULT_SHARE)))
        room = piece = found.f_bavail * found.f_frsize - keep
        while piece >= SMALLEST_CHUNK_BYTES:
            try:
                os.posix_fallocate(self._descriptor, self._size, piece)
            except OSError:  # The last of it does not fit in one piece.
                piece //= 2
                continue
            self._size += piece
            room -= piece
            piece = min(piece, room)
        self.measured["filled_bytes"] = float(self._size)
        return TICK_S / 2

    def end(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
        super().end()


class SmallFiles(_DiskFault):
    """Uses up the inodes with empty files: there is space left, but no file can be created."""

    name = "empty files that take the inodes"
    supported_parameters = frozenset({"share"})
    ramps = True

    def prepare(self) -> None:
        super().prepare()
        inodes = os.statvfs(self.disk).f_files
        if not 0 < inodes <= MOST_SMALL_FILES:
            raise FaultImpossible(
                f"expected a disk of the run folder with 1 to {MOST_SMALL_FILES} inodes (0: created on demand), "
                f"got {inodes}"
            )

    def begin(self) -> None:
        self._count = 0
        self.path.mkdir()
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        found = os.statvfs(self.disk)
        keep = round(found.f_files * (1 - strength * self.parameter("share", DEFAULT_SHARE)))
        with suppress(OSError):  # The folder itself needs room, of which there may be none before.
            for _ in range(found.f_favail - keep):
                os.close(os.open(self.path / str(self._count), os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._count += 1
        self.measured["files"] = float(self._count)
        return TICK_S / 2


class ContendingWriters(_DiskFault):
    """Writes new blocks to several files and syncs them: a sync of any other process waits for these writes."""

    name = "competing writes, synced"
    supported_parameters = frozenset({"rate", "block_size"})
    ramps = True

    def begin(self) -> None:
        self._block = max(4096, int(self.parameter("block_size", DEFAULT_BLOCK_BYTES)))
        found = os.statvfs(self.disk)
        self._most = min(LOAD_FILE_BYTES, found.f_bavail * found.f_frsize // 4) // NUM_WRITERS
        self._over = threading.Event()
        self._strength = 0.0 if self.injection.ramp_s else 1.0
        self._written = [0] * NUM_WRITERS
        self.path.mkdir()
        self._threads = [
            threading.Thread(target=self._write, args=(index,), name=f"writer-{index}", daemon=True)
            for index in range(NUM_WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, index: int) -> None:
        """Write a file up to its share and start over: new blocks need allocation and journaling, overwritten ones do
        not."""
        block, began = os.urandom(self._block), SYSTEM_CLOCK.monotonic()
        with (self.path / str(index)).open("wb", buffering=0) as file:
            while not self._over.is_set():
                rate = self.parameter("rate", DEFAULT_RATE) * self._strength / NUM_WRITERS
                due = began + self._written[index] / rate if rate else began + 3600.0
                early_s = due - SYSTEM_CLOCK.monotonic()
                if early_s > 0:
                    self._pause(min(early_s, TICK_S))
                    continue
                try:
                    self._written[index] += file.write(block)
                    os.fdatasync(file.fileno())
                except OSError:  # The disk is full for another reason, and may stay so.
                    self._pause(TICK_S)
                if file.tell() + self._block > self._most:
                    file.seek(0)
                    file.truncate()

    def _pause(self, seconds: float) -> None:
        with suppress(DeadlineExceeded):
            wait(
                lambda remaining_s: self._over.wait(remaining_s) or None,
                whom="timer",
                what="the next block's turn",
                timeout_s=seconds,
            )

    def tick(self, strength: float) -> float:
        self._strength = strength
        self.measured["written_bytes"] = float(sum(self._written))
        return TICK_S

    def end(self) -> None:
        if hasattr(self, "_threads"):
            self._over.set()
            for thread in self._threads:
                _join(thread)
        super().end()


class WriteLimit(GroupedFault):
    """Limits writes to the disk of the run folder to a number of bytes per second: syncs take accordingly long."""

    name = "write limit of a control group"
    controller = "blkio"
    supported_parameters = frozenset({"limit"})

    @classmethod
    def missing(cls) -> str | None:
        return cgroups.missing("blkio") and cgroups.missing("io")

    def prepare(self) -> None:
        self.controller = "blkio" if cgroups.missing("blkio") is None else "io"
        number = os.stat(self.context.disk or self.context.run_dir).st_dev
        if os.major(number) == 0:
            raise FaultImpossible("the run's folder is on a disk in memory, which has no writes to limit")
        self._device = f"{os.major(number)}:{os.minor(number)}"
        super().prepare()

    def set_up(self) -> None:
        rate = max(4096, int(self.parameter("limit", DEFAULT_LIMIT)))
        if self.version == 2:
            self.write_control("io.max", f"{self._device} wbps={rate}")
        else:
            self.write_control("blkio.throttle.write_bps_device", f"{self._device} {rate}")
        self.measured["limit"] = float(rate)


def _join(thread: threading.Thread) -> None:
    with suppress(DeadlineExceeded):
        join(thread, whom=thread.name, what="its end", timeout_s=END_TIMEOUT_S)


class FailingCalls(FaultMechanism):
    """Makes system calls that sync files fail with EIO, by ptrace."""

    name = "failing system calls (strace)"
    supported_parameters = frozenset({"share"})

    @classmethod
    def missing(cls) -> str | None:
        return None if tools.has("strace") else "strace is not installed (Debian: strace)"

    def begin(self) -> None:
        share = self.parameter("share", 1.0)
        every = max(1, round(1 / share)) if share > 0 else 1
        calls = "fsync,fdatasync,sync_file_range"
        self._tracer: Child = SystemProcesses().spawn(
            [
                *("strace", "--follow-forks", "--quiet=all", "--trace", calls),
                *("--inject", f"{calls}:error=EIO:when=1+{every}"),
                *("--output", "/dev/null", "--attach", str(self.pid)),
            ],
            before_exec=partial(end_with_parent, os.getpid()),
            new_session=True,
        )
        self._wait_attached()

    def _wait_attached(self) -> None:
        status = Path(f"/proc/{self.pid}/status")

        def attempt(remaining_s: float) -> bool | None:
            if self._tracer.ended():
                raise FaultImpossible(f"strace could not attach to process {self.pid}")
            with suppress(FileNotFoundError, ProcessLookupError):
                if f"TracerPid:\t{self._tracer.pid}" in status.read_text():
                    return True
            threading.Event().wait(min(remaining_s, 0.002))
            return None

        wait(attempt, whom="strace", what="to attach", timeout_s=END_TIMEOUT_S)

    def end(self) -> None:
        """End the tracer: on SIGTERM it detaches from all threads; when it is killed, the kernel detaches them."""
        if hasattr(self, "_tracer"):
            self._tracer.send_signal(signal.SIGTERM)
            try:
                self._tracer.wait_ended(whom="strace", timeout_s=1.0)
            except DeadlineExceeded:
                self._tracer.send_signal(signal.SIGKILL)
                self._tracer.wait_ended(whom="strace", timeout_s=END_TIMEOUT_S)
            self._tracer.close()
        super().end()
