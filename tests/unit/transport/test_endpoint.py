"""Who may speak, and what arrives: exactly once, in spite of loss, repetition, replacement and nonsense."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kintsugi.errors import (
    DeadlineExceeded,
    Fault,
    ProcessDied,
    RefusedError,
    RemoteError,
    StorageError,
)
from kintsugi.protocol import wire
from kintsugi.protocol.membership import AddressBook, Failed, Ok, Ping, Register, Registered
from kintsugi.protocol.weights import FetchWeights
from kintsugi.protocol.wire import MessageKind
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import WAITS
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.transport import Endpoint, PendingReply, new_key_pair
from kintsugi.transport.rpc import SAVED_BYTES
from kintsugi.types import Role
from tests.unit.transport.harness import (
    ask,
    envelope,
    frame_of,
    introduce,
    make_endpoint,
    pump,
    raw_dealer,
    receive,
)

Make = Callable[..., Endpoint]
FAULT = Fault("f1", "ProcessDied", "agent-0", "exit status -9", 0.0)


def counter(name: str) -> int:
    return COUNTERS.snapshot().counters.get(name, 0)


def test_a_request_is_answered(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    assert ask(model, server, Ping(b"x")).body == Ok()


def test_a_one_way_message_arrives_with_its_sender_and_cause(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    assert model.send("server-0", Ping(b"t"), cause_id="f1")
    (delivery,) = receive(server, model)
    assert (delivery.body, delivery.peer.process, delivery.wants_reply) == (Ping(b"t"), "model-0", False)
    assert delivery.envelope.cause_id == "f1"


def test_a_key_that_was_not_admitted_can_not_speak(make: Make) -> None:
    stranger, model, server = make("model-1"), make("model-0"), make("server-0")
    introduce(model, server)
    stranger.admit(server.peer(host="here"))
    stranger.send("server-0", Ping(b"t"))
    before = counter("transport.not_admitted_yet")
    assert pump(server, until=lambda: counter("transport.not_admitted_yet") > before) == []
    model.send("server-0", Ping(b"u"))
    assert [delivery.body for delivery in receive(server, model, stranger)] == [Ping(b"u")]


def test_a_replaced_process_can_not_connect(make: Make) -> None:
    old, model, server = make("model-0"), make("model-0", incarnation="b"), make("server-0")
    introduce(old, server)
    introduce(model, server)
    old.send("server-0", Ping(b"t"))
    ask(model, server, Ping())
    model.send("server-0", Ping(b"u"))
    assert [delivery.body for delivery in receive(server, model, old)] == [Ping(b"u")]


def test_a_process_that_is_admitted_late_gets_through(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    model.admit(server.peer(host="here"))
    model.send("server-0", Ping(b"t"))
    before = counter("transport.not_admitted_yet")
    pump(server, until=lambda: counter("transport.not_admitted_yet") > before)
    server.admit(model.peer(host="here"))
    assert receive(server, model)[0].body == Ping(b"t")


def test_a_server_with_the_wrong_key_hears_nothing(make: Make) -> None:
    model, impostor, server = make("model-0"), make("server-0"), make("server-0")
    introduce(model, impostor)
    lie = msgspec.structs.replace(server.peer(host="here"), address=impostor.address)
    model.admit(lie)
    pending = model.request("server-0", Ping(), deadline_s=0.3)
    assert pump(impostor, model, until=lambda: pending.done) == []
    assert isinstance(pending.error, DeadlineExceeded)


def test_one_process_can_not_speak_as_another(make: Make) -> None:
    keys = new_key_pair()
    liar, server = make("model-1", keys=keys), make("server-0")
    server.admit(liar.peer(host="here"))
    context, dealer = raw_dealer(server, keys)
    dealer.send(frame_of(Ping(b"1"), sender="model-0"))
    before = counter("transport.refused")
    assert pump(server, until=lambda: counter("transport.refused") > before) == []
    context.destroy(linger=0)


def test_a_message_of_another_job_is_refused(make: Make) -> None:
    model, server = make("model-0", job="other"), make("server-0")
    introduce(model, server)
    with pytest.raises(RemoteError, match="expected job job, got other"):
        ask(model, server, Ping())


def test_a_repeated_request_runs_once_and_gets_the_saved_reply(make: Make) -> None:
    keys = new_key_pair()
    model, server = make("model-0", keys=keys), make("server-0")
    server.admit(model.peer(host="here"))
    context, dealer = raw_dealer(server, keys)
    frame = frame_of(Ping(b"1"))
    dealer.send(frame)
    (delivery,) = receive(server)
    dealer.send(frame)
    dealer.send(frame_of(Ping(), sequence=2, kind=MessageKind.ONE_WAY))
    assert [late.body for late in receive(server)] == [Ping()], (
        "the repetition of a running request is dropped"
    )
    server.reply(delivery, Registered(7))
    first = dealer.recv()
    dealer.send(frame)
    before = counter("transport.answered_again")
    assert pump(server, until=lambda: counter("transport.answered_again") > before) == []
    assert dealer.recv() == first
    context.destroy(linger=0)


def test_a_lost_reply_is_asked_for_again(make: Make) -> None:
    clock = VirtualClock()
    model, server = make("model-0", clock=clock), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=60)
    (delivery,) = receive(server, model)
    delivery.route = b"a connection that is gone"
    server.reply(delivery, Ok())
    clock.advance(0.3)
    assert pump(server, model, until=lambda: pending.done) == []
    assert pending.result().body == Ok()


def test_a_request_waits_for_a_receiver_that_starts_late(make: Make) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    keys = new_key_pair()
    model = make("model-0")
    model.admit(msgspec.structs.replace(make("server-0", keys=keys).peer(host="here"), address=address))
    pending = model.request("server-0", Ping(b"1"), deadline_s=10)
    server = make("server-0", keys=keys, bind=address)
    server.admit(model.peer(host="here"))
    (delivery,) = receive(server, model)
    server.reply(delivery, Ok())
    pump(model, server, until=lambda: pending.done)
    assert pending.result().body == Ok()


def test_a_request_ends_at_its_deadline_and_says_for_whom_it_waited(make: Make) -> None:
    clock = VirtualClock()
    model, server = make("model-0", clock=clock), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=5)
    for _ in range(20):
        assert not pending.done
        clock.advance(0.25)
        model.poll(0)
    with pytest.raises(DeadlineExceeded, match=r"waited 5\.0 s for server-0: Ping"):
        pending.result()


def test_an_answer_that_came_while_the_asking_process_did_not_run_is_read_before_the_request_expires(
    make: Make,
) -> None:
    clock = VirtualClock()
    model, server = make("model-0", clock=clock), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=5)
    (delivery,) = receive(server)
    server.reply(delivery, Ok())
    clock.advance(12)
    pump(model, server, until=lambda: pending.done)
    assert pending.result().body == Ok()


def test_a_request_whose_answer_was_lost_while_the_asking_process_did_not_run_is_sent_once_more(
    make: Make,
) -> None:
    clock = VirtualClock()
    model, server = make("model-0", clock=clock), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=5)
    (delivery,) = receive(server)
    delivery.route = b"a connection that is gone"
    server.reply(delivery, Ok())
    clock.advance(12)
    assert pump(server, model, until=lambda: pending.done) == []
    assert pending.result().body == Ok()


def test_a_blocking_call_survives_a_pause_of_its_own_process(make: Make) -> None:
    clock = VirtualClock()
    model, server = make("model-0", clock=clock), make_endpoint("server-0")
    introduce(model, server)
    begun = threading.Event()

    def serve() -> None:
        (delivery,) = receive(server)
        clock.advance(12)  # The caller's deadline and the limit of its wait pass before it runs again.
        begun.set()
        server.reply(delivery, Ok())
        server.close(flush_s=1)

    thread = threading.Thread(target=serve)
    thread.start()
    assert model.call("server-0", Ping(b"1"), deadline_s=5).body == Ok()
    thread.join()
    assert begun.is_set()


def test_a_blocking_call_is_declared_while_it_waits(make: Make) -> None:
    model, server = make("model-0"), make_endpoint("server-0")
    introduce(model, server)
    seen: list[tuple[str, str]] = []

    def serve() -> None:
        (delivery,) = receive(server)
        seen.extend((wait.whom, wait.what) for wait in WAITS.declared())
        server.reply(delivery, Ok())
        server.close(flush_s=1)

    thread = threading.Thread(target=serve)
    thread.start()
    model.call("server-0", Ping(b"1"), deadline_s=10)
    thread.join()
    assert ("server-0", "Ping") in seen


def test_an_error_of_the_receiver_becomes_the_cause(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=10)
    fault = server.fail(receive(server, model)[0], StorageError("disk full"))
    pump(model, until=lambda: pending.done)
    with pytest.raises(RemoteError, match="server-0: StorageError: disk full") as caught:
        pending.result()
    assert caught.value.cause == fault


def test_an_old_term_is_refused_and_registering_is_not(make: Make) -> None:
    model, master = make("model-0", term=1), make("master-0", term=2)
    introduce(model, master)
    register = Register(model.peer(host="here"), Role.MODEL, os.getpid())
    assert ask(model, master, register, answer=Registered(2)).body == Registered(2)
    pending = model.request("master-0", Ping(b"1"), deadline_s=0.2)
    assert pump(master, model, until=lambda: pending.done) == []
    assert isinstance(pending.error, DeadlineExceeded)
    assert model.seen_term == 2


def test_a_request_refused_for_its_term_gets_through_once_the_term_is_adopted(make: Make) -> None:
    clock = VirtualClock()
    model, master = make("model-0", term=1, clock=clock), make("master-0", term=2)
    introduce(model, master)
    pending = model.request("master-0", Ping(b"1"), deadline_s=10)
    pump(master, model, until=lambda: model.seen_term == 2)
    assert not pending.done
    model.term = model.seen_term
    clock.advance(0.3)
    (delivery,) = receive(master, model)
    assert delivery.envelope.term == 2


def test_the_sender_of_a_one_way_message_learns_of_a_newer_term(make: Make) -> None:
    model, master = make("model-0", term=1), make("master-0", term=2)
    introduce(model, master)
    model.send("master-0", Ping())
    assert pump(master, model, until=lambda: model.seen_term == 2) == []


def test_an_old_incarnation_is_refused_once_its_replacement_is_admitted(make: Make) -> None:
    old, new, server = make("model-0"), make("model-0", incarnation="b"), make("server-0")
    introduce(old, server)
    ask(old, server, Ping())
    introduce(new, server)
    ask(new, server, Ping())
    with pytest.raises(RemoteError, match="RefusedError: model-0 a is not in the address book"):
        ask(old, server, Ping())


def test_a_master_that_took_over_is_recognised_by_its_key_and_newer_term(make: Make) -> None:
    keys = new_key_pair()
    dead, model = make("master-0", keys=keys, term=1), make("model-0", term=1)
    introduce(dead, model)
    ask(dead, model, Ping())
    living = make("master-0", keys=keys, incarnation="b", term=2)
    living.admit(model.peer(host="here"))
    ask(living, model, Ping())
    assert (model.seen_term, model.peers["master-0"].incarnation) == (2, "b")
    with pytest.raises(RemoteError, match="master-0 a is not b"):
        ask(dead, model, Ping())


def test_requests_to_a_forgotten_process_fail_at_once_with_the_cause(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    done: list[str] = []
    pending = model.request(
        "server-0", Ping(b"1"), deadline_s=60, on_done=lambda pending: done.append(pending.process)
    )
    model.forget("server-0", FAULT)
    later = model.request("server-0", Ping(b"2"), deadline_s=60)
    assert done == ["server-0"]
    for request in (pending, later):
        with pytest.raises(ProcessDied, match="exit status -9") as caught:
            request.result()
        assert caught.value.cause == FAULT


def test_a_process_nobody_introduced_can_not_be_asked(make: Make) -> None:
    pending = make("model-0").request("server-0", Ping(), deadline_s=60)
    with pytest.raises(RefusedError, match="server-0 is not in the address book of model-0"):
        pending.result()


def test_sequence_numbers_go_on_when_a_process_is_introduced_again(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    assert ask(model, server, Ping(), answer=Registered(1)).body == Registered(1)
    model.forget("server-0", FAULT)
    introduce(model, server)
    assert ask(model, server, Ping(), answer=Registered(2)).body == Registered(2)


def test_an_older_address_book_is_ignored_and_a_newer_one_forgets_who_is_missing(make: Make) -> None:
    model, server, manager = make("model-0"), make("server-0"), make("manager-0")
    both = (server.peer(host="here"), manager.peer(host="here"), model.peer(host="here"))
    assert model.set_book(AddressBook(2, both))
    assert not model.set_book(AddressBook(1, ()))
    assert set(model.peers) == {"server-0", "manager-0"}
    assert model.set_book(AddressBook(3, both[:1]))
    assert set(model.peers) == {"server-0"}


def test_a_reply_too_large_to_keep_is_made_again_only_when_the_first_must_be_lost(make: Make) -> None:
    keys = new_key_pair()
    clock = VirtualClock()
    server, model = make("server-0", keys=keys), make("model-0", clock=clock)
    model.admit(server.peer(host="here"))
    context, dealer = raw_dealer(model, keys)
    fetch = frame_of(FetchWeights(3), sender="server-0")
    mark = frame_of(Ping(), sender="server-0", kind=MessageKind.ONE_WAY, sequence=9)
    dealer.send(fetch)
    model.reply(receive(model)[0], Ping(bytes(SAVED_BYTES + 1)))
    dealer.send(fetch)
    dealer.send(mark)
    assert [type(delivery.body) for delivery in receive(model)] == [Ping]
    clock.advance(3)
    dealer.send(fetch)
    assert [type(delivery.body) for delivery in receive(model)] == [FetchWeights]
    context.destroy(linger=0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=4))
@example(frames=[b""])
@example(frames=[frame_of(Ok())[:-1]])
@example(frames=[frame_of(Ok(), kind=MessageKind.REPLY), b""])
@example(frames=[msgspec.msgpack.encode([envelope(), {"type": "Evil"}])])
@example(frames=[msgspec.msgpack.encode([envelope(kind=MessageKind.REPLY), 1])])
def test_no_frames_whatsoever_break_the_loop(
    frames: list[bytes], nonsense: tuple[Endpoint, zmq.Socket[bytes]]
) -> None:
    server, dealer = nonsense
    before = counter("transport.malformed") + counter("transport.refused")
    dealer.send_multipart(frames)
    arrived = pump(
        server, until=lambda: counter("transport.malformed") + counter("transport.refused") > before
    )
    assert arrived == []


@pytest.fixture
def nonsense(make: Make) -> Iterator[tuple[Endpoint, zmq.Socket[bytes]]]:
    keys = new_key_pair()
    model, server = make("model-0", keys=keys), make("server-0")
    server.admit(model.peer(host="here"))
    context, dealer = raw_dealer(server, keys)
    yield server, dealer
    context.destroy(linger=0)


def test_a_request_with_a_malformed_body_is_answered_with_what_is_wrong(
    nonsense: tuple[Endpoint, zmq.Socket[bytes]],
) -> None:
    server, dealer = nonsense
    dealer.send(msgspec.msgpack.encode([envelope(), {"type": "CommitStep", "step": "three"}]))
    pump(server, until=lambda: bool(dealer.poll(0)))
    reply = wire.decode(dealer.recv()).body
    assert isinstance(reply, Failed)
    assert "Expected `int`, got `str`" in reply.fault.message


def test_a_malformed_reply_is_dropped_and_the_good_one_taken(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=10)
    (delivery,) = receive(server, model)
    before = counter("transport.malformed")
    server._router.send_multipart([delivery.route, b"nonsense"])
    pump(model, until=lambda: counter("transport.malformed") > before)
    server.reply(delivery, Ok())
    pump(model, until=lambda: pending.done)
    assert pending.result().body == Ok()


def test_a_listening_socket_serves_a_second_endpoint_after_the_first(make: Make) -> None:
    keys = new_key_pair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = make_endpoint("master-0", keys=keys, listener=listening.fileno(), term=1)
        model = make("model-0", term=1)
        introduce(dead, model)
        ask(model, dead, Ping())
        dead.close()
        living = make("master-0", keys=keys, incarnation="b", listener=listening.fileno(), term=2)
        assert living.address == dead.address
        living.admit(model.peer(host="here"))
        pending = model.request("master-0", Register(model.peer(host="here"), Role.MODEL, 1), deadline_s=10)
        (delivery,) = receive(living, model)
        living.reply(delivery, Registered(2))
        pump(model, living, until=lambda: pending.done)
        assert pending.result().expect(Registered).term == 2


def test_a_watched_descriptor_calls_back_from_the_loop(make: Make) -> None:
    agent = make("agent-0")
    readable, writable = os.pipe()
    ended: list[int] = []
    agent.watch(readable, lambda: ended.append(readable))
    assert agent.poll(0) == [] and ended == []
    os.close(writable)
    agent.poll(5)
    assert ended == [readable]
    agent.unwatch(readable)
    os.close(readable)


def test_another_thread_can_wake_the_loop(make: Make) -> None:
    agent = make("agent-0")
    thread = threading.Thread(target=agent.wake)
    thread.start()
    assert agent.poll(60) == []
    thread.join()


def test_closing_fails_what_is_under_way(make: Make) -> None:
    server = make("server-0")
    model = make_endpoint("model-0")
    introduce(model, server)
    pending = model.request("server-0", Ping(b"1"), deadline_s=60)
    model.close()
    with pytest.raises(ProcessDied, match="model-0 closed its endpoint"):
        pending.result()


def test_who_waits_for_what_closing_fails_is_still_answered(make: Make) -> None:
    rollout, server = make("rollout-0"), make("server-0")
    manager = make_endpoint("manager-0")
    introduce(rollout, manager, server)
    asked = rollout.request("manager-0", Ping(b"1"), deadline_s=60)
    (delivery,) = receive(manager, rollout)

    def pass_on(pending: PendingReply) -> None:
        assert pending.error is not None
        manager.fail(delivery, pending.error)

    manager.request("server-0", Ping(b"1"), deadline_s=60, on_done=pass_on)
    manager.close(flush_s=1.0)
    pump(rollout, until=lambda: asked.done)
    with pytest.raises(RemoteError, match="manager-0 closed its endpoint"):
        asked.result()


def test_a_request_that_a_callback_makes_while_closing_fails_as_well(make: Make) -> None:
    master, model = make("master-0"), make_endpoint("model-0")
    introduce(master, model)
    again: list[PendingReply] = []

    def ask_again(pending: PendingReply) -> None:
        again.append(model.request("master-0", Ping(), deadline_s=60.0, on_done=again.append))

    first = [model.request("master-0", Ping(), deadline_s=60.0, on_done=ask_again) for _ in range(2)]
    model.close()
    assert all(isinstance(pending.error, ProcessDied) for pending in (*first, *again))
    assert len(again) == 4, "each of the two was settled and returned"


def test_a_callback_may_forget_the_process_whose_requests_closing_fails(make: Make) -> None:
    master, model = make("master-0"), make_endpoint("model-0")
    introduce(master, model)

    def forget(pending: PendingReply) -> None:
        model.forget("master-0", Fault("f", "ProcessDied", "master-0", "gone", 0.0))

    pending = [model.request("master-0", Ping(), deadline_s=60.0, on_done=forget) for _ in range(2)]
    model.close()
    assert all(each.done for each in pending)


def test_an_event_of_a_closed_descriptor_does_not_reach_the_next_one_with_its_number(make: Make) -> None:
    endpoint = make("model-0")
    pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
    called: list[str] = []
    reused: list[int] = []

    def replace_the_other(index: int) -> None:
        """Close both, and open a pipe under the number of the other one, which has an event already."""
        called.append(f"first {index}")
        for reader, _ in pipes:
            endpoint.unwatch(reader)
        other = pipes[1 - index][0]
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.dup2(reader, other)
        reused.extend((reader, writer))
        endpoint.watch(other, lambda: called.append("second"))

    for index, (reader, writer) in enumerate(pipes):
        os.write(writer, b"x")
        endpoint.watch(reader, lambda index=index: replace_the_other(index))  # type: ignore[misc]
    endpoint.turn(1.0)
    endpoint.turn(0.01)
    assert len(called) == 1, "nothing was written to the new pipe"
    os.write(reused[1], b"x")
    endpoint.turn(1.0)
    assert called[1:] == ["second"]
    for descriptor in {*reused, *(each for pipe in pipes for each in pipe)}:
        endpoint.unwatch(descriptor)
        os.close(descriptor)


def test_a_reply_of_the_wrong_type_is_an_error(make: Make) -> None:
    model, server = make("model-0"), make("server-0")
    introduce(model, server)
    with pytest.raises(RefusedError, match="expected Registered as answer, got Ok"):
        ask(model, server, Ping()).expect(Registered)
