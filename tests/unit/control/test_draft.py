from __future__ import annotations

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.protocol import Raise, Request
from kintsugi.facts import RunStarted
from kintsugi.messages import Body, CommitStep, HashWeights, Ok, Ping
from tests.unit.control.driven import new_state

RANKS = ("model-0", "model-1")


class Talk:
    """A conversation, and when its rounds were over."""

    def __init__(self) -> None:
        self.draft = Draft(new_state())
        self.conversation = Conversation(self.draft, first_s=60.0)
        self.over: list[float] = []

    def ask_all(self, body: Body, *, now: float = 0.0) -> list[Request]:
        self.conversation.ask_all(dict.fromkeys(RANKS, body), now, then=self.over.append)
        return self.taken()

    def taken(self) -> list[Request]:
        return [effect for effect in self.draft.take().effects if isinstance(effect, Request)]

    def answer(self, request: Request, body: Body, *, now: float) -> None:
        """What the master does with a reply."""
        if self.conversation.close(request.token, request.to) is not None:
            self.conversation.answered(request.token, request.to, body, now)


def test_a_draft_applies_facts_at_once_and_is_empty_after_it_is_taken() -> None:
    draft = Draft(new_state())
    draft.fact(RunStarted("job", "digest"))
    draft.do(Raise("look"))
    draft.because("one")
    draft.because("two")
    assert draft.state.job == "job"
    decision = draft.take()
    assert decision.facts == (RunStarted("job", "digest"),)
    assert (decision.effects, decision.reason) == ((Raise("look"),), "one; two")
    empty = draft.take()
    assert (empty.facts, empty.effects, empty.reason) == ((), (), "")


def test_a_round_is_over_when_every_process_has_answered() -> None:
    talk = Talk()
    first, second = talk.ask_all(Ping())
    talk.answer(second, Ok(), now=1.0)
    assert talk.over == []
    talk.answer(first, Ok(), now=2.0)
    assert talk.over == [2.0]
    assert talk.conversation.answers == {"model-0": Ok(), "model-1": Ok()}


def test_an_answer_that_comes_twice_does_not_end_a_round() -> None:
    talk = Talk()
    first, _ = talk.ask_all(Ping())
    talk.answer(first, Ok(), now=1.0)
    talk.answer(first, Ok(), now=2.0)
    assert talk.over == []
    assert "nobody waits for" in talk.draft.take().reason


def test_a_late_answer_of_an_earlier_round_neither_counts_nor_is_kept() -> None:
    talk = Talk()
    early, _ = talk.ask_all(HashWeights())
    first, second = talk.ask_all(Ping())
    talk.answer(early, CommitStep(9), now=1.0)
    assert (talk.conversation.answers, talk.over) == ({}, [])
    talk.answer(first, Ok(), now=2.0)
    talk.answer(second, Ok(), now=3.0)
    assert talk.over == [3.0]


def test_a_request_outside_the_round_does_not_end_it() -> None:
    talk = Talk()
    talk.ask_all(Ping())
    talk.conversation.ask("alone", "agent-0", Ping(), 0.0)
    (alone,) = talk.taken()
    talk.answer(alone, Ok(), now=1.0)
    assert (talk.conversation.answers, talk.over) == ({}, [])


def test_an_abandoned_round_never_goes_on() -> None:
    talk = Talk()
    first, second = talk.ask_all(Ping())
    talk.conversation.abandon_round()
    talk.answer(first, Ok(), now=1.0)
    talk.answer(second, Ok(), now=1.0)
    assert talk.over == []


def test_bodies_in_turn_make_one_round_each() -> None:
    talk = Talk()
    talk.conversation.ask_in_turn(RANKS, [Ping(), CommitStep(1)], 0.0, then=talk.over.append)
    for body in (Ping(), CommitStep(1)):
        requests = talk.taken()
        assert [(request.to, request.body) for request in requests] == [(rank, body) for rank in RANKS]
        assert talk.over == []
        for request in requests:
            talk.answer(request, Ok(), now=1.0)
    assert talk.over == [1.0]


def test_what_was_asked_of_a_lost_process_or_withdrawn_is_not_waited_for() -> None:
    talk = Talk()
    first, second = talk.ask_all(Ping())
    talk.conversation.abandon(first.to)
    talk.conversation.withdraw(second.token)
    assert talk.conversation.close(first.token, first.to) is None
    assert talk.conversation.close(second.token, second.to) is None


def test_deadlines_come_from_answers_of_the_same_kind() -> None:
    talk = Talk()
    first, _ = talk.ask_all(Ping())
    assert first.deadline_s == 60.0
    talk.conversation.observed("Ping", 7.0)
    again, _ = talk.ask_all(Ping())
    other, _ = talk.ask_all(HashWeights())
    assert (again.deadline_s, other.deadline_s) == (70.0, 60.0)
