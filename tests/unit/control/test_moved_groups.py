"""A group that moves to another worker runs only there: the first worker is sent a drop, and its answer is ignored."""

from __future__ import annotations

import msgspec

from kintsugi.config.schema import EvaluationSection, RolloutSection
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Request, Tell
from kintsugi.journal.facts import TicketAssigned, TicketReturned
from kintsugi.protocol.rollout import Drop, RunEpisodes
from tests.unit.control.driven import CONFIG, Driven

TWO_WORKERS = msgspec.structs.replace(
    CONFIG,
    rollout=RolloutSection(workers=2),
    algorithm=msgspec.structs.replace(CONFIG.algorithm, batch_size=4),
    eval=EvaluationSection(num_samples=0),
)


def groups(requests: list[Request], *, of: str) -> set[str]:
    return {r.body.ticket.id for r in requests if isinstance(r.body, RunEpisodes) and r.to == of}


def test_of_what_a_lone_worker_runs_the_next_to_come_takes_half_and_the_first_drops_it() -> None:
    driven = Driven(TWO_WORKERS)
    driven.begin()
    driven.until(Phase.COLLECTING)
    driven.lose("rollout-1")
    before = groups(driven.asked(RunEpisodes), of="rollout-0")
    assert len(before) == 4
    driven.effects.clear()
    facts = len(driven.facts)
    while not groups(driven.asked(RunEpisodes), of="rollout-1"):
        start = next(r for r in driven.open.values() if not isinstance(r.body, RunEpisodes))
        driven.answer(start)
    moved = groups(driven.asked(RunEpisodes), of="rollout-1")
    assert len(moved) == 2
    assert groups(driven.asked(RunEpisodes), of="rollout-0") == before - moved
    dropped = [e.body.tickets for e in driven.effects if isinstance(e, Tell) and isinstance(e.body, Drop)]
    assert {ticket for tickets in dropped for ticket in tickets} == moved
    assert {fact.ticket for fact in driven.facts[facts:] if isinstance(fact, TicketReturned)} == moved
    assigned = [fact for fact in driven.facts[facts:] if isinstance(fact, TicketAssigned)]
    assert {(fact.ticket, fact.worker) for fact in assigned} == {(ticket, "rollout-1") for ticket in moved}
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"


def test_evaluation_problems_move_without_becoming_tickets() -> None:
    driven = Driven(TWO_WORKERS, num_eval_rows=4)
    driven.begin()
    driven.until(Phase.EVALUATING)
    driven.lose("rollout-1")
    driven.effects.clear()
    facts = len(driven.facts)
    while not groups(driven.asked(RunEpisodes), of="rollout-1"):
        driven.answer(next(r for r in driven.open.values() if not isinstance(r.body, RunEpisodes)))
    moved = groups(driven.asked(RunEpisodes), of="rollout-1")
    dropped = [e.body.tickets for e in driven.effects if isinstance(e, Tell) and isinstance(e.body, Drop)]
    assert {ticket for tickets in dropped for ticket in tickets} == moved
    assert not any(isinstance(fact, TicketReturned | TicketAssigned) for fact in driven.facts[facts:])
    driven.until(Phase.ENDED)
    assert driven.state.outcome == "finished"
