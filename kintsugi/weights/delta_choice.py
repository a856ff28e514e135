"""Choice between a whole version and its difference to the one before, by rates that were measured on this host.

A difference has fewer bytes, but its source compares two versions first, and its receiver copies the one that it has.
That pays where the link is slow beside the memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

MAX_SHARE = 0.5
"""Largest size of a difference, as a share of the bytes of its version; a larger one is not made."""
MAX_SKIPPED = 64
"""Most versions in a row for which no difference is asked for, after differences that took longer than the whole."""
MIN_MEASURED_BYTES = 1 << 20
"""Smallest transfer from which a rate is taken."""


@dataclass(frozen=True, slots=True)
class DeltaCost:
    """Cost of the last difference, in seconds per byte of the whole version."""

    share: float
    """Bytes of the difference, per byte of the version."""
    made_s: float
    applied_s: float

    def per_byte(self, link_s: float) -> float:
        """Seconds per byte of the version over a link that takes `link_s` per byte."""
        return self.made_s + self.share * link_s + self.applied_s


class DeltaChoice:
    """Rates measured so far, and the choice that follows from them. Called by the threads that fetch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link_s: float | None = None
        """Seconds per byte of the last whole version."""
        self._cost: DeltaCost | None = None
        self._num_skipped = 0
        self._skip_next = 0
        """Versions after the last failed attempt for which no difference is asked for."""

    def is_worth_asking(self, size: int) -> bool:
        """Whether a difference to a version of this size is likely to be faster, or not known."""
        with self._lock:
            if self._link_s is None:
                return False
            if self._num_skipped < self._skip_next:
                self._num_skipped += 1
                return False
            if self._cost is None or self._cost.per_byte(self._link_s) < self._link_s:
                return True
            self._cost = None  # The next attempt measures again.
            self._skip()
            return False

    def pays(self, size: int, num_bytes: int) -> bool:
        """Whether a difference that is made already should be fetched."""
        with self._lock:
            applied_s = 0.0 if self._cost is None else self._cost.applied_s
            link_s = self._link_s or 0.0
        return num_bytes * link_s + size * applied_s < size * link_s

    def note_whole(self, size: int, seconds: float) -> None:
        if size >= MIN_MEASURED_BYTES:
            with self._lock:
                self._link_s = seconds / size

    def note_difference(self, size: int, num_bytes: int, *, made_s: float, applied_s: float) -> None:
        if size < MIN_MEASURED_BYTES:
            return
        with self._lock:
            self._cost = cost = DeltaCost(num_bytes / size, made_s / size, applied_s / size)
            if self._link_s is not None and cost.per_byte(self._link_s) < self._link_s:
                self._skip_next = self._num_skipped = 0

    def note_refused(self) -> None:
        """A difference was asked for and not used: it is asked for again after twice as many versions."""
        with self._lock:
            self._skip()

    def _skip(self) -> None:
        self._skip_next = min(MAX_SKIPPED, max(1, 2 * self._skip_next))
        self._num_skipped = 0
