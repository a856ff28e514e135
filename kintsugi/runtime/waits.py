"""The one function that blocks, and the table of what this process waits for.

A process blocks only in `wait`, which records for which process, for what, since when and until when. Heartbeats carry
`WAITS.declared()` to the master. No wait is unbounded.
"""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable
from typing import TypeVar

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.types import Wait

T = TypeVar("T")


class WaitTable:
    """Current waits of this process, in all of its threads."""

    def __init__(self) -> None:
        # Single operations on a dict and a counter are atomic under the GIL; a lock would slow down every message.
        self._waits: dict[int, Wait] = {}
        self._tokens = itertools.count()

    def begin(self, wait: Wait) -> int:
        token = next(self._tokens)
        self._waits[token] = wait
        return token

    def end(self, token: int) -> None:
        del self._waits[token]

    def declared(self) -> tuple[Wait, ...]:
        return tuple(self._waits.copy().values())


WAITS = WaitTable()


def wait(
    attempt: Callable[[float], T | None],
    *,
    whom: str,
    what: str,
    timeout_s: float,
    clock: Clock = SYSTEM_CLOCK,
    waits: WaitTable = WAITS,
) -> T:
    """Block until `attempt` returns a value; the only place where a process blocks.

    `attempt(remaining_s)` blocks at most that long and returns None when there is no result yet. It is called at least
    once. At the deadline `DeadlineExceeded` names the process and the event that were waited for.
    """
    since = clock.monotonic()
    until = since + timeout_s
    token = waits.begin(Wait(whom, what, since, until))
    try:
        remaining_s = max(0.0, timeout_s)
        while True:
            value = attempt(remaining_s)
            if value is not None:
                return value
            now = clock.monotonic()
            remaining_s = until - now
            if remaining_s <= 0:
                raise DeadlineExceeded(whom=whom, what=what, waited_s=now - since)
    finally:
        waits.end(token)


def join(
    thread: threading.Thread, *, whom: str, what: str = "its end", timeout_s: float, waits: WaitTable = WAITS
) -> None:
    """Block until a thread has ended; DeadlineExceeded if it does not end in time."""

    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    wait(attempt, whom=whom, what=what, timeout_s=timeout_s, waits=waits)


def wait_readable(*descriptors: int, whom: str, what: str, timeout_s: float) -> set[int]:
    """Block until a descriptor is readable or closed, or the time has passed; return the descriptors."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    ready = wait(
        lambda remaining_s: poller.poll(remaining_s * 1000), whom=whom, what=what, timeout_s=timeout_s
    )
    return {descriptor for descriptor, _ in ready}
