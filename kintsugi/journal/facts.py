"""Facts that the master writes to its journal, one struct each.

The state of the master is a fold over these facts and nothing else: a restarted master that replays them has the state
of its predecessor. A decision first yields facts; they are applied and journaled, then their effects happen.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.errors import Fault
from kintsugi.types import Peer, Role, SampleMeta, Ticket, WeightSource


class _Fact(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


# The run.


class RunStarted(_Fact, frozen=True):
    """First fact of every journal."""

    job: str
    config_digest: str


class TermStarted(_Fact, frozen=True, tag="EpochStarted"):
    """A master (the first, or one that took over) owns the run from here on; messages of older terms are refused."""

    term: int = msgspec.field(name="epoch")
    incarnation: str
    adopting: bool = False
    """The processes of the term before are still live."""
    time: float = 0.0
    """Wall-clock time; 0 in journals that do not have it."""
    state_format: int = 1
    """Number of the definition of a state's digest in this term (`model.seats.STATE_FORMAT`)."""


class StageStarted(_Fact, frozen=True):
    """A stage of the run (warm-up, main) begins at this global step."""

    stage: str
    step: int


class RunEnded(_Fact, frozen=True):
    """The run is over: "finished", "stopped" (by request, resumable) or "failed" (with its cause)."""

    outcome: str
    fault: Fault | None = None
    weights_sha256: str = ""
    wall_s: float = 0.0
    """Duration of this session, from the start of the master."""


class StopAccepted(_Fact, frozen=True):
    """A clean stop was requested; a new master still honours it."""

    reason: str


class StateFolded(_Fact, frozen=True):
    """All facts so far, folded: the first record of a compacted journal stands for every record up to its own number.

    The parts of the state encode themselves; the fields in plain text are for readers of the run folder.
    """

    term: int
    job: str
    step: int
    processes: dict[str, int]
    """PIDs of the registered processes."""
    saved_steps: tuple[int, ...]
    servers: int | None
    """Number of generation servers that a user requested; None: as configured."""
    answers: dict[str, str]
    """Requests of users that were answered: reason of the refusal; empty for an accepted one."""
    parts: dict[str, bytes]
    """Part of the state → its msgpack: "run", "ledger", "members", "incidents"."""


# Processes.


class ProcessRequested(_Fact, frozen=True):
    """The start of a process was requested from an agent."""

    process: str
    role: Role
    host: str
    incarnation: str


class ProcessJoined(_Fact, frozen=True):
    """The process registered."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}


class ProcessLost(_Fact, frozen=True):
    """The process is lost for good; a replacement has another incarnation."""

    process: str
    incarnation: str
    fault: Fault


class ProcessRetired(_Fact, frozen=True):
    """The process is not needed any more: it gets no more work and ends. `ProcessLost` follows when it has."""

    process: str
    incarnation: str


class ServersScaled(_Fact, frozen=True):
    """The run continues with this many generation servers, as a user requested."""

    request: str
    servers: int


class ScaleRefused(_Fact, frozen=True):
    """A user requested a number of generation servers that the run cannot have."""

    request: str
    reason: str


# Lifecycle of samples (samples/ledger.py).


class TicketsIssued(_Fact, frozen=True):
    """Prompts are issued for the first time; the data cursor is behind the last of them."""

    tickets: tuple[Ticket, ...]


class TicketAssigned(_Fact, frozen=True):
    """A rollout worker runs the ticket's episodes: issued → generating."""

    ticket: str
    worker: str
    incarnation: str
    version: int = -1
    """Version of the current weights: no token of the group is older."""


class TicketReturned(_Fact, frozen=True):
    """The worker (or its samples) is lost, or the group failed and is tried again: back to issued."""

    ticket: str
    reason: str


class SamplesScored(_Fact, frozen=True):
    """Samples of one ticket were generated and scored: generating → scored; when all are, the group is ready."""

    ticket: str
    samples: tuple[SampleMeta, ...]


class SampleQuarantined(_Fact, frozen=True):
    """A sample cannot be scored and is never trained."""

    key: str
    reason: str


class FilterReason(StrEnum):
    """Reason why the algorithm drops a complete group."""

    EQUAL_REWARDS = "all rewards of the group are equal"
    TOO_FEW_VALID = "too few of its samples could be scored"


class TicketFiltered(_Fact, frozen=True):
    """The algorithm dropped the whole group; the next prompt replaces it."""

    ticket: str
    reason: str
    """A `FilterReason`."""


class TicketExpired(_Fact, frozen=True):
    """The group became too stale."""

    ticket: str
    reason: str


class BatchFormed(_Fact, frozen=True):
    """Ready groups go into the batch of this step: ready → in batch."""

    step: int
    tickets: tuple[str, ...]


class StepCommitted(_Fact, frozen=True):
    """Every rank reported prepared with the same state hash: in batch → trained. The first of the step's two facts."""

    step: int
    state_digest: str
    metrics: dict[str, float] = {}


class VersionCurrent(_Fact, frozen=True):
    """All live servers acknowledged the weights of this step. The second of the step's two facts."""

    version: int
    digest: str
    """Digest of the manifest."""
    sources: tuple[WeightSource, ...]
    servers: tuple[str, ...]
    pause_ms: dict[str, float] = {}
    """Server → time in which it decoded nothing while the weights changed."""


class RolledBack(_Fact, frozen=True):
    """Steps after `step` are undone; their groups are issued again under the same tickets."""

    step: int
    reason: str


class PaceChanged(_Fact, frozen=True):
    """Rollout may run further or less far ahead, or run more or fewer groups at once, after this step."""

    step: int
    ahead: int
    """Number of steps; at most `asynchrony.max_staleness`."""
    groups: int
    reason: str


# Evaluations, checkpoints, incidents.


class EvaluationDone(_Fact, frozen=True):
    """Held-out accuracy at a pinned version."""

    step: int
    version: int
    stage: str
    metrics: dict[str, float]


class CheckpointSaved(_Fact, frozen=True):
    """A durable checkpoint of a committed step exists and was verified."""

    step: int
    path: str
    digest: str


class CheckpointFailed(_Fact, frozen=True):
    """A save failed; the previous checkpoint stays valid."""

    step: int
    fault: Fault


class IncidentOpened(_Fact, frozen=True):
    """A fault opened an incident. Faults that come before it is recovered belong to the same incident."""

    incident: int
    step: int
    phase: str
    fault: Fault


class FaultNoted(_Fact, frozen=True):
    """Another fault of an open incident, of a lost process or a live one."""

    incident: int
    fault: Fault


class StrategyChosen(_Fact, frozen=True):
    """Strategy chosen for an incident, the reason, and the other options."""

    incident: int
    strategy: str
    reason: str
    alternatives: tuple[str, ...] = ()


class MeshChanged(_Fact, frozen=True):
    """The ranks hold other parts of the state from the next step on, because ranks are lost or have come back."""

    shards: int
    stages: int
    tensors: int
    ranks: tuple[str, ...] = ()
    """Ranks in the order of their seats (`model.seats.Mesh.ranks`); empty: as configured."""


class CauseDiagnosed(_Fact, frozen=True):
    """The diagnosis named the cause of a problem: of an incident, or of a slowdown."""

    process: str
    kind: str
    """A `diagnosis.verdict.FaultKind`."""
    onset: float
    """Wall-clock time."""
    confidence: float
    summary: str
    path: tuple[str, ...] = ()


class IncidentClosed(_Fact, frozen=True):
    """The incident is recovered, and a step was committed since: the strategy, the duration of each part, and the
    cost."""

    incident: int
    outcome: str
    """Last strategy."""
    step: int
    processes: tuple[str, ...]
    """Processes that were lost."""
    timing: dict[str, float] = {}
    """Seconds per part: {"start": 0.2, "rebuild": 0.03, "repair": 0.01, "replay": 0.4, "total": 0.7, "outage": 0.9}.

    `total` is counted from the last fault, `outage` from the first one."""


Fact = (
    RunStarted
    | TermStarted
    | StageStarted
    | StopAccepted
    | RunEnded
    | StateFolded
    | ProcessRequested
    | ProcessJoined
    | ProcessLost
    | ProcessRetired
    | ServersScaled
    | ScaleRefused
    | TicketsIssued
    | TicketAssigned
    | TicketReturned
    | SamplesScored
    | SampleQuarantined
    | TicketFiltered
    | TicketExpired
    | BatchFormed
    | StepCommitted
    | VersionCurrent
    | RolledBack
    | PaceChanged
    | EvaluationDone
    | CheckpointSaved
    | CheckpointFailed
    | IncidentOpened
    | FaultNoted
    | StrategyChosen
    | MeshChanged
    | IncidentClosed
    | CauseDiagnosed
)

LedgerFact = (
    TicketsIssued
    | TicketAssigned
    | TicketReturned
    | SamplesScored
    | SampleQuarantined
    | TicketFiltered
    | TicketExpired
    | BatchFormed
    | StepCommitted
    | RolledBack
)
