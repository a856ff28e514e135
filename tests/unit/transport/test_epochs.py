from collections.abc import Callable

from kintsugi.protocol.membership import Ok, Ping
from kintsugi.protocol.training import CommitStep
from kintsugi.runtime.counters import COUNTERS
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.transport import Endpoint, new_key_pair
from tests.unit.transport.harness import frame_of, introduce, pump, raw_dealer, receive

Make = Callable[..., Endpoint]


def _num_refused() -> int:
    return COUNTERS.snapshot().counters.get("transport.refused", 0)


def test_a_refusal_that_arrives_after_the_term_was_adopted_does_not_end_the_request(make: Make) -> None:
    clock = VirtualClock()
    rollout, manager = make("rollout-0", term=1, clock=clock), make("manager-0", term=2)
    introduce(rollout, manager)
    pending = rollout.request("manager-0", Ping(), deadline_s=10)
    before = _num_refused()
    pump(manager, until=lambda: _num_refused() > before)
    rollout.term = 2
    clock.advance(0.3)
    (delivery,) = receive(manager, rollout)
    manager.reply(delivery, Ok())
    pump(rollout, manager, until=lambda: pending.done)
    assert pending.result().body == Ok()


def test_an_answer_is_given_again_as_it_was_in_the_term_of_then(make: Make) -> None:
    keys = new_key_pair()
    master, model = make("master-0", keys=keys), make("model-0", term=1)
    model.admit(master.peer(host="here"))
    context, dealer = raw_dealer(model, keys)
    question = frame_of(CommitStep(3), sender="master-0", term=1)
    dealer.send(question)
    model.reply(receive(model)[0], Ok())
    model.term = 2
    dealer.send(question)
    pump(model, until=lambda: bool(dealer.poll(5)))
    first = dealer.recv()
    pump(model, until=lambda: bool(dealer.poll(5)))
    assert dealer.recv() == first
    context.destroy(linger=0)
