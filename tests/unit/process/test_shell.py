"""A worker's control side against a master that the test plays by hand."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from kintsugi.cluster.handover import PROGRAMS
from kintsugi.cluster.spawn import in_memory
from kintsugi.errors import DataError, DeadlineExceeded, RemoteError, StorageError
from kintsugi.process.exit_codes import EXIT_ORPHANED
from kintsugi.process.main import run_process
from kintsugi.process.membership import Membership, ShuttingDown, open_endpoint
from kintsugi.process.shell import Shell
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import AddressBook, Heartbeat, Ok, Ping, Register, Registered, Shutdown
from kintsugi.protocol.training import CommitStep
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import FaultSeen, Note, ProcessBegan, ProcessEnded, read_events
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import ChildReport, Peer, Role
from tests.unit.transport.harness import ask, make_endpoint, pump, receive

MASTER_KEYS = new_key_pair()
BODY = """
import os, sys
import msgspec
from kintsugi.process import shell as shells
from kintsugi.process.main import run_process, run_worker
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import Ping
shells.GRACE_S = 0.3

def stuck(shell):
    import threading
    shell.send("master-0", Ping(b"stuck"))
    threading.Event().wait()

def idle(shell):
    while True:
        shell.next_request(10.0)

body = {"stuck": stuck, "idle": idle}[sys.argv[2]]
with os.fdopen(int(sys.argv[1]), 'rb') as handed_over:
    bootstrap = msgspec.msgpack.decode(handed_over.read(), type=Bootstrap)
sys.exit(run_process(bootstrap, lambda bootstrap: run_worker(bootstrap, body)))
"""


Kind = TypeVar("Kind")


class Master:
    """A master in the hands of the test: answers registrations, keeps everything else."""

    def __init__(self, *, term: int = 1, listener: int = -1) -> None:
        self.endpoint = make_endpoint(
            "master-0", incarnation=f"m{term}", keys=MASTER_KEYS, term=term, listener=listener
        )
        self.registered: list[Register] = []
        self.received: list[Delivery] = []

    def work(self) -> None:
        for delivery in self.endpoint.poll(0.005):
            if isinstance(delivery.body, Register):
                self.registered.append(delivery.body)
                self.endpoint.admit(delivery.body.peer)
                self.endpoint.reply(delivery, Registered(self.endpoint.term))
            else:
                self.received.append(delivery)

    def work_until(self, condition: Callable[[], object]) -> None:
        def attempt(_: float) -> object | None:
            self.work()
            return condition() or None

        wait(attempt, whom="the worker", what="the expected state", timeout_s=15)

    def bodies(self, kind: type[Kind]) -> list[Kind]:
        return [delivery.body for delivery in self.received if isinstance(delivery.body, kind)]


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master()
    yield master
    master.endpoint.close()


@pytest.fixture
def lifeline() -> Iterator[list[int]]:
    """[read end, write end]; a test takes out what it closes itself."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def bootstrap_of(master: Master, run_dir: Path, lifeline: int) -> Bootstrap:
    public_key, secret_key = new_key_pair()
    bootstrap = Bootstrap(
        job="job",
        run_dir=str(run_dir),
        process="model-0",
        role=Role.MODEL,
        host="host-0",
        incarnation="a",
        public_key=public_key,
        secret_key=secret_key,
        master=master.endpoint.peer(host="host-0"),
        lifeline=lifeline,
    )
    # What the agent reports to the master when it has started the process.
    master.endpoint.admit(Peer("model-0", "a", "host-0", "", public_key))
    return bootstrap


@pytest.fixture
def shell(master: Master, tmp_path: Path, lifeline: list[int]) -> Iterator[Shell]:
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(
            Shell.start, bootstrap_of(master, tmp_path, lifeline[0]), capabilities={"device": "cpu"}
        )
        master.work_until(starting.done)
        shell = starting.result()
    yield shell
    shell.close()


def test_a_worker_registers_with_what_it_can_do(master: Master, shell: Shell) -> None:
    (register,) = master.registered
    assert (register.peer.address, register.role, register.pid) == (shell.address, Role.MODEL, os.getpid())
    assert register.capabilities == {"device": "cpu"}


def test_heartbeats_carry_progress_load_and_waits(master: Master, shell: Shell) -> None:
    COUNTERS.add("steps_of_this_test", 3)
    shell.report(load=0.5, gauges={"pages_free": 7.0})

    def complete(heartbeat: Heartbeat) -> bool:
        declared = {(wait.whom, wait.what) for wait in heartbeat.waits}
        steps = heartbeat.progress.counters.get("steps_of_this_test")
        said = (steps, heartbeat.load, heartbeat.gauges["pages_free"])
        return said == (3, 0.5, 7.0) and ("the worker", "the expected state") in declared

    master.work_until(lambda: any(complete(heartbeat) for heartbeat in master.bodies(Heartbeat)))


def test_a_ping_is_answered_while_the_main_thread_is_busy(master: Master, shell: Shell) -> None:
    pending = master.endpoint.request("model-0", Ping(), deadline_s=10)
    master.work_until(lambda: pending.done)
    assert pending.result().body == Ok()
    assert shell.take_all() == []


def test_a_request_reaches_the_main_thread_and_its_reply_the_master(master: Master, shell: Shell) -> None:
    pending = master.endpoint.request("model-0", CommitStep(3), deadline_s=10)
    master.work()
    delivery = shell.next_request(10)
    assert delivery is not None and delivery.body == CommitStep(3)
    shell.reply(delivery, Ok())
    master.work_until(lambda: pending.done)
    assert pending.result().body == Ok()


def test_waiting_for_a_request_ends_without_one(shell: Shell) -> None:
    assert shell.next_request(0.01) is None


def test_a_failure_is_answered_and_recorded(master: Master, shell: Shell, tmp_path: Path) -> None:
    pending = master.endpoint.request("model-0", CommitStep(3), deadline_s=10)
    master.work()
    delivery = shell.next_request(10)
    assert delivery is not None
    shell.fail(delivery, StorageError("disk full"))
    master.work_until(lambda: pending.done)
    assert isinstance(pending.error, RemoteError) and pending.error.cause is not None
    assert FaultSeen(pending.error.cause) in [record.event for record in read_events(tmp_path)]


def test_the_main_thread_can_ask_and_tell(master: Master, shell: Shell) -> None:
    future = shell.submit("master-0", Ping(b"asked"), deadline_s=10)
    shell.send("master-0", Ping(b"told"))
    master.work_until(lambda: {ping.payload for ping in master.bodies(Ping)} == {b"asked", b"told"})
    (request,) = [delivery for delivery in master.received if delivery.body == Ping(b"asked")]
    master.endpoint.reply(request, Ok())
    master.work_until(lambda: future.done)
    assert future.result().body == Ok()


def test_asking_a_stranger_fails_at_once(shell: Shell) -> None:
    with pytest.raises(Exception, match="server-9 is not in the address book"):
        shell.call("server-9", CommitStep(1), deadline_s=10)


def test_an_answer_that_never_comes_ends_at_the_deadline(master: Master, shell: Shell) -> None:
    with pytest.raises(DeadlineExceeded):
        shell.call("master-0", Ping(), deadline_s=0.05)


def test_the_address_book_is_taken_over_and_keeps_the_master(master: Master, shell: Shell) -> None:
    other = make_endpoint("server-0")
    master.endpoint.send("model-0", AddressBook(1, (other.peer(host="host-0"),)))
    master.work_until(lambda: shell.peer("server-0") is not None)
    assert shell.peer("master-0") is not None
    other.close()


def test_a_worker_is_told_to_end_and_who_is_who_by_the_master_alone(
    master: Master, tmp_path: Path, lifeline: list[int]
) -> None:
    bootstrap = bootstrap_of(master, tmp_path, lifeline[0])
    endpoint = open_endpoint(bootstrap)
    forger, stranger = make_endpoint("server-0"), make_endpoint("server-1")
    endpoint.admit(forger.peer(host="host-0"))
    forger.admit(endpoint.peer(host="host-0"))
    membership = Membership(endpoint, bootstrap, capabilities={})
    before = COUNTERS.snapshot().counters.get("transport.refused", 0)
    forger.send("model-0", Shutdown("forged"))
    forger.send("model-0", AddressBook(9, (forger.peer(host="host-0"), stranger.peer(host="host-0"))))
    asked = forger.request("model-0", Shutdown("forged"), deadline_s=10)
    for delivery in pump(endpoint, forger, until=lambda: asked.done):
        membership.handle(delivery)
    assert isinstance(asked.error, RemoteError) and "server-0 may not send" in str(asked.error)
    assert membership.shutdown_reason is None
    assert "server-1" not in endpoint.peers
    assert COUNTERS.snapshot().counters["transport.refused"] == before + 3
    for one in (endpoint, forger, stranger):
        one.close()


def test_shutdown_reaches_a_main_thread_that_waits(master: Master, shell: Shell) -> None:
    future = shell.submit("master-0", Ping(), deadline_s=60)
    master.endpoint.send("model-0", Shutdown("finished"))
    with pytest.raises(ShuttingDown, match="finished"):
        shell.next_request(10)
    with pytest.raises(ShuttingDown, match="finished"):
        future.result()
    with pytest.raises(ShuttingDown):
        shell.take_all()


def test_the_end_of_the_lifeline_ends_the_worker(master: Master, shell: Shell, lifeline: list[int]) -> None:
    os.close(lifeline.pop())
    with pytest.raises(ShuttingDown, match="agent and launcher are gone"):
        shell.next_request(10)


def test_a_worker_registers_again_with_a_master_that_took_over_and_does_what_it_asks(
    tmp_path: Path, lifeline: list[int]
) -> None:
    children = [ChildReport("model-1", "1.0", 7, b"key"), ChildReport("model-2", "1.0", 8, b"key")]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = Master(term=1, listener=listening.fileno())
        bootstrap = bootstrap_of(dead, tmp_path, lifeline[0])
        endpoint = open_endpoint(bootstrap)
        membership = Membership(endpoint, bootstrap, capabilities={}, children=lambda: tuple(children))
        known = work_together(dead, endpoint, membership)
        assert known.children == tuple(children)
        assert ask(dead.endpoint, endpoint, CommitStep(1)).body == Ok()
        dead.endpoint.close()
        lost = children.pop()
        living = Master(term=2, listener=listening.fileno())
        living.endpoint.admit(known.peer)
        again = work_together(living, endpoint, membership)
        assert lost not in again.children, "the list is that of the moment"
        assert (endpoint.term, membership.registered) == (2, True)
        fresh = Registered(2)
        assert ask(living.endpoint, endpoint, CommitStep(1), answer=fresh).body == fresh, (
            "not the saved answer"
        )
        endpoint.close()
        living.endpoint.close()


def test_a_master_that_dies_with_a_registration_in_its_hands_is_succeeded_by_one_that_answers(
    tmp_path: Path, lifeline: list[int]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = Master(term=1, listener=listening.fileno())
        bootstrap = bootstrap_of(dead, tmp_path, lifeline[0])
        endpoint = open_endpoint(bootstrap)
        membership = Membership(endpoint, bootstrap, capabilities={})
        membership.tick(0.0)
        receive(dead.endpoint, endpoint)
        dead.endpoint.close()
        living = Master(term=2, listener=listening.fileno())
        living.endpoint.admit(Peer("model-0", "a", "host-0", "", bootstrap.public_key))
        work_together(living, endpoint, membership)
        assert (endpoint.term, membership.registered) == (2, True)
        endpoint.close()
        living.endpoint.close()


def test_the_answer_of_a_master_that_has_been_replaced_is_no_registration_with_its_successor(
    master: Master, tmp_path: Path, lifeline: list[int]
) -> None:
    bootstrap = bootstrap_of(master, tmp_path, lifeline[0])
    endpoint = open_endpoint(bootstrap)
    membership = Membership(endpoint, bootstrap, capabilities={})
    membership.tick(0.0)
    (register,) = receive(master.endpoint, endpoint)
    endpoint.seen_term = 2
    master.endpoint.reply(register, Registered(1))

    def asked_again() -> list[Delivery]:
        endpoint.turn(0.005)
        membership.tick(0.0)
        return master.endpoint.poll(0.005)

    wait(lambda _: asked_again() or None, whom="the worker", what="another Register", timeout_s=15)
    assert (membership.registered, endpoint.term) == (False, 2)
    endpoint.close()


def work_together(master: Master, endpoint: Endpoint, membership: Membership) -> Register:
    """Until the master has the registration and a heartbeat under its own term."""

    def settled() -> bool:
        membership.tick(time.monotonic())
        for delivery in endpoint.poll(0.005):
            assert membership.handle(delivery)
        return bool(master.registered and master.bodies(Heartbeat))

    master.work_until(settled)
    return master.registered[-1]


def spawn(master: Master, tmp_path: Path, lifeline: int, behaviour: str) -> Child:
    descriptor = in_memory(msgspec.msgpack.encode(bootstrap_of(master, tmp_path, lifeline)))
    child = SystemProcesses().spawn(
        [sys.executable, "-c", BODY, str(descriptor), behaviour], pass_fds=[descriptor, lifeline]
    )
    os.close(descriptor)
    master.work_until(lambda: master.registered or child.ended())
    return child


@pytest.mark.parametrize(("behaviour", "code"), [("idle", 0), ("stuck", EXIT_ORPHANED)])
def test_a_process_ends_with_its_lifeline_even_if_its_main_thread_is_stuck(
    master: Master, tmp_path: Path, lifeline: list[int], behaviour: str, code: int
) -> None:
    child = spawn(master, tmp_path, lifeline[0], behaviour)
    master.work_until(lambda: behaviour == "idle" or master.bodies(Ping))
    os.close(lifeline.pop())
    master.work_until(child.ended)
    assert child.status() == code
    assert [record.event for record in read_events(tmp_path)][-1] == ProcessEnded(
        code, "" if code == 0 else "the main thread did not end after the lifeline did"
    )
    child.close()


def test_a_killed_worker_leaves_a_beginning_and_no_end(
    master: Master, tmp_path: Path, lifeline: list[int]
) -> None:
    child = spawn(master, tmp_path, lifeline[0], "idle")
    child.send_signal(signal.SIGKILL)
    master.work_until(child.ended)
    assert child.status() == -signal.SIGKILL
    assert [type(record.event) for record in read_events(tmp_path)] == [ProcessBegan]
    child.close()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            DataError("data.path: expected a file, got nothing"),
            2,
            "data.path: expected a file, got nothing\n",
        ),
        (StorageError("disk full"), 1, "Traceback"),
        (KeyError("bug"), 1, "Traceback"),
    ],
)
def test_an_uncaught_error_is_recorded_and_becomes_the_exit_code(
    master: Master, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception, code: int, said: str
) -> None:
    def main(bootstrap: Bootstrap) -> int:
        raise error

    assert run_process(bootstrap_of(master, tmp_path, -1), main) == code
    events = [record.event for record in read_events(tmp_path)]
    assert [type(event) for event in events] == [ProcessBegan, FaultSeen, ProcessEnded]
    assert isinstance(events[1], FaultSeen) and events[1].fault.kind == type(error).__name__
    assert capsys.readouterr().err.startswith(said)


def test_every_role_that_is_started_has_a_main() -> None:
    beside = {Role.LAUNCHER, Role.AGENT, Role.SPARE, Role.SUPERVISOR, Role.HOST_MANAGER}
    assert set(PROGRAMS.entries) == set(Role) - beside


def test_being_told_to_end_is_noted(master: Master, tmp_path: Path, lifeline: list[int]) -> None:
    child = spawn(master, tmp_path, lifeline[0], "idle")
    master.endpoint.send("model-0", Shutdown("finished"))
    master.work_until(child.ended)
    assert child.status() == 0
    assert Note("shutting down: finished") in [record.event for record in read_events(tmp_path)]
    child.close()
