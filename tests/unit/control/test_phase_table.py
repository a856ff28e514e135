"""The table of phases: complete, in step with its page, and followed by the master."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from kintsugi.control.master import Master
from kintsugi.control.phases.table import (
    AFTER_STEP,
    RANK_FAULTS,
    TRANSITIONS,
    WORK,
    Due,
    Next,
    Phase,
    PhaseResult,
    markdown,
)
from tests.unit.control.driven import Driven

DOCUMENT = Path(__file__).parents[3] / "docs" / "master.md"
_P, _R = Phase, PhaseResult


def test_the_page_is_what_the_table_contains() -> None:
    assert DOCUMENT.read_text() == markdown()


def test_every_phase_is_described_and_every_phase_but_the_first_can_be_entered() -> None:
    assert WORK.keys() == set(Phase)
    targets = {after for after in TRANSITIONS.values() if isinstance(after, Phase)}
    assert targets | set(AFTER_STEP.values()) == set(Phase) - {_P.STARTING} == Master._entries.keys()


def test_every_reason_that_can_be_due_has_its_phase() -> None:
    assert list(AFTER_STEP) == list(Due)
    chosen = {phase for (phase, result), after in TRANSITIONS.items() if after is Next.DUE}
    assert chosen == {_P.PUBLISHING, _P.EVALUATING, _P.SAVING}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not _P.ENDED])
def test_every_phase_ends_when_the_run_has_failed_and_all_with_ranks_recover_from_their_faults(
    phase: Phase,
) -> None:
    assert TRANSITIONS[phase, _R.FAILED] is _P.ENDED
    again = {TRANSITIONS.get((phase, result)) for result in RANK_FAULTS}
    expected = {_P.STARTING: None, _P.PREPARING: _P.PREPARING}.get(phase, _P.RECOVERING)
    assert again == {expected}


def test_nothing_leads_out_of_the_end_and_a_running_phase_is_not_left() -> None:
    assert _P.ENDED not in {phase for phase, _ in TRANSITIONS}
    assert not {_R.RUNNING, _R.UNRECOVERABLE} & {result for _, result in TRANSITIONS}


def test_a_run_without_faults_takes_only_transitions_of_the_table() -> None:
    driven = Driven(num_eval_rows=2)
    passed = [driven.master.phase]

    def is_over() -> bool:
        if driven.master.phase is not passed[-1]:
            passed.append(driven.master.phase)
        return driven.master.phase is _P.ENDED

    driven.begin()
    driven.until(is_over)
    allowed = {(before, after) for (before, _), after in TRANSITIONS.items() if isinstance(after, Phase)}
    # Several phases may pass within one decision: without an evaluation and a save, what is due follows a step.
    allowed |= {(before, after) for before in (_P.PUBLISHING, _P.EVALUATING, _P.SAVING) for after in Phase}
    assert set(pairwise(passed)) <= allowed
    assert {_P.COLLECTING, _P.TRAINING, _P.COMMITTING, _P.EVALUATING, _P.SAVING} <= set(passed)
