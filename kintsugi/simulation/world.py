"""Virtual time, one queue and one source of chance: everything that happens in a simulated run happens here, in order.

The same seed gives the same order of the same happenings, and `trace_hash` says whether it did.
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
    """The queue. `after` plans, `turn` lets the next planned thing happen."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        """Things delivered to a state machine: decisions of the master, messages to workers, operations of ranks."""
        self.trace: list[str] | None = [] if keep_trace else None
        self._hash = xxhash.xxh3_64()
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0
        self._num_faults = 0

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, action, arguments))

    def turn(self) -> bool:
        """Let the next thing happen; False when nothing is planned any more."""
        if not self._queue:
            return False
        due, _, action, arguments = heapq.heappop(self._queue)
        self.now = due
        action(*arguments)
        return True

    def note(self, who: str, what: str) -> None:
        """Count something that was delivered to a state machine, and make it part of the trace."""
        self.num_events += 1
        self._hash.update(f"{self.now!r} {who} {what}\n".encode())
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f}  {who:<14} {what}")

    def remark(self, who: str, what: str) -> None:
        """Write something down that is no event of its own: for who reads a trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:12.6f}  {who:<14} · {what}")

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def fault(self, kind: str, process: str, message: str, *, cause: Fault | None = None) -> Fault:
        """A fault under a name that is the same in every replay."""
        self._num_faults += 1
        return Fault(f"{process}#{self._num_faults}", kind, process, message, self.now, cause)
