from __future__ import annotations

import random
from collections import Counter

from kintsugi.control.phases.table import Phase
from kintsugi.lab.injector.injection import INJECTABLE_PHASES, Ability, Injection, Trigger
from kintsugi.lab.soak.plan import HERE_ROLES, SIGNAL_ABILITIES, FaultPlan, FaultRole, PlannedFault

NUM_PAIRS = len(HERE_ROLES) * len(INJECTABLE_PHASES)


def drawn(plan: FaultPlan, count: int) -> list[PlannedFault]:
    """Draw `count` faults, all of which are injected as planned."""
    faults = []
    for _ in range(count):
        fault = plan.draw()
        plan.record_injected(fault.role, fault.phase)
        faults.append(fault)
    return faults


def test_every_pair_is_hit_twice_before_any_is_hit_three_times() -> None:
    plan = FaultPlan(random.Random(0))
    faults = drawn(plan, 2 * NUM_PAIRS)
    assert set(Counter((fault.role, fault.phase) for fault in faults).values()) == {2}
    assert plan.uncovered(at_least=2) == []
    assert len(plan.uncovered(at_least=3)) == NUM_PAIRS


def test_the_same_seed_draws_the_same_faults_and_another_seed_others() -> None:
    first, again, other = (drawn(FaultPlan(random.Random(seed)), 30) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_both_kinds_of_fault_are_drawn() -> None:
    assert {fault.ability for fault in drawn(FaultPlan(random.Random(3)), 40)} == set(SIGNAL_ABILITIES)


def test_a_machine_is_never_stopped_and_is_no_target_of_a_run_on_this_machine() -> None:
    faults = drawn(FaultPlan(random.Random(3), roles=[FaultRole.NODE]), 40)
    assert {fault.ability for fault in faults} == {Ability.KILL}
    assert FaultRole.NODE not in {fault.role for fault in drawn(FaultPlan(random.Random(3)), NUM_PAIRS)}


def test_a_missed_fault_is_drawn_again_and_does_not_count() -> None:
    plan = FaultPlan(random.Random(0), roles=[FaultRole.SERVER], phases=[Phase.SAVING])
    plan.record_missed(plan.draw())
    assert plan.uncovered(at_least=1) == [("server", "saving")]
    assert (plan.draw().role, plan.draw().phase) == (FaultRole.SERVER, Phase.SAVING)


def test_a_pair_that_can_not_be_reached_does_not_keep_the_others_from_being_hit() -> None:
    plan = FaultPlan(random.Random(0), roles=list(HERE_ROLES), phases=[Phase.COLLECTING, Phase.RECOVERING])
    for _ in range(200):
        fault = plan.draw()
        if fault.phase is Phase.RECOVERING:
            plan.record_missed(fault)
        else:
            plan.record_injected(fault.role, fault.phase)
    assert all(hits["collecting"] >= 5 and hits["recovering"] == 0 for hits in plan.coverage.values())


def test_a_hit_in_another_phase_than_planned_counts_for_the_phase_it_hit() -> None:
    plan = FaultPlan(random.Random(0), roles=[FaultRole.MODEL])
    plan.record_injected(FaultRole.MODEL, "publishing")
    plan.record_injected(FaultRole.MODEL, "preparing")
    assert plan.coverage["model"]["publishing"] == 1
    assert sum(plan.coverage["model"].values()) == 1


def test_a_planned_fault_becomes_an_injection_into_the_chosen_process() -> None:
    planned = PlannedFault(FaultRole.SERVER, Ability.KILL, Phase.PUBLISHING)
    expected = Injection(ability=Ability.KILL, target="server-1", trigger=Trigger(phase="publishing"))
    assert planned.injection("server-1") == expected
