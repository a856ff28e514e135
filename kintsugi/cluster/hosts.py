"""Where the agents of a run are: on this machine as it is, or each in namespaces that make it a host of its own.

A host of its own has its own network interface and, where somebody prepared one, its own files under /etc. Its agent
enters the namespaces before it begins, so that whatever it starts is born there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterable

import msgspec

from kintsugi.runtime import wait

LOOPBACK = "127.0.0.1"
LISTEN_TIMEOUT_S = 5.0


class HostPlace(msgspec.Struct, frozen=True):
    """One host: `HostPlace("host-1", address="10.77.0.11", namespaces=("/proc/4711/ns/net", "/proc/4711/ns/mnt"))`."""

    name: str
    address: str = LOOPBACK
    """Of the interface that its processes are reached at."""
    known_as: str = ""
    """The name under which others reach it; empty: by its address."""
    namespaces: tuple[str, ...] = ()
    """What to enter, each a file of /proc; empty: none."""

    @property
    def bind(self) -> str:
        return f"tcp://{self.address}:*"


def enter(namespaces: Iterable[str]) -> None:
    """Go there for good. Of mounts only a process with one thread can, of the network each thread by itself."""
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


def listening_socket(place: HostPlace, *, port: int) -> socket.socket:
    """A socket that listens on a host's interface; OSError says why not.

    A socket belongs to the network that it was made in, so a thread goes there to make it and ends.
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

    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    wait(attempt, whom=place.name, what="a socket", timeout_s=LISTEN_TIMEOUT_S)
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
