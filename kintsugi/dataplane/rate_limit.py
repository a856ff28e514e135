"""Bandwidth limit for a class of traffic: requests are spaced so that the average rate is not exceeded."""

from __future__ import annotations


class RateLimit:
    """Admits nothing more until the bytes taken would have passed at this rate. Unused bandwidth is not saved up.

    >>> limit = RateLimit(bytes_per_s=100.0)
    >>> limit.take(50, now=7.0)
    >>> limit.admits(7.4), limit.admits(7.5), limit.free_in_s(7.25)
    (False, True, 0.25)
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        """`bytes_per_s` None means no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def admits(self, now: float) -> bool:
        return now >= self._free_at

    def free_in_s(self, now: float) -> float:
        """Seconds until the next request is admitted."""
        return max(0.0, self._free_at - now)

    def take(self, size: int, *, now: float) -> None:
        """Count bytes that are requested now."""
        if self._bytes_per_s is not None:
            self._free_at = max(now, self._free_at) + size / self._bytes_per_s
