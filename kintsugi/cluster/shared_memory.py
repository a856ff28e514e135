"""Shared memory of one host, held by its node agent and handed out by descriptor.

A segment is anonymous memory (memfd) with a name within the job. The agent holds a descriptor of each, so the content
survives the process that created or wrote it. The creator holds a descriptor too and offers it to the agent's
successor, so the content survives the agent. No segment has a path, so none can be left behind. Clients connect to an
abstract Unix socket under a name that a successor takes over. Every user of the host can see it; both ends refuse
connections of other users. Two hosts (two agents) share nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kintsugi.errors import DeadlineExceeded, RefusedError, WorldError
from kintsugi.runtime.waits import wait

_MOST_BYTES = 4096
"""Maximum size of one message."""
_MOST_SEGMENTS = 1024
_MOST_CLIENTS = 1024
_ANSWER_TIMEOUT_S = 10.0
_RECONNECT_TIMEOUT_S = 5.0
"""Time for the successor of a killed agent to start; it takes a second or two."""
_RECONNECT_INTERVAL_S = 0.05
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Request(msgspec.Struct, frozen=True, tag=True):
    name: str


class CreateSegment(_Request, frozen=True, tag="Create"):
    """Create the segment, or return it if it exists with this size; one of another size is replaced."""

    size: int


class OpenSegment(_Request, frozen=True, tag="Open"):
    """Return an existing segment."""


class OfferSegment(_Request, frozen=True, tag="Offer"):
    """Hold this segment, created under an earlier agent; its descriptor is attached."""

    size: int


class RemoveSegment(_Request, frozen=True, tag="Remove"):
    """Remove the segment; its memory is freed when the last process has unmapped it."""


Request = CreateSegment | OpenSegment | OfferSegment | RemoveSegment


class SegmentAnswer(msgspec.Struct, frozen=True):
    """Success, with the requested descriptor attached; or the reason of a refusal."""

    refusal: str = ""


class EventLoop(Protocol):
    """Calls back when a descriptor is readable; an `Endpoint` is one."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


class SegmentServer:
    """The service in the agent's loop; never blocks, and answers every request immediately."""

    def __init__(self, loop: EventLoop, *, job: str, host: str, capacity: int) -> None:
        self.name = f"kintsugi-{job}-{host}"
        self.capacity = capacity
        """Maximum size of all segments together, in bytes."""
        self._loop = loop
        self._segments: dict[str, tuple[int, int]] = {}
        self._clients: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        loop.watch(self._listener.fileno(), self._accept)

    @property
    def used(self) -> int:
        """Size of all segments together, in bytes."""
        return sum(size for _, size in self._segments.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._segments)

    def close(self) -> None:
        """Stop serving and close every segment."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for client in tuple(self._clients.values()):
            self._drop(client)
        for name in tuple(self._segments):
            self.remove(name)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if user_of(client) != os.getuid() or len(self._clients) >= _MOST_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self._clients[client.fileno()] = client
        self._loop.watch(client.fileno(), lambda: self._serve(client))

    def _drop(self, client: socket.socket) -> None:
        self._loop.unwatch(client.fileno())
        del self._clients[client.fileno()]
        client.close()

    def _serve(self, client: socket.socket) -> None:
        """Answer one request; a client that has ended, or sends another format, is disconnected."""
        received: list[int] = []
        try:
            content, received = _receive(client)
            request = msgspec.msgpack.decode(content, type=Request) if content else None
            if request is not None:
                self._answer(client, request, offered=received[0] if received else -1)
                return
        except BlockingIOError:
            return
        except (ConnectionResetError, msgspec.DecodeError):
            pass
        finally:
            for descriptor in received:
                os.close(descriptor)
        self._drop(client)

    def _answer(self, client: socket.socket, request: Request, *, offered: int) -> None:
        try:
            descriptor = self._carry_out(request, offered=offered)
            answer, descriptors = SegmentAnswer(), [] if descriptor is None else [descriptor]
        except (RefusedError, OSError) as error:
            answer, descriptors = SegmentAnswer(str(error)), []
        try:
            socket.send_fds(client, [msgspec.msgpack.encode(answer)], descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._drop(client)

    def _carry_out(self, request: Request, *, offered: int) -> int | None:
        match request:
            case CreateSegment(name=name, size=size):
                return self.create(name, size=size)
            case OfferSegment(name=name, size=size):
                self._take(name, size=size, offered=offered)
                return None
            case OpenSegment(name=name):
                return self.open(name)
            case RemoveSegment(name=name):
                self.remove(name)
                return None

    def open(self, name: str) -> int:
        """Descriptor of an existing segment, which stays the server's."""
        if name not in self._segments:
            raise RefusedError(f"no segment {name}; there are {len(self._segments)} on this host")
        return self._segments[name][0]

    def create(self, name: str, *, size: int) -> int:
        """Descriptor of a segment of this size, which stays the server's."""
        descriptor, old_size = self._segments.get(name, (-1, 0))
        if descriptor >= 0 and old_size == size:
            return descriptor
        self._check_room(name, size=size)
        made = _memory(name, size=size)
        self.remove(name)
        self._segments[name] = (made, size)
        return made

    def _take(self, name: str, *, size: int, offered: int) -> None:
        """Hold an offered segment if its size and seals are as expected; an existing one of this name is newer."""
        if name in self._segments:
            return
        found = os.fstat(offered).st_size if offered >= 0 else -1
        if found != size:
            raise RefusedError(f"segment {name} was offered with {size} bytes and has {found}")
        if fcntl.fcntl(offered, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise RefusedError(f"segment {name} was offered with a size that can still be changed")
        self._check_room(name, size=size)
        self._segments[name] = (os.dup(offered), size)

    def _check_room(self, name: str, *, size: int) -> None:
        descriptor, old_size = self._segments.get(name, (-1, 0))
        if size <= 0:
            raise RefusedError(f"expected a size of at least 1 byte for segment {name}, got {size}")
        if self.used - old_size + size > self.capacity:
            raise RefusedError(
                f"segment {name} of {size} bytes does not fit: {self.used - old_size} of {self.capacity} bytes are used"
            )
        if descriptor < 0 and len(self._segments) >= _MOST_SEGMENTS:
            raise RefusedError(f"segment {name} is one too many: {_MOST_SEGMENTS} exist")

    def remove(self, name: str) -> None:
        descriptor, _ = self._segments.pop(name, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)


class OwnSegments:
    """Access of the agent itself to the segments that it serves; descriptors belong to the caller, as for clients."""

    def __init__(self, server: SegmentServer) -> None:
        self._server = server

    def create(self, name: str, size: int) -> int:
        return os.dup(self._server.create(name, size=size))

    def open(self, name: str) -> int:
        return os.dup(self._server.open(name))

    def remove(self, name: str) -> None:
        self._server.remove(name)


def _memory(name: str, *, size: int) -> int:
    """Create anonymous memory with a sealed size: a client that shrank it would kill others by SIGBUS."""
    descriptor = os.memfd_create(f"kintsugi-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message that is known to have arrived, and at most one descriptor."""
    content, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return content, descriptors


def user_of(peer: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket, from the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    assert isinstance(user, int)
    return user


class SegmentClient:
    """A thread's access to the segments of its host. Returned descriptors belong to the caller.

    It also holds the segments that it created. When the agent has died, the next operation waits for the successor,
    offers it these segments, and is repeated once. If no successor starts in time, later operations do not wait until
    there is one.
    """

    def __init__(self, socket_name: str) -> None:
        self._name = socket_name
        self._created: dict[str, tuple[int, int]] = {}
        self._socket: socket.socket | None = None
        self._all_held = True
        """Whether the agent has accepted all offered segments."""
        self._patience_s = _RECONNECT_TIMEOUT_S
        try:
            wait(
                lambda _: self._attempt_connect(),
                whom="agent",
                what="a connection to the segment service",
                timeout_s=_ANSWER_TIMEOUT_S,
            )
        except (OSError, DeadlineExceeded) as error:
            raise WorldError(f"segment service {socket_name} of this host: {error}") from error

    def create(self, name: str, size: int) -> int:
        """Return a descriptor of `size` bytes, zeroed unless the segment existed with that size."""
        descriptor = self._descriptor(CreateSegment(name, size))
        self._forget(name)
        self._created[name] = (os.dup(descriptor), size)
        return descriptor

    def open(self, name: str) -> int:
        """Return a descriptor of an existing segment; RefusedError when there is none."""
        return self._descriptor(OpenSegment(name))

    def remove(self, name: str) -> None:
        """Remove the segment; no error if it does not exist or the agent has ended."""
        self._forget(name)
        self._exchange(RemoveSegment(name))

    def renew(self) -> bool:
        """Offer the created segments to a new agent, if there is one; does not wait for it.

        For clients without other requests: until they are offered again, only this process holds the segments. True
        when all are held; refused or unanswered ones are offered again by the next call.
        """
        if self._socket is not None and _attempt_readable(self._socket, 0.0):
            # No request is pending, so this is the end of the connection.
            self._disconnect()
        try:
            if self._socket is None:
                return self._reconnect(timeout_s=0.0) and self._all_held
            return self._all_held or self._offer_all()
        except DeadlineExceeded:
            return False

    def close(self) -> None:
        self._disconnect()
        for name in tuple(self._created):
            self._forget(name)

    def _forget(self, name: str) -> None:
        descriptor, _ = self._created.pop(name, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def _descriptor(self, request: CreateSegment | OpenSegment) -> int:
        answer, descriptors = self._exchange(request)
        if answer is None:
            found = self._reconnect(timeout_s=self._patience_s)
            self._patience_s = _RECONNECT_TIMEOUT_S if found else 0.0
            answer, descriptors = self._exchange(request)
        if answer is None:
            raise WorldError(
                f"the agent of this host is gone: {type(request).__name__} of segment {request.name}"
            )
        if answer.refusal:
            raise RefusedError(answer.refusal)
        if not descriptors:
            # It was sent, but this process had no free descriptor to receive it.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), request.name)
        return descriptors[0]

    # The connection.

    def _attempt_connect(self) -> bool | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A connection waits while the queue of the service is full; the kernel gives up after this time.
        timeout = struct.pack("ll", int(_ANSWER_TIMEOUT_S), int(_ANSWER_TIMEOUT_S % 1 * 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            connection.connect(f"\0{self._name}")
            if user_of(connection) != os.getuid():
                raise PermissionError(f"it belongs to user {user_of(connection)}")
        except BlockingIOError:
            connection.close()
            return None
        except OSError:
            connection.close()
            raise
        self._socket = connection
        return True

    def _reconnect(self, *, timeout_s: float) -> bool:
        """Connect to the agent's successor and offer it the held segments; False when there is none in time."""

        def attempt(remaining_s: float) -> bool | None:
            try:
                return self._attempt_connect()
            except ConnectionRefusedError:
                # Not listening yet; the kernel has no event for when it does.
                time.sleep(min(remaining_s, _RECONNECT_INTERVAL_S))
                return None

        try:
            wait(attempt, whom="agent", what="its successor's segment service", timeout_s=timeout_s)
        except (OSError, DeadlineExceeded):
            return False
        self._offer_all()
        return self._socket is not None

    def _offer_all(self) -> bool:
        """Offer all created segments; True if all were accepted."""
        answers = [
            self._exchange(OfferSegment(name, size), offered=descriptor)[0]
            for name, (descriptor, size) in self._created.items()
        ]
        self._all_held = all(answer is not None and not answer.refusal for answer in answers)
        return self._all_held

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, request: Request, *, offered: int = -1) -> tuple[SegmentAnswer | None, list[int]]:
        """Send a request; return the answer with its descriptors, or None when the agent has ended."""
        if self._socket is None:
            return None, []
        connection = self._socket
        try:
            descriptors = [offered] if offered >= 0 else []
            socket.send_fds(connection, [msgspec.msgpack.encode(request)], descriptors)
            wait(
                lambda remaining_s: _attempt_readable(connection, remaining_s),
                whom="agent",
                what=f"{type(request).__name__} of segment {request.name}",
                timeout_s=_ANSWER_TIMEOUT_S,
            )
            content, received = _receive(connection)
        except (BrokenPipeError, ConnectionResetError):
            content, received = b"", []
        except DeadlineExceeded:
            # A late answer must not be taken for the answer to a later request.
            self._disconnect()
            raise
        if not content:
            self._disconnect()
            return None, []
        return msgspec.msgpack.decode(content, type=SegmentAnswer), received


def _attempt_readable(connection: socket.socket, remaining_s: float) -> bool | None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(remaining_s * 1000)) or None
