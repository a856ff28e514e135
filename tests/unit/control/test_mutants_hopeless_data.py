"""A step that loses more groups than it needs ends the run with the reason, and not before."""

from __future__ import annotations

from kintsugi.control.phases import Phase
from kintsugi.control.protocol import RequestFailed
from kintsugi.errors import Fault
from kintsugi.messages import RunEpisodes
from tests.unit.control.driven import CONFIG, Driven


def spoil_a_group(driven: Driven) -> None:
    request = driven.asked(RunEpisodes)[0]
    del driven.open[request.token]
    fault = Fault(request.token, "DataError", request.to, "the prompt is too long", 0.0)
    driven.feed(RequestFailed(request.token, request.to, fault))


def test_as_many_groups_as_a_batch_has_may_be_set_aside_and_one_more_ends_the_run() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    for _ in range(CONFIG.algorithm.batch_size):
        spoil_a_group(driven)
        driven.let_grace_pass()
        assert driven.master.phase is Phase.COLLECTING
    spoil_a_group(driven)
    driven.let_grace_pass()
    assert (driven.master.phase, driven.state.outcome) == (Phase.ENDED, "failed")


def test_groups_that_an_earlier_step_lost_are_not_held_against_the_next() -> None:
    driven = Driven()
    driven.begin()
    for _ in (1, 2):
        driven.until(Phase.COLLECTING)
        for _ in range(CONFIG.algorithm.batch_size):
            spoil_a_group(driven)
        driven.until(Phase.PUBLISHING)
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
