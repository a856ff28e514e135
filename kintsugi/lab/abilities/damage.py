"""Bytes that are not those that were written, and numbers that are not those that were to be computed.

What is damaged stays so: it belongs to the target, which has to find out. Only the damaging ends.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

from kintsugi.lab import floating
from kintsugi.lab.abilities.fault import Fault, Impossible
from kintsugi.lab.ports import opened
from kintsugi.lab.undo import Rounding, threads_of

SMALLEST_BYTES = 4096
DEFAULT_BYTES = 64.0
ROUND_S = 0.1


class Rounds(Fault):
    """Every thread rounds towards zero: results differ from those of its peers in the last bits."""

    name = "another rounding of every thread (ptrace)"

    @classmethod
    def missing(cls) -> str | None:
        return floating.missing()

    def begin(self) -> None:
        self.before(Rounding(self.scene.target))
        self._threads: frozenset[int] = frozenset()
        self.tick(1.0)
        if not self._threads:
            raise Impossible(f"process {self.pid} had ended before the fault could begin")

    def tick(self, strength: float) -> float:
        """New threads round like the one that started them; what is new is looked at all the same."""
        with suppress(FileNotFoundError, ProcessLookupError):
            threads = frozenset(threads_of(self.pid))
            if threads - self._threads:
                floating.set_rounding(self.pid, floating.TOWARDS_ZERO)
                self._threads = threads
        self.measured["threads"] = float(len(self._threads))
        return ROUND_S


class FlippedMemory(Fault):
    """Bytes of the memory that the target shares with others, as weights on their way to a server, are inverted."""

    name = "inverted bytes in its shared memory"
    words = frozenset({"bytes"})

    def begin(self) -> None:
        self._random = random.Random(self.scene.seed)
        if not self._files():
            raise Impossible(
                f"process {self.pid} shares no memory of {SMALLEST_BYTES} bytes or more with anybody"
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
                    path, count=int(self.amount("bytes", DEFAULT_BYTES)), choose=self._random
                )
        return ROUND_S


class FlippedFiles(Fault):
    """Bytes of the newest checkpoint are inverted, as by a disk that forgets."""

    name = "inverted bytes in its newest checkpoint"
    lasts = False
    words = frozenset({"bytes"})

    def begin(self) -> None:
        folders = sorted(Path(self.scene.run_dir, "checkpoints").glob("step-*"), key=os.path.getmtime)
        files = [path for path in (folders[-1].rglob("*") if folders else ()) if path.is_file()]
        large = max(files, key=lambda path: path.stat().st_size, default=None)
        if large is None:
            raise Impossible("the run has no checkpoint yet")
        count = int(self.amount("bytes", DEFAULT_BYTES))
        self.measured["inverted_bytes"] = float(
            invert(large, count=count, choose=random.Random(self.scene.seed))
        )


def invert(path: Path, *, count: int, choose: random.Random) -> int:
    """Invert bytes of a file at random places; gives how many."""
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
