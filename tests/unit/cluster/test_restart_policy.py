from __future__ import annotations

import pytest

from kintsugi.cluster.restart_policy import (
    DAY_S,
    MOST_PER_DAY,
    MOST_RESTARTS,
    QUICK_RESTARTS,
    WITHIN_S,
    RestartLimit,
    StoppedProcessDetector,
)
from kintsugi.runtime.backoff import LONGEST_SHORTAGE_PAUSE_S
from kintsugi.runtime.proc import ProcessStat


def test_ten_restarts_in_half_a_minute_are_allowed_and_no_more() -> None:
    limit = RestartLimit()
    assert [limit.allows(float(now)) for now in range(MOST_RESTARTS + 1)] == [True] * MOST_RESTARTS + [False]
    assert limit.explain(float(MOST_RESTARTS)) == f"more than {MOST_RESTARTS} times in {WITHIN_S:g} s"
    assert limit.allows(WITHIN_S + 1.0), "the first one is longer ago than that"


def test_a_process_that_dies_every_four_seconds_is_not_restarted_for_ever() -> None:
    limit = RestartLimit()
    times = [4.0 * number for number in range(2 * MOST_PER_DAY)]
    assert [limit.allows(now) for now in times] == [
        number < MOST_PER_DAY for number in range(2 * MOST_PER_DAY)
    ]
    assert limit.explain(times[-1]) == f"more than {MOST_PER_DAY} times in a day"
    assert limit.allows(DAY_S + 1.0)


def test_pauses_grow_with_the_restarts_of_the_last_half_minute() -> None:
    limit, pauses = RestartLimit(), []
    for _ in range(MOST_RESTARTS):
        assert limit.allows(0.0)
        pauses.append(limit.pause_s(0.0))
    assert pauses == [0.0] * QUICK_RESTARTS + [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert limit.allows(WITHIN_S + 1.0)
    assert limit.pause_s(WITHIN_S + 1.0) == 0.0


def test_a_shortage_of_the_host_is_waited_for_and_bounded_by_the_day() -> None:
    limit, now, pauses = RestartLimit(), 0.0, []
    while limit.allows(now, shortage=True):
        pauses.append(limit.pause_s(now))
        now += pauses[-1]
    assert pauses[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_SHORTAGE_PAUSE_S, LONGEST_SHORTAGE_PAUSE_S]
    assert len(pauses) == MOST_PER_DAY and now > 2 * 3600.0


def test_a_restart_that_could_not_be_made_does_not_count() -> None:
    limit = RestartLimit()
    for _ in range(3 * MOST_RESTARTS):
        assert limit.allows(0.0)
        limit.withdraw()


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stop_is_told_once_after_a_second_and_again_when_it_comes_again(state: str) -> None:
    states = {7: state, 8: "S"}
    watch = StoppedProcessDetector(stat=lambda pid: ProcessStat(states[pid], 1, 0.0))
    assert [watch.sample((7, 8), now=now) for now in (0.0, 0.5, 1.0, 1.5)] == [[], [], [7], []]
    states[7] = "R"
    assert watch.sample((7, 8), now=2.0) == []
    states[7] = state
    assert [watch.sample((7, 8), now=now) for now in (2.5, 3.5)] == [[], [7]]


def test_a_process_that_is_gone_is_not_stopped() -> None:
    watch = StoppedProcessDetector(stat=lambda pid: None)
    assert [watch.sample((7,), now=now) for now in (0.0, 2.0)] == [[], []]
