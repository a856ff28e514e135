"""Simulated ranks that compute a model together: groups along each axis of the mesh, new ones in every generation."""

from __future__ import annotations

from typing import Any

import pytest

from kintsugi.journal.facts import StepCommitted, StrategyChosen
from kintsugi.model.seats import mesh_of
from kintsugi.simulation.campaign import Runner, SimulatedLayout, layout_of, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from kintsugi.simulation.groups import members_of
from kintsugi.simulation.ranks import SimulatedRank

LAYOUT = SimulatedLayout(8, 2, 2, 2, 2)
CONFIG = simulated_config(layout=LAYOUT)
RANKS = tuple(f"model-{index}" for index in range(LAYOUT.ranks))
BETWEEN_S = 0.012
"""From the order to form groups to a moment at which a rank has joined some of four."""
KILL = PlannedSimFault(SimulatedFaultKind.KILL, "model-3", state="training", step=3)


def run(*faults: PlannedSimFault) -> SimulationOutcome:
    return SimulatedCluster(
        CONFIG, seed=0, plan=SimulatedFaultPlan([*faults]), reference=undisturbed(CONFIG)
    ).run()


def test_stages_and_tensors_change_no_weight() -> None:
    whole = undisturbed(simulated_config(layout=SimulatedLayout(8, 1, 2)))
    assert undisturbed(CONFIG).weights_sha256 == whole.weights_sha256 != ""


def test_every_step_has_a_digest_of_each_box() -> None:
    digests = [
        fact.state_digest
        for fact in SimulatedCluster(CONFIG, seed=1).run().facts
        if isinstance(fact, StepCommitted)
    ]
    assert all(digest.startswith("2x2x2:") and digest.count(".") == 7 for digest in digests)


def test_a_rank_is_in_one_group_along_each_axis() -> None:
    found = members_of("model-6", RANKS, mesh_of(CONFIG.actor.layout))
    assert list(found) == ["", "data", "tensors", "stages"]
    assert (found["data"], found["tensors"], found["stages"]) == (
        ("model-2", "model-6"),
        ("model-6", "model-7"),
        ("model-4", "model-6"),
    )


def test_a_lost_rank_is_replaced_and_its_neighbours_form_new_groups() -> None:
    outcome = run(KILL)
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)
    assert "recover" in [fact.strategy for fact in outcome.facts if isinstance(fact, StrategyChosen)]


def test_a_rank_that_is_lost_between_two_groups_of_a_generation_breaks_it_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end, joined = SimulatedRank.end, list[list[str]]()

    def ends(rank: SimulatedRank, status: int) -> None:
        if rank.name == "model-5":
            joined.append(list(rank._joined))
        end(rank, status)

    monkeypatch.setattr(SimulatedRank, "end", ends)
    in_rebuild = "recovering: rebuild communication"
    again = PlannedSimFault(SimulatedFaultKind.KILL, "model-5", state=in_rebuild, delay_s=BETWEEN_S)
    outcome = run(KILL, again)
    assert 0 < len(joined[0]) < len(members_of("model-5", RANKS, mesh_of(CONFIG.actor.layout)))
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)


def test_a_rank_that_keeps_its_group_of_an_older_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SimulatedRank._probe

    def keeps_its_tensor_group(rank: SimulatedRank, *given: Any) -> None:
        before = rank._groups
        probe(rank, *given)
        rank._groups = {
            **rank._groups,
            **{axis: group for axis, group in before.items() if axis == "tensors"},
        }

    monkeypatch.setattr(SimulatedRank, "_leave", lambda rank: None)
    monkeypatch.setattr(SimulatedRank, "_probe", keeps_its_tensor_group)
    assert any("tensors" in violation for violation in run(KILL).violations)


def test_seeds_with_stages_and_tensors_keep_every_invariant() -> None:
    runner = Runner(draws_layouts=True)
    cut = [seed for seed in range(60) if layout_of(seed).stages * layout_of(seed).tensors > 1]
    for seed in cut[:6]:
        outcome = runner.run(seed)
        assert outcome.violations == [], runner.replay_command(seed)
