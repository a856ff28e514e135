"""A simulated rollout worker runs one request of a group at a time, as the real one does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kintsugi.errors import Fault
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.simulation.campaign import Runner
from kintsugi.simulation.network import SimulatedNetwork
from kintsugi.simulation.workers import SimulatedRollout, drawn_digest
from kintsugi.simulation.world import World
from kintsugi.transport.rpc import Delivery
from kintsugi.types import Completion, FinishReason, Peer, Role, SamplingParams, Ticket, sample_key

AGAIN = (713050, 745743)
"""Seeds with layouts in which a group is requested again, after steps were undone, while it still runs."""

TICKET = Ticket("grpo:0:14:0", "grpo", 0, 14, 0, 2)


class Calls:
    """Endpoint of a rollout worker: what it answered, and what it asked the manager."""

    def __init__(self) -> None:
        self.answers: dict[str, Body] = {}
        self.refusals: dict[str, str] = {}
        self.asked: list[Callable[[Body | None, Fault | None], None]] = []

    def reply(self, delivery: Delivery, body: Body) -> None:
        self.answers[delivery.envelope.sender] = body

    def fail(self, delivery: Delivery, kind: str, message: str, *, cause: Fault | None = None) -> None:
        self.refusals[delivery.envelope.sender] = message

    def request(self, to: str, body: Body, *, deadline_s: float, on_done: Any) -> None:
        assert isinstance(body, Generate)
        self.asked.append(on_done)


def delivery(sender: str) -> Delivery:
    return cast("Delivery", SimpleNamespace(envelope=SimpleNamespace(sender=sender)))


def generated(weights: str) -> Generated:
    completion = Completion(0, weights.encode(), b"", (4).to_bytes(4, "little"), FinishReason.EOS)
    return Generated(TICKET.id, 0, (completion,), "server-0")


def test_a_request_of_a_later_lineage_ends_the_earlier_one_whose_samples_never_take_its_place() -> None:
    world = World(0)
    master = Peer("master-0", "1", "host-0", "sim://master-0", b"key")
    worker = SimulatedRollout(
        SimulatedNetwork(world),
        world,
        name="rollout-1",
        role=Role.ROLLOUT,
        host="host-1",
        incarnation="1.1",
        key=b"own",
        master=master,
        pid=1,
    )
    calls = Calls()
    worker.endpoint = cast("Any", calls)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, num_samples=2, seed=0)
    for lineage in (0, 1):
        worker.serve(delivery(f"of {lineage}"), RunEpisodes(TICKET, "train", sampling, 4, 60.0, lineage))
    assert calls.refusals == {"of 0": f"{TICKET.id} was dropped"}
    for number, weights in ((1, "later"), (0, "earlier")):  # That of the earlier one comes last.
        calls.asked[number](generated(weights), None)
    while world.turn():
        pass
    key = sample_key(TICKET.id, 1)
    assert worker.kept == {TICKET.id: {k: drawn_digest(k, "later") for k in (sample_key(TICKET.id, 0), key)}}
    done = calls.answers["of 1"]
    assert isinstance(done, EpisodesDone) and {meta.key for meta in done.samples} >= {key}
    assert "of 0" not in calls.answers


@pytest.mark.parametrize("seed", AGAIN)
def test_samples_of_a_group_that_was_requested_again_are_where_the_ledger_says(seed: int) -> None:
    outcome = Runner(draws_layouts=True).run(seed)
    assert outcome.num_rollbacks > 0
    assert (outcome.outcome, outcome.violations) == ("finished", [])
