"""States of a sample, the complete table of transitions, and the record of a group. `ledger.py` applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kintsugi.journal.facts import (
    BatchFormed,
    LedgerFact,
    RolledBack,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
)
from kintsugi.types import SampleMeta, Ticket


class SampleState(StrEnum):
    """State of a sample. The last four are final; of these only TRAINED can be undone, by a rollback."""

    ISSUED = "issued"
    GENERATING = "generating"
    SCORED = "scored"
    READY = "ready"
    IN_BATCH = "in_batch"
    TRAINED = "trained"
    FILTERED = "filtered"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"


_S = SampleState
LIVE = frozenset({_S.ISSUED, _S.GENERATING, _S.SCORED, _S.READY, _S.IN_BATCH})

TRANSITIONS: Mapping[tuple[SampleState, type[LedgerFact]], SampleState] = {
    (_S.ISSUED, TicketAssigned): _S.GENERATING,
    (_S.QUARANTINED, TicketAssigned): _S.QUARANTINED,
    (_S.GENERATING, TicketReturned): _S.ISSUED,
    (_S.SCORED, TicketReturned): _S.ISSUED,
    (_S.READY, TicketReturned): _S.ISSUED,
    (_S.IN_BATCH, TicketReturned): _S.ISSUED,
    (_S.QUARANTINED, TicketReturned): _S.QUARANTINED,
    (_S.GENERATING, SamplesScored): _S.SCORED,
    (_S.ISSUED, SampleQuarantined): _S.QUARANTINED,
    (_S.GENERATING, SampleQuarantined): _S.QUARANTINED,
    (_S.SCORED, TicketFiltered): _S.FILTERED,
    (_S.READY, TicketFiltered): _S.FILTERED,
    (_S.QUARANTINED, TicketFiltered): _S.QUARANTINED,
    (_S.ISSUED, TicketExpired): _S.EXPIRED,
    (_S.GENERATING, TicketExpired): _S.EXPIRED,
    (_S.SCORED, TicketExpired): _S.EXPIRED,
    (_S.READY, TicketExpired): _S.EXPIRED,
    (_S.QUARANTINED, TicketExpired): _S.QUARANTINED,
    (_S.READY, BatchFormed): _S.IN_BATCH,
    (_S.QUARANTINED, BatchFormed): _S.QUARANTINED,
    (_S.IN_BATCH, StepCommitted): _S.TRAINED,
    (_S.QUARANTINED, StepCommitted): _S.QUARANTINED,
    (_S.ISSUED, RolledBack): _S.ISSUED,
    (_S.GENERATING, RolledBack): _S.ISSUED,
    (_S.SCORED, RolledBack): _S.ISSUED,
    (_S.READY, RolledBack): _S.ISSUED,
    (_S.IN_BATCH, RolledBack): _S.ISSUED,
    (_S.TRAINED, RolledBack): _S.ISSUED,
    (_S.QUARANTINED, RolledBack): _S.QUARANTINED,
}


@dataclass(slots=True)
class GroupRecord:
    """One ticket and its samples."""

    ticket: Ticket
    order: int
    """Place in the order of issue, over all stages."""
    states: list[SampleState]
    metas: list[SampleMeta | None]
    phase: SampleState = _S.ISSUED
    """State of the group: GENERATING while any sample is, else the common state of its valid samples."""
    worker: str = ""
    """Process that runs the group and keeps its trajectories until the group ends."""
    incarnation: str = ""
    version: int = -1
    """Weight version at its last assignment; its tokens are not older."""
    step: int = 0
    """Step of its batch; 0 if it is in none."""
    ended: int = 0
    """Step that trained it, or that was being collected when it was dropped; meaningless while it is live."""
    reason: str = ""
    """Reason of its latest return, filtering or expiry."""
    quarantine: dict[str, str] = field(default_factory=dict)
    """Sample key → reason."""


def phase_of(states: list[SampleState]) -> SampleState:
    """State of a group from those of its samples; quarantined ones count only if there are no others."""
    if _S.GENERATING in states:
        return _S.GENERATING
    return next((state for state in states if state is not _S.QUARANTINED), _S.QUARANTINED)


@dataclass(slots=True)
class StageCounters:
    """Counters of one stage, in tickets; they outlive forgotten tickets."""

    num_issued: int = 0
    """Tickets ever issued."""
    num_trained: int = 0
    """Tickets trained in steps that were not rolled back."""
    num_dropped: int = 0
    """Tickets that ended untrained."""
    num_failed: int = 0
    """Dropped tickets that could not be trained; without those that the algorithm filtered out."""
    cursor: tuple[int, int] = (0, 0)
    """(epoch, position) after the last issued prompt; a position past the end means the start of the next epoch."""
