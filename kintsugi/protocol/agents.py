"""Node agents: they start, stop and inspect processes for the master, and report exits and suspicions to it."""

from __future__ import annotations

import msgspec

from kintsugi.protocol.body import MessageBody
from kintsugi.types import Placement, Role


class StartProcess(MessageBody, frozen=True):
    process: str
    role: Role
    incarnation: str
    placement: Placement = Placement()


class ProcessStarted(MessageBody, frozen=True):
    """The process runs under this pid and will use this key; it has not registered yet."""

    process: str
    incarnation: str
    pid: int
    public_key: bytes


class StopProcess(MessageBody, frozen=True):
    process: str
    incarnation: str
    grace_s: float = 2.0


class ProcessExited(MessageBody, frozen=True):
    """A process has ended, as its pidfd shows. `status` is the exit code, or minus the signal; None for a process that
    is not a child of the agent. `last_output` is the end of its log."""

    process: str
    incarnation: str
    status: int | None
    last_output: str = ""
    error: str = ""
    """Kind of the error that the process recorded at its end; empty where it recorded none."""


class ProcessSuspected(MessageBody, frozen=True):
    """Observed by the agent: the process is stopped (state T in /proc), or does not give its shared device back."""

    process: str
    incarnation: str
    evidence: str


class ChipFault(MessageBody, frozen=True):
    """Observed by the agent: an accelerator of its host is broken, or has errors that an operator should know of."""

    host: str
    chip: str
    """Name to display: "GPU 0 (NVIDIA H200)"."""
    uuid: str
    """Identity; processes that use it register with it as their capability `chip`."""
    kind: str
    detail: str
    broken: bool = True
    """No process can use it any more; False: a warning for the operator."""
    num_healthy: int = 0
    """Healthy accelerators that remain on the host."""
    processes: dict[str, str] = {}
    """Process → incarnation of its users by the driver's pids; empty where the driver sees another pid namespace."""

    @property
    def summary(self) -> str:
        return f"{self.chip} of {self.host} is {'broken' if self.broken else 'worrying'}: {self.detail}"


class DiagnosisVerdict(msgspec.Struct, frozen=True, tag="Verdict", omit_defaults=True):
    """Cause that the diagnosis found: `DiagnosisVerdict("model-1", "1.3", "cpu", 1763.2, 0.95, …)`.

    Not a message: the watcher leaves it to the master as a file (`telemetry/verdict_files.py`).
    """

    process: str
    incarnation: str
    """Incarnation at the time of the diagnosis; empty for a process that has recorded nothing yet."""
    kind: str
    """A `diagnosis.verdict.FaultKind`."""
    onset: float
    """Wall clock time at which the fault began."""
    confidence: float
    summary: str
    path: tuple[str, ...] = ()
    """Processes from the cause to the visible symptom."""
    replace: bool = False
    """Whether the process alone slows the run down, so that a replacement may help."""


class Inspect(MessageBody, frozen=True):
    """Read the state of a process from outside: /proc, its control group, the file of its recorded heartbeats."""

    process: str
    incarnation: str


class Inspected(MessageBody, frozen=True):
    """State R, S, D, T or Z as in /proc; empty when there is no such process."""

    state: str
    cpu_s: float = 0.0
    """CPU time of all its threads so far."""
    frozen: bool = False
    """Its control group is frozen."""
    switches: int = 0
    """Context switches of its main thread so far."""
    recorded: float = 0.0
    """Time at which it last recorded a heartbeat in the run folder, by the clock of its host; 0 if it has not. It does
    so whether or not the master can be reached."""


class AskTime(MessageBody, frozen=True):
    """Request the master's wall clock, with which the clock offset of this host is estimated."""


class TimeTold(MessageBody, frozen=True):
    wall: float
