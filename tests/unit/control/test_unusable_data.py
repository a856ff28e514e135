"""A step that loses more groups than its batch has ends the run with the reason."""

from __future__ import annotations

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RequestFailed
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    SampleQuarantined,
    SamplesScored,
    TicketAssigned,
    TicketFiltered,
    TicketsIssued,
)
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.types import Ticket, sample_key, ticket_id
from tests.unit.control.driven import CONFIG, Driven, scored
from tests.unit.control.test_abandoned_work import STAGE, Desk


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


def test_groups_without_enough_valid_samples_are_set_aside_and_counted_from_where_the_step_began() -> None:
    desk = Desk()
    batch_size = STAGE.algorithm.batch_size
    for position in range(batch_size + 1):
        ticket = Ticket(ticket_id("grpo", epoch=0, position=position), "grpo", 0, position, 0, 2)
        desk.decision.add_fact(TicketsIssued((ticket,)))
        desk.decision.add_fact(TicketAssigned(ticket.id, "rollout-0", "1.1"))
        desk.decision.add_fact(SampleQuarantined(sample_key(ticket.id, 0), "no answer in it"))
        desk.decision.add_fact(SamplesScored(ticket.id, scored(ticket, version=0).samples[1:]))
        desk.decision.take()
        problem = desk.dispatch.drop_unusable(STAGE, before=0)
        assert [fact.ticket for fact in desk.decision.take().facts if isinstance(fact, TicketFiltered)] == [
            ticket.id
        ]
        assert (problem is None) == (position < batch_size)
    assert desk.dispatch.drop_unusable(STAGE, before=1) is None
    assert desk.decision.take().facts == ()
