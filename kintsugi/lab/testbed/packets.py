"""Packets that the kernel queues to this process, which accepts or drops each of them (NFQUEUE).

Implemented over netlink with the standard library. A rule with `bypass` lets packets pass when no process reads the
queue, so a fault built on it ends with its process.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator

NETLINK_NETFILTER = 12
_QUEUE_SUBSYSTEM = 3 << 8
_PACKET, _VERDICT, _CONFIG = 0, 1, 2
_ERROR = 2
_REQUEST, _ACK = 1, 4
_HEADER = struct.Struct("=IHHII")
_FAMILY = struct.Struct("!BBH")
_ATTRIBUTE = struct.Struct("=HH")
_CFG_CMD, _CFG_PARAMS, _CFG_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_BIND = 1
_COPY_META = 1
_FAIL_OPEN, _GSO = 1, 4
_PACKET_HEADER, _VERDICT_HEADER = 1, 2
_RECEIVE_BYTES = 16 << 20
_SO_RCVBUFFORCE = 33
_SOL_NETLINK, _NO_ENOBUFS = 270, 5
MOST_PACKETS = 1 << 16
ACCEPT, DROP = 1, 0


class PacketQueue:
    """One queue of the network namespace that this process is in."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        self._socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        self._socket.settimeout(1.0)
        self._configure(_attribute(_CFG_CMD, struct.pack("!BBH", _BIND, 0, socket.AF_INET)))
        self._configure(_attribute(_CFG_PARAMS, struct.pack("!IB", 0, _COPY_META)))
        flags = struct.pack("!I", _FAIL_OPEN | _GSO)
        self._configure(
            _attribute(_CFG_MAXLEN, struct.pack("!I", MOST_PACKETS))
            + _attribute(_CFG_FLAGS, flags)
            + _attribute(_CFG_MASK, flags)
        )
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def arrived(self) -> Iterator[int]:
        """Yield the ids of the packets that have arrived since the last call and wait for a verdict."""
        while True:
            try:
                content = self._socket.recv(1 << 17)
            except BlockingIOError:
                return
            yield from _packets(content)

    def decide(self, packets: Iterable[int], verdict: int) -> None:
        """Accept or drop packets."""
        messages = [
            self._message(_VERDICT, _attribute(_VERDICT_HEADER, struct.pack("!II", verdict, packet)))
            for packet in packets
        ]
        for start in range(0, len(messages), 256):
            self._socket.send(b"".join(messages[start : start + 256]))

    def _configure(self, attributes: bytes) -> None:
        self._socket.send(self._message(_CONFIG, attributes, flags=_REQUEST | _ACK))
        answer = self._socket.recv(4096)
        (number,) = struct.unpack_from("=i", answer, _HEADER.size)
        if number != 0:
            raise OSError(-number, f"the kernel refused queue {self._number}")

    def _message(self, kind: int, attributes: bytes, *, flags: int = _REQUEST) -> bytes:
        body = _FAMILY.pack(socket.AF_UNSPEC, 0, self._number) + attributes
        return _HEADER.pack(_HEADER.size + len(body), _QUEUE_SUBSYSTEM | kind, flags, 0, 0) + body

    def close(self) -> None:
        """Close the queue; the kernel drops packets without a verdict, so all packets must be decided before."""
        self._socket.close()


def _attribute(kind: int, data: bytes) -> bytes:
    padding = -len(data) % 4
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(data), kind) + data + b"\0" * padding


def _packets(content: bytes) -> Iterator[int]:
    offset = 0
    while offset + _HEADER.size <= len(content):
        length, kind, *_ = _HEADER.unpack_from(content, offset)
        if kind == _QUEUE_SUBSYSTEM | _PACKET:
            yield from _packet(content[offset + _HEADER.size + _FAMILY.size : offset + length])
        offset += (length + 3) & ~3


def _packet(attributes: bytes) -> Iterator[int]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, offset)
        if kind & 0x3FFF == _PACKET_HEADER:
            (number,) = struct.unpack_from("!I", attributes, offset + _ATTRIBUTE.size)
            yield number
        offset += (length + 3) & ~3
