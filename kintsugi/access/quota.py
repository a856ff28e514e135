"""Quotas of tokens at a server: requests per minute and requests in flight."""

from __future__ import annotations

from collections import defaultdict, deque

from kintsugi.access.tokens import Token
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

MINUTE_S = 60.0


class Quotas:
    """Counts requests per token. For one thread."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._recent: dict[str, deque[float]] = defaultdict(deque)
        self._in_flight: dict[str, int] = defaultdict(int)

    def refusal(self, token: Token, *, count: int = 1) -> str | None:
        """Take `count` requests from the quota, or return why they exceed it. `release` follows an accepted one."""
        recent, now = self._recent[token.id], self._clock.monotonic()
        while recent and now - recent[0] >= MINUTE_S:
            recent.popleft()
        if token.requests_per_minute is not None and len(recent) >= token.requests_per_minute:
            return f"the key {token.name} has a quota of {token.requests_per_minute} requests per minute"
        if token.in_flight is not None and self._in_flight[token.id] + count > token.in_flight:
            return f"the key {token.name} has a quota of {token.in_flight} completions in flight"
        if token.requests_per_minute is not None:
            recent.append(now)
        self._in_flight[token.id] += count
        return None

    def release(self, token: Token, *, count: int = 1) -> None:
        """Return completions that are not in flight any more."""
        self._in_flight[token.id] -= count
        if self._in_flight[token.id] <= 0:
            del self._in_flight[token.id]
