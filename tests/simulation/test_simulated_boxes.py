"""Simulated runs whose state is cut into boxes: several ranks write a save, and a box is repaired from its holders."""

from __future__ import annotations

import pytest

from kintsugi.control.phases.recover import REPAIR_ATTEMPTS
from kintsugi.control.phases.train import FORGET_EVERY
from kintsugi.errors import Fault, RefusedError
from kintsugi.journal.facts import (
    CheckpointSaved,
    IncidentClosed,
    IncidentOpened,
    MeshChanged,
    ProcessJoined,
    ProcessLost,
    RolledBack,
    StepCommitted,
    StrategyChosen,
)
from kintsugi.model.seats import WHOLE
from kintsugi.recovery import rank_protocol
from kintsugi.recovery.rank import Flow
from kintsugi.simulation.campaign import LAYOUTS, Runner, SimulatedLayout, layout_of, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster, SimulationOutcome, undisturbed
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultKind, SimulatedFaultPlan
from kintsugi.simulation.ranks import SimulatedRank
from kintsugi.simulation.replay_adapter import ReplaySnapshot

BOX_LOST = 8
"""Seed in which the host of the only rank with a box is lost before another host has a copy."""

RECUT = (1225, 30269)
"""Seeds with layouts in which the ranks form another mesh. 30269: a host without ranks has the only copy of a part."""

OUT_OF_REACH = {
    703017: "some of the lost ranks come, and the others still have parts",
    710323: "the lost rank comes while the last repair is tried",
    740975: "the state is not cut, and only the host without ranks has a copy of the last step",
    743486: "a rank without a seat was interrupted in its update, and its host has the step before",
    744847: "a rank without a seat has just started, and its host has what its predecessor held",
}
"""Seeds with layouts in which no live rank can read a part of the last step for a while."""

OTHER_FORM = 712110
"""Seed with layouts in which a rank alone prepared a step that was not committed; two ranks trained it again in parts,
one of which is lost."""

BOOK_LOST = 30447
"""Seed with layouts in which a replaced rank does not get the first address book, and repairs fail at once for that."""
PAUSED_MASTER = 410051
"""Seed with layouts in which the master does nothing for longer than a request's deadline, and an answer was lost."""
BEFORE_THE_FIRST_STEP = 707898
"""Seed with layouts in which the state is cut again at step 0, and the ranks recover there once more."""
NO_RANK_LIVES = 735772
"""Seed with layouts in which all ranks are killed and the first starts of their replacements fail."""
LOST_WITH_ITS_MESH = (708180, 715168, 722383, 744809)
"""Seeds with layouts in which the host with the only copy of a part is lost, and ranks that had none need it."""


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


@pytest.mark.parametrize("lost", [("model-1",), ("model-1", "model-2")])
def test_ranks_go_on_while_each_box_has_one_and_take_the_others_back(lost: tuple[str, ...]) -> None:
    config = simulated_config(layout=SimulatedLayout(4, 2, 2))
    reference = undisturbed(config)
    faults = [
        PlannedSimFault(SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", 2, about=rank, times=4)
        for rank in lost
        for agent in ("agent-0", "agent-1")
    ]
    faults += [PlannedSimFault(SimulatedFaultKind.KILL, rank, state="collecting", step=2) for rank in lost]
    slow = PlannedSimFault(SimulatedFaultKind.SLOW, "rollout-0", state="collecting", step=2)
    slow.share, slow.duration_s = 0.3, 5.0  # So that the ranks are back before the run ends.
    plan = SimulatedFaultPlan([*faults, slow])
    outcome = SimulatedCluster(config, seed=0, plan=plan, reference=reference).run()
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)
    assert "elastic" in [fact.strategy for fact in outcome.facts if isinstance(fact, StrategyChosen)]
    back = [fact.peer.process for fact in outcome.facts if isinstance(fact, ProcessJoined)]
    assert all(back.count(rank) == 2 for rank in lost)


def test_a_state_without_a_rank_for_each_part_is_cut_over_fewer_ranks_and_back() -> None:
    config = simulated_config(layout=SimulatedLayout(4, 4, 2))
    lost = {"model-3": (2, 5), "model-1": (4, 3)}
    faults = [
        PlannedSimFault(
            SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", step, about=rank, times=times
        )
        for rank, (step, times) in lost.items()
        for agent in ("agent-0", "agent-1")
    ]
    faults += [
        PlannedSimFault(SimulatedFaultKind.KILL, rank, state="collecting", step=step)
        for rank, (step, _) in lost.items()
    ]
    slow = PlannedSimFault(SimulatedFaultKind.SLOW, "rollout-0", state="collecting", step=5)
    slow.share, slow.duration_s = 0.3, 60.0  # So that the ranks are back before the run ends.
    plan = SimulatedFaultPlan([*faults, slow])
    reference = undisturbed(config)
    outcome = SimulatedCluster(config, seed=0, plan=plan, reference=reference).run()
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)
    meshes = [fact.shards for fact in outcome.facts if isinstance(fact, MeshChanged)]
    assert meshes[0] == 3 and min(meshes) == 2 and meshes[-1] > 2
    assert outcome.reference.weights_sha256 == reference.weights_sha256


@pytest.mark.parametrize("flow", Flow)
def test_ranks_whose_state_was_cut_again_before_the_first_step_recover_there_once_more(flow: Flow) -> None:
    config = simulated_config(layout=SimulatedLayout(3, 3, 2))
    faults = [
        PlannedSimFault(
            SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", 0, about="model-2", times=50
        )
        for agent in ("agent-0", "agent-1")
    ]
    faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "model-2", state="collecting", step=0))
    call = PlannedSimFault(SimulatedFaultKind.FAIL, "model-0", "RunCall", "recovering: wait for replacements")
    faults.append(call)
    reference = undisturbed(config, flow=flow)
    plan = SimulatedFaultPlan(faults)
    outcome = SimulatedCluster(config, seed=0, plan=plan, reference=reference, flow=flow).run()
    assert call.fired_in == "training"
    fell = next(fact.shards for fact in outcome.facts if isinstance(fact, MeshChanged))
    assert (fell, outcome.outcome, outcome.violations, outcome.num_rollbacks) == (2, "finished", [], 0)


def test_the_loss_of_a_rank_without_a_seat_stops_no_other() -> None:
    config = simulated_config(layout=SimulatedLayout(4, 1, 2, stages=2))
    faults = [
        PlannedSimFault(
            SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", 2, about="model-3", times=50
        )
        for agent in ("agent-0", "agent-1")
    ]
    faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "model-3", state="collecting", step=2))
    faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "model-2", state="training", step=6))
    reference = undisturbed(config)
    cluster = SimulatedCluster(config, seed=0, plan=SimulatedFaultPlan(faults), reference=reference)
    outcome = cluster.run()
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)
    assert [fault.fired_in for fault in outcome.faults if fault.target == "model-2"] == ["training"]
    lost = [
        fact.incident
        for fact in outcome.facts
        if isinstance(fact, IncidentOpened) and fact.fault.process == "model-2"
    ]
    chosen = [
        (fact.strategy, fact.reason)
        for fact in outcome.facts
        if isinstance(fact, StrategyChosen) and fact.incident in lost
    ]
    assert chosen == [("elastic", "model-2 had no seat: the group goes on without it")]
    closed = [
        fact.step for fact in outcome.facts if isinstance(fact, IncidentClosed) and fact.incident in lost
    ]
    assert closed == [7], "the step in which it was lost"


@pytest.mark.parametrize("seed", RECUT)
def test_disturbed_runs_in_which_the_state_is_cut_again_keep_every_invariant(seed: int) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert any(isinstance(fact, MeshChanged) for fact in outcome.facts)
    assert outcome.violations == []


@pytest.mark.parametrize("seed", OUT_OF_REACH, ids=lambda seed: OUT_OF_REACH[seed])
def test_no_step_is_undone_whose_parts_are_in_the_memory_of_live_hosts(seed: int) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert any(fault.kind is SimulatedFaultKind.KILL for fault in outcome.faults)
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)


def test_a_step_that_was_prepared_in_another_form_than_it_was_committed_in_may_be_undone() -> None:
    outcome = Runner(draws_layouts=True).run(OTHER_FORM)
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 1)


def test_hosts_forget_what_they_held_of_meshes_that_are_passed() -> None:
    config = simulated_config(layout=SimulatedLayout(4, 4, 2))
    faults = [
        PlannedSimFault(
            SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", 2, about="model-3", times=5
        )
        for agent in ("agent-0", "agent-1")
    ]
    faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "model-3", state="collecting", step=2))
    cluster = SimulatedCluster(config, seed=0, plan=SimulatedFaultPlan(faults))
    outcome = cluster.run()
    assert (outcome.outcome, outcome.violations) == ("finished", [])
    assert any(isinstance(fact, MeshChanged) and fact.shards == 3 for fact in outcome.facts)
    held = [step for host in cluster.hosts.values() for _, step in host.memory.replicas]
    assert held and min(held) >= outcome.num_steps - FORGET_EVERY


@pytest.mark.parametrize("seed", [BOOK_LOST, PAUSED_MASTER])
def test_neither_a_lost_address_book_nor_a_pause_of_the_master_costs_a_step_or_a_rank(seed: int) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)


@pytest.mark.parametrize("seed", [BEFORE_THE_FIRST_STEP, NO_RANK_LIVES])
def test_a_run_does_not_end_before_its_first_step_for_ranks_that_come_or_go_on_without_the_others(
    seed: int,
) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert (outcome.outcome, outcome.violations) == ("finished", [])


@pytest.mark.parametrize("seed", LOST_WITH_ITS_MESH)
def test_no_rank_is_ended_for_a_part_that_every_place_said_it_does_not_have(seed: int) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert outcome.num_rollbacks > 0
    assert (outcome.outcome, outcome.violations) == ("finished", [])


def test_a_rank_that_no_source_answers_is_started_again_before_a_step_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = simulated_config(layout=SimulatedLayout(2, 2, 2))
    faults = [
        PlannedSimFault(
            SimulatedFaultKind.FAIL, agent, "StartProcess", "collecting", 2, about="model-1", times=4
        )
        for agent in ("agent-0", "agent-1")
    ]
    faults.append(PlannedSimFault(SimulatedFaultKind.KILL, "model-1", state="collecting", step=2))
    slow = PlannedSimFault(SimulatedFaultKind.SLOW, "rollout-0", state="collecting", step=2)
    slow.share, slow.duration_s = 0.3, 60.0  # So that the rank is back before the run ends.
    fetch_box, unanswered = SimulatedRank._fetch_box, dict[str, int]()

    def fetch(self: SimulatedRank, source: str, step: int, owner: str, box: str) -> ReplaySnapshot:
        if self.name == "model-1" and {self.incarnation} >= unanswered.keys():
            unanswered[self.incarnation] = unanswered.get(self.incarnation, 0) + 1
            late = Fault("late", "DeadlineExceeded", source, "no answer", 0.0)
            raise RefusedError("no answer", cause=late)
        return fetch_box(self, source, step, owner, box)

    monkeypatch.setattr(SimulatedRank, "_fetch_box", fetch)
    reference = undisturbed(config)
    plan = SimulatedFaultPlan([*faults, slow])
    outcome = SimulatedCluster(config, seed=0, plan=plan, reference=reference).run()
    assert sum(unanswered.values()) >= REPAIR_ATTEMPTS
    lost = [fact.incarnation for fact in outcome.facts if isinstance(fact, ProcessLost)]
    assert lost.count(*unanswered) == 1
    assert (outcome.outcome, outcome.violations, outcome.num_rollbacks) == ("finished", [], 0)


def test_layouts_are_drawn_for_each_seed_and_keep_every_invariant() -> None:
    runner, layouts = Runner(draws_layouts=True), [layout_of(seed) for seed in range(100)]
    assert {(each.ranks, each.shards, each.stages, each.tensors) for each in layouts} == set(LAYOUTS)
    for seed in range(4):
        outcome = runner.run(seed)
        assert outcome.violations == [], runner.replay_command(seed)
    assert "--layouts" in runner.replay_command(1)


def test_a_master_that_takes_every_rank_for_a_holder_of_every_box_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(shards=2)
    assert all(runner.run(seed).violations == [] for seed in range(3))
    monkeypatch.setattr(rank_protocol, "seat_of", lambda process, mesh: WHOLE)
    assert any(runner.run(seed).violations for seed in range(3))
