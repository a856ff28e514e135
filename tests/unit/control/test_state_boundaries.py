"""Exact limits of what the master's state counts: an error of one would repeat or skip a step or a save."""

from __future__ import annotations

from kintsugi.control.membership import WorkerRegistry
from kintsugi.control.step_metrics import commit_record
from kintsugi.errors import Fault
from kintsugi.journal.facts import CheckpointFailed, ProcessJoined, ProcessLost, ProcessRequested, RolledBack
from kintsugi.types import Peer, Role, Ticket
from tests.unit.control.driven import scored
from tests.unit.control.test_due import configured, evaluated_steps, saved_steps
from tests.unit.control.test_state import fold, run_to

FAULT = Fault("a", "StorageError", "model-0", "disk full", 0.0)


def test_a_save_that_failed_at_the_step_that_a_rollback_leads_to_is_not_tried_again() -> None:
    assert fold(*run_to(3), CheckpointFailed(2, FAULT), RolledBack(2, "lost")).failed_save_step == 2
    assert fold(*run_to(3), CheckpointFailed(3, FAULT), RolledBack(2, "lost")).failed_save_step == -1


def test_tokens_of_the_first_version_count_as_generated() -> None:
    batch = scored(Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 2), version=0).samples
    record = commit_record(batch, {}, {})
    assert record["tokens_generated"] == sum(meta.num_loss_tokens for meta in batch) > 0


def test_before_anything_happened_no_version_is_current_and_no_save_has_failed() -> None:
    state = fold()
    assert (state.step, state.version, state.failed_save_step, state.term) == (0, -1, -1, 0)
    assert (state.num_incarnations, state.open_incident, state.num_incidents) == (0, 0, 0)


def test_the_address_book_has_only_those_who_live() -> None:
    members = WorkerRegistry()
    master = Peer("master-0", "1", "host-0", "tcp://master", b"")
    for name in ("model-0", "model-1", "model-2"):
        members.apply(ProcessRequested(name, Role.MODEL, "host-0", "1.1"))
    for name in ("model-0", "model-1"):
        members.apply(ProcessJoined(Peer(name, "1.1", "host-0", "tcp://here", b""), Role.MODEL, 1))
    members.apply(ProcessLost("model-0", "1.1", FAULT))
    book = members.address_book(master)
    assert [peer.process for peer in book.peers] == ["master-0", "model-1"]


def test_an_agent_of_another_session_may_come_under_a_number_that_was_used_and_a_late_one_may_not() -> None:
    members = WorkerRegistry()

    def joined(key: bytes) -> ProcessJoined:
        return ProcessJoined(Peer("agent-0", "0", "host-0", "tcp://here", key), Role.AGENT, 1)

    members.apply(joined(b"first"))
    members.apply(ProcessLost("agent-0", "0", FAULT))
    assert members.accepts(joined(b"first")) == "agent-0 0 is lost"
    assert members.accepts(joined(b"second")) is None


def test_every_step_means_the_first_one_too() -> None:
    assert evaluated_steps(configured(steps=3, every=1)) == [0, 1, 2, 3]
    assert evaluated_steps(configured(steps=3, warmup=2, every=1)) == [2, 3, 4, 5]
    assert saved_steps(configured(steps=7, save_every=1)) == [1, 2, 3, 4, 5, 6, 7]


def peer(process: str, incarnation: str, *, key: bytes = b"key") -> Peer:
    return Peer(process, incarnation, "host-0", "tcp://here", key)


def test_only_an_earlier_agent_of_the_same_session_registers_too_late() -> None:
    members = WorkerRegistry()
    members.apply(ProcessJoined(peer("agent-0", "3"), Role.AGENT, 1))
    late = {"2": True, "3": False, "4": False, "10": False}
    assert {n: members.replaced(peer("agent-0", n), Role.AGENT) for n in late} == late
    assert not members.replaced(peer("agent-0", "2", key=b"another"), Role.AGENT)
    assert not members.replaced(peer("agent-1", "0"), Role.AGENT)


def test_a_worker_registers_too_late_when_it_is_lost_or_another_incarnation_is_awaited() -> None:
    members = WorkerRegistry()
    assert not members.replaced(peer("model-0", "1.1"), Role.MODEL)
    members.apply(ProcessRequested("model-0", Role.MODEL, "host-0", "1.1"))
    assert not members.replaced(peer("model-0", "1.1"), Role.MODEL)
    assert members.replaced(peer("model-0", "1.0"), Role.MODEL)
    members.apply(ProcessJoined(peer("model-0", "1.1"), Role.MODEL, 1))
    assert not members.replaced(peer("model-0", "1.1"), Role.MODEL)
    members.apply(ProcessLost("model-0", "1.1", FAULT))
    assert members.replaced(peer("model-0", "1.1"), Role.MODEL)


def test_the_books_of_a_new_term_are_newer_than_all_before_and_each_change_makes_a_newer_one() -> None:
    members, numbers = WorkerRegistry(), []
    for term in (1, 2):
        members.begin_term(term)
        numbers.append(members.book_number)
        for incarnation in range(3):
            members.apply(ProcessJoined(peer("agent-0", f"{term}{incarnation}"), Role.AGENT, 1))
            members.apply(ProcessLost("agent-0", f"{term}{incarnation}", FAULT))
            numbers.append(members.book_number)
    assert numbers == sorted(set(numbers))
    assert numbers[4] - numbers[0] == 1 << 32


def test_the_agent_of_a_host_is_the_one_that_lives_there() -> None:
    members = WorkerRegistry()
    for number in (0, 1):
        there = Peer(f"agent-{number}", "0", f"host-{number}", "tcp://here", b"")
        members.apply(ProcessJoined(there, Role.AGENT, 10 + number))
    assert [members.agent_of(f"host-{number}") for number in range(3)] == ["agent-0", "agent-1", None]
    assert members.pids() == {"agent": [10, 11]}
    members.apply(ProcessLost("agent-1", "0", FAULT))
    assert (members.agent_of("host-1"), members.pids()) == (None, {"agent": [10]})
