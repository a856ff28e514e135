"""Every place at which a master can die is aimed at, or declared impossible with its reason."""

from __future__ import annotations

import random

import msgspec
import pytest

from kintsugi.control.master import Master
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Decision, Event, Tell
from kintsugi.protocol.rollout import Drop
from kintsugi.simulation import targeted_faults
from kintsugi.simulation.campaign import Runner, draw_plan, shape_of, simulated_config
from kintsugi.simulation.cluster import SimulatedCluster
from kintsugi.simulation.coverage import (
    BOUNDARIES,
    DUMPING,
    IMPOSSIBLE_BOUNDARIES,
    PRE_LOCKING,
    RECOVERY_STATES,
    STAGING,
    STATES,
    WAITING,
    Coverage,
    Pair,
    possible_boundaries,
)
from kintsugi.simulation.faults import STEP_STATES, draw_faults
from kintsugi.types import Role

RUNNER = Runner()


def seeds_aimed_at(pair: Pair, *, count: int) -> list[int]:
    period, place = 3 * len(targeted_faults.BOUNDARIES), targeted_faults.BOUNDARIES.index(pair)
    return [3 * place + 1 + period * turn for turn in range(count)]


def test_every_pair_of_state_and_boundary_is_possible_or_has_a_reason_why_it_is_not() -> None:
    pairs = {(state, what) for state in (*STATES, Phase.ENDED.value) for what in BOUNDARIES}
    possible = set(possible_boundaries())
    assert possible | IMPOSSIBLE_BOUNDARIES.keys() == pairs
    assert not possible & IMPOSSIBLE_BOUNDARIES.keys()
    assert all(IMPOSSIBLE_BOUNDARIES.values())


def test_the_report_counts_what_no_master_died_at_as_missing() -> None:
    died = Coverage()
    for pair in possible_boundaries()[1:]:
        died.crashes[pair] += 1
    found = died.report()["state_effect_crash"]
    state, what = possible_boundaries()[0]
    assert isinstance(found, dict)
    assert found["missing"] == [f"{state} × {what}"]
    assert found["met"] == found["possible"] - 1


def test_a_period_of_seeds_aims_at_every_possible_pair_and_a_seed_always_at_the_same() -> None:
    layout = SimulatedCluster(simulated_config(), seed=0).layout
    aimed = set()
    for seed in range(1, 3 * len(targeted_faults.BOUNDARIES), 3):
        plan = draw_plan(seed, layout, num_steps=10)
        assert plan == draw_plan(seed, layout, num_steps=10)
        aimed |= {(fault.state, fault.other) for fault in plan.faults if fault.kind == "crash"}
    assert aimed == set(possible_boundaries())


def test_every_run_loses_a_rank_in_a_step_and_every_third_its_master_too() -> None:
    """Only a lost rank makes the ranks recover: a new master takes over the group that it finds."""
    layout = SimulatedCluster(simulated_config(), seed=0).layout
    ranks = {plan.process: plan.host for plan in layout if plan.role is Role.MODEL}
    plans = [draw_faults(random.Random(seed), layout, num_steps=10).faults for seed in range(300)]
    for faults in plans:
        assert faults[0].target in {*ranks, *ranks.values()} and faults[0].state in STEP_STATES
        assert faults[1].or_last and faults[1].state in RECOVERY_STATES
    masters = [any(f.target == "master-0" and f.state in STEP_STATES for f in faults[1:]) for faults in plans]
    assert 60 < sum(masters) < 150


def test_seeds_that_aim_at_the_same_differ_in_their_shape() -> None:
    shapes = [shape_of(seed) for seed in seeds_aimed_at((WAITING, "sync"), count=40)]
    assert len({(shape.flow, shape.is_busy) for shape in shapes}) == 4
    assert len({shape.variant.name for shape in shapes}) > 1


@pytest.mark.parametrize(
    "pair",
    [
        ("ended", "Admit"),
        ("ended", "Raise"),
        ("ending", "Forget"),
        ("starting", "Forget"),
        (DUMPING, "sync"),
        (WAITING, "sync"),
        (STAGING, "Tell"),
        (PRE_LOCKING, "RecordEvaluation"),
        ("adopting", "Request"),
        ("adopting", "Raise"),
    ],
)
def test_a_master_dies_where_it_is_aimed_at_also_where_chance_would_hardly_lead(pair: Pair) -> None:
    coverage = Coverage()
    for seed in seeds_aimed_at(pair, count=8):
        assert RUNNER.run(seed, coverage=coverage).violations == []
        if coverage.crashes[pair]:
            break
    assert coverage.crashes[pair]


class Misplaced(Master):
    """Tells workers something where nobody has anything yet."""

    def decide(self, event: Event, now: float) -> Decision:
        decision = super().decide(event, now)
        if self.phase is Phase.STARTING:
            effects = (*decision.effects, Tell("rollout-0", Drop(())))
            decision = msgspec.structs.replace(decision, effects=effects)
        return decision


def test_an_effect_in_a_state_where_it_is_declared_impossible_is_a_violation() -> None:
    (violation, *_) = RUNNER.run(2, new_master=Misplaced).violations
    assert violation.startswith("Tell occurs in starting, which can not be: workers are sent")
