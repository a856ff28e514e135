"""Progress counters and idle time of this process, as heartbeats report them."""

from __future__ import annotations

import threading

from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.types import Progress


class Counters:
    """Progress counters of this process. They only grow; a process in which none of them moves is stuck, not slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        assert amount >= 0, f"counter {name} only grows, got {amount}"
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def snapshot(self) -> Progress:
        with self._lock:
            return Progress(dict(self._values))


COUNTERS = Counters()


class Idleness:
    """Time in which this process had no work, since its start; shows where the bottleneck is not."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._idle_s = 0.0

    def begin(self) -> None:
        """Reset: this process may have been forked from one that has waited."""
        self._since = self._clock.monotonic()
        self._idle_s = 0.0

    def add(self, seconds: float) -> None:
        self._idle_s += seconds

    def gauges(self) -> dict[str, float]:
        alive_s = self._clock.monotonic() - self._since
        return {"idle_s": round(self._idle_s, 3), "alive_s": round(alive_s, 3)}


IDLENESS = Idleness()


class SaveProgress:
    """Bytes of the checkpoint that this process writes, for display; no gauges while none is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = self._total = 0.0

    def begin(self, total: float) -> None:
        with self._lock:
            self._done, self._total = 0.0, total

    def add(self, size: float) -> None:
        with self._lock:
            self._done = min(self._done + size, self._total)

    def end(self) -> None:
        self.begin(0.0)

    def gauges(self) -> dict[str, float]:
        with self._lock:
            return {SAVED_BYTES: self._done, SAVE_BYTES: self._total} if self._total else {}


SAVED_BYTES, SAVE_BYTES = "save_bytes_done", "save_bytes_total"
"""Gauges of a rank that saves."""
SAVE_PROGRESS = SaveProgress()
