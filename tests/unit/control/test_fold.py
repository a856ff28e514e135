"""A folded state is the state: it restores to an equal one, at any point of a run, and goes on as the original does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kintsugi.config.schema import Config
from kintsugi.control.process import new_state
from kintsugi.control.state import MasterState
from kintsugi.journal.facts import CheckpointSaved, Fact, IncidentClosed, ScaleRefused, StateFolded
from kintsugi.journal.journal import kept_files
from kintsugi.run_folder.incidents import IncidentIndex
from kintsugi.run_folder.reader import summarize_facts
from kintsugi.simulation.campaign import simulated_config
from kintsugi.simulation.cluster import SimulatedCluster
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from kintsugi.simulation.master import JOURNAL


def facts_of(config: Config, plan: SimulatedFaultPlan) -> list[Fact]:
    cluster = SimulatedCluster(config, seed=3, plan=plan)
    outcome = cluster.run()
    assert outcome.outcome == "finished"
    return cluster.invariants.facts


@pytest.fixture(scope="module")
def disturbed() -> tuple[Config, list[Fact]]:
    """A run with evaluations, checkpoints, two stages of faults, and a master that dies."""
    config = simulated_config(6, is_busy=True)
    faults = [
        PlannedSimFault(SimulatedFaultKind.KILL, "model-0", state="training", step=3),
        PlannedSimFault(SimulatedFaultKind.KILL, "rollout-0", state="collecting", step=5),
        PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="training", step=6),
        PlannedSimFault(SimulatedFaultKind.KILL, "agent-0", state="training", step=8),
    ]
    facts = facts_of(config, SimulatedFaultPlan(faults))
    return config, [*facts, ScaleRefused("b", "too many")]


def state_of(config: Config, facts: Sequence[Fact]) -> MasterState:
    state = new_state(config)
    for fact in facts:
        state.apply(fact)
    return state


def test_a_state_that_begins_with_a_folded_one_goes_on_as_the_original(
    disturbed: tuple[Config, list[Fact]],
) -> None:
    config, facts = disturbed
    assert {CheckpointSaved, IncidentClosed} <= {type(fact) for fact in facts}
    whole = state_of(config, facts)
    for count in range(0, len(facts), len(facts) // 6):
        early = state_of(config, facts[:count])
        restored = state_of(config, [early.fold()])
        assert restored.fold() == early.fold()
        assert restored.ledger.digest() == early.ledger.digest()
        for fact in facts[count:]:
            restored.apply(fact)
        assert restored.fold() == whole.fold()
        assert restored.incidents.report() == whole.incidents.report()


def test_readers_of_the_run_folder_see_the_same_through_a_folded_state(
    disturbed: tuple[Config, list[Fact]],
) -> None:
    config, facts = disturbed
    for count in (len(facts) // 3, len(facts) // 2, len(facts)):
        known, rest = facts[:count], facts[count:]
        folded = state_of(config, known).fold()
        plain, through = summarize_facts(facts), summarize_facts([folded, *rest])
        assert (through.processes, through.incident) == (plain.processes, plain.incident)
        assert (through.scaled_to, through.answers) == (plain.scaled_to, plain.answers)
        assert through.saved_steps == plain.saved_steps[-len(through.saved_steps) :] != ()
        index = IncidentIndex()
        for fact in [folded, *rest]:
            index.take(fact)
        assert index.report() == state_of(config, facts).incidents.report()


def test_masters_of_a_simulated_run_begin_with_folded_states() -> None:
    config = simulated_config(6, is_busy=True)
    faults = [
        PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="collecting", step=5),
        PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="training", step=9),
    ]
    cluster = SimulatedCluster(config, seed=5, plan=SimulatedFaultPlan(faults))
    outcome = cluster.run()
    assert (outcome.outcome, outcome.violations, len(outcome.faults)) == ("finished", [], 2)
    assert not any(isinstance(fact, StateFolded) for fact in cluster.invariants.facts)
    assert kept_files(JOURNAL, disk=cluster.disk), "the journal was compacted"
