"""Bandwidth limits: a class of traffic that must leave room for others is asked for no faster than it may come."""

from __future__ import annotations


class Pace:
    """After so many bytes, nothing more until they would have passed at this rate. It saves nothing up.

    >>> pace = Pace(bytes_per_s=100.0)
    >>> pace.take(50, now=7.0)
    >>> pace.admits(7.4), pace.admits(7.5), pace.free_in_s(7.25)
    (False, True, 0.25)
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        """None: no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def admits(self, now: float) -> bool:
        return now >= self._free_at

    def free_in_s(self, now: float) -> float:
        """How long it will hold back what comes next."""
        return max(0.0, self._free_at - now)

    def take(self, size: int, *, now: float) -> None:
        """So much is on its way from now on."""
        if self._bytes_per_s is not None:
            self._free_at = max(now, self._free_at) + size / self._bytes_per_s
