"""A simulated master dies in every phase: what the ranks have computed is never computed again."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kintsugi.recovery.rank import Flow
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from tests.simulation.test_simulated_algorithms import CONFIGS

CALL = re.compile(r"(model-\d+) +(\w+) of step (\d+)$")


def run(name: str, *faults: PlannedSimFault, flow: Flow = Flow.ROLLBACK) -> SimulationOutcome:
    config = CONFIGS[name]
    return SimulatedCluster(
        config,
        seed=0,
        plan=SimulatedFaultPlan(list(faults)),
        reference=undisturbed(config, flow=flow),
        flow=flow,
        keep_trace=True,
    ).run()


def computed(outcome: SimulationOutcome) -> Counter[tuple[str, ...]]:
    """(rank, call, step) → how often that rank computed it."""
    return Counter(match.groups() for line in outcome.trace if (match := CALL.search(line)))


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("state", "delay_s"),
    [
        *(("training", delay_s) for delay_s in (0.0, 0.005, 0.02, 0.05, 0.1)),
        ("committing", 0.0),
        ("committing", 0.002),
        ("publishing", 0.0),
        ("collecting", 0.01),
        ("saving", 0.0),
    ],
)
def test_every_rank_computes_every_call_once_though_the_master_dies(
    state: str, delay_s: float, name: str, flow: Flow
) -> None:
    step = 10 if state == "saving" else 5
    killed = PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state=state, step=step, delay_s=delay_s)
    outcome = run(name, killed, flow=flow)
    assert [fault.target for fault in outcome.faults] == ["master-0"]
    assert (outcome.outcome, outcome.violations) == ("finished", [])
    found = computed(outcome)
    assert len({step for _, _, step in found}) == 10 and set(found.values()) == {1}


def test_a_second_master_that_dies_as_it_takes_over_loses_nothing_either() -> None:
    first = PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="training", step=5)
    second = PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="adopting", step=5)
    outcome = run("ppo", first, second)
    assert len(outcome.faults) == 2 and (outcome.outcome, outcome.violations) == ("finished", [])
    assert set(computed(outcome).values()) == {1}


@pytest.mark.parametrize("rank", ["model-0", "model-1"])
def test_a_call_that_only_one_rank_received_from_the_last_master_does_not_keep_the_next_one_waiting(
    rank: str,
) -> None:
    """The other rank is in that call and waits for this one: it must answer the call before it again meanwhile."""
    cut = PlannedSimFault(
        SimulatedFaultKind.PARTITION, "master-0", rank, "training", 5, delay_s=0.005, duration_s=0.145
    )
    killed = PlannedSimFault(SimulatedFaultKind.KILL, "master-0", state="training", step=5, delay_s=0.14)
    outcome = run("ppo", cut, killed)
    assert [fault.kind for fault in outcome.faults] == ["partition", "kill"]
    assert (outcome.outcome, outcome.violations) == ("finished", [])
    assert set(computed(outcome).values()) == {1}
    assert outcome.virtual_s < 10.0, "a master waited until a call was too late"
