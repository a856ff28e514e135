"""Virtual time, one event queue and one source of randomness: all actions of a simulated run happen here, in order.

The same seed gives the same actions in the same order; `trace_hash` proves it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import xxhash

from kintsugi.errors import Fault

Action = Callable[..., None]


class World:
    """The queue. `after` schedules an action, `turn` runs the next one."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        """Number of inputs of state machines: decisions of the master, messages to workers, operations of ranks."""
        self.trace: list[str] | None = [] if keep_trace else None
        self._hash = xxhash.xxh3_64()
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0
        self._num_faults = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, action, arguments))

    def turn(self) -> bool:
        """Run the next action; False when none is scheduled."""
        if not self._queue:
            return False
        due, _, action, arguments = heapq.heappop(self._queue)
        self.now = due
        action(*arguments)
        return True

    def note(self, process: str, what: str) -> None:
        """Count an input of a state machine, and add it to the trace."""
        self.num_events += 1
        self._hash.update(f"{self.now!r} {process} {what}\n".encode())
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f}  {process:<14} {what}")

    def remark(self, process: str, what: str) -> None:
        """Add a remark to the trace that is not part of its hash."""
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f}  {process:<14} · {what}")

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def fault(self, kind: str, process: str, message: str, *, cause: Fault | None = None) -> Fault:
        """Return a fault with an id that is the same in every replay."""
        self._num_faults += 1
        return Fault(f"{process}#{self._num_faults}", kind, process, message, self.now, cause)
