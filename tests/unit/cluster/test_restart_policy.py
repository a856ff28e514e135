from __future__ import annotations

from itertools import pairwise

import pytest

from kintsugi.cluster.restart_policy import (
    DAY_S,
    LONGEST_PAUSE_S,
    MOST_A_DAY,
    MOST_IN_A_ROW,
    NUM_IMMEDIATE,
    REST_S,
    SETTLED_S,
    RestartLimit,
    StoppedProcessDetector,
)
from kintsugi.runtime.proc import ProcessStat


def _end_at_once(limit: RestartLimit, now: float = 0.0) -> tuple[list[float], float]:
    """Return the pauses before restarts of a process that ends half a second after each, and the time at the end."""
    pauses: list[float] = []
    while limit.allows(now):
        pauses.append(limit.pause_s)
        now += limit.pause_s + 0.5
    return pauses, now


def test_restarts_in_a_row_are_bounded_and_counted_anew_after_a_rest() -> None:
    limit = RestartLimit()
    pauses, now = _end_at_once(limit)
    assert len(pauses) == MOST_IN_A_ROW
    assert limit.reason == f"more than {MOST_IN_A_ROW} times in a row"
    assert not limit.allows(now + SETTLED_S)
    assert limit.allows(now + REST_S)


def test_pauses_between_restarts_grow_from_none_to_the_longest() -> None:
    pauses, _ = _end_at_once(RestartLimit())
    assert pauses[:NUM_IMMEDIATE] == [0.0] * NUM_IMMEDIATE
    assert all(later >= 2 * earlier or later == LONGEST_PAUSE_S for earlier, later in pairwise(pauses))
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_process_that_settles_is_restarted_at_once_but_not_for_ever() -> None:
    limit = RestartLimit()
    times = [number * SETTLED_S for number in range(MOST_A_DAY + 1)]
    assert [limit.allows(now) for now in times] == [True] * MOST_A_DAY + [False]
    assert limit.pause_s == 0.0
    assert limit.reason == f"more than {MOST_A_DAY} times a day"
    assert limit.allows(DAY_S)


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
