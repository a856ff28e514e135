from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection
from kintsugi.config.stages import stages
from kintsugi.control.dispatch import next_tickets
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Exited, RequestFailed, Tick
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    SampleQuarantined,
    SamplesScored,
    TicketAssigned,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.samples.ledger import Ledger
from tests.unit.control.driven import CONFIG, Driven, scored

(STAGE,) = stages(CONFIG)


def ids(*, num_issued: int, count: int, num_rows: int = 4) -> list[str]:
    return [
        ticket.id for ticket in next_tickets(STAGE, num_issued=num_issued, count=count, num_rows=num_rows)
    ]


def test_tickets_follow_the_data_and_begin_a_new_term_at_its_end() -> None:
    assert ids(num_issued=0, count=2) == ["grpo:0:0:0", "grpo:0:1:0"]
    assert ids(num_issued=3, count=3) == ["grpo:0:3:0", "grpo:1:0:0", "grpo:1:1:0"]
    assert ids(num_issued=9, count=0) == []


def test_tickets_issued_in_portions_are_those_issued_at_once() -> None:
    portions = [id for start, count in ((0, 3), (3, 4), (7, 6)) for id in ids(num_issued=start, count=count)]
    assert portions == ids(num_issued=0, count=13)


def test_the_ledger_takes_the_tickets_over_several_terms_and_each_is_for_a_whole_group() -> None:
    ledger = Ledger()
    for start in range(0, 20, 5):
        tickets = next_tickets(STAGE, num_issued=start, count=5, num_rows=4)
        ledger.apply(TicketsIssued(tickets))
        assert {ticket.num_samples for ticket in tickets} == {STAGE.algorithm.group_size}
    assert ledger.stage("grpo").num_issued == 20


def collecting() -> Driven:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    return driven


def test_a_group_whose_data_are_wrong_is_set_aside_with_the_reason_and_replaced() -> None:
    driven = collecting()
    request = driven.asked(RunEpisodes)[0]
    assert isinstance(request.body, RunEpisodes)
    fault = Fault("a", "DataError", request.to, "prompt too long", 0.0)
    decision = driven.feed(RequestFailed(request.token, request.to, fault))
    reasons = [fact.reason for fact in decision.facts if isinstance(fact, SampleQuarantined)]
    assert reasons == ["prompt too long"] * request.body.ticket.num_samples
    (issued,) = [fact for fact in decision.facts if isinstance(fact, TicketsIssued)]
    assert len(issued.tickets) == 1


def test_a_group_that_the_world_failed_is_tried_again_and_ends_the_run_after_the_last_attempt() -> None:
    driven = collecting()
    name = next(iter(driven.open)).rpartition(" ")[2]
    for attempt in range(1, CONFIG.rollout.attempts + 1):
        assert driven.master.phase is Phase.COLLECTING
        (token,) = [token for token in driven.open if token.endswith(f" {name}")]
        decision = driven.fail(driven.open[token], f"attempt {attempt}")
        returned = [fact.ticket for fact in decision.facts if isinstance(fact, TicketReturned)]
        assert returned == ([name] if attempt < CONFIG.rollout.attempts else [])
    driven.let_grace_pass()
    assert driven.master.phase is Phase.ENDED
    assert f"attempt {CONFIG.rollout.attempts}" in repr(driven.facts[-1])


def test_the_groups_of_a_lost_worker_are_run_by_another_under_the_same_tickets() -> None:
    driven = collecting()
    lost = [request for request in driven.asked(RunEpisodes) if request.to == "rollout-0"]
    incarnation = driven.state.members.members["rollout-0"].incarnation
    decision = driven.feed(Exited("rollout-0", incarnation, -9))
    returned = [fact.ticket for fact in decision.facts if isinstance(fact, TicketReturned)]
    again = [(fact.ticket, fact.worker) for fact in decision.facts if isinstance(fact, TicketAssigned)]
    tickets = [request.body.ticket.id for request in lost if isinstance(request.body, RunEpisodes)]
    assert tickets and returned == tickets
    assert again == [(ticket, "rollout-1") for ticket in tickets]


def test_a_worker_that_could_not_be_reached_is_asked_nothing_until_the_next_tick() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    for request in driven.asked(RunEpisodes):
        driven.fail(request, "the link is closed", kind="ProcessDied")
    assert all(request.to != "rollout-0" for request in driven.asked(RunEpisodes))
    for request in driven.asked(RunEpisodes):
        driven.fail(request, "the link is closed", kind="ProcessDied")
    assert driven.asked(RunEpisodes) == []
    driven.feed(Tick())
    assert {request.to for request in driven.asked(RunEpisodes)} == {"rollout-0", "rollout-1"}


def without_its_first(done: EpisodesDone) -> EpisodesDone:
    first, *others = done.samples
    return EpisodesDone(done.ticket, tuple(others), {first.key: "its reward is not a number"})


@pytest.mark.parametrize("is_set_aside_again", [True, False])
def test_a_group_with_a_sample_that_was_set_aside_can_be_run_again(*, is_set_aside_again: bool) -> None:
    """Of other weights, the sample may be a valid one the second time: it stays set aside."""
    algorithm = AlgorithmSection(steps=3, batch_size=2, group_size=3)
    driven = Driven(msgspec.structs.replace(CONFIG, algorithm=algorithm))
    driven.begin()
    driven.until(Phase.COLLECTING)
    first = driven.asked(RunEpisodes)[0]
    assert isinstance(first.body, RunEpisodes)
    ticket = first.body.ticket
    driven.answer(first, without_its_first(scored(ticket, version=0, holder=first.to)))
    driven.lose(first.to)
    again = next(request for request in driven.asked(RunEpisodes) if request.body.ticket == ticket)  # type: ignore[union-attr]
    done = driven.serve(again)
    assert isinstance(done, EpisodesDone) and len(done.samples) == 3
    driven.answer(again, without_its_first(done) if is_set_aside_again else done)
    driven.until(lambda: driven.state.outcome is not None)
    assert driven.state.outcome == "finished"
    assert [fact.key for fact in driven.facts if isinstance(fact, SampleQuarantined)] == [f"{ticket.id}/0"]
    *_, scores = [
        fact for fact in driven.facts if isinstance(fact, SamplesScored) and fact.ticket == ticket.id
    ]
    assert [meta.key for meta in scores.samples] == [f"{ticket.id}/1", f"{ticket.id}/2"]
