"""Ids that must be unique or name their subject: request ids, faults of lost masters."""

from __future__ import annotations

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.pending import PendingRequests, Purpose, RequestId
from kintsugi.control.phases.table import Phase
from kintsugi.journal.facts import IncidentOpened, TermStarted
from kintsugi.protocol.membership import Ping
from tests.unit.control.driven import Driven, new_state


def test_no_two_requests_have_the_same_token_not_even_those_of_another_term() -> None:
    decision = DecisionBuilder(new_state())
    pending = PendingRequests(decision, first_s=60.0)
    request_ids = []
    for term in (1, 2):
        decision.add_fact(TermStarted(term, str(term)))
        for _ in range(3):
            request_ids += pending.ask_each(Purpose.ROUND, {"model-0": Ping(), "model-1": Ping()}, 0.0)
    assert len({each.token for each in request_ids}) == len(request_ids) == 12


def test_a_new_term_never_uses_the_tokens_of_a_master_that_asked_the_same() -> None:
    asked: list[set[str]] = []
    for term in (1, 2):
        decision = DecisionBuilder(new_state())
        decision.add_fact(TermStarted(term, str(term)))
        pending = PendingRequests(decision, first_s=60.0)
        asked.append({each.token for each in pending.ask_each(Purpose.ROUND, {"model-0": Ping()}, 0.0)})
    assert not asked[0] & asked[1]


def test_the_incident_of_a_lost_master_names_the_term_that_ended() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    (opened,) = [fact for fact in successor.facts if isinstance(fact, IncidentOpened)]
    assert (opened.fault.id, opened.fault.process) == ("master-0@1", "master-0")
    assert "term 1" in opened.fault.message


def test_who_is_answered_learns_what_was_asked_and_since_when() -> None:
    pending = PendingRequests(DecisionBuilder(new_state()), first_s=60.0)
    request_id = RequestId(Purpose.INSPECT, "1.1")
    pending.ask(request_id, "model-0", Ping(), 3.0)
    assert list(pending.open_requests()) == [("inspect:1.1", "model-0", "Ping", 3.0)]
    assert pending.close("inspect:1.1", "model-1") is None
    request = pending.close("inspect:1.1", "model-0")
    assert request is not None
    assert (request.id, request.kind, request.since) == (request_id, "Ping", 3.0)
    assert pending.close("inspect:1.1", "model-0") is None
