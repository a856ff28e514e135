from __future__ import annotations

import pytest

from kintsugi.cluster.restart_policy import MOST_RESTARTS, WITHIN_S, RestartLimit, StoppedProcessDetector
from kintsugi.runtime.proc import ProcessStat


def test_five_restarts_a_minute_are_allowed_and_no_more() -> None:
    limit = RestartLimit()
    assert [limit.allows(float(now)) for now in range(MOST_RESTARTS + 1)] == [True] * MOST_RESTARTS + [False]
    assert limit.allows(WITHIN_S + 1.0), "the first one is longer ago than that"


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
