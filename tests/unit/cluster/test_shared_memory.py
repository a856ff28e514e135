from __future__ import annotations

import fcntl
import mmap
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import msgspec
import pytest

from kintsugi.cluster import shared_memory
from kintsugi.cluster.shared_memory import OfferSegment, SegmentAnswer, SegmentClient, SegmentServer
from kintsugi.errors import RefusedError, WorldError


class Loop:
    """The agent's loop, as far as the segment service sees it."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._stop_read, self._stop_write = os.pipe()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._callbacks[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        del self._callbacks[descriptor]

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._stop_read, *self._callbacks], [], [])
            if self._stop_read in ready:
                return
            for descriptor in ready:
                if descriptor in self._callbacks:
                    self._callbacks[descriptor]()

    def stop(self) -> None:
        os.write(self._stop_write, b"x")

    def close(self) -> None:
        os.close(self._stop_read)
        os.close(self._stop_write)


class Agent:
    """A segment service in a thread of its own, as an agent runs it."""

    def __init__(self, job: str, *, capacity: int = 1 << 20) -> None:
        self._loop = Loop()
        self.server = SegmentServer(self._loop, job=job, host="host-0", capacity=capacity)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def die(self) -> None:
        self._loop.stop()
        self._thread.join(10)
        self.server.close()
        self._loop.close()


@pytest.fixture
def job() -> str:
    """The service's name is known from it, so every test has its own."""
    return uuid4().hex[:12]


@pytest.fixture
def server(job: str) -> Iterator[SegmentServer]:
    agent = Agent(job)
    yield agent.server
    agent.die()


@pytest.fixture
def client(server: SegmentServer) -> Iterator[SegmentClient]:
    client = SegmentClient(server.name)
    yield client
    client.close()


def same_memory(first: int, second: int) -> bool:
    return os.fstat(first).st_ino == os.fstat(second).st_ino


def test_two_clients_see_the_same_memory(server: SegmentServer, client: SegmentClient) -> None:
    other = SegmentClient(server.name)
    written, read = client.create("weights", 4096), other.open("weights")
    with mmap.mmap(written, 4096) as ours, mmap.mmap(read, 4096) as theirs:
        ours[:5] = b"hello"
        assert theirs[:5] == b"hello"
    os.close(written)
    os.close(read)
    other.close()


def test_creating_again_finds_the_same_segment_and_another_size_replaces_it(client: SegmentClient) -> None:
    first, again, larger = (client.create("weights", size) for size in (4096, 4096, 8192))
    assert same_memory(first, again)
    assert not same_memory(first, larger)
    assert os.fstat(larger).st_size == 8192
    for descriptor in (first, again, larger):
        os.close(descriptor)


def test_a_removed_segment_is_unknown_but_stays_with_who_has_it(client: SegmentClient) -> None:
    descriptor = client.create("weights", 4096)
    client.remove("weights")
    with pytest.raises(RefusedError, match="no segment weights"):
        client.open("weights")
    assert os.pwrite(descriptor, b"still here", 0) == 10
    os.close(descriptor)


def test_removing_what_is_not_there_is_fine(client: SegmentClient) -> None:
    client.remove("weights")


def test_more_than_the_capacity_is_refused_with_the_sizes(
    server: SegmentServer, client: SegmentClient
) -> None:
    os.close(client.create("first", 1 << 19))
    with pytest.raises(
        RefusedError, match="segment second of 524289 bytes does not fit: 524288 of 1048576 bytes are used"
    ):
        client.create("second", (1 << 19) + 1)
    client.remove("first")
    os.close(client.create("second", (1 << 19) + 1))
    assert server.used == (1 << 19) + 1


def test_a_size_below_one_is_refused(client: SegmentClient) -> None:
    with pytest.raises(RefusedError, match="at least 1 byte"):
        client.create("weights", 0)


def test_nobody_can_shrink_a_segment_under_the_others(client: SegmentClient) -> None:
    descriptor = client.create("weights", 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_a_client_that_speaks_nonsense_is_dropped_and_others_are_served(
    server: SegmentServer, client: SegmentClient
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{server.name}")
        stranger.send(b"\xff\xff\xff")
        assert stranger.recv(16) == b""
    os.close(client.create("weights", 4096))


def test_who_has_no_descriptor_left_is_told_so(client: SegmentClient) -> None:
    descriptor = client.create("weights", 4096)
    os.close(descriptor)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            client.open("weights")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(client.open("weights"))


def test_a_service_that_is_gone_is_named() -> None:
    with pytest.raises(WorldError, match="segment service kintsugi-nobody"):
        SegmentClient("kintsugi-nobody")


def test_a_segment_that_went_with_its_agent_can_be_removed_and_not_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_RECONNECT_TIMEOUT_S", 0.1)
    loop = Loop()
    server = SegmentServer(loop, job=uuid4().hex, host="host-0", capacity=1 << 20)
    client = SegmentClient(server.name)
    server.close()
    loop.close()
    client.remove("weights")
    with pytest.raises(WorldError, match="the agent of this host is gone: OpenSegment of segment weights"):
        client.open("weights")
    client.close()


def test_a_segment_descriptor_is_not_inherited(client: SegmentClient) -> None:
    descriptor = client.create("weights", 4096)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_a_service_that_takes_no_more_connections_is_waited_for_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_ANSWER_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0kintsugi-busy")
        listener.listen(0)
        first = SegmentClient("kintsugi-busy")
        with pytest.raises(WorldError, match=r"waited .* for agent: a connection to the segment service"):
            SegmentClient("kintsugi-busy")
        first.close()


@pytest.fixture
def agents(job: str) -> Iterator[Callable[[], Agent]]:
    """Starts an agent after the other, each under the same name."""
    started: list[Agent] = []

    def start() -> Agent:
        if started:
            started[-1].die()
        started.append(Agent(job))
        return started[-1]

    yield start
    started[-1].die()


def test_what_a_client_created_survives_the_agent(agents: Callable[[], Agent]) -> None:
    client = SegmentClient(agents().server.name)
    descriptor = client.create("weights", 4096)
    os.pwrite(descriptor, b"version 3", 0)
    second = agents()
    os.close(client.create("another", 4096))
    reader = SegmentClient(second.server.name)
    read = reader.open("weights")
    assert os.pread(read, 9, 0) == b"version 3"
    assert same_memory(descriptor, read)
    for descriptor_left in (descriptor, read):
        os.close(descriptor_left)
    reader.close()
    client.close()


def test_what_a_client_created_is_offered_again_by_who_has_nothing_else_to_ask(
    agents: Callable[[], Agent],
) -> None:
    client = SegmentClient(agents().server.name)
    os.close(client.create("weights", 4096))
    assert client.renew()
    second = agents()
    assert second.server.used == 0
    assert client.renew()
    assert second.server.used == 4096
    client.close()


def test_what_a_new_agent_has_no_room_for_is_offered_again_and_the_rest_is_held(
    agents: Callable[[], Agent],
) -> None:
    client = SegmentClient(agents().server.name)
    for name, size in (("large", 8192), ("small", 4096)):
        os.close(client.create(name, size))
    second = agents()
    capacity, second.server.capacity = second.server.capacity, 4096
    assert not client.renew() and second.server.used == 4096
    assert not client.renew(), "it is still not held"
    second.server.capacity = capacity
    assert client.renew() and second.server.used == 3 * 4096
    client.close()


def test_what_was_removed_is_not_offered_again(agents: Callable[[], Agent]) -> None:
    client = SegmentClient(agents().server.name)
    os.close(client.create("weights", 4096))
    client.remove("weights")
    second = agents()
    assert client.renew()
    assert second.server.used == 0
    client.close()


def test_a_segment_made_under_the_new_agent_is_not_replaced_by_an_older_one(
    agents: Callable[[], Agent],
) -> None:
    old = SegmentClient(agents().server.name)
    os.close(old.create("weights", 4096))
    new = SegmentClient(agents().server.name)
    made = new.create("weights", 8192)
    assert old.renew()
    found = old.open("weights")
    assert same_memory(made, found)
    for descriptor in (made, found):
        os.close(descriptor)
    old.close()
    new.close()


def test_an_agent_that_comes_a_moment_later_is_waited_for(job: str) -> None:
    first = Agent(job)
    client = SegmentClient(first.server.name)
    first.die()
    with ThreadPoolExecutor() as pool:
        creating = pool.submit(client.create, "weights", 4096)
        second = Agent(job)
        os.close(creating.result(timeout=10))
    assert second.server.used == 4096
    client.close()
    second.die()


def test_an_agent_that_does_not_come_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    monkeypatch.setattr(shared_memory, "_RECONNECT_TIMEOUT_S", 0.5)
    agent = Agent(job)
    client = SegmentClient(agent.server.name)
    agent.die()
    begun = time.monotonic()
    for _ in range(10):
        with pytest.raises(WorldError, match="the agent of this host is gone"):
            client.open("weights")
    assert 0.5 <= time.monotonic() - begun < 4.0
    client.close()


@pytest.mark.parametrize(
    ("size", "seals", "why"),
    [
        (4096, 0, "a size that can still be changed"),
        (8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "was offered with 8192 bytes and has 4096"),
    ],
    ids=["not sealed", "another size"],
)
def test_an_offer_that_is_not_what_it_claims_is_refused(
    server: SegmentServer, size: int, seals: int, why: str
) -> None:
    memory = os.memfd_create("offered", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{server.name}")
        socket.send_fds(stranger, [msgspec.msgpack.encode(OfferSegment("weights", size))], [memory])
        assert why in msgspec.msgpack.decode(stranger.recv(4096), type=SegmentAnswer).refusal
    os.close(memory)
    assert server.used == 0
