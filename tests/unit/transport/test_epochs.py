from collections.abc import Callable

from kintsugi.messages import CommitStep, Ok
from kintsugi.runtime import COUNTERS, VirtualClock
from kintsugi.transport import Endpoint
from tests.unit.transport.harness import introduce, pump, receive

Make = Callable[..., Endpoint]


def _num_refused() -> int:
    return COUNTERS.snapshot().counters.get("transport.refused", 0)


def test_a_refusal_that_arrives_after_the_epoch_was_adopted_does_not_end_the_request(make: Make) -> None:
    clock = VirtualClock()
    rollout, manager = make("rollout-0", epoch=1, clock=clock), make("manager-0", epoch=2)
    introduce(rollout, manager)
    pending = rollout.request("manager-0", CommitStep(1), deadline_s=10)
    before = _num_refused()
    pump(manager, until=lambda: _num_refused() > before)
    rollout.epoch = 2
    clock.advance(0.3)
    (delivery,) = receive(manager, rollout)
    manager.reply(delivery, Ok())
    pump(rollout, manager, until=lambda: pending.done)
    assert pending.result().body == Ok()
