"""Hosts of a run: this machine as it is, or Linux namespaces that act as separate hosts.

A namespaced host has its own network interface and, where one was prepared, its own files under /etc. Its agent enters
the namespaces before it starts, so that all its children are in them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterable

import msgspec

from kintsugi.runtime.waits import join

LOOPBACK = "127.0.0.1"
LISTEN_TIMEOUT_S = 5.0


class HostNamespaces(msgspec.Struct, frozen=True):
    """One host: `HostNamespaces("host-1", "10.77.0.11", namespaces=("/proc/4711/ns/net", "/proc/4711/ns/mnt"))`."""

    name: str
    address: str = LOOPBACK
    """Address of the interface on which its processes listen."""
    known_as: str = ""
    """Host name under which other hosts reach it; empty: by its address."""
    namespaces: tuple[str, ...] = ()
    """Files of /proc, one per namespace to enter; empty: none."""

    @property
    def bind(self) -> str:
        return f"tcp://{self.address}:*"


def enter(namespaces: Iterable[str]) -> None:
    """Enter namespaces for good. Mounts: only in a process with one thread; network: this thread alone."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in namespaces]
    try:
        for descriptor in descriptors:
            if library.setns(descriptor, 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def listening_socket(place: HostNamespaces, *, port: int) -> socket.socket:
    """Open a listening socket on a host's interface; OSError if that fails.

    A socket belongs to the network namespace in which it is created, so a thread enters it, creates it and ends.
    """
    if not place.namespaces:
        return _listen(place.address, port)
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            enter(path for path in place.namespaces if path.endswith("/net"))
            made.append(_listen(place.address, port))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="listening-elsewhere")
    thread.start()

    join(thread, whom=place.name, what="a socket", timeout_s=LISTEN_TIMEOUT_S)
    (result,) = made
    if isinstance(result, OSError):
        raise result
    return result


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
