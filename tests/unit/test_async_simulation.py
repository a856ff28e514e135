"""The model of larger clusters (`benchmarks/async_simulation.py`) in cases that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.async_simulation import Cluster, Costs, Run, simulate
from benchmarks.async_vs_sync import ideal_step_s
from benchmarks.async_workloads import Layout, countdown, even_countdown, rows

COSTS = Costs(
    decode_s=1.0, decode_row_s=0.5, group_s=0.0, train_s=2.0, train_token_s=0.25, publish_s=3.0, judge_s=7.0
)
TAIL = [(4, 4), (40, 40), (4, 4), (6, 6)]


def test_a_synchronous_step_is_the_sum_of_its_stages() -> None:
    outcome = simulate(
        COSTS,
        Cluster(servers=1, ranks=1, slots=4),
        Run(1, prompt_tokens=2, max_staleness=0, steps=2),
        [(3, 3)],
    )
    generate_s, train_s = 3 * (1.0 + 2 * 0.5), 2.0 + (3 + 2) * 2 * 0.25
    assert outcome.whole.seconds == pytest.approx(2 * (generate_s + 7.0 + train_s) + 3.0)


def test_rows_that_are_left_alone_cost_the_base_of_every_step() -> None:
    costs = replace(COSTS, judge_s=0.0, publish_s=0.0, train_s=0.0, train_token_s=0.0)
    outcome = simulate(costs, Cluster(1, 1, slots=2), Run(1, 0, 0, 1), [(2, 10)])
    assert outcome.whole.seconds == pytest.approx(2 * 2.0 + 8 * 1.5)
    assert outcome.whole.base_s == pytest.approx(10.0)
    assert outcome.whole.row_s == pytest.approx(0.5 * 12)


def test_what_does_not_fit_into_the_slots_waits() -> None:
    costs = replace(COSTS, judge_s=0.0, train_s=0.0, train_token_s=0.0)
    assert simulate(costs, Cluster(1, 1, slots=1), Run(1, 0, 0, 1), [(5, 5)]).whole.seconds == pytest.approx(
        15.0
    )


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_holds(bound: int) -> None:
    assert simulate(COSTS, Cluster(2, 1, slots=8), Run(2, 1, bound, 20), TAIL).max_staleness == bound


def test_a_bound_that_is_wide_enough_hides_everything_but_the_slowest_stage() -> None:
    costs = replace(COSTS, train_s=50.0, train_token_s=0.0)
    outcome = simulate(costs, Cluster(2, 1, slots=8), Run(2, 1, 8, 200), TAIL)
    assert outcome.whole.seconds / 200 == pytest.approx(50.0, rel=0.03)


def test_shared_cores_do_the_same_work_in_the_same_time_whoever_has_them() -> None:
    costs = replace(COSTS, judge_s=0.0, publish_s=0.0, decode_row_s=0.0)
    cluster, run = Cluster(1, 1, slots=1, cores=1), Run(1, 0, 6, 40)
    outcome = simulate(costs, cluster, run, [(5,)])
    assert outcome.whole.base_s == pytest.approx(40 * 5.0)
    assert outcome.whole.train_s == pytest.approx(40 * (2.0 + 5 * 0.25))
    assert outcome.whole.seconds == pytest.approx(outcome.whole.base_s + outcome.whole.train_s, rel=0.02)


@pytest.mark.parametrize(("layout", "expected"), [(Layout(2, 2, 64), 1.5), (Layout(1, 1, 64), 1.0)])
def test_the_ideal_step_leaves_no_core_idle(layout: Layout, expected: float) -> None:
    assert ideal_step_s(layout, generate_s=1.0, train_s=0.5, cores=2) == expected


def test_answers_have_the_lengths_that_the_tasks_are_for() -> None:
    assert countdown(23, 7) == "16 9 2"
    assert even_countdown(1, 3).startswith("62 59") and even_countdown(1, 3).endswith(" 01")
    assert {len(row["answer"]) for row in rows("even")} == {191}
    lengths = sorted(len(row["answer"]) for row in rows("tail"))
    assert lengths[-1] > 9 * lengths[len(lengths) // 2]
