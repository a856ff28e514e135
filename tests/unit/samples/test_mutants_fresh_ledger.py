"""A ledger in which nothing happened yet: nothing is forgotten, nothing is trained, nothing lies before step 0."""

from __future__ import annotations

from kintsugi.journal.facts import (
    BatchFormed,
    RolledBack,
    SampleQuarantined,
    SamplesScored,
    StepCommitted,
    TicketAssigned,
    TicketsIssued,
)
from kintsugi.samples.ledger import Ledger
from kintsugi.types import Ticket
from tests.unit.control.driven import scored


def test_step_0_is_there_and_nothing_before_it() -> None:
    ledger = Ledger()
    assert (ledger.step, ledger.trained_in(0), ledger.in_batch(1)) == (0, (), ())
    assert not any(ledger.counts().values())
    assert ledger.accepts(RolledBack(0, "lost")) is None
    assert ledger.accepts(RolledBack(-1, "lost")) is not None
    assert ledger.accepts(RolledBack(1, "lost")) is not None
    assert ledger.accepts(StepCommitted(1, "digest")) is not None


def test_the_first_ticket_of_a_stage_is_that_of_the_first_row() -> None:
    first = Ticket("g:0:0:0", "g", 0, 0, 0, 1)
    second = Ticket("g:0:1:0", "g", 0, 1, 0, 1)
    assert Ledger().accepts(TicketsIssued((first, second))) is None
    assert Ledger().accepts(TicketsIssued((second,))) is not None
    assert (Ledger().stage("g").cursor, Ledger().stage("g").num_issued, Ledger().stage("g").num_trained) == (
        (0, 0),
        0,
        0,
    )


def test_what_was_never_issued_is_refused_in_these_words() -> None:
    for name in ("g:0:0:0", "g", "g:0:x:0"):
        refusal = Ledger().accepts(TicketAssigned(name, "rollout-0", "1"))
        assert refusal == f"ticket {name} was never issued"


def test_a_ticket_beyond_those_that_were_issued_was_never_issued_and_one_before_is_forgotten() -> None:
    ledger = Ledger()
    tickets = tuple(Ticket(f"g:0:{position}:0", "g", 0, position, 0, 1) for position in range(2))
    ledger.apply(TicketsIssued(tickets))
    for ticket in tickets:
        ledger.apply(TicketAssigned(ticket.id, "rollout-0", "1"))
        ledger.apply(SamplesScored(ticket.id, scored(ticket, version=0).samples))
    for step, ticket in enumerate(tickets, start=1):
        ledger.apply(BatchFormed(step, (ticket.id,)))
        ledger.apply(StepCommitted(step, "digest"))
    ledger.forget_before(3)
    words = {
        "g:0:1:0": "is finished and forgotten",
        "g:0:2:0": "was never issued",
        "g:1:0:0": "was never issued",
    }
    for name, said in words.items():
        assert ledger.accepts(TicketAssigned(name, "rollout-0", "1")) == f"ticket {name} {said}"


def test_a_key_without_a_number_names_no_sample() -> None:
    ledger = Ledger()
    ledger.apply(TicketsIssued((Ticket("g:0:0:0", "g", 0, 0, 0, 1),)))
    for index in ("x", "", "-1", "1"):
        assert ledger.accepts(SampleQuarantined(f"g:0:0:0/{index}", "bad")) is not None
    assert ledger.accepts(SampleQuarantined("g:0:0:0/0", "bad")) is None
