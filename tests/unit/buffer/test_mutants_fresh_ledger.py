"""A ledger in which nothing happened yet: nothing is forgotten, nothing is trained, nothing lies before step 0."""

from __future__ import annotations

from kintsugi.buffer.ledger import Ledger
from kintsugi.facts import RolledBack, StepCommitted, TicketAssigned, TicketsIssued
from kintsugi.types import Ticket


def test_step_0_is_there_and_nothing_before_it() -> None:
    ledger = Ledger()
    assert (ledger.step, ledger.trained_in(0), ledger.in_batch(1), ledger.num_live) == (0, (), (), 0)
    assert ledger.accepts(RolledBack(0, "lost")) is None
    assert ledger.accepts(RolledBack(-1, "lost")) is not None
    assert ledger.accepts(RolledBack(1, "lost")) is not None
    assert ledger.accepts(StepCommitted(1, "digest")) is not None


def test_the_first_ticket_of_a_stage_is_that_of_the_first_row() -> None:
    first = Ticket("g:0:0:0", "g", 0, 0, 0, 1)
    second = Ticket("g:0:1:0", "g", 0, 1, 0, 1)
    assert Ledger().accepts(TicketsIssued((first, second))) is None
    assert Ledger().accepts(TicketsIssued((second,))) is not None
    assert (Ledger().cursor("g"), Ledger().num_issued("g"), Ledger().num_trained("g")) == ((0, 0), 0, 0)


def test_what_was_never_issued_is_refused_in_these_words() -> None:
    for name in ("g:0:0:0", "g", "g:0:x:0"):
        refusal = Ledger().accepts(TicketAssigned(name, "rollout-0", "1"))
        assert refusal == f"ticket {name} was never issued"
