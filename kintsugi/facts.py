"""Everything the master writes to its journal, one struct per fact.

The master's state is a fold over these facts and nothing else: a restarted master that replays them stands where the
dead one stood. A decision first yields facts, they are journaled, then they are applied, then their effects happen.
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


class EpochStarted(_Fact, frozen=True):
    """A master (the first, or one that took over) owns the run from here on; older epochs are refused."""

    epoch: int
    incarnation: str
    adopting: bool = False
    """The processes of the epoch before live on."""


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
    """Of this session, from the master's start."""


class StopAccepted(_Fact, frozen=True):
    """Someone asked for a clean stop; a master that takes over still knows."""

    reason: str


# Who is there.


class ProcessRequested(_Fact, frozen=True):
    """A process was ordered from an agent."""

    process: str
    role: Role
    host: str
    incarnation: str


class ProcessJoined(_Fact, frozen=True):
    """It registered and answers."""

    peer: Peer
    role: Role
    pid: int
    capabilities: dict[str, str] = {}


class ProcessLost(_Fact, frozen=True):
    """It is gone for good; a replacement has another incarnation."""

    process: str
    incarnation: str
    fault: Fault


class ProcessRetired(_Fact, frozen=True):
    """It is not needed any more: it gets no more work and ends after a moment. `ProcessLost` says that it has."""

    process: str
    incarnation: str


class ServersScaled(_Fact, frozen=True):
    """The run goes on with this many generation servers, because somebody asked for it."""

    request: str
    servers: int


class ScaleRefused(_Fact, frozen=True):
    """Somebody asked for a number of generation servers that the run can not have."""

    request: str
    reason: str


# The samples' lives (buffer/ledger.py).


class TicketsIssued(_Fact, frozen=True):
    """Prompts are given out for the first time; the data cursor stands behind the last of them."""

    tickets: tuple[Ticket, ...]


class TicketAssigned(_Fact, frozen=True):
    """A rollout worker runs the ticket's episodes: issued → generating."""

    ticket: str
    worker: str
    incarnation: str
    version: int = -1
    """Of the weights that are current: none of its tokens will be older."""


class TicketReturned(_Fact, frozen=True):
    """Its worker (or what it held) is lost, or it failed and is tried again: back to issued."""

    ticket: str
    reason: str


class SamplesScored(_Fact, frozen=True):
    """Samples of one ticket were generated and scored: generating → scored; when all are, the group is ready."""

    ticket: str
    samples: tuple[SampleMeta, ...]


class SampleQuarantined(_Fact, frozen=True):
    """A sample can not be scored and never trains."""

    key: str
    reason: str


class FilterReason(StrEnum):
    """Why the algorithm has no use for a complete group."""

    EQUAL_REWARDS = "all rewards of the group are equal"
    TOO_FEW_VALID = "too few of its samples could be scored"


class TicketFiltered(_Fact, frozen=True):
    """The algorithm dropped the whole group, which the next prompt replaces."""

    ticket: str
    reason: str
    """A `FilterReason`."""


class TicketExpired(_Fact, frozen=True):
    """The group became too old for the staleness bound."""

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
    """Of its manifest."""
    sources: tuple[WeightSource, ...]
    servers: tuple[str, ...]
    pause_ms: dict[str, float] = {}
    """Server → how long it decoded nothing while the weights changed."""


class RolledBack(_Fact, frozen=True):
    """Steps after `step` are undone; what they trained is issued again under the same tickets."""

    step: int
    reason: str


class PaceChanged(_Fact, frozen=True):
    """The master lets rollout run further or less far ahead, or more or fewer groups at once, after this step."""

    step: int
    ahead: int
    """Steps; at most `asynchrony.max_staleness`."""
    groups: int
    reason: str


# Beside the loop.


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
    """A save failed loudly; the previous checkpoint stays good."""

    step: int
    fault: Fault


class IncidentOpened(_Fact, frozen=True):
    """Something broke. What breaks before it is mended belongs to the same incident."""

    incident: int
    step: int
    phase: str
    fault: Fault


class FaultNoted(_Fact, frozen=True):
    """Another fault of an incident that is open, of a process that is lost or of one that lives."""

    incident: int
    fault: Fault


class StrategyChosen(_Fact, frozen=True):
    """What is done about an incident, why, and what else could have been done."""

    incident: int
    strategy: str
    reason: str
    alternatives: tuple[str, ...] = ()


class CauseDiagnosed(_Fact, frozen=True):
    """The watcher has named the cause of a trouble; it may belong to an incident, or to what is only slow."""

    process: str
    kind: str
    """A `diagnosis.verdict.FaultKind`."""
    onset: float
    """Wall clock."""
    confidence: float
    summary: str
    path: tuple[str, ...] = ()


class IncidentClosed(_Fact, frozen=True):
    """Mended, and a step was committed since: how, how long each part took, and what it cost."""

    incident: int
    outcome: str
    """The last strategy."""
    step: int
    processes: tuple[str, ...]
    """That were lost."""
    timing: dict[str, float] = {}
    """Seconds per part: {"start": 0.2, "rebuild": 0.03, "repair": 0.01, "replay": 0.4, "total": 0.7, "outage": 0.9}.

    `total` is counted from the last fault, `outage` from the first one."""


Fact = (
    RunStarted
    | EpochStarted
    | StageStarted
    | StopAccepted
    | RunEnded
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
