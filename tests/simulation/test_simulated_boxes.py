"""Simulated runs whose state is cut into boxes: several ranks write a save, and a box is repaired from its holders."""

from __future__ import annotations

import pytest

from kintsugi.journal.facts import CheckpointSaved, RolledBack, StepCommitted
from kintsugi.model.seats import WHOLE
from kintsugi.recovery import rank_protocol
from kintsugi.simulation.campaign import Runner, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed

BOX_LOST = 8
"""Seed in which the host of the only rank with a box is lost before another host has a copy."""


def run(seed: int, *, workers: int = 6, shards: int = 2) -> SimulationOutcome:
    return Runner(num_workers=workers, shards=shards).run(seed)


@pytest.mark.parametrize("workers", [6, 12])
def test_disturbed_runs_of_cut_states_keep_every_invariant(workers: int) -> None:
    for seed in range(4):
        outcome = run(seed, workers=workers)
        assert outcome.violations == []
        assert outcome.outcome == "finished"


def test_every_step_has_the_digest_of_both_boxes_and_the_ranks_save_it_together() -> None:
    config = simulated_config(shards=2)
    cluster = SimulatedCluster(config, seed=1)
    outcome = cluster.run()
    digests = [fact.state_digest for fact in outcome.facts if isinstance(fact, StepCommitted)]
    assert all(len(digest.split(".")) == 2 for digest in digests)
    saved = [fact for fact in outcome.facts if isinstance(fact, CheckpointSaved)]
    assert saved
    for fact in saved:
        assert cluster.checkpoints[fact.path].keys() == {"0/2", "1/2"}


def test_the_cut_changes_no_weight() -> None:
    whole, cut = (undisturbed(simulated_config(12, shards=shards)) for shards in (1, 2))
    assert whole.weights_sha256 == cut.weights_sha256 != ""


def test_a_run_goes_back_when_one_box_has_no_holder_left_and_ends_with_the_same_bits() -> None:
    outcome = run(BOX_LOST)
    assert any(isinstance(fact, RolledBack) for fact in outcome.facts)
    assert (outcome.outcome, outcome.violations) == ("finished", [])


def test_a_master_that_takes_every_rank_for_a_holder_of_every_box_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(shards=2)
    assert all(runner.run(seed).violations == [] for seed in range(3))
    monkeypatch.setattr(rank_protocol, "seat_of", lambda process, mesh: WHOLE)
    assert any(runner.run(seed).violations for seed in range(3))
