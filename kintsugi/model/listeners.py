"""Listening sockets that a library opened in this process, and how to close them for strangers.

gloo keeps the socket on which ranks connected open as long as the group. A packet filter on the socket lets the kernel
drop further attempts; connections that exist are not affected. Some kernels refuse such a filter to processes without
rights, as those of a container are: there, only processes of the same host can connect further.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from contextlib import closing
from typing import NamedTuple

_SO_ATTACH_FILTER = 26
_SO_BINDTODEVICE = 25
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The program of a classic packet filter with one instruction: accept 0 bytes (BPF_RET | BPF_K)."""


class Listener(NamedTuple):
    """A listening socket: its descriptor, and its inode, because a descriptor's number is soon used again."""

    descriptor: int
    inode: int


def listening_sockets() -> set[Listener]:
    """Return the sockets of this process on which connections are accepted."""
    found = (_listener(int(name)) for name in os.listdir("/proc/self/fd"))
    return {listener for listener in found if listener is not None}


def _listener(descriptor: int) -> Listener | None:
    try:
        copy = os.dup(descriptor)  # Of its own: another thread may close the descriptor meanwhile.
    except OSError:
        return None
    try:
        handle = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with closing(handle):
        is_internet = handle.family in (socket.AF_INET, socket.AF_INET6)
        if not (is_internet and handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            return None
        return Listener(descriptor, os.fstat(handle.fileno()).st_ino)


def refuse_connections(listener: Listener) -> None:
    """Let the kernel drop further connection attempts of a listening socket: all of them, or all from other hosts."""
    if _listener(listener.descriptor) != listener:
        return  # Another thread opened it at the same time, and has closed it since.
    program = ctypes.create_string_buffer(_DROP)
    with closing(socket.socket(fileno=os.dup(listener.descriptor))) as handle:
        try:
            handle.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
            )
        except PermissionError:
            # The ranks prove their membership over every connection; this only keeps others from asking.
            with contextlib.suppress(OSError):
                handle.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, b"lo")
