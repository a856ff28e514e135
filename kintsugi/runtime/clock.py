"""Clocks, and random streams that depend on a seed and names only."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time: `monotonic` for durations and deadlines, `wall` for timestamps."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class WorkingClock:
    """Clock that leaves out time in which this process did not run: while the disk was full, while it was stopped by a
    signal, or while its host was suspended. Deadlines of other processes are measured with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() - self._skipped_s

    def wall(self) -> float:
        return self._clock.wall()

    def skip(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


SYSTEM_CLOCK = SystemClock()


def random_stream(seed: int, *names: str | int) -> random.Random:
    """Return an independent stream per name, the same in every process and on every run.

    >>> random_stream(7, "shuffle", 0).random() == random_stream(7, "shuffle", 0).random()
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (seed, *names):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return random.Random(int.from_bytes(digest.digest(), "little"))
