"""Connections that show no key: what they can occupy."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import pytest

from kintsugi.transport import Endpoint
from kintsugi.transport.sockets import LARGEST_FRAME_BYTES, send_frame

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
LONG_COMMAND = 0x06
MIB = 1 << 20


def bytes_taken(stranger: socket.socket, *, most: int) -> int:
    """Stream until the other end closes the connection."""
    sent = 0
    while sent < most:
        try:
            sent += stranger.send(bytes(MIB))
        except (ConnectionResetError, BrokenPipeError):
            break
    return sent


def test_a_stranger_cannot_make_an_endpoint_hold_a_gigabyte(make: Callable[..., Endpoint]) -> None:
    """The attack: a greeting, then a command of the handshake that is announced as huge and streamed."""
    endpoint = make("master-0")
    host, _, port = endpoint.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as stranger:
        assert len(GREETING) == 64
        stranger.sendall(GREETING)
        stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(struct.pack(">BQ", LONG_COMMAND, 1 << 29))
        assert bytes_taken(stranger, most=4 * LARGEST_FRAME_BYTES) < 4 * LARGEST_FRAME_BYTES


def test_a_frame_beyond_the_limit_is_our_mistake() -> None:
    assert 16 * MIB < LARGEST_FRAME_BYTES <= 32 * MIB
    with pytest.raises(AssertionError, match="a frame of 33,554,433 bytes"):
        send_frame(None, bytes(LARGEST_FRAME_BYTES + 1))  # type: ignore[arg-type]
