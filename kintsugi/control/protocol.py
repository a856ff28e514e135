"""Events that enter the master, and the decisions (facts, effects, reasons) that leave it.

Events are recorded as they come (`<run>/inputs`), so a run can be replayed through the same code.
"""

from __future__ import annotations

import msgspec

from kintsugi.errors import Fault
from kintsugi.graph.executor import CallSpan
from kintsugi.journal.facts import Fact
from kintsugi.protocol.agents import ChipFault, DiagnosisVerdict
from kintsugi.protocol.messages import Body
from kintsugi.telemetry.events import AlertEvent
from kintsugi.types import ChildReport, Peer, Role, SampleMeta, SampleText


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class Began(_Event, frozen=True):
    """A master takes the run over and continues at `restore_step`, from a checkpoint if there is one."""

    job: str
    config_digest: str
    incarnation: str
    resumed: bool = False
    """No process of the earlier session is live."""
    restore_step: int = 0
    restore_path: str | None = None
    adopting: bool = False
    """The last master died in mid-run; its processes are live and report to this one."""
    time: float = 0.0


class Joined(_Event, frozen=True):
    """A process registered, for the first time or with a new master."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}
    children: tuple[ChildReport, ...] = ()
    time: float = 0.0
    """Wall-clock time of the event, for users."""


class Exited(_Event, frozen=True):
    """An agent reported the end of one of its processes."""

    process: str
    incarnation: str
    status: int | None
    last_output: str = ""
    time: float = 0.0
    error: str = ""
    """Kind of the error that the process recorded at its end."""


class Replied(_Event, frozen=True):
    """A request was answered."""

    token: str
    sender: str
    body: Body


class RequestFailed(_Event, frozen=True):
    """A request was refused, failed, or reached its deadline."""

    token: str
    sender: str
    fault: Fault


class Suspected(_Event, frozen=True):
    """A process seems stuck or unreachable; `certain` if its agent, or for a host the host manager, has seen the
    cause."""

    process: str
    incarnation: str
    evidence: str
    kind: str = "silent"
    lasting_s: float = 0.0
    certain: bool = False
    time: float = 0.0
    chip: ChipFault | None = None
    """Report of an agent about an accelerator of its host."""
    verdict: DiagnosisVerdict | None = None
    """Verdict of the diagnosis process."""


class StopRequested(_Event, frozen=True):
    """A user requested a clean stop."""

    reason: str


class ScaleRequested(_Event, frozen=True):
    """A user requested a number of generation servers; repeated until it is answered."""

    request: str
    servers: int


class Tick(_Event, frozen=True):
    """Time passed."""

    queue: float = 0.0
    """Samples that wait at the servers, per sample that is decoded."""


Event = Began | Joined | Exited | Replied | RequestFailed | Suspected | StopRequested | ScaleRequested | Tick


class Request(msgspec.Struct, frozen=True):
    """Send a request; the answer comes back as `Replied` or `RequestFailed` with the same token."""

    token: str
    to: str
    body: Body
    deadline_s: float


class Tell(msgspec.Struct, frozen=True):
    """Send a one-way message."""

    to: str
    body: Body


class Admit(msgspec.Struct, frozen=True):
    """Accept messages of this process under this key."""

    peer: Peer


class Forget(msgspec.Struct, frozen=True):
    """Refuse the key of a lost process, and fail the requests to it with this cause."""

    process: str
    fault: Fault


class ShareBook(msgspec.Struct, frozen=True):
    """Send the current address book to all processes: each what changed since the one that it has."""

    lacking: tuple[str, ...] = ()
    """Processes that were found not to have a part of it: they are sent all of it."""


class RecordStep(msgspec.Struct, frozen=True):
    """Write metrics and samples of a committed step."""

    step: int
    stage: str
    metas: tuple[SampleMeta, ...]
    texts: dict[str, SampleText]
    values: dict[str, dict[str, float]]
    call_metrics: dict[str, float]
    timing: dict[str, float]
    spans: tuple[CallSpan, ...]


class RecordEvaluation(msgspec.Struct, frozen=True):
    step: int
    metrics: dict[str, float]
    verdicts: tuple[bool, ...] = ()
    """Whether each greedy answer is correct, problem by problem."""


class Raise(msgspec.Struct, frozen=True):
    """Alert the operator to a problem that does not stop the run."""

    message: str
    values: dict[str, float] = {}
    event: AlertEvent | None = None
    """The event to emit; a plain `Alert` of message and values where there is none."""

    @classmethod
    def of(cls, event: AlertEvent) -> Raise:
        """Raise an alert that a diagnosis decides by."""
        return cls(event.message, event.values, event)


class Finish(msgspec.Struct, frozen=True):
    """Close the run folder and end every process."""

    outcome: str
    faults: tuple[Fault, ...] = ()


Effect = Request | Tell | Admit | Forget | ShareBook | RecordStep | RecordEvaluation | Raise | Finish


class Decision(msgspec.Struct, frozen=True):
    """Facts to journal, then effects to carry out, and the reason."""

    facts: tuple[Fact, ...]
    effects: tuple[Effect, ...]
    reason: str
