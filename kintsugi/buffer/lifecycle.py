"""The states of a sample, the complete table of moves between them, and what is kept of a group; `ledger.py` acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kintsugi.facts import (
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
    """Where a sample stands. The last four are ends; of these only TRAINED can be undone, by a rollback."""

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
class Group:
    """One ticket and its samples."""

    ticket: Ticket
    order: int
    """Place in the order of issue, over all stages."""
    states: list[SampleState]
    metas: list[SampleMeta | None]
    phase: SampleState = _S.ISSUED
    """The group as a whole: GENERATING while any sample is, else the state that its valid samples share."""
    worker: str = ""
    """Runs the group, and keeps its trajectories until the group ends."""
    incarnation: str = ""
    version: int = -1
    """Of the weights that were current when it was last assigned; its tokens are not older."""
    step: int = 0
    """Of its batch; 0 when it is in none."""
    ended: int = 0
    """The step that trained it, or that was being collected when it was dropped; meaningless while it lives."""
    reason: str = ""
    """Of the latest return, filtering or expiry."""
    quarantine: dict[str, str] = field(default_factory=dict)
    """Sample key → reason."""


def phase_of(states: list[SampleState]) -> SampleState:
    """Of a group whose samples are in these states; quarantined ones count only where there are no others."""
    if _S.GENERATING in states:
        return _S.GENERATING
    return next((state for state in states if state is not _S.QUARANTINED), _S.QUARANTINED)


@dataclass(slots=True)
class Stage:
    """Counters of one stage, in tickets; they outlive forgotten tickets."""

    num_issued: int = 0
    """Ever."""
    num_trained: int = 0
    """In steps that were not rolled back."""
    num_dropped: int = 0
    """Ended without being trained."""
    num_failed: int = 0
    """The dropped ones that could not be trained, rather than were not wanted."""
    cursor: tuple[int, int] = (0, 0)
    """(epoch, position) behind the last issued prompt; past the data's end it means the next epoch's start."""
