from __future__ import annotations

import pytest

from kintsugi.control.draft import OPERATION_FLOOR_S, Conversation, Draft
from kintsugi.control.protocol import Raise, Request
from kintsugi.facts import EpochStarted, RunStarted
from kintsugi.messages import Body, CommitStep, HashWeights, Ok, Ping
from kintsugi.operations import PreLock
from kintsugi.patience import FLOOR_S
from kintsugi.supervision import Inspect, StopProcess
from kintsugi.types import Wait
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


def test_a_new_round_gives_up_the_one_before() -> None:
    talk = Talk()
    talk.ask_all(Ping())
    first, second = talk.ask_all(CommitStep(1), now=1.0)
    talk.answer(first, Ok(), now=2.0)
    talk.answer(second, Ok(), now=2.0)
    assert talk.over == [2.0]
    assert list(talk.conversation.open_requests()) == []


def test_tokens_are_never_used_twice_not_even_by_the_next_master() -> None:
    talk, successor = Talk(), Talk()
    for epoch, one in ((1, talk), (2, successor)):
        one.draft.fact(EpochStarted(epoch, str(epoch)))
        one.draft.take()
    tokens = [request.token for one in (talk, talk, successor) for request in one.ask_all(Ping())]
    assert len(set(tokens)) == len(tokens) == 6


def test_everything_of_one_purpose_can_be_withdrawn_at_once() -> None:
    talk = Talk()
    talk.conversation.ask_each("rank", dict.fromkeys(RANKS, Ping()), 0.0)
    talk.conversation.ask("call:1", "model-0", Ping(), 0.0)
    talk.conversation.withdraw_all("rank:")
    assert [token for token, *_ in talk.conversation.open_requests()] == ["call:1"]


def test_operations_of_recovery_are_waited_for_less_long_once_they_are_known() -> None:
    talk = Talk()
    talk.conversation.num_tokens = 1000
    assert talk.conversation.deadline_s(PreLock) == 60.0
    assert talk.conversation.deadline_s(HashWeights) > 60.0
    for kind in ("PreLock", "HashWeights"):
        talk.conversation.observed(kind, 0.01)
    assert talk.conversation.deadline_s(PreLock) == OPERATION_FLOOR_S < FLOOR_S
    assert talk.conversation.deadline_s(HashWeights) == FLOOR_S


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


def test_a_round_that_was_given_up_has_no_requests_any_more() -> None:
    talk = Talk()
    requests = talk.ask_all(Ping())
    assert all(talk.conversation.in_round(request.token) for request in requests)
    talk.conversation.abandon_round()
    assert not any(talk.conversation.in_round(request.token) for request in requests)
    assert list(talk.conversation.open_requests()) == []


def test_the_longest_answer_so_far_is_known_by_kind_of_request() -> None:
    conversation = Talk().conversation
    for seconds in (2.0, 5.0, 3.0):
        conversation.observed("RunCall", seconds)
    assert conversation.longest_s("RunCall") == 5.0
    assert conversation.longest_s("Publish") is None


@pytest.mark.parametrize("kind", [Inspect, StopProcess])
def test_what_an_agent_can_always_do_at_once_is_not_waited_for_longer_because_it_was_slow(
    kind: type[Body],
) -> None:
    conversation = Talk().conversation
    conversation.observed(kind.__name__, 100.0)
    assert conversation.deadline_s(kind) == OPERATION_FLOOR_S
    conversation.observed("PreLock", 100.0)
    assert conversation.deadline_s(PreLock) > 100.0


def test_it_says_for_whom_it_waits_once_for_each_kind_of_request() -> None:
    talk = Talk()
    talk.conversation.ask("first", "rollout-0", CommitStep(1), 3.0)
    talk.conversation.ask("second", "rollout-0", CommitStep(2), 4.0)
    talk.conversation.ask("third", "model-0", Inspect("model-1", "a"), 5.0)
    first, _, third = talk.taken()
    assert talk.conversation.waits() == (
        Wait("rollout-0", "CommitStep", 3.0, 3.0 + first.deadline_s),
        Wait("model-0", "Inspect", 5.0, 5.0 + third.deadline_s),
    )
    talk.conversation.withdraw("first", "second", "third")
    assert talk.conversation.waits() == ()
