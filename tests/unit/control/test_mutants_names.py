"""Names that must never be used twice, or must say whom they mean: tokens of requests, faults of lost masters."""

from __future__ import annotations

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.phases import Phase
from kintsugi.facts import EpochStarted, IncidentOpened
from kintsugi.messages import Ping
from tests.unit.control.driven import Driven, new_state


def test_no_two_requests_have_the_same_token_not_even_those_of_another_epoch() -> None:
    draft = Draft(new_state())
    talk = Conversation(draft, first_s=60.0)
    tokens = []
    for epoch in (1, 2):
        draft.fact(EpochStarted(epoch, str(epoch)))
        for _ in range(3):
            tokens += talk.ask_each("round", {"model-0": Ping(), "model-1": Ping()}, 0.0)
    assert len(set(tokens)) == len(tokens) == 12


def test_a_new_epoch_never_uses_the_tokens_of_a_master_that_asked_the_same() -> None:
    asked: list[set[str]] = []
    for epoch in (1, 2):
        draft = Draft(new_state())
        draft.fact(EpochStarted(epoch, str(epoch)))
        asked.append(set(Conversation(draft, first_s=60.0).ask_each("round", {"model-0": Ping()}, 0.0)))
    assert not asked[0] & asked[1]


def test_the_incident_of_a_lost_master_names_the_epoch_that_ended() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.TRAINING)
    successor = driven.succeed(carried_out=False)
    successor.take_over()
    (opened,) = [fact for fact in successor.facts if isinstance(fact, IncidentOpened)]
    assert (opened.fault.id, opened.fault.process) == ("master-0@1", "master-0")
    assert "epoch 1" in opened.fault.message


def test_who_is_answered_learns_what_was_asked_and_since_when() -> None:
    talk = Conversation(Draft(new_state()), first_s=60.0)
    talk.ask("token", "model-0", Ping(), 3.0)
    assert list(talk.open_requests()) == [("token", "model-0", "Ping", 3.0)]
    assert talk.close("token", "model-1") is None
    assert talk.close("token", "model-0") == ("Ping", 3.0)
    assert talk.close("token", "model-0") is None
