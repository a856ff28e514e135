"""A disk that is full, that is busy with somebody else's writes, or that fails."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from kintsugi.errors import DeadlineExceeded
from kintsugi.lab import groups, tools
from kintsugi.lab.abilities.fault import TICK_S, Fault, Impossible, end_with_parent
from kintsugi.lab.abilities.grouped import GroupedFault
from kintsugi.lab.undo import Remove
from kintsugi.runtime import SYSTEM_CLOCK, Child, SystemProcesses, wait

MIB = 1 << 20
LARGEST_DISK_BYTES = 8 << 30
"""Of a disk that is not the laboratory's own: what is larger is somebody's, and would take long to fill."""
DEFAULT_SHARE = 1.0
DEFAULT_BLOCK_BYTES = 1 * MIB
DEFAULT_LIMIT = 256.0 * 1024
DEFAULT_RATE = 512.0 * MIB
LOAD_FILE_BYTES = 64 * MIB
NUM_WRITERS = 4
SMALLEST_CHUNK_BYTES = 4096
MOST_CRUMBS = 200_000
"""More would take longer to make, and to remove, than a fault lasts."""
END_TIMEOUT_S = 5.0


class _DiskFault(Fault):
    """On the disk that the run's folder is on, in a file beside the folder."""

    def prepare(self) -> None:
        self.disk = Path(self.scene.disk or self.scene.run_dir)
        size = os.statvfs(self.disk).f_blocks * os.statvfs(self.disk).f_frsize
        if self.scene.disk is None and size > LARGEST_DISK_BYTES:
            raise Impossible(
                f"the run's folder is on a disk of {size >> 30} GiB that others use too: "
                "give the run a place with a disk of its own"
            )
        self.path = self.disk / f".{uuid4().hex[:12]}"
        self.before(Remove(str(self.path)))


class Filler(_DiskFault):
    """A file that takes the room, and takes it again when there is more."""

    name = "a file that takes the room"
    words = frozenset({"share"})
    ramps = True

    def begin(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = 0
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        found = os.statvfs(self.disk)
        total = found.f_blocks * found.f_frsize
        keep = round(total * (1 - strength * self.amount("share", DEFAULT_SHARE)))
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


class Crumbs(_DiskFault):
    """Empty files that take the inodes: there is room, and no file can be made."""

    name = "empty files that take the inodes"
    words = frozenset({"share"})
    ramps = True

    def prepare(self) -> None:
        super().prepare()
        inodes = os.statvfs(self.disk).f_files
        if not 0 < inodes <= MOST_CRUMBS:
            raise Impossible(
                f"expected a disk of the run's folder with 1 to {MOST_CRUMBS} inodes (0: they are made as they are "
                f"needed), got {inodes}"
            )

    def begin(self) -> None:
        self._count = 0
        self.path.mkdir()
        self.tick(0.0 if self.injection.ramp_s else 1.0)

    def tick(self, strength: float) -> float:
        found = os.statvfs(self.disk)
        keep = round(found.f_files * (1 - strength * self.amount("share", DEFAULT_SHARE)))
        with suppress(OSError):  # The folder itself needs room, of which there may be none before.
            for _ in range(found.f_favail - keep):
                os.close(os.open(self.path / str(self._count), os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._count += 1
        self.measured["files"] = float(self._count)
        return TICK_S / 2


class Writers(_DiskFault):
    """New blocks of several files, synced one after the other: whoever else syncs waits for all of it to be written."""

    name = "competing writes, synced"
    words = frozenset({"rate", "block_size"})
    ramps = True

    def begin(self) -> None:
        self._block = max(4096, int(self.amount("block_size", DEFAULT_BLOCK_BYTES)))
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
        """A file that grows to its share and begins anew: only new blocks have to be allocated and journaled."""
        block, began = os.urandom(self._block), SYSTEM_CLOCK.monotonic()
        with (self.path / str(index)).open("wb", buffering=0) as file:
            while not self._over.is_set():
                rate = self.amount("rate", DEFAULT_RATE) * self._strength / NUM_WRITERS
                due = began + self._written[index] / rate if rate else began + 3600.0
                early_s = due - SYSTEM_CLOCK.monotonic()
                if early_s > 0:
                    self._pause(min(early_s, TICK_S))
                    continue
                try:
                    self._written[index] += file.write(block)
                    os.fdatasync(file.fileno())
                except OSError:  # A full disk is somebody else's doing, and lasts.
                    self._pause(TICK_S)
                if file.tell() + self._block > self._most:
                    file.seek(0)
                    file.truncate()

    def _pause(self, seconds: float) -> None:
        with suppress(DeadlineExceeded):
            wait(
                lambda remaining_s: self._over.wait(remaining_s) or None,
                whom="nobody",
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
    """So many bytes a second to the disk of the run's folder, and no more: its syncs take as long as that needs."""

    name = "write limit of a control group"
    controller = "blkio"
    words = frozenset({"limit"})

    @classmethod
    def missing(cls) -> str | None:
        return groups.missing("blkio") and groups.missing("io")

    def prepare(self) -> None:
        self.controller = "blkio" if groups.missing("blkio") is None else "io"
        number = os.stat(self.scene.disk or self.scene.run_dir).st_dev
        if os.major(number) == 0:
            raise Impossible("the run's folder is on a disk in memory, which has no writes to limit")
        self._device = f"{os.major(number)}:{os.minor(number)}"
        super().prepare()

    def set_up(self) -> None:
        rate = max(4096, int(self.amount("limit", DEFAULT_LIMIT)))
        if self.version == 2:
            self.say("io.max", f"{self._device} wbps={rate}")
        else:
            self.say("blkio.throttle.write_bps_device", f"{self._device} {rate}")
        self.measured["limit"] = float(rate)


def _join(thread: threading.Thread) -> None:
    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    with suppress(DeadlineExceeded):
        wait(attempt, whom=thread.name, what="its end", timeout_s=END_TIMEOUT_S)


class FailingCalls(Fault):
    """System calls of the target that sync files fail with EIO, by the kernel's debugging interface."""

    name = "failing system calls (strace)"
    words = frozenset({"share"})

    @classmethod
    def missing(cls) -> str | None:
        return None if tools.has("strace") else "strace is not installed (Debian: strace)"

    def begin(self) -> None:
        share = self.amount("share", 1.0)
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
                raise Impossible(f"strace could not attach to process {self.pid}")
            with suppress(FileNotFoundError, ProcessLookupError):
                if f"TracerPid:\t{self._tracer.pid}" in status.read_text():
                    return True
            threading.Event().wait(min(remaining_s, 0.002))
            return None

        wait(attempt, whom="strace", what="to attach", timeout_s=END_TIMEOUT_S)

    def end(self) -> None:
        """A tracer that ends by itself lets go of everybody first; one that is killed is let go of by the kernel."""
        if hasattr(self, "_tracer"):
            self._tracer.send_signal(signal.SIGTERM)
            try:
                self._tracer.wait_ended(whom="strace", timeout_s=1.0)
            except DeadlineExceeded:
                self._tracer.send_signal(signal.SIGKILL)
                self._tracer.wait_ended(whom="strace", timeout_s=END_TIMEOUT_S)
            self._tracer.close()
        super().end()
