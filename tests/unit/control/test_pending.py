from __future__ import annotations

import pytest

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.pending import OPERATION_FLOOR_S, PendingRequests, Purpose, RequestId
from kintsugi.control.protocol import Raise, Request
from kintsugi.journal.facts import RunStarted, TermStarted
from kintsugi.protocol.agents import Inspect, StopProcess
from kintsugi.protocol.membership import Ok, Ping
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import PreLock
from kintsugi.protocol.training import CommitStep, HashWeights
from kintsugi.runtime.deadlines import FLOOR_S
from kintsugi.types import Wait
from tests.unit.control.driven import new_state

RANKS = ("model-0", "model-1")


class Requests:
    """Pending requests, and when their rounds were over."""

    def __init__(self) -> None:
        self.decision = DecisionBuilder(new_state())
        self.pending = PendingRequests(self.decision, first_s=60.0)
        self.over: list[float] = []

    def ask_all(self, body: Body, *, now: float = 0.0) -> list[Request]:
        self.pending.ask_all(dict.fromkeys(RANKS, body), now)
        return self.taken()

    def taken(self) -> list[Request]:
        return [effect for effect in self.decision.take().effects if isinstance(effect, Request)]

    def answer(self, request: Request, body: Body, *, now: float) -> None:
        """What the master does with a reply."""
        closed = self.pending.close(request.token, request.to)
        if closed is not None and self.pending.answered(request.token, request.to, body):
            self.over.append(now)


def named(incarnation: str) -> RequestId:
    return RequestId(Purpose.START, incarnation)


def test_a_draft_applies_facts_at_once_and_is_empty_after_it_is_taken() -> None:
    builder = DecisionBuilder(new_state())
    builder.add_fact(RunStarted("job", "digest"))
    builder.add_effect(Raise("look"))
    builder.explain("one")
    builder.explain("two")
    assert builder.state.job == "job"
    decision = builder.take()
    assert decision.facts == (RunStarted("job", "digest"),)
    assert (decision.effects, decision.reason) == ((Raise("look"),), "one; two")
    empty = builder.take()
    assert (empty.facts, empty.effects, empty.reason) == ((), (), "")


def test_a_round_is_over_when_every_process_has_answered() -> None:
    requests = Requests()
    first, second = requests.ask_all(Ping())
    requests.answer(second, Ok(), now=1.0)
    assert requests.over == []
    requests.answer(first, Ok(), now=2.0)
    assert requests.over == [2.0]
    assert requests.pending.answers == {"model-0": Ok(), "model-1": Ok()}


def test_an_answer_that_comes_twice_does_not_end_a_round() -> None:
    requests = Requests()
    first, _ = requests.ask_all(Ping())
    requests.answer(first, Ok(), now=1.0)
    requests.answer(first, Ok(), now=2.0)
    assert requests.over == []
    assert "is not pending at" in requests.decision.take().reason


def test_a_late_answer_of_an_earlier_round_neither_counts_nor_is_kept() -> None:
    requests = Requests()
    early, _ = requests.ask_all(HashWeights())
    first, second = requests.ask_all(Ping())
    requests.answer(early, CommitStep(9), now=1.0)
    assert (requests.pending.answers, requests.over) == ({}, [])
    requests.answer(first, Ok(), now=2.0)
    requests.answer(second, Ok(), now=3.0)
    assert requests.over == [3.0]


def test_a_request_outside_the_round_does_not_end_it() -> None:
    requests = Requests()
    requests.ask_all(Ping())
    requests.pending.ask(named("alone"), "agent-0", Ping(), 0.0)
    (alone,) = requests.taken()
    requests.answer(alone, Ok(), now=1.0)
    assert (requests.pending.answers, requests.over) == ({}, [])


def test_an_abandoned_round_never_goes_on() -> None:
    requests = Requests()
    first, second = requests.ask_all(Ping())
    requests.pending.abandon_round()
    requests.answer(first, Ok(), now=1.0)
    requests.answer(second, Ok(), now=1.0)
    assert requests.over == []


def test_a_new_round_gives_up_the_one_before() -> None:
    requests = Requests()
    requests.ask_all(Ping())
    first, second = requests.ask_all(CommitStep(1), now=1.0)
    requests.answer(first, Ok(), now=2.0)
    requests.answer(second, Ok(), now=2.0)
    assert requests.over == [2.0]
    assert list(requests.pending.open_requests()) == []


def test_tokens_are_never_used_twice_not_even_by_the_next_master() -> None:
    pending, successor = Requests(), Requests()
    for term, one in ((1, pending), (2, successor)):
        one.decision.add_fact(TermStarted(term, str(term)))
        one.decision.take()
    tokens = [request.token for one in (pending, pending, successor) for request in one.ask_all(Ping())]
    assert len(set(tokens)) == len(tokens) == 6


def test_everything_of_one_purpose_can_be_withdrawn_at_once() -> None:
    requests = Requests()
    requests.pending.ask_each(Purpose.OPERATION, dict.fromkeys(RANKS, Ping()), 0.0)
    requests.pending.ask(RequestId(Purpose.CALL, "train", 1, 2, "model-0"), "model-0", Ping(), 0.0)
    requests.pending.withdraw_all(Purpose.OPERATION)
    assert [token for token, *_ in requests.pending.open_requests()] == ["call:train:1.2:model-0"]


def test_operations_of_recovery_are_waited_for_less_long_once_they_are_known() -> None:
    requests = Requests()
    requests.pending.num_tokens = 1000
    assert requests.pending.deadline_s(PreLock) == 60.0
    assert requests.pending.deadline_s(HashWeights) > 60.0
    for kind in ("PreLock", "HashWeights"):
        requests.pending.observed(kind, 0.01, 0.0)
    assert requests.pending.deadline_s(PreLock) == OPERATION_FLOOR_S < FLOOR_S
    assert requests.pending.deadline_s(HashWeights) == FLOOR_S


def test_what_was_asked_of_a_lost_process_or_withdrawn_is_not_waited_for() -> None:
    requests = Requests()
    first, second = requests.ask_all(Ping())
    requests.pending.abandon(first.to)
    requests.pending.withdraw(second.token)
    assert requests.pending.close(first.token, first.to) is None
    assert requests.pending.close(second.token, second.to) is None


def test_deadlines_come_from_answers_of_the_same_kind() -> None:
    requests = Requests()
    first, _ = requests.ask_all(Ping())
    assert first.deadline_s == 60.0
    requests.pending.observed("Ping", 8.0, 0.0)
    again, _ = requests.ask_all(Ping())
    other, _ = requests.ask_all(HashWeights())
    assert (again.deadline_s, other.deadline_s) == (80.0, 60.0)


def test_a_round_that_was_given_up_has_no_requests_any_more() -> None:
    requests = Requests()
    asked = requests.ask_all(Ping())
    assert all(requests.pending.in_round(request.token) for request in asked)
    requests.pending.abandon_round()
    assert not any(requests.pending.in_round(request.token) for request in asked)
    assert list(requests.pending.open_requests()) == []


def test_the_longest_answer_so_far_is_known_by_kind_of_request() -> None:
    conversation = Requests().pending
    for seconds in (2.0, 5.0, 3.0):
        conversation.observed("RunCall", seconds, 0.0)
    assert conversation.longest_s("RunCall") == 5.0
    assert conversation.longest_s("Publish") is None


@pytest.mark.parametrize("kind", [Inspect, StopProcess])
def test_what_an_agent_can_always_do_at_once_is_not_waited_for_longer_because_it_was_slow(
    kind: type[Body],
) -> None:
    conversation = Requests().pending
    conversation.observed(kind.__name__, 100.0, 0.0)
    assert conversation.deadline_s(kind) == OPERATION_FLOOR_S
    conversation.observed("PreLock", 100.0, 0.0)
    assert conversation.deadline_s(PreLock) > 100.0


def test_it_says_for_whom_it_waits_once_for_each_kind_of_request() -> None:
    requests = Requests()
    requests.pending.ask(named("first"), "rollout-0", CommitStep(1), 3.0)
    requests.pending.ask(named("second"), "rollout-0", CommitStep(2), 4.0)
    requests.pending.ask(named("third"), "model-0", Inspect("model-1", "a"), 5.0)
    first, _, third = requests.taken()
    assert requests.pending.waits() == (
        Wait("rollout-0", "CommitStep", 3.0, 3.0 + first.deadline_s),
        Wait("model-0", "Inspect", 5.0, 5.0 + third.deadline_s),
    )
    requests.pending.withdraw("start:first", "start:second", "start:third")
    assert requests.pending.waits() == ()


@pytest.mark.parametrize(
    ("request_id", "token"),
    [
        (RequestId(Purpose.START, "2.7"), "start:2.7"),
        (RequestId(Purpose.STOP, "2.7"), "stop:2.7"),
        (RequestId(Purpose.RETIRE, "2.7"), "retire:2.7"),
        (RequestId(Purpose.INSPECT, "2.7"), "inspect:2.7"),
        (RequestId(Purpose.EPISODE, "grpo:0:17:0", 1, 4), "episode 1.4 grpo:0:17:0"),
        (RequestId(Purpose.CALL, "actor_train", 7, 2, "model-0"), "call:actor_train:7.2:model-0"),
        (RequestId(Purpose.LOAD, "LoadWeights", 1, 9, "manager-0"), "load:1.9:LoadWeights:manager-0"),
        (RequestId(Purpose.RELOAD, "LoadWeights", 1, 9, "manager-0"), "weights:1.9:LoadWeights:manager-0"),
        (RequestId(Purpose.OPERATION, "PreLock", 2, 14, "model-0"), "rank:2.14:PreLock:model-0"),
        (RequestId(Purpose.DUMP, "Save", 2, 15, "model-1"), "dump:2.15:Save:model-1"),
        (RequestId(Purpose.ROUND, "Publish", 2, 16, "model-1"), "round:2.16:Publish:model-1"),
    ],
)
def test_the_stored_form_of_a_request_id_stays_so_that_recorded_inputs_can_be_replayed(
    request_id: RequestId, token: str
) -> None:
    assert request_id.token == token
