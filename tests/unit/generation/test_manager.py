import time
from collections.abc import Callable, Iterator

import pytest

from kintsugi.errors import DataError, DeadlineExceeded, KintsugiError, RefusedError, RemoteError
from kintsugi.generation import manager as manager_module
from kintsugi.generation.manager import MAX_ATTEMPTS, MAX_LOAD_ATTEMPTS, Manager
from kintsugi.messages import AddressBook, Generate, Generated, LoadWeights, Ping, WeightsLoaded
from kintsugi.runtime import WaitTable
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import Completion, Finish, Peer, Sampling, WeightManifest


class _FakeServer:
    """Loads what it is told to and keeps requests until the test lets it answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.loads_weights = True
        self.digest: str | None = None
        """What it claims to have loaded; None is the truth."""
        self.loaded: list[int] = []
        self.held: list[Delivery] = []

    @property
    def tickets(self) -> list[str]:
        return [delivery.body.ticket for delivery in self.held if isinstance(delivery.body, Generate)]

    def turn(self) -> None:
        for delivery in self.endpoint.poll(0):
            if isinstance(delivery.body, LoadWeights):
                if self.loads_weights:
                    manifest = delivery.body.manifest
                    self.loaded.append(manifest.version)
                    self.endpoint.reply(
                        delivery, WeightsLoaded(manifest.version, self.digest or manifest.digest)
                    )
            else:
                self.held.append(delivery)

    def answer(self) -> None:
        for delivery in self.held:
            request = delivery.body
            assert isinstance(request, Generate)
            completions = tuple(
                Completion(sample, f"{request.ticket}/{sample}".encode(), b"", b"", Finish.EOS)
                for sample in request.wanted
            )
            self.endpoint.reply(
                delivery, Generated(request.ticket, request.turn, completions, self.endpoint.process)
            )
        self.held.clear()

    def fail(self, error: KintsugiError) -> None:
        for delivery in self.held:
            self.endpoint.fail(delivery, error)
        self.held.clear()


class _World:
    """A manager, who asks it, and its servers: real endpoints on loopback, all driven by this thread."""

    def __init__(self, *, servers: int = 2) -> None:
        self._peers: dict[str, Peer] = {}
        self._endpoints: list[Endpoint] = []
        self._book_number = 0
        self.waits = WaitTable()
        self.notes: list[str] = []
        self.master = self._endpoint("master-0")
        self.rollout = self._endpoint("rollout-0")
        self.manager_endpoint = self._endpoint("manager-0")
        self.manager = Manager(self.manager_endpoint, note=self.notes.append, waits=self.waits)
        self.servers = {name: _FakeServer(self._endpoint(name)) for name in self._names(servers)}
        self.publish_book()

    @staticmethod
    def _names(servers: int) -> list[str]:
        return [f"server-{index}" for index in range(servers)]

    def _endpoint(self, process: str, *, incarnation: str = "a") -> Endpoint:
        public_key, secret_key = new_key_pair()
        endpoint = Endpoint(
            job="job",
            process=process,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
        )
        self._endpoints.append(endpoint)
        self._peers[process] = endpoint.peer(host="host-0")
        return endpoint

    def add_server(self, process: str, *, incarnation: str = "a") -> _FakeServer:
        server = self.servers[process] = _FakeServer(self._endpoint(process, incarnation=incarnation))
        return server

    def kill(self, process: str) -> None:
        """The process stops at once; the address book does not know yet."""
        server = self.servers.pop(process)
        self._endpoints.remove(server.endpoint)
        server.endpoint.close()
        del self._peers[process]

    def publish_book(self) -> None:
        self._book_number += 1
        for endpoint in self._endpoints:
            endpoint.set_book(AddressBook(self._book_number, tuple(self._peers.values())))

    def turn(self) -> None:
        for delivery in self.manager_endpoint.poll(0.001):
            self.manager.handle(delivery)
        self.manager.turn()
        for server in self.servers.values():
            server.turn()
        for asker in (self.master, self.rollout):
            asker.turn(0)

    def until(self, condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition was not reached"
            self.turn()

    def load(self, version: int, *, wait: bool = True) -> PendingReply:
        manifest = WeightManifest(version, version, (), 0, f"digest-{version}")
        pending = self.master.request("manager-0", LoadWeights(manifest, ()), deadline_s=60)
        if wait:
            self.until(lambda: pending.done)
        return pending

    def generate(
        self, ticket: str, *, version: int = 1, max_new_tokens: int = 4, timeout_s: float = 60.0
    ) -> PendingReply:
        request = Generate(
            ticket,
            0,
            b"\x01\x00\x00\x00",
            Sampling(num_samples=2, max_new_tokens=max_new_tokens),
            version,
            timeout_s=timeout_s,
        )
        return self.rollout.request("manager-0", request, deadline_s=60)

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()


@pytest.fixture
def world() -> Iterator[_World]:
    world = _World()
    yield world
    world.close()


def _texts(pending: PendingReply) -> list[bytes]:
    return [completion.tokens for completion in pending.result().expect(Generated).completions]


def _held(world: _World) -> list[str]:
    return sorted(ticket for server in world.servers.values() for ticket in server.tickets)


def test_requests_are_spread_by_tokens_in_flight(world: _World) -> None:
    world.load(1)
    big = world.generate("big", max_new_tokens=100)
    world.until(lambda: len(_held(world)) == 1)
    small = [world.generate(f"small-{index}") for index in range(3)]
    world.until(lambda: len(_held(world)) == 4)
    assert world.servers["server-0"].tickets == ["big"]
    assert len(world.servers["server-1"].tickets) == 3
    for server in world.servers.values():
        server.answer()
    world.until(lambda: big.done and all(pending.done for pending in small))
    assert _texts(big) == [b"big/0", b"big/1"]
    assert world.manager.load == 0


def test_a_dead_servers_requests_are_sent_again_and_answered_once(world: _World) -> None:
    world.load(1)
    asked = {ticket: world.generate(ticket) for ticket in ("a", "b", "c", "d")}
    world.until(lambda: len(_held(world)) == 4)
    assert len(world.servers["server-0"].tickets) == 2
    answers: list[str] = []
    for ticket, pending in asked.items():
        pending.on_done = lambda _, ticket=ticket: answers.append(ticket)
    world.kill("server-0")
    world.publish_book()
    world.until(lambda: len(world.servers["server-1"].tickets) == 4)
    world.servers["server-1"].answer()
    world.until(lambda: all(pending.done for pending in asked.values()))
    assert sorted(answers) == ["a", "b", "c", "d"]
    assert "server-0 a has left" in world.notes
    assert all(
        _texts(pending) == [f"{ticket}/{n}".encode() for n in (0, 1)] for ticket, pending in asked.items()
    )


def test_a_request_that_a_server_fails_is_tried_on_another(world: _World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    world.servers["server-0"].fail(RefusedError("not now"))
    world.until(lambda: world.servers["server-1"].held)
    world.servers["server-1"].answer()
    world.until(lambda: pending.done)
    assert pending.result().expect(Generated).server == "server-1"


def test_a_request_that_every_server_fails_is_given_up_with_the_cause(world: _World) -> None:
    world.load(1)
    pending = world.generate("a")
    num_failures = 0
    while not pending.done:
        world.until(lambda: _held(world) or pending.done)
        for server in world.servers.values():
            num_failures += len(server.held)
            server.fail(RefusedError("no"))
    assert num_failures == MAX_ATTEMPTS
    with pytest.raises(RemoteError, match="no"):
        pending.result()


def test_the_users_mistake_is_answered_at_once_as_it_is(world: _World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    world.servers["server-0"].fail(DataError("prompt too long"))
    world.until(lambda: pending.done)
    assert isinstance(pending.error, RemoteError) and pending.error.cause is not None
    assert (pending.error.cause.kind, pending.error.cause.process) == ("DataError", "server-0")


def test_an_answer_to_another_question_is_not_accepted(world: _World) -> None:
    world.load(1)
    pending = world.generate("a")
    world.until(lambda: world.servers["server-0"].held)
    (delivery,) = world.servers["server-0"].held
    world.servers["server-0"].endpoint.reply(delivery, Generated("b", 0, (), "server-0"))
    world.until(lambda: world.servers["server-1"].held)
    world.servers["server-1"].answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == [b"a/0", b"a/1"]


def test_weights_reach_every_server_before_they_count_as_loaded(world: _World) -> None:
    slow = world.servers["server-1"]
    slow.loads_weights = False
    pending = world.load(1, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1])
    for _ in range(20):
        world.turn()
    assert not pending.done
    assert any(wait.whom == "server-1" and "version 1" in wait.what for wait in world.waits.declared())
    world.kill("server-1")
    world.publish_book()
    world.until(lambda: pending.done)
    assert pending.result().expect(WeightsLoaded) == WeightsLoaded(1, "digest-1", ("server-0",))
    assert world.waits.declared() == ()


def test_a_server_that_loads_other_bytes_is_found_out(world: _World) -> None:
    world.servers["server-1"].digest = "something else"
    pending = world.load(1)
    with pytest.raises(RemoteError, match="server-1: expected version 1 with digest digest-1"):
        pending.result()
    assert world.servers["server-1"].loaded == [1] * MAX_LOAD_ATTEMPTS
    asked = [world.generate(str(index)) for index in range(4)]
    world.until(lambda: len(world.servers["server-0"].held) == 4)
    world.servers["server-0"].answer()
    world.until(lambda: all(pending.done for pending in asked))


def test_a_server_that_joins_later_is_not_used_until_it_has_loaded_the_weights(world: _World) -> None:
    world.load(1)
    for process in ("server-0", "server-1"):
        world.kill(process)
    newcomer = world.add_server("server-0", incarnation="b")
    newcomer.loads_weights = False
    world.publish_book()
    pending = world.generate("a")
    world.until(lambda: any("server-0 stale at version -1" in wait.what for wait in world.waits.declared()))
    assert newcomer.held == []
    world.kill("server-0")
    replacement = world.add_server("server-0", incarnation="c")
    world.publish_book()
    world.until(lambda: replacement.held)
    assert replacement.loaded == [1]
    replacement.answer()
    world.until(lambda: pending.done)
    assert _texts(pending) == [b"a/0", b"a/1"]


def test_a_request_for_a_newer_version_waits_for_it_and_does_not_hold_up_others(world: _World) -> None:
    world.load(1)
    newer = world.generate("newer", version=2)
    older = world.generate("older", version=1)
    world.until(lambda: _held(world) == ["older"])
    for server in world.servers.values():
        server.answer()
    world.until(lambda: older.done)
    assert not newer.done
    world.load(2)
    world.until(lambda: _held(world) == ["newer"])


def test_a_request_that_no_server_can_serve_fails_at_its_deadline_with_the_reason(world: _World) -> None:
    world.load(1)
    pending = world.generate("a", version=9, timeout_s=0.05)
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match="no server can serve version 9"):
        pending.result()
    assert isinstance(pending.error, RemoteError) and pending.error.cause is not None
    assert pending.error.cause.kind == DeadlineExceeded.__name__


def test_newer_weights_supersede_those_that_are_still_being_loaded(world: _World) -> None:
    world.servers["server-1"].loads_weights = False
    first = world.load(1, wait=False)
    world.until(lambda: world.servers["server-0"].loaded == [1])
    world.kill("server-1")
    second = world.load(2, wait=False)
    world.until(lambda: first.done)
    with pytest.raises(RemoteError, match="superseded by version 2"):
        first.result()
    world.publish_book()
    world.until(lambda: second.done)
    assert world.servers["server-0"].loaded == [1, 2]


def test_the_queue_is_bounded(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_REQUESTS", 3)
    asked = [world.generate(str(index)) for index in range(4)]
    world.until(lambda: asked[3].done)
    with pytest.raises(RemoteError, match="3 requests are unanswered"):
        asked[3].result()
    assert not any(pending.done for pending in asked[:3])


def test_requests_of_a_process_that_is_gone_are_dropped(world: _World) -> None:
    world.generate("a")
    world.until(lambda: world.manager.load > 0)
    world._peers.pop("rollout-0")
    world.publish_book()
    world.turn()
    assert world.manager.load == 0


def test_a_message_that_is_not_its_business_is_refused(world: _World) -> None:
    pending = world.rollout.request("manager-0", Ping(), deadline_s=5)
    world.until(lambda: pending.done)
    with pytest.raises(RemoteError, match="does not answer Ping"):
        pending.result()
