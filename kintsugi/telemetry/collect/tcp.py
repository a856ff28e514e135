"""TCP connections of this host from the kernel, through netlink SOCK_DIAG, as `ss -ti` shows them.

It needs no privilege, and sees the network namespace that the socket was opened in.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache

import msgspec

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
REQUEST_AND_DUMP = 0x301
INET_DIAG_INFO = 2
INFO_WANTED = 1 << (INET_DIAG_INFO - 1)
MOST_BYTES = 1 << 18

STATES = {
    1: "ESTABLISHED",
    2: "SYN_SENT",
    3: "SYN_RECV",
    4: "FIN_WAIT1",
    5: "FIN_WAIT2",
    6: "TIME_WAIT",
    7: "CLOSE",
    8: "CLOSE_WAIT",
    9: "LAST_ACK",
    10: "LISTEN",
    11: "CLOSING",
    12: "SYN_RECV",
}
NOT_OURS = 1 << 6 | 1 << 7
"""States in which a connection has no owner any more: TIME_WAIT and CLOSE."""

_header = struct.Struct("=IHHII")
_request = struct.Struct("=BBBxI48x")
_message = struct.Struct("=BBBB2s2s16s16s4x8sIIIII")
_attribute = struct.Struct("=HH")
_info = struct.Struct("=4xB3x I12xI4xI16xI12xII24xI 16xQQ 12xI8x 16xQ8x 8x16xI")
"""Used fields of `struct tcp_info` up to `tcpi_dsack_dups`; an older kernel returns fewer, which read as zeros."""


class TcpInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the kernel for one connection."""

    backoff: int
    """Doublings of the retransmission timeout: grows while nothing is acknowledged."""
    rto_s: float
    unacked: int
    """Segments in flight."""
    lost: int
    """Segments in flight that are presumed lost."""
    last_received_s: float
    """Seconds since data last arrived."""
    rtt_s: float
    rtt_variance_s: float
    min_rtt_s: float
    retransmits: int
    """Retransmitted segments in all."""
    needless: int
    """Retransmissions that were needless: the receiver reported the segment as a duplicate (DSACK). It was late, not
    lost."""
    out_bytes: int
    """Bytes sent and acknowledged."""
    in_bytes: int
    receiver_limited_s: float
    """Seconds in which the receiver had no room for waiting data."""


class TcpSocket(msgspec.Struct, frozen=True):
    """One end of a connection: `TcpSocket("ESTABLISHED", ("127.0.0.1", 4001), ("127.0.0.1", 51234), 8811, …)`."""

    state: str
    local: tuple[str, int]
    remote: tuple[str, int]
    inode: int
    """Inode, by which descriptors of processes refer to it."""
    cookie: int
    """Unique as long as the host is up; inode numbers are reused."""
    receive_queue: int
    send_queue: int
    info: TcpInfo | None = None


class TcpTable:
    """Queries the kernel. It sees the connections of the network namespace of the thread that opened it."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG
        )
        self._sequence = 0

    def read(self) -> list[TcpSocket]:
        """Return every connection and listener that has an owner. Raises OSError if the kernel refuses."""
        return [*self._read(socket.AF_INET), *self._read(socket.AF_INET6)]

    def _read(self, family: int) -> Iterator[TcpSocket]:
        self._sequence += 1
        states = 0xFFF & ~NOT_OURS
        body = _request.pack(family, socket.IPPROTO_TCP, INFO_WANTED, states)
        header = _header.pack(
            _header.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_AND_DUMP, self._sequence, 0
        )
        self._socket.send(header + body)
        while True:
            # The kernel has the next part of its reply ready before the call before returns.
            content = self._socket.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            for kind, sequence, payload in _parts(content):
                if sequence != self._sequence:
                    continue  # Reply to an interrupted query.
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    (code,) = struct.unpack_from("=i", payload)
                    raise OSError(-code, errno.errorcode.get(-code, "netlink"))
                yield _tcp_socket(family, payload)

    def close(self) -> None:
        self._socket.close()


def _parts(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, sequence number and payload of each netlink message."""
    offset = 0
    while offset + _header.size <= len(content):
        size, kind, _, sequence, _ = _header.unpack_from(content, offset)
        yield kind, sequence, content[offset + _header.size : offset + size]
        offset += max(_header.size, size + 3 & ~3)


def _tcp_socket(family: int, payload: bytes) -> TcpSocket:
    fields = _message.unpack_from(payload)
    _, state, _, _, source_port, target_port, source, target, cookie, _, receive, send, _, inode = fields
    return TcpSocket(
        state=STATES.get(state, str(state)),
        local=(_address(family, source), int.from_bytes(source_port, "big")),
        remote=(_address(family, target), int.from_bytes(target_port, "big")),
        inode=inode,
        cookie=int.from_bytes(cookie, "little"),
        receive_queue=receive,
        send_queue=send,
        info=_info_in(payload[_message.size :]),
    )


@lru_cache(maxsize=1024)
def _address(family: int, packed: bytes) -> str:
    """Return the address of a socket; an IPv4 address of a dual-stack socket is written as IPv4."""
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, packed[:4])
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


def _info_in(attributes: bytes) -> TcpInfo | None:
    offset = 0
    while offset + _attribute.size <= len(attributes):
        size, kind = _attribute.unpack_from(attributes, offset)
        if kind == INET_DIAG_INFO:
            return tcp_info(attributes[offset + _attribute.size : offset + size])
        offset += max(_attribute.size, size + 3 & ~3)
    return None


def tcp_info(content: bytes) -> TcpInfo:
    """Decode the kernel's `struct tcp_info`, which every version has extended."""
    if len(content) < _info.size:
        content = content.ljust(_info.size, b"\0")
    (
        backoff,
        rto,
        unacked,
        lost,
        received,
        rtt,
        variance,
        again,
        out_bytes,
        in_bytes,
        least,
        limited,
        needless,
    ) = _info.unpack_from(content)
    return TcpInfo(
        backoff=backoff,
        rto_s=rto / 1e6,
        unacked=unacked,
        lost=lost,
        last_received_s=received / 1e3,
        rtt_s=rtt / 1e6,
        rtt_variance_s=variance / 1e6,
        retransmits=again,
        needless=needless,
        out_bytes=out_bytes,
        in_bytes=in_bytes,
        min_rtt_s=least / 1e6,
        receiver_limited_s=limited / 1e6,
    )


def socket_inodes(pid: int) -> Iterator[int]:
    """Return the socket inodes of a process; empty if it is gone or not accessible."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])
