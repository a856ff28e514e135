"""A master without new checkpoints forgets what it cannot keep, and still goes back exactly."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import Config
from kintsugi.control.state import MasterState
from kintsugi.journal.facts import RolledBack
from kintsugi.simulation.campaign import simulated_config, undisturbed
from kintsugi.simulation.cluster import SimulatedCluster
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan

STEPS = 30
SAMPLES = 8
"""Samples of a step."""


def _config(*, every: int) -> Config:
    config = simulated_config()
    return msgspec.structs.replace(
        config,
        algorithm=msgspec.structs.replace(config.algorithm, steps=STEPS),
        checkpoint=msgspec.structs.replace(config.checkpoint, every=every),
    )


@pytest.mark.parametrize("every", [0, 8])
def test_a_run_that_forgot_its_samples_goes_back_to_the_undisturbed_result(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(every=every)
    reference = undisturbed(config)
    monkeypatch.setattr("kintsugi.control.state.SAMPLES_KEPT", 4 * SAMPLES)
    returned: list[int] = []
    apply = MasterState.apply

    def note(state: MasterState, fact: object) -> None:
        if isinstance(fact, RolledBack) and fact.step in state.return_points:
            returned.append(fact.step)
        apply(state, fact)  # type: ignore[arg-type]

    monkeypatch.setattr(MasterState, "apply", note)
    last = [
        PlannedSimFault(SimulatedFaultKind.KILL_HOST, f"host-{number}", state="training", step=23)
        for number in range(config.cluster.hosts)
    ]
    cluster = SimulatedCluster(config, seed=0, reference=reference, plan=SimulatedFaultPlan(last))
    outcome = cluster.run()
    assert (outcome.outcome, outcome.violations) == ("finished", [])
    assert len(outcome.faults) == config.cluster.hosts
    assert set(returned) == {16 if every else 0}


def test_the_state_of_a_run_without_checkpoints_does_not_grow_with_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kintsugi.control.state.SAMPLES_KEPT", 10 * SAMPLES)
    cluster = SimulatedCluster(_config(every=0), seed=0)
    sizes: dict[int, int] = {}

    def measure(*_: object) -> None:
        assert cluster.master is not None
        state = cluster.master.master.state
        sizes[state.step] = sum(map(len, state.fold().parts.values()))

    cluster.invariants.follow(measure)
    assert cluster.run().outcome == "finished"
    first, last = max(sizes[step] for step in range(5, 15)), max(sizes[step] for step in range(20, STEPS))
    assert last < 1.25 * first
