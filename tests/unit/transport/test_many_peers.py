from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from kintsugi.errors import Fault, RefusedError
from kintsugi.protocol import wire
from kintsugi.protocol.membership import AddressBook, Heartbeat, Ping
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.descriptors import num_descriptors, raise_descriptor_limit
from kintsugi.runtime.waits import wait
from kintsugi.transport import Endpoint, new_key_pair
from kintsugi.transport.sockets import SPARE_SOCKETS
from kintsugi.types import Peer, Progress
from tests.unit.transport.harness import ask, introduce

Make = Callable[..., Endpoint]
NUM_PEERS = 1200
NUM_DESCRIPTORS = 10 * NUM_PEERS
"""Of both sides, which are in one process here."""


@contextmanager
def _limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Peers:
    """The sockets of many processes: one listens, one is connected to the endpoint."""

    def __init__(self, master: Endpoint) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2)
        self._context.set(zmq.MAX_SOCKETS, 2 * NUM_PEERS + SPARE_SOCKETS)
        self.listening: list[zmq.Socket[bytes]] = []
        self.connected: list[zmq.Socket[bytes]] = []
        self.book: list[Peer] = []
        for number in range(NUM_PEERS):
            public, secret = new_key_pair()
            router, dealer = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
            for socket in (router, dealer):
                socket.linger = 0
                socket.curve_publickey, socket.curve_secretkey = public, secret
            router.curve_server = True
            router.bind("tcp://127.0.0.1:*")
            dealer.curve_serverkey = master.peer(host="here").public_key
            dealer.connect(master.address)
            address = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self.book.append(Peer(f"rollout-{number}", "a", "here", address, public))
            self.listening.append(router)
            self.connected.append(dealer)

    def receive_all(self, master: Endpoint) -> list[bytes]:
        """Return the first message to each of them."""
        frames: dict[int, bytes] = {}

        def attempt(_: float) -> bool | None:
            master.turn(0.01)
            for number, router in enumerate(self.listening):
                if number not in frames and router.poll(0):
                    frames[number] = router.recv_multipart()[-1]
            return len(frames) == NUM_PEERS or None

        wait(attempt, whom="the endpoint", what="a message to each peer", timeout_s=120.0)
        return [frames[number] for number in range(NUM_PEERS)]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.slow
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < NUM_DESCRIPTORS,
    reason=f"needs {NUM_DESCRIPTORS} file descriptors",
)
def test_an_endpoint_exchanges_messages_with_1200_peers(make: Make) -> None:
    with _limit(NUM_DESCRIPTORS):
        master = make("master-0", num_peers=NUM_PEERS)
        peers = Peers(master)
        try:
            book = AddressBook(1, (*peers.book, master.peer(host="here")))
            assert master.set_book(book)
            master.send_to_all([peer.process for peer in peers.book], Ping(b"to all"))
            frames = peers.receive_all(master)
            assert {wire.decode(frame).body for frame in frames} == {Ping(b"to all")}
            for peer, dealer in zip(peers.book, peers.connected, strict=True):
                envelope = Envelope("job", 0, peer.process, "a", 1, MessageKind.ONE_WAY)
                dealer.send(wire.encode(envelope, Heartbeat(Progress({}), 0.0, book=1)))
            senders: set[str] = set()

            def attempt(remaining_s: float) -> bool | None:
                senders.update(delivery.envelope.sender for delivery in master.poll(min(1.0, remaining_s)))
                return len(senders) == NUM_PEERS or None

            wait(attempt, whom="the peers", what="a heartbeat of each", timeout_s=120.0)
        finally:
            peers.close()


def test_a_process_without_a_free_socket_still_reaches_the_peers_that_it_is_connected_to(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = make("model-0"), make("model-1")
    monkeypatch.setattr("kintsugi.transport.sockets.SPARE_SOCKETS", 3)  # The endpoint's own two, and one.
    master = make("master-0")
    introduce(master, known, other)
    ask(master, known, Ping())
    assert not master.send("model-1", Ping())
    pending = master.request("model-1", Ping(), deadline_s=10.0)
    with pytest.raises(RefusedError, match="model-1 can not be reached by master-0: Too many open files"):
        pending.result()
    master.admit(Peer("model-2", "a", "here", "", new_key_pair()[0]))
    with pytest.raises(RefusedError, match="model-2 is not in the address book of master-0"):
        master.request("model-2", Ping(), deadline_s=10.0).result()
    ask(master, known, Ping())
    master.forget("model-0", Fault("f1", "ProcessDied", "model-0", "killed", 0.0))

    def attempt(_: float) -> bool | None:
        master.turn(0.01)
        return master.send("model-1", Ping()) or None

    wait(attempt, whom="ZeroMQ", what="a free socket", timeout_s=10.0)


def test_the_soft_limit_of_descriptors_is_raised_as_far_as_the_hard_one_allows() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with _limit(512):
        raise_descriptor_limit(10)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert 512 < soft <= hard
        raise_descriptor_limit(10**6)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, num_descriptors(10**6))
