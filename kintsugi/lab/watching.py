"""Where a living run stands, told by its event files: the master's phase, who runs under which pid, what was committed.

Monotonic times of all processes of one machine are comparable, so a moment of ours can be placed between two of theirs.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.observe.events import (
    Alert,
    FaultSeen,
    Note,
    ProcessBegan,
    Record,
    Span,
    Tail,
    Transition,
)
from kintsugi.runtime import SYSTEM_CLOCK, wait

MASTER = "master-0"
GLANCE_S = 0.001
"""Between two looks at the master's events; the shortest phase takes a few milliseconds."""
ROUND_S = 0.02
"""Between two looks at everybody's."""


class Commit(msgspec.Struct, frozen=True):
    step: int
    at: float
    """Monotonic."""


class Presence(msgspec.Struct, frozen=True):
    """A process and since when it runs."""

    pid: int
    at: float


class Watch:
    """Follows a run. `glance` looks at the master only and costs microseconds; `look` takes everybody in."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "events"
        self._tails: dict[str, Tail] = {MASTER: Tail(self._folder / f"{MASTER}.jsonl")}
        self._phase_times: list[float] = []
        self._phases: list[str] = []
        self._next_look = 0.0
        self.staff: dict[str, Presence] = {}
        self.commits: list[Commit] = []
        self.records: list[Record] = []
        """Of faults, alerts, notes, beginnings and moves into recovery: what may tell of a fault, in reading order."""

    @property
    def phase(self) -> str:
        return self._phases[-1] if self._phases else ""

    @property
    def step(self) -> int:
        """The last one committed."""
        return self.commits[-1].step if self.commits else 0

    def phase_at(self, moment: float) -> str:
        """The master's phase at a monotonic time."""
        index = bisect.bisect_right(self._phase_times, moment)
        return self._phases[index - 1] if index else ""

    def phases(self) -> list[tuple[float, str]]:
        """Every phase that began, with its monotonic time."""
        return list(zip(self._phase_times, self._phases, strict=True))

    def lengths_s(self, phase: str) -> list[float]:
        """How long the phase took, each time that it has ended."""
        ends = zip(self._phase_times, self._phases, self._phase_times[1:], strict=False)
        return [after - before for before, name, after in ends if name == phase]

    def committed_after(self, moment: float) -> Commit | None:
        """The first step committed after a monotonic time."""
        return next((commit for commit in self.commits if commit.at > moment), None)

    def glance(self) -> None:
        for record in self._tails[MASTER].records():
            self._take(record)

    def look(self, *, at_once: bool = False) -> None:
        self.glance()
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next_look and not at_once:
            return
        self._next_look = now + ROUND_S
        for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
            tail = self._tails.setdefault(path.stem, Tail(path))
            for record in tail.records():
                self._take(record)

    def _take(self, record: Record) -> None:
        at = record.stamp.monotonic
        match record.event:
            case ProcessBegan(pid=pid):
                self.staff[record.stamp.process] = Presence(pid, at)
                self.records.append(record)
            case Transition(machine="master", key="run", after=after):
                self._phase_times.append(at)
                self._phases.append(after)
                if after == "recovering":
                    self.records.append(record)
            case Transition() | FaultSeen() | Alert() | Note():
                self.records.append(record)
            case Span(name="step", attributes=attributes):
                self.commits.append(Commit(int(attributes["step"]), at))
            case _:
                pass

    def until(
        self,
        condition: Callable[[], bool],
        *,
        what: str,
        timeout_s: float,
        pause_s: float = GLANCE_S,
    ) -> None:
        """Follow the run until the condition holds; DeadlineExceeded if it does not in time."""

        def attempt(remaining_s: float) -> bool | None:
            self.look()
            if condition():
                return True
            time.sleep(min(pause_s, max(0.0, remaining_s)))
            return None

        wait(attempt, whom="the run", what=what, timeout_s=timeout_s)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


def detected_at(records: list[Record], *, process: str, after: float) -> float | None:
    """When somebody first recorded what was done to a process: a fault, alert or note that names it, its successor's
    beginning, or the master's move into recovery."""
    return min(
        (
            record.stamp.monotonic
            for record in records
            if record.stamp.monotonic > after and _tells_of(record, process)
        ),
        default=None,
    )


def _tells_of(record: Record, process: str) -> bool:
    match record.event:
        case ProcessBegan():
            return record.stamp.process == process
        case FaultSeen(fault=fault):
            return fault.process == process or process in fault.message
        case Alert(message=message) | Note(message=message):
            return process in message
        case Transition(key=key, reason=reason):
            return key == process or process in reason
        case _:
            return False
