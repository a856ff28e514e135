"""Abandoned work leaves nothing behind: late answers change nothing, and the same work can be begun again."""

from __future__ import annotations

from kintsugi.config.stages import stages
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.table import RUNNING
from kintsugi.control.phases.train import TrainPhase
from kintsugi.control.protocol import Request
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    BatchFormed,
    ProcessJoined,
    ProcessRequested,
    SamplesScored,
    TicketAssigned,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.types import Peer, Role, SampleText, Ticket
from tests.unit.control.driven import CONFIG, new_state, scored

(STAGE,) = stages(CONFIG)
TICKET = Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 2)
RANKS = ("model-0", "model-1")


class Desk:
    """The parts of a master that run groups and steps, with one rollout worker."""

    def __init__(self) -> None:
        self.decision = DecisionBuilder(new_state())
        self.pending = PendingRequests(self.decision, first_s=60.0)
        self.dispatch = EpisodeDispatch(CONFIG, decision=self.decision, pending=self.pending, num_rows=10)
        self.training = TrainPhase(
            CONFIG, decision=self.decision, pending=self.pending, dispatch=self.dispatch
        )
        self.decision.add_fact(ProcessRequested("rollout-0", Role.ROLLOUT, "host-0", "1.1"))
        peer = Peer("rollout-0", "1.1", "host-0", "", b"")
        self.decision.add_fact(ProcessJoined(peer, Role.ROLLOUT, 1, {}))

    def taken(self) -> list[Request]:
        return [effect for effect in self.decision.take().effects if isinstance(effect, Request)]

    def begin_step(self) -> list[Request]:
        self.training.begin((TICKET.id,), 0.0, stage=STAGE, ranks=RANKS, generation=1)
        return self.taken()


def test_an_answer_to_a_step_that_was_given_up_neither_goes_on_nor_prepares_it() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
    desk.decision.add_fact(SamplesScored(TICKET.id, scored(TICKET, version=0).samples))
    first = desk.begin_step()
    desk.training.abandon()
    for request in first:
        assert isinstance(request.body, RunCall)
        report = desk.training.answered(request.body.call, request.to, CallDone(1, "state", {}), 1.0)
        assert report is RUNNING
    assert desk.taken() == []
    assert not any(desk.pending.is_open(request.token) for request in first)


def test_a_step_that_was_given_up_is_begun_again_with_the_batch_that_it_had() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
    desk.decision.add_fact(SamplesScored(TICKET.id, scored(TICKET, version=0).samples))
    first = desk.begin_step()
    desk.training.abandon()
    desk.training.begin((TICKET.id,), 1.0, stage=STAGE, ranks=RANKS, generation=2)
    decision = desk.decision.take()
    assert not any(isinstance(fact, BatchFormed) for fact in decision.facts)
    again = [effect for effect in decision.effects if isinstance(effect, Request)]
    assert {request.to for request in again} == {request.to for request in first} == set(RANKS)
    assert not {request.token for request in again} & {request.token for request in first}


def test_after_steps_were_undone_an_evaluation_is_asked_from_its_beginning_under_new_tokens() -> None:
    desk = Desk()
    desk.dispatch.evaluate(Evaluation(CONFIG, step=0, version=0, num_problems=2), 0.0)
    first = desk.taken()
    assert len(first) == 2
    desk.dispatch.discard_all()
    assert desk.dispatch.evaluation is None
    assert not any(desk.pending.is_open(request.token) for request in first)
    desk.dispatch.evaluate(Evaluation(CONFIG, step=0, version=0, num_problems=2), 1.0)
    again = desk.taken()
    assert [request.body for request in again] == [request.body for request in first]
    assert not {request.token for request in again} & {request.token for request in first}


def test_after_steps_were_undone_the_texts_of_their_samples_are_forgotten() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
    samples = scored(TICKET, version=0).samples
    texts = {meta.key: SampleText("question", "answer") for meta in samples}
    desk.dispatch.done(EpisodesDone(TICKET.id, samples, texts=texts), "rollout-0")
    desk.dispatch.discard_all()
    assert desk.dispatch.take_texts(samples) == {}


def failure(number: int) -> Fault:
    return Fault(f"f{number}", "RemoteError", "rollout-0", f"failure {number}", 0.0)


def test_failures_of_a_group_that_was_scored_in_the_end_are_not_held_against_it_when_it_runs_again() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    attempts = CONFIG.rollout.attempts
    assert attempts > 1
    for _ in range(2):
        desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
        for number in range(attempts - 1):
            assert desk.dispatch.failed(TICKET.id, failure(number), worker="rollout-0") is None
            desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
        samples = scored(TICKET, version=0).samples
        assert desk.dispatch.done(EpisodesDone(TICKET.id, samples), "rollout-0") is None
        assert desk.decision.state.ledger.oldest_ready(1) == [TICKET.id]
        desk.decision.add_fact(TicketReturned(TICKET.id, "its holder died"))


def test_failures_from_before_steps_were_undone_are_forgotten() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    for _ in range(2 * CONFIG.rollout.attempts):
        desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
        assert desk.dispatch.failed(TICKET.id, failure(0), worker="rollout-0") is None
        desk.dispatch.discard_all()


def test_a_failure_of_a_group_that_nobody_runs_any_more_changes_nothing() -> None:
    desk = Desk()
    desk.decision.add_fact(TicketsIssued((TICKET,)))
    desk.decision.add_fact(TicketAssigned(TICKET.id, "rollout-0", "1.1"))
    desk.decision.add_fact(SamplesScored(TICKET.id, scored(TICKET, version=0).samples))
    desk.decision.take()
    for number in range(2 * CONFIG.rollout.attempts):
        assert desk.dispatch.failed(TICKET.id, failure(number), worker="rollout-0") is None
    assert desk.decision.take().facts == ()


def test_what_an_heir_asks_a_worker_for_again_counts_as_its_load_and_is_shared_with_the_next_to_come() -> (
    None
):
    desk = Desk()
    tickets = (TICKET, Ticket("grpo:0:1:0", "grpo", 0, 1, 0, 2))
    desk.decision.add_fact(TicketsIssued(tickets))
    for ticket in tickets:
        desk.decision.add_fact(TicketAssigned(ticket.id, "rollout-0", "1.1"))
    desk.dispatch.adopt(0.0)
    assert [request.to for request in desk.taken()] == ["rollout-0", "rollout-0"]
    desk.decision.add_fact(ProcessRequested("rollout-1", Role.ROLLOUT, "host-0", "1.2"))
    desk.decision.add_fact(ProcessJoined(Peer("rollout-1", "1.2", "host-0", "", b""), Role.ROLLOUT, 1, {}))
    desk.dispatch.rebalance(1.0)
    assert [request.to for request in desk.taken()] == ["rollout-1"]
