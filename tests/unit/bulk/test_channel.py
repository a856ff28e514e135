"""A bulk connection carries exactly the bytes that were sent, or fails."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from kintsugi.bulk import channel as channel_module
from kintsugi.bulk.channel import CHUNK_BYTES, TAG_BYTES, TaggedChannel, connection_keys
from kintsugi.bulk.exports import Region
from kintsugi.errors import IntegrityError, WorldError

OWN, OTHER = b"o" * 16, b"p" * 16
SIZE = 3 * CHUNK_BYTES
BLOCK = CHUNK_BYTES + TAG_BYTES
CONTENT = os.urandom(SIZE)


@contextmanager
def receiving(stream: bytes, *, key: bytes = OWN) -> Iterator[TaggedChannel]:
    """A channel to which these bytes arrive, and then the end."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)

        def feed() -> None:
            with suppress(OSError):  # The receiver may refuse it before the end.
                far.sendall(stream)
                far.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        yield TaggedChannel(near, own_key=OTHER, other_key=key)
    thread.join(10)


@pytest.fixture(scope="module")
def recorded() -> bytes:
    """All bytes that a sender of `CONTENT` puts on the wire."""
    near, far = socket.socketpair()
    parts: list[bytes] = []

    def take() -> None:
        while part := far.recv(1 << 20):
            parts.append(part)

    with near, far:
        thread = threading.Thread(target=take)
        thread.start()
        TaggedChannel(near, own_key=OWN, other_key=OTHER).send_region(Region(memoryview(CONTENT)))
        near.shutdown(socket.SHUT_WR)
        thread.join(10)
    return b"".join(parts)


def test_what_was_sent_arrives(recorded: bytes) -> None:
    assert len(recorded) == 3 * BLOCK
    target = bytearray(SIZE)
    with receiving(recorded) as channel:
        channel.attempt_fill(memoryview(target))
    assert target == CONTENT


def flipped(stream: bytes) -> bytes:
    return stream[:BLOCK] + bytes([stream[BLOCK] ^ 1]) + stream[BLOCK + 1 :]


def reordered(stream: bytes) -> bytes:
    return stream[BLOCK : 2 * BLOCK] + stream[:BLOCK] + stream[2 * BLOCK :]


def replayed(stream: bytes) -> bytes:
    return stream[:BLOCK] + stream[:BLOCK] + stream[BLOCK:]


def injected(stream: bytes) -> bytes:
    return bytes(BLOCK) + stream


def left_out(stream: bytes) -> bytes:
    return stream[BLOCK:]


def moved(stream: bytes) -> bytes:
    """Bytes that move from one chunk to the next: every byte is there, at another place."""
    return stream[: CHUNK_BYTES - 1] + stream[CHUNK_BYTES:]


@pytest.mark.parametrize("attack", [flipped, reordered, replayed, injected, left_out, moved])
def test_a_stream_that_was_tampered_with_is_refused(
    recorded: bytes, attack: Callable[[bytes], bytes]
) -> None:
    with (
        receiving(attack(recorded)) as channel,
        pytest.raises(IntegrityError, match="does not have the expected tag"),
    ):
        channel.attempt_fill(memoryview(bytearray(SIZE)))


def test_a_stream_that_ends_early_is_refused(recorded: bytes) -> None:
    with receiving(recorded[:-1]) as channel, pytest.raises(WorldError, match="ended after"):
        channel.attempt_fill(memoryview(bytearray(SIZE)))


def test_what_one_side_sent_is_not_accepted_from_the_other(recorded: bytes) -> None:
    with receiving(recorded, key=OTHER) as channel, pytest.raises(IntegrityError):
        channel.attempt_fill(memoryview(bytearray(SIZE)))


def test_every_connection_and_direction_has_its_own_key() -> None:
    key, nonces = bytes(32), (b"a" * 16, b"b" * 16)
    made = [
        connection_keys(key, client_nonce=client, server_nonce=server)
        for client in nonces
        for server in nonces
    ]
    found = {each for keys in made for each in keys.values()}
    assert len(found) == 8


def test_an_announced_message_beyond_the_bound_takes_no_memory() -> None:
    with (
        receiving((1 << 30).to_bytes(4, "little")) as channel,
        pytest.raises(IntegrityError, match="at most"),
    ):
        channel.attempt_message()


def test_a_file_in_memory_is_sent_by_the_kernel_from_its_offset() -> None:
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"x" * 100 + CONTENT)
    near, far = socket.socketpair()
    sender = TaggedChannel(near, own_key=OWN, other_key=OTHER)
    receiver = TaggedChannel(far, own_key=OTHER, other_key=OWN)
    target = bytearray(CHUNK_BYTES)
    thread = threading.Thread(target=receiver.attempt_fill, args=(memoryview(target),))
    with near, far:
        thread.start()
        sender.send_region(Region(memoryview(CONTENT)[:CHUNK_BYTES], descriptor, 100))
        thread.join(10)
    os.close(descriptor)
    assert target == CONTENT[:CHUNK_BYTES]


def test_a_peer_that_sends_nothing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "STALL_S", 0.1)
    near, far = socket.socketpair()
    with near, far, pytest.raises(OSError, match="temporarily unavailable"):
        TaggedChannel(near, own_key=OWN, other_key=OTHER).attempt_message()
