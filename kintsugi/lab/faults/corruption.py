"""Silent corruption: inverted bytes in memory or files, and wrong rounding.

Corrupted bytes stay corrupted after the fault: the run has to detect them. Only the corrupting ends.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

from kintsugi.lab.faults import fpu_rounding
from kintsugi.lab.faults.mechanism import FaultImpossible, FaultMechanism
from kintsugi.lab.injector.undo_log import RestoreRounding, threads_of
from kintsugi.lab.testbed.ports import opened
from kintsugi.run_folder.layout import RunFolder

SMALLEST_BYTES = 4096
DEFAULT_BYTES = 64.0
ROUND_S = 0.1


class ChangedRounding(FaultMechanism):
    """Makes every thread round towards zero: results differ from those of its peers in the last bits."""

    name = "another rounding of every thread (ptrace)"

    @classmethod
    def missing(cls) -> str | None:
        return fpu_rounding.missing()

    def begin(self) -> None:
        self.before(RestoreRounding(self.context.target))
        self._threads: frozenset[int] = frozenset()
        self.tick(1.0)
        if not self._threads:
            raise FaultImpossible(f"process {self.pid} had ended before the fault could begin")

    def tick(self, strength: float) -> float:
        """Set the rounding of new threads; a thread inherits the rounding of its creator, so this is a safeguard."""
        with suppress(FileNotFoundError, ProcessLookupError):
            threads = frozenset(threads_of(self.pid))
            if threads - self._threads:
                fpu_rounding.set_rounding(self.pid, fpu_rounding.TOWARDS_ZERO)
                self._threads = threads
        self.measured["threads"] = float(len(self._threads))
        return ROUND_S


class FlippedMemory(FaultMechanism):
    """Inverts bytes of the memory that the target shares with others, such as weights on their way to a server."""

    name = "inverted bytes in its shared memory"
    shares_memory = True
    supported_parameters = frozenset({"bytes"})

    def begin(self) -> None:
        self._random = random.Random(self.context.seed)
        if not self._files():
            raise FaultImpossible(
                f"process {self.pid} shares no memory of {SMALLEST_BYTES} bytes or more with another process"
            )
        self.tick(1.0)

    def _files(self) -> list[Path]:
        found = {}
        for path, target in opened(self.pid):
            with suppress(OSError):
                if target.startswith("/memfd:") and (status := path.stat()).st_size >= SMALLEST_BYTES:
                    found[status.st_ino] = path
        return list(found.values())

    def tick(self, strength: float) -> float:
        for path in self._files():
            with suppress(OSError):  # Sealed against writes, or gone.
                self.measured["inverted_bytes"] = self.measured.get("inverted_bytes", 0.0) + invert(
                    path, count=int(self.parameter("bytes", DEFAULT_BYTES)), choose=self._random
                )
        return ROUND_S


class FlippedFiles(FaultMechanism):
    """Inverts bytes of the newest checkpoint, as a failing disk does."""

    name = "inverted bytes in its newest checkpoint"
    lasts = False
    supported_parameters = frozenset({"bytes"})

    def begin(self) -> None:
        folders = sorted(
            RunFolder(self.context.run_dir).checkpoints_folder.glob("step-*"), key=os.path.getmtime
        )
        files = [path for path in (folders[-1].rglob("*") if folders else ()) if path.is_file()]
        large = max(files, key=lambda path: path.stat().st_size, default=None)
        if large is None:
            raise FaultImpossible("the run has no checkpoint yet")
        count = int(self.parameter("bytes", DEFAULT_BYTES))
        self.measured["inverted_bytes"] = float(
            invert(large, count=count, choose=random.Random(self.context.seed))
        )


def invert(path: Path, *, count: int, choose: random.Random) -> int:
    """Invert `count` bytes of a file at random positions; return the number."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        for _ in range(count):
            place = choose.randrange(size)
            (byte,) = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 0xFF]), place)
    finally:
        os.close(descriptor)
    return count
