"""State of a running job, read from its event files: the master's phase, processes with pids, committed steps.

Monotonic times of all processes on one machine are comparable, so a time of this process can be placed between theirs.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import Alert, FaultSeen, Note, ProcessBegan, Record, Span, Tail, Transition

MASTER = "master-0"
SAVING = "saving"
GLANCE_S = 0.001
"""Interval between two reads of the master's events; the shortest phase takes a few milliseconds."""
ROUND_S = 0.02
"""Interval between two reads of all event files."""


class StepCommit(msgspec.Struct, frozen=True):
    step: int
    at: float
    """Monotonic time."""


class ProcessPresence(msgspec.Struct, frozen=True):
    """Process and the monotonic time at which it started."""

    pid: int
    at: float


class RunWatch:
    """Follows a run. `glance` reads the master's events only and costs microseconds; `look` reads those of all
    processes."""

    def __init__(self, run_dir: Path, *, is_elsewhere: Callable[[str], bool] = lambda process: False) -> None:
        """`is_elsewhere`: whether a process is on another machine, whose monotonic clock says nothing here: its events
        are of the moment at which they arrive."""
        self._is_elsewhere = is_elsewhere
        self._folder = RunFolder(run_dir).events_folder
        self._tails: dict[str, Tail] = {MASTER: Tail(self._folder / f"{MASTER}.jsonl")}
        self._phase_times: list[float] = []
        self._phases: list[str] = []
        self._saves: list[tuple[float, float | None]] = []
        """Begin and end of every save, which the run makes beside its phases; None while it is under way."""
        self._next_look = 0.0
        self.processes: dict[str, ProcessPresence] = {}
        self.commits: list[StepCommit] = []
        self.records: list[Record] = []
        """Faults, alerts, notes, process starts and moves into recovery, in reading order: evidence that a fault was
        detected."""

    @property
    def phase(self) -> str:
        return self._phases[-1] if self._phases else ""

    def is_in(self, phase: str) -> bool:
        """Return whether the master is in a phase; for "saving" also whether a save is under way beside its phases."""
        return self.phase == phase or (phase == SAVING and bool(self._saves) and self._saves[-1][1] is None)

    def num_times(self, phase: str) -> int:
        """Return how often a phase, or a save, has begun."""
        return self._phases.count(phase) + (len(self._saves) if phase == SAVING else 0)

    @property
    def step(self) -> int:
        """Last committed step."""
        return self.commits[-1].step if self.commits else 0

    def phase_at(self, moment: float) -> str:
        """Return the master's phase at a monotonic time."""
        index = bisect.bisect_right(self._phase_times, moment)
        return self._phases[index - 1] if index else ""

    def phases(self) -> list[tuple[float, str]]:
        """Return all phases with the monotonic times at which they began."""
        return list(zip(self._phase_times, self._phases, strict=True))

    def lengths_s(self, phase: str) -> list[float]:
        """Return the lengths of all completed occurrences of a phase."""
        ends = zip(self._phase_times, self._phases, self._phase_times[1:], strict=False)
        lengths = [after - before for before, name, after in ends if name == phase]
        saves = [end - begin for begin, end in self._saves if end is not None]
        return saves if phase == SAVING and saves else lengths

    def committed_after(self, moment: float) -> StepCommit | None:
        """Return the first step committed after a monotonic time."""
        return next((commit for commit in self.commits if commit.at > moment), None)

    def glance(self) -> None:
        for record in self._tails[MASTER].records():
            self._take(record)

    def look(self, *, force: bool = False) -> None:
        self.glance()
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next_look and not force:
            return
        self._next_look = now + ROUND_S
        for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
            tail = self._tails.setdefault(path.stem, Tail(path))
            for record in tail.records():
                self._take(record)

    def _take(self, record: Record) -> None:
        if record.stamp.process != MASTER and self._is_elsewhere(record.stamp.process):
            stamp = msgspec.structs.replace(record.stamp, monotonic=SYSTEM_CLOCK.monotonic())
            record = msgspec.structs.replace(record, stamp=stamp)
        at = record.stamp.monotonic
        match record.event:
            case ProcessBegan(pid=pid):
                self.processes[record.stamp.process] = ProcessPresence(pid, at)
                self.records.append(record)
            case Transition(machine="master", key="run", after=after):
                self._phase_times.append(at)
                self._phases.append(after)
                if after == "recovering":
                    self.records.append(record)
            case Transition(machine="master", key="save", after=after):
                if after == SAVING:
                    self._saves.append((at, None))
                elif self._saves:
                    self._saves[-1] = (self._saves[-1][0], at)
            case Transition() | FaultSeen() | Alert() | Note():
                self.records.append(record)
            case Span(name="step", attributes=attributes):
                self.commits.append(StepCommit(int(attributes["step"]), at))
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
        """Follow the run until the condition holds; DeadlineExceeded after `timeout_s`."""

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
    """Return when a fault of a process was first recorded: a fault, alert or note that names it, the start of its
    successor, or the master's move into recovery."""
    return min(
        (
            record.stamp.monotonic
            for record in records
            if record.stamp.monotonic > after and _mentions(record, process)
        ),
        default=None,
    )


def _mentions(record: Record, process: str) -> bool:
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
