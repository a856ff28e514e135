from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import pytest

from kintsugi.telemetry.collect.tcp import TcpSocket, TcpTable, socket_inodes, tcp_info


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            with server:
                yield client, server


def ends(client: socket.socket) -> dict[int, TcpSocket]:
    """Our own connections by their inodes."""
    with closing(TcpTable()) as table:
        own = {*socket_inodes(os.getpid())}
        return {each.inode: each for each in table.read() if each.inode in own}


def inode_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_a_connection_is_seen_with_its_ends_and_what_went_through_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    client.sendall(b"x" * 1000)
    server.sendall(b"y" * 77)
    assert client.recv(100) == b"y" * 77  # So the acknowledgement has come with it.
    seen = ends(client)[inode_of(client)]
    assert (seen.state, seen.local, seen.remote) == (
        "ESTABLISHED",
        client.getsockname(),
        client.getpeername(),
    )
    assert seen.info is not None
    assert (seen.info.in_bytes, seen.info.out_bytes) == (77, 1001), "one for the beginning of the connection"
    assert 0 < seen.info.rtt_s < 1


def test_what_nobody_reads_is_seen_in_the_receivers_queue(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    server.sendall(b"y" * 500)
    client.recv(200)
    assert ends(client)[inode_of(client)].receive_queue == 300


def test_listeners_are_seen_and_cookies_tell_connections_apart(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    seen = ends(pair[0])
    assert "LISTEN" in {each.state for each in seen.values()}
    assert len({each.cookie for each in seen.values()}) == len(seen)


def test_a_shorter_answer_of_an_older_kernel_reads_as_zeros() -> None:
    info = tcp_info(struct.pack("=8B24I", *[0] * 8, *range(24)))
    assert (info.unacked, info.rtt_s, info.retransmits) == (4, 15e-6, 23)
    assert (info.out_bytes, info.min_rtt_s) == (0, 0.0)


def test_what_was_sent_again_needlessly_is_where_the_kernel_puts_it() -> None:
    """`tcpi_dsack_dups` is at byte 216 of `struct tcp_info`, which ends later."""
    assert tcp_info(bytes(216) + struct.pack("=3I", 7, 8, 9)).needless == 7
    assert tcp_info(bytes(216)).needless == 0


def test_a_process_that_is_gone_has_no_sockets() -> None:
    assert list(socket_inodes(0)) == []
