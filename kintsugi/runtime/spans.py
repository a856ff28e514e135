"""Durations of this process, handed to a recorder where one is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock


class Spans:
    """Spans of this process. Without a recorder, as in tests and the simulator, they are dropped."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._record: Callable[[str, Mapping[str, object], float, float], None] | None = None

    def record_to(self, record: Callable[[str, Mapping[str, object], float, float], None] | None) -> None:
        """Install a recorder: `record(name, attributes, since, until)` is called in the thread that ends the span."""
        self._record = record

    def add(
        self, name: str, attributes: Mapping[str, object], *, since: float, until: float | None = None
    ) -> None:
        """Record a span from a monotonic time until now, or until another end. Attributes that are None are left out;
        the caller does not change them afterwards."""
        if self._record is not None:
            self._record(name, attributes, since, self._clock.monotonic() if until is None else until)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Record a span around a block, also around one that fails."""
        since = self._clock.monotonic()
        try:
            yield
        finally:
            self.add(name, {}, since=since)


SPANS = Spans()
