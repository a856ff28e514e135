"""Bytes between two processes over the bulk channel, and every kind of stranger."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kintsugi.bulk import channel as channel_module
from kintsugi.bulk import server as server_module
from kintsugi.bulk.client import BulkClient, _encode
from kintsugi.bulk.credentials import Credentials
from kintsugi.bulk.exports import SLICE_BYTES, FileExport, ViewExport, slices
from kintsugi.errors import IntegrityError, KintsugiError, RefusedError, WorldError
from kintsugi.protocol.bulk import BulkMode, BulkOffer, BulkOpened, BulkRange, BulkRequest, OpenBulk
from kintsugi.types import Peer
from tests.unit.bulk.peers import Processes, processes

CONTENT = os.urandom(SLICE_BYTES + 12_345)
MODES: list[BulkMode] = ["encrypted", "authenticated"]


@pytest.fixture(params=MODES)
def both(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with processes(request.param) as made:
        made.add("model-0")
        made.add("server-0")
        yield made


@pytest.fixture
def tagged() -> Iterator[Processes]:
    with processes("authenticated") as made:
        made.add("model-0")
        made.add("server-0")
        yield made


def offered(made: Processes, content: bytes = CONTENT) -> BulkOffer:
    export = ViewExport({0: len(content)}, lambda index: memoryview(content))
    return made.endpoints["model-0"].server.offer("weights", export)


def fetched(client: BulkClient, offer: BulkOffer, *, size: int = len(CONTENT)) -> bytes:
    target = bytearray(size)
    parts = slices(0, size)
    places = [memoryview(target)[part.offset : part.offset + part.size] for part in parts]
    client.fetch(offer, parts, places)
    return bytes(target)


def until(holds: object, *, within_s: float = 10.0) -> None:
    assert callable(holds)
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


def test_bytes_arrive_in_their_place_and_a_connection_is_used_again(both: Processes) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    assert [fetched(client, offer) == CONTENT for _ in range(3)] == [True] * 3
    assert both.num_opened == 1 and both.endpoints["model-0"].server.num_connections == 1


def test_a_connection_is_not_watched_any_more_when_another_request_may_use_it(both: Processes) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    watched: list[tuple[object, int]] = []
    for _ in range(2):
        parts, places = [BulkRange(0, 0, 4)], [memoryview(bytearray(4))]
        client.fetch(
            offer,
            parts,
            places,
            watch=lambda channel: watched.append((channel, len(client._idle.get("model-0", ())))),
        )
    first = watched[0][0]
    assert first is not None and watched == [(first, 0), (None, 0)] * 2


def test_a_process_that_is_not_fetched_from_listens_nowhere(both: Processes) -> None:
    offered(both)
    assert both.endpoints["model-0"].server._listener is None


@pytest.mark.parametrize("part", [BulkRange(0, 0, len(CONTENT) + 1), BulkRange(0, -1, 4), BulkRange(1, 0, 1)])
def test_a_range_outside_of_the_export_is_refused_and_the_connection_stays(
    both: Processes, part: BulkRange
) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    with pytest.raises(RefusedError, match=r"pieces here|has .* bytes"):
        client.fetch(offer, [part], [memoryview(bytearray(part.size))])
    assert fetched(client, offer) == CONTENT


def test_what_is_not_offered_any_more_is_refused(both: Processes) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    both.endpoints["model-0"].server.withdraw(offer.export)
    with pytest.raises(RefusedError, match="model-0 does not offer weights"):
        fetched(client, offer)


def test_a_piece_that_is_still_arriving_is_passed_on_slice_by_slice(both: Processes) -> None:
    memory = memoryview(bytearray(len(CONTENT)))
    export = FileExport({0: (0, len(CONTENT))}, memory)
    offer = both.endpoints["model-0"].server.offer("weights", export)
    target, parts = bytearray(len(CONTENT)), slices(0, len(CONTENT))
    client, first = both.endpoints["server-0"].client, threading.Event()

    def fetch() -> None:
        client.fetch(offer, parts[:1], [memoryview(target)[:SLICE_BYTES]])
        first.set()
        client.fetch(offer, parts[1:], [memoryview(target)[SLICE_BYTES:]])

    thread = threading.Thread(target=fetch)
    thread.start()
    memory[:SLICE_BYTES] = CONTENT[:SLICE_BYTES]
    export.arrived(parts[0])
    assert first.wait(10) and thread.is_alive()
    memory[SLICE_BYTES:] = CONTENT[SLICE_BYTES:]
    export.arrived(parts[1])
    thread.join(10)
    assert target == CONTENT


def test_a_withdrawn_export_ends_transfers_before_its_memory_is_used_again(tagged: Processes) -> None:
    memory = memoryview(bytearray(len(CONTENT)))
    server = tagged.endpoints["model-0"].server
    offer = server.offer("weights", FileExport({0: (0, len(CONTENT))}, memory))
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            fetched(tagged.endpoints["server-0"].client, offer)
        except WorldError as error:
            failed.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    until(lambda: any(each.export for each in server._connections))
    server.withdraw(offer.export)
    assert not any(each.export for each in server._connections)
    thread.join(10)
    assert len(failed) == 1


# Hosts that lack something.


class FullHost(socket.socket):
    """A listener whose first connections find no free descriptor."""

    attempts: list[float]
    num_failing = 2

    def accept(self) -> tuple[socket.socket, Any]:
        accepted = super().accept() if len(self.attempts) >= self.num_failing else None
        if accepted is None:
            self.attempts.append(time.monotonic())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accepted


def test_a_server_without_a_free_descriptor_waits_before_it_accepts_again(
    tagged: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []

    def open_listener(address: tuple[str, int], *, backlog: int) -> socket.socket:
        listener = FullHost()
        listener.attempts = attempts
        listener.bind(address)
        listener.listen(backlog)
        return listener

    monkeypatch.setattr(socket, "create_server", open_listener)
    offer, client = offered(tagged), tagged.endpoints["server-0"].client
    assert fetched(client, offer) == CONTENT
    first, second = attempts
    assert second - first >= 0.9 * server_module.ACCEPT_PAUSE_S


def test_a_server_that_waits_for_descriptors_is_closed_at_once(
    tagged: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 60.0)
    server = tagged.endpoints["model-0"].server
    opened = opened_as(tagged, "server-0", Credentials.create("server-0"))
    monkeypatch.setattr(server, "_attempt_accept", lambda listener: False)
    host, _, port = opened.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        since = time.monotonic()
        server.close()
        assert time.monotonic() - since < server_module.CLOSE_S
    del tagged.endpoints["model-0"]


def test_a_listener_whose_thread_could_not_be_started_is_opened_again(
    tagged: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, client = offered(tagged), tagged.endpoints["server-0"].client

    def no_thread(thread: threading.Thread) -> None:
        raise RefusedError("no thread is left")

    with monkeypatch.context() as patched:
        patched.setattr(server_module, "_start", no_thread)
        with pytest.raises(RefusedError, match="no thread is left"):
            fetched(client, offer)
    assert fetched(client, offer) == CONTENT


# Strangers.


def opened_as(made: Processes, process: str, credentials: Credentials) -> BulkOpened:
    server = made.endpoints["model-0"].server
    return server.open_session(made.book[process], credentials.certificate)


def test_a_client_with_another_certificate_is_refused_and_recorded() -> None:
    with processes("encrypted") as made:
        made.add("model-0")
        made.add("server-0")
        offer, known, other = offered(made), Credentials.create("server-0"), Credentials.create("server-0")
        stolen = BulkClient(
            lambda process, request: opened_as(made, "server-0", known), credentials=lambda: other
        )
        with pytest.raises(WorldError):
            fetched(stolen, offer)
        until(lambda: any("refused a bulk connection of 127.0.0.1" in note.message for note in made.notes))


def test_a_server_with_another_certificate_is_refused() -> None:
    with processes("encrypted") as made:
        made.add("model-0")
        made.add("server-0")
        offer, own, other = offered(made), Credentials.create("server-0"), Credentials.create("model-0")

        def elsewhere(process: str, request: OpenBulk) -> BulkOpened:
            opened = opened_as(made, "server-0", own)
            return BulkOpened(opened.address, opened.session, opened.key, other.certificate, opened.mode)

        with pytest.raises(WorldError, match="certificate"):
            fetched(BulkClient(elsewhere, credentials=lambda: own), offer)


def test_a_client_without_the_sessions_key_is_refused(tagged: Processes) -> None:
    offer, own = offered(tagged), Credentials.create("server-0")

    def without_key(process: str, request: OpenBulk) -> BulkOpened:
        opened = opened_as(tagged, "server-0", own)
        return BulkOpened(opened.address, opened.session, bytes(32), b"", opened.mode)

    with pytest.raises(KintsugiError):
        fetched(BulkClient(without_key, credentials=lambda: own), offer)
    until(lambda: any("expected tag" in note.message for note in tagged.notes))


def test_a_session_ends_with_the_incarnation_that_opened_it(both: Processes) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    assert fetched(client, offer) == CONTENT
    both.book["server-0"] = Peer("server-0", "b", "host-0", "", b"")
    old = both.endpoints["model-0"].server
    client._open_session = lambda process, request: old.open_session(
        Peer("server-0", "a", "host-0", "", b""), request.certificate
    )
    with pytest.raises(WorldError):
        fetched(client, offer)


def test_a_restarted_process_is_asked_for_a_new_session(both: Processes) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    assert fetched(client, offer) == CONTENT
    both.kill("model-0")
    both.add("model-0", "b")
    assert fetched(client, offered(both)) == CONTENT
    assert both.num_opened == 2


def test_a_hundred_connections_without_a_key_are_bounded_and_keep_no_other_out(
    both: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, client = offered(both), both.endpoints["server-0"].client
    assert fetched(client, offer) == CONTENT
    client.close()
    server = both.endpoints["model-0"].server
    monkeypatch.setattr(server_module, "SET_UP_S", 0.5)
    assert server._listener is not None
    strangers = [socket.create_connection(server._listener.getsockname()) for _ in range(100)]
    try:
        until(lambda: server.num_connections >= 1)
        for stranger in strangers[::2]:
            stranger.sendall(os.urandom(32))
        most = 0
        for _ in range(50):
            most = max(most, sum(not each.is_proven for each in list(server._connections)))
            time.sleep(0.001)
        assert most <= server_module.MAX_UNPROVEN + 1
        assert fetched(client, offer) == CONTENT
        until(lambda: not any(not each.is_proven for each in list(server._connections)))
        named = [
            note.message for note in both.notes if "refused a bulk connection of 127.0.0.1" in note.message
        ]
        assert named and len(named) <= 4
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_reader_that_does_not_read_is_ended_and_named(
    both: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 0.3)
    offer, client = offered(both, bytes(8 * SLICE_BYTES)), both.endpoints["server-0"].client
    server = both.endpoints["model-0"].server
    channel = client._connect("model-0")
    channel.send_message(_encode(BulkRequest(offer.export, tuple(slices(0, 8 * SLICE_BYTES)))))
    until(lambda: any(each.export for each in server._connections))
    assert fetched(client, offer, size=SLICE_BYTES) == bytes(SLICE_BYTES)
    until(lambda: any("could not send weights to server-0" in note.message for note in both.notes))
    channel.close()


class Proxy:
    """Passes bytes on between a client and a server, and attacks what the server sends at one byte: flips a bit of it,
    ends the stream there, or sends it and those before it once more."""

    def __init__(self, address: str, *, at: int, attack: str = "flip") -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._at, self._attack = at, attack
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._sockets += [near, far]
        self._threads.append(threading.Thread(target=self._pass, args=(near, far, -1)))
        self._threads[-1].start()
        self._pass(far, near, self._at)

    def _pass(self, source: socket.socket, target: socket.socket, at: int) -> None:
        passed = 0
        with suppress(OSError):
            while part := bytearray(source.recv(1 << 16)):
                here = at - passed
                passed += len(part)
                if not 0 <= here < len(part):
                    target.sendall(part)
                elif self._attack == "cut":
                    target.sendall(part[:here])
                    break
                elif self._attack == "repeat":
                    target.sendall(part[: here + 1] + part)
                else:
                    part[here] ^= 1
                    target.sendall(part)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()


@pytest.mark.parametrize("attack", ["flip", "cut", "repeat"])
@pytest.mark.parametrize("at", [10, 5_000, 1_500_000])
def test_what_is_changed_cut_off_or_sent_again_on_the_wire_is_never_taken_for_data(
    both: Processes, at: int, attack: str
) -> None:
    offer, own = offered(both), Credentials.create("server-0")
    proxies: list[Proxy] = []

    def through_proxy(process: str, request: OpenBulk) -> BulkOpened:
        opened = opened_as(both, "server-0", own)
        proxies.append(Proxy(opened.address, at=at, attack=attack))
        return BulkOpened(proxies[-1].address, opened.session, opened.key, opened.certificate, opened.mode)

    client = BulkClient(through_proxy, credentials=lambda: own)
    with pytest.raises((WorldError, IntegrityError)):
        fetched(client, offer)
    client.close()
    for proxy in proxies:
        proxy.close()
