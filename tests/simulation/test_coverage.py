"""Every place at which a master can die is aimed at, or declared impossible with its reason."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.control.master import Master
from kintsugi.control.phases import Phase
from kintsugi.control.protocol import Decision, Event, Tell
from kintsugi.messages import Drop
from kintsugi.simulation import aims
from kintsugi.simulation.campaign import Runner, draw_plan, shape_of, simulated_config
from kintsugi.simulation.cluster import Cluster
from kintsugi.simulation.coverage import (
    BOUNDARIES,
    DUMPING,
    IMPOSSIBLE_BOUNDARIES,
    PRE_LOCKING,
    STAGING,
    STATES,
    WAITING,
    Coverage,
    Pair,
    possible_boundaries,
)

RUNNER = Runner()


def seeds_aimed_at(pair: Pair, *, count: int) -> list[int]:
    period, place = 3 * len(aims.BOUNDARIES), aims.BOUNDARIES.index(pair)
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
    layout = Cluster(simulated_config(), seed=0).layout
    aimed = set()
    for seed in range(1, 3 * len(aims.BOUNDARIES), 3):
        plan = draw_plan(seed, layout, num_steps=10)
        assert plan == draw_plan(seed, layout, num_steps=10)
        aimed |= {(fault.state, fault.other) for fault in plan.faults if fault.kind == "crash"}
    assert aimed == set(possible_boundaries())


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
    assert violation.startswith("Tell occurs in starting, which can not be: workers are told")
