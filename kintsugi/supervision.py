"""What the master asks of node agents, and what they see with their own eyes: starts, stops, exits, suspicions."""

from __future__ import annotations

import msgspec

from kintsugi.types import Placement, Role


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class StartProcess(_Body, frozen=True):
    process: str
    role: Role
    incarnation: str
    placement: Placement = Placement()


class ProcessStarted(_Body, frozen=True):
    """It runs under this pid and will speak with this key; it has not registered yet."""

    process: str
    incarnation: str
    pid: int
    public_key: bytes


class StopProcess(_Body, frozen=True):
    process: str
    incarnation: str
    grace_s: float = 2.0


class ProcessExited(_Body, frozen=True):
    """Seen through the kernel's pidfd. `status` as of waitid: exit code, or minus the signal; None if not our child.
    `last_output` is the end of what it wrote to its standard error."""

    process: str
    incarnation: str
    status: int | None
    last_output: str = ""


class ProcessSuspected(_Body, frozen=True):
    """The agent has seen with its own eyes that a process does not run: it is stopped, or its device is in error."""

    process: str
    incarnation: str
    evidence: str


class ChipFault(_Body, frozen=True):
    """The agent has seen that an accelerator of its host is broken, or shows a worrying sign."""

    host: str
    chip: str
    """For people: "GPU 0 (NVIDIA H200)"."""
    uuid: str
    """What processes name as `chip` among their capabilities when they register."""
    kind: str
    detail: str
    broken: bool = True
    """Nobody can go on with it; False: a sign that people should know of."""
    num_healthy: int = 0
    """Accelerators that the host has left."""
    processes: dict[str, str] = {}
    """Process → incarnation of those that the driver names as its users; where it sees other numbers, none."""

    @property
    def summary(self) -> str:
        return f"{self.chip} of {self.host} is {'broken' if self.broken else 'worrying'}: {self.detail}"


class Verdict(_Body, frozen=True):
    """What the watcher has found to be the cause of a trouble: `Verdict("model-1", "1.3", "cpu", 1763.2, 0.95, …)`."""

    process: str
    incarnation: str
    """That it had when it was found; empty where it has said nothing yet."""
    kind: str
    """A `diagnosis.verdict.FaultKind`."""
    onset: float
    """Wall clock."""
    confidence: float
    summary: str
    path: tuple[str, ...] = ()
    """Processes, from the cause to what people saw."""
    replace: bool = False
    """It holds the run up by itself, so that another in its place may do better."""


class Inspect(_Body, frozen=True):
    """Look at a process from outside: does it run at all?"""

    process: str
    incarnation: str


class Inspected(_Body, frozen=True):
    """As of /proc: `state` R, S, D, T, Z, or empty when there is no such process."""

    state: str
    cpu_s: float = 0.0
    """Processor time of all its threads so far."""


class AskTime(_Body, frozen=True):
    """What does your clock say? So that what hosts have recorded can be put in one order."""


class TimeTold(_Body, frozen=True):
    wall: float
