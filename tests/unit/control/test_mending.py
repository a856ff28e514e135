"""Processes of every role die at every moment of a run, and the run ends with the same steps as if none had."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kintsugi.control.phases import Phase
from kintsugi.facts import IncidentClosed, IncidentOpened, ProcessLost
from kintsugi.recovery.processor import Flow
from tests.unit.control.driven import Driven
from tests.unit.control.outcomes import begun, outcome, undisturbed

EXPECTED = undisturbed()
LOSSES = {
    "rank": ("model-1",),
    "first rank": ("model-0",),
    "both ranks": ("model-0", "model-1"),
    "rollout worker": ("rollout-0",),
    "rollout worker and rank": ("rollout-1", "model-0"),
    "manager": ("manager-0",),
    "manager and rank": ("manager-0", "model-1"),
    "server": ("server-0",),
}


def at(number: int, *, flow: Flow = Flow.ROLLBACK) -> Driven | None:
    """A run after so many answers, once everybody is there; None behind its end."""
    driven = begun(flow=flow)
    driven.until(Phase.PREPARING)
    for _ in range(number):
        driven.go_on()
    return None if driven.master.phase is Phase.ENDED else driven


def incidents(driven: Driven) -> tuple[list[IncidentOpened], list[IncidentClosed]]:
    return (
        [fact for fact in driven.facts if isinstance(fact, IncidentOpened)],
        [fact for fact in driven.facts if isinstance(fact, IncidentClosed)],
    )


@pytest.mark.parametrize("lost", LOSSES)
def test_a_loss_at_any_moment_changes_no_step_and_is_one_incident(lost: str) -> None:
    phases: Counter[Phase] = Counter()
    number = 0
    while (driven := at(number, flow=list(Flow)[number % 2])) is not None:
        phases[driven.master.phase] += 1
        phase, step = driven.master.phase, driven.state.step
        for process in LOSSES[lost]:
            driven.lose(process)
        driven.until(Phase.ENDED)
        assert outcome(driven.facts) == EXPECTED, f"lost after answer {number}, {phase}"
        opened, closed = incidents(driven)
        assert [(fact.step, fact.phase) for fact in opened] == [(step, phase)]
        if driven.state.open_incident:
            assert set(driven.world.hosts) - {process for process, _, _ in driven.world.living()}
        else:
            assert [set(fact.processes) for fact in closed] == [set(LOSSES[lost])]
        number += 1
    assert set(phases) == set(Phase) - {Phase.STARTING, Phase.RECOVERING, Phase.ENDED}
