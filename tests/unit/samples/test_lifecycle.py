"""The table of moves, column by column: from where each fact leads, and to where."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import pytest

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
from kintsugi.samples.lifecycle import LIVE, TRANSITIONS, SampleState

_S = SampleState
MOVES: dict[type[LedgerFact], tuple[AbstractSet[SampleState], SampleState]] = {
    TicketAssigned: ({_S.ISSUED}, _S.GENERATING),
    TicketReturned: (LIVE - {_S.ISSUED}, _S.ISSUED),
    SamplesScored: ({_S.GENERATING}, _S.SCORED),
    SampleQuarantined: ({_S.ISSUED, _S.GENERATING}, _S.QUARANTINED),
    TicketFiltered: ({_S.SCORED, _S.READY}, _S.FILTERED),
    TicketExpired: (LIVE - {_S.IN_BATCH}, _S.EXPIRED),
    BatchFormed: ({_S.READY}, _S.IN_BATCH),
    StepCommitted: ({_S.IN_BATCH}, _S.TRAINED),
    RolledBack: (LIVE | {_S.TRAINED}, _S.ISSUED),
}
OF_SAMPLES = (SamplesScored, SampleQuarantined)
"""Facts that name samples; the others are of whole groups, in which a sample may be quarantined."""


@pytest.mark.parametrize("kind", MOVES, ids=lambda kind: kind.__name__)
def test_a_fact_leads_from_these_states_to_this_one_and_leaves_what_is_quarantined(
    kind: type[LedgerFact],
) -> None:
    sources, target = MOVES[kind]
    expected = dict.fromkeys(sources, target)
    if kind not in OF_SAMPLES:
        expected[_S.QUARANTINED] = _S.QUARANTINED
    assert {state: after for (state, fact), after in TRANSITIONS.items() if fact is kind} == expected


def test_no_other_fact_moves_a_sample() -> None:
    assert {kind for _, kind in TRANSITIONS} == set(MOVES)
