"""A process that was started and never came: its agent is asked again, which starts only what does not run."""

from __future__ import annotations

from kintsugi.control.processes import ASK_AGAIN_S
from kintsugi.control.protocol import Replied, Tick
from kintsugi.protocol.agents import ProcessStarted, StartProcess
from tests.unit.control.driven import Driven


def test_a_process_whose_death_nobody_told_of_is_ordered_again_under_the_same_incarnation() -> None:
    driven = Driven()
    driven.begin()
    request = driven.asked(StartProcess)[0]
    assert isinstance(request.body, StartProcess)
    process, incarnation = request.body.process, request.body.incarnation
    driven.feed(Replied(request.token, request.to, ProcessStarted(process, incarnation, 1, b"key")))
    del driven.open[request.token]
    driven.feed(Tick())
    assert request.body not in [again.body for again in driven.asked(StartProcess)]
    driven.now += ASK_AGAIN_S
    driven.feed(Tick())
    assert [again.body for again in driven.asked(StartProcess)].count(request.body) == 1
