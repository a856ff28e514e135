"""Connections that break in ways which ZeroMQ does not mend by itself."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.membership import Ok, Ping
from kintsugi.runtime.waits import wait
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.transport import Delivery, Endpoint, PendingReply, endpoint
from kintsugi.transport.endpoint import BLOCKED_S
from kintsugi.transport.sockets import UNACKNOWLEDGED_S
from kintsugi.types import Peer
from tests.unit.transport.harness import ask, introduce, make_endpoint, pump

MakeEndpoint = Callable[..., Endpoint]
_TCP_USER_TIMEOUT = 18
"""Of linux/tcp.h."""


class Wire:
    """Between a client and an endpoint: passes every byte on, or flips one of each piece in one direction."""

    def __init__(self, target: Endpoint) -> None:
        host, _, port = target.address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.mangled: str | None = None
        """"there" or "back"."""
        self.place = -1
        """Of the byte that is flipped in each piece."""
        self.num_flipped = 0
        self.num_connections = 0
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                server = socket.create_connection(self._target)
                self._open.append(server)
                self.num_connections += 1
                for ends in ((client, server, "there"), (server, client, "back")):
                    self._threads.append(threading.Thread(target=self._carry, args=ends))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with suppress(OSError):
            while piece := bytearray(source.recv(65536)):
                if way == self.mangled:
                    piece[min(self.place, len(piece) - 1)] ^= 0x55
                    self.num_flipped += 1
                target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()


@pytest.fixture
def wires() -> Iterator[Callable[[Endpoint, Endpoint], Wire]]:
    """Puts a wire between a client and the server that it knows."""
    with ExitStack() as stack:

        def connect(client: Endpoint, server: Endpoint) -> Wire:
            introduce(client, server)
            wire = Wire(server)
            stack.callback(wire.close)
            client.admit(msgspec.structs.replace(server.peer(host="here"), address=wire.address))
            return wire

        yield connect


def answer(server: Endpoint, pending: PendingReply, client: Endpoint) -> list[Delivery]:
    """Let both work until the request is done; gives what was delivered of it."""
    delivered: list[Delivery] = []

    def done() -> bool:
        for delivery in server.poll(0.0):
            delivered.append(delivery)
            server.reply(delivery, Ok())
        return pending.done

    pump(client, until=done)
    return delivered


@pytest.mark.parametrize("place", [1, 12, -1], ids=["a length", "a nonce", "the last byte"])
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_connection_whose_bytes_were_damaged_works_again_within_seconds(
    make: MakeEndpoint, wires: Callable[[Endpoint, Endpoint], Wire], way: str, place: int
) -> None:
    client, server = make("model-0"), make("agent-0")
    wire = wires(client, server)
    ask(client, server, Ping())
    wire.place, wire.mangled = place, way
    lost = client.request("agent-0", Ping(), deadline_s=0.6)
    answer(server, lost, client)
    assert isinstance(lost.error, DeadlineExceeded)
    assert wire.num_flipped
    wire.mangled = None
    pending = client.request("agent-0", Ping(), deadline_s=5.0)
    answer(server, pending, client)
    assert pending.error is None
    assert wire.num_connections > 1, "the fault ended a connection"


def test_what_was_asked_before_its_connection_was_damaged_is_answered_and_done_once(
    make: MakeEndpoint, wires: Callable[[Endpoint, Endpoint], Wire]
) -> None:
    client, server = make("model-0"), make("agent-0")
    wire = wires(client, server)
    ask(client, server, Ping())
    wire.mangled = "back"
    first, second = (client.request("agent-0", Ping(), deadline_s=8.0) for _ in range(2))
    delivered = pump(client, server, until=lambda: client.poll(0.0) == [])
    while len(delivered) < 2:
        delivered += server.poll(0.1)
    server.reply(delivered[0], Ok())  # This one is damaged on its way, and closes the connection for good.
    pump(client, until=lambda: wire.num_flipped > 0)
    wire.mangled = None
    assert answer(server, first, client) == [], "it was answered from what was saved"
    assert first.error is None and not second.done
    server.reply(delivered[1], Ok())  # On the connection on which it was asked again.
    assert answer(server, second, client) == []
    assert second.error is None


def test_one_way_messages_alone_bring_a_damaged_connection_back(
    make: MakeEndpoint, wires: Callable[[Endpoint, Endpoint], Wire]
) -> None:
    client, server = make("model-0"), make("agent-0")
    wire = wires(client, server)
    ask(client, server, Ping())
    wire.mangled = "back"
    answer(server, client.request("agent-0", Ping(), deadline_s=0.1), client)
    pump(client, server, until=lambda: not client.send("agent-0", Ping()))
    wire.mangled = None
    delivered = pump(client, server, until=lambda: client.send("agent-0", Ping()))
    delivered += pump(server, until=lambda: wire.num_connections == 2)
    while not [one for one in delivered if not one.wants_reply]:
        delivered += server.poll(0.1)


def test_a_queue_that_is_full_is_given_up_only_after_a_while_in_which_it_took_nothing(
    make: MakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    client, server = make("model-0", clock=clock), make("agent-0")
    introduce(client, server)
    assert client.send("agent-0", Ping())
    link, dial = client._links["agent-0"], client._links._open_socket
    dialled: list[Peer] = []

    def note(peer: Peer) -> zmq.Socket[bytes]:
        dialled.append(peer)
        return dial(peer)

    monkeypatch.setattr(client._links, "_open_socket", note)

    def refuse(*_: object, **__: object) -> None:
        raise zmq.Again

    with monkeypatch.context() as full:
        full.setattr(endpoint, "send_frame", refuse)
        assert not client.send("agent-0", Ping())
        clock.advance(BLOCKED_S * 0.9)
        assert not client.send("agent-0", Ping())
    assert client.send("agent-0", Ping()), "it took one"
    with monkeypatch.context() as full:
        full.setattr(endpoint, "send_frame", refuse)
        clock.advance(BLOCKED_S * 0.9)
        assert not client.send("agent-0", Ping())
        assert not dialled
        clock.advance(BLOCKED_S * 1.1)
        assert not client.send("agent-0", Ping()), "the new one does not take it either"
        assert not client.send("agent-0", Ping())
    assert len(dialled) == 1
    assert client._links["agent-0"] is link


def test_connections_on_which_nothing_is_acknowledged_are_ended_by_the_kernel_at_both_ends(
    make: MakeEndpoint,
) -> None:
    client, server = make("model-0"), make("agent-0")
    introduce(client, server)
    ask(client, server, Ping())
    port = int(server.address.rpartition(":")[2])
    limits = [
        end.getsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT)
        for end in own_tcp_sockets()
        if port in (end.getsockname()[1], connected_to(end))
        and not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]
    assert limits == [UNACKNOWLEDGED_S * 1000] * 2


def own_tcp_sockets() -> Iterator[socket.socket]:
    """Of this process, each as long as it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / name
        if path.is_symlink() and str(path.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET:
                    yield end


def connected_to(end: socket.socket) -> int | None:
    """The other end's port."""
    with suppress(OSError):
        return int(end.getpeername()[1])
    return None


def test_the_end_of_a_caller_is_a_closed_connection_and_its_silence_is_none(
    make: Callable[..., Endpoint],
) -> None:
    manager, caller = make("host_manager-0"), make_endpoint("supervisor-1")
    introduce(manager, caller)
    assert manager.closed_connections() == 0
    assert ask(caller, manager, Ping()).body == Ok()
    assert manager.closed_connections() == 0
    caller.close()
    closed = wait(
        lambda _: manager.closed_connections() or None, whom="the kernel", what="the close", timeout_s=10.0
    )
    assert closed == 1
    assert manager.closed_connections() == 0
