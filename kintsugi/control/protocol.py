"""What enters the master's decisions and what leaves them, as values.

Events are recorded as they come (`<run>/inputs`), so a run can be replayed through the same code.
"""

from __future__ import annotations

import msgspec

from kintsugi.errors import Fault
from kintsugi.facts import Fact
from kintsugi.graph.executor import CallSpan
from kintsugi.messages import Body
from kintsugi.supervision import ChipFault, Verdict
from kintsugi.types import ChildReport, Peer, Role, SampleMeta, SampleText


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class Began(_Event, frozen=True):
    """A master takes the run over; `restore_step` is where it continues, with the checkpoint to restore from."""

    job: str
    config_digest: str
    incarnation: str
    resumed: bool = False
    """Nobody of the earlier session lives."""
    restore_step: int = 0
    restore_path: str | None = None
    adopting: bool = False
    """The last master died in mid-run; its workers live and report to this one."""
    time: float = 0.0


class Joined(_Event, frozen=True):
    """A process registered, for the first time or with a new master."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}
    children: tuple[ChildReport, ...] = ()
    time: float = 0.0
    """Wall clock, for people: what the event tells of is stamped with it."""


class Exited(_Event, frozen=True):
    """An agent saw one of its processes end."""

    process: str
    incarnation: str
    status: int | None
    last_output: str = ""
    time: float = 0.0


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
    """A process seems to stand still, or can not be reached; `certain` when its agent saw it with its own eyes."""

    process: str
    incarnation: str
    evidence: str
    kind: str = "silent"
    lasting_s: float = 0.0
    certain: bool = False
    time: float = 0.0
    chip: ChipFault | None = None
    """What the agent named here has seen of an accelerator of its host."""
    verdict: Verdict | None = None
    """What the watcher has found, and handed over."""


class StopRequested(_Event, frozen=True):
    """Someone asked for a clean stop."""

    reason: str


class ScaleRequested(_Event, frozen=True):
    """Someone asked for a number of generation servers; it comes again until it is answered."""

    request: str
    servers: int


class Tick(_Event, frozen=True):
    """Time passed."""

    queue: float = 0.0
    """Samples that wait at the servers, per sample that is decoded."""


Event = Began | Joined | Exited | Replied | RequestFailed | Suspected | StopRequested | ScaleRequested | Tick


class Request(msgspec.Struct, frozen=True):
    """Ask a process; the answer comes back as `Replied` or `RequestFailed` with the same token."""

    token: str
    to: str
    body: Body
    deadline_s: float


class Tell(msgspec.Struct, frozen=True):
    """Send a one-way message."""

    to: str
    body: Body


class Admit(msgspec.Struct, frozen=True):
    """Let this key speak as this process from now on."""

    peer: Peer


class Forget(msgspec.Struct, frozen=True):
    """A process is gone: refuse its key, and fail what is still asked of it with this cause."""

    process: str
    fault: Fault


class ShareBook(msgspec.Struct, frozen=True):
    """Send everyone the current address book."""


class RecordStep(msgspec.Struct, frozen=True):
    """A committed step for metrics and samples."""

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
    """Of the greedy answers, problem by problem."""


class Raise(msgspec.Struct, frozen=True):
    """Tell people that something looks wrong though the run goes on."""

    message: str
    values: dict[str, float] = {}


class Finish(msgspec.Struct, frozen=True):
    """Close the run folder and end every process."""

    outcome: str
    faults: tuple[Fault, ...] = ()


Effect = Request | Tell | Admit | Forget | ShareBook | RecordStep | RecordEvaluation | Raise | Finish


class Decision(msgspec.Struct, frozen=True):
    """Facts to journal, then effects to carry out, and why."""

    facts: tuple[Fact, ...]
    effects: tuple[Effect, ...]
    reason: str
