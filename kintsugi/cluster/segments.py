"""Shared memory of one host, held by its node agent and handed out by descriptor.

A segment is anonymous memory (memfd) known by a name of this job. The agent keeps a descriptor of each, so the contents
survive whoever created or wrote them; who created one keeps a descriptor too and offers it to the agent's successor, so
the contents survive the agent. Nothing has a path, so nothing can be left behind. Clients reach the service over an
abstract Unix socket whose name a successor takes over. Every user of the host can see it; both ends refuse to speak
with another user. Two hosts (two agents) share nothing.
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
from kintsugi.runtime import wait

_MOST_BYTES = 4096
"""Of one message."""
_MOST_SEGMENTS = 1024
_MOST_CLIENTS = 1024
_ANSWER_TIMEOUT_S = 10.0
_RECONNECT_TIMEOUT_S = 5.0
"""For a killed agent's successor to begin; it takes a second or two."""
_RECONNECT_INTERVAL_S = 0.05
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Request(msgspec.Struct, frozen=True, tag=True):
    name: str


class Create(_Request, frozen=True):
    """Make the segment, or find it if it exists with this size; one of another size is replaced."""

    size: int


class Open(_Request, frozen=True):
    """Hand out an existing segment."""


class Offer(_Request, frozen=True):
    """Hold this segment, whose descriptor comes along: it was created when another agent was there."""

    size: int


class Remove(_Request, frozen=True):
    """Forget the segment; its memory goes when the last who mapped it is gone."""


Request = Create | Open | Offer | Remove


class Answer(msgspec.Struct, frozen=True):
    """Done, with the descriptor beside it where one was asked for; or why not."""

    refusal: str = ""


class Loop(Protocol):
    """Where the service hears that a descriptor is readable; an `Endpoint` is one."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, descriptor: int) -> None: ...


class SegmentServer:
    """The service inside the agent's loop: never blocks, answers every request at once."""

    def __init__(self, loop: Loop, *, job: str, host: str, capacity: int) -> None:
        self.name = f"kintsugi-{job}-{host}"
        self.capacity = capacity
        """Bytes in all; what exceeds it is refused."""
        self._loop = loop
        self._segments: dict[str, tuple[int, int]] = {}
        self._clients: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(64)
        loop.watch(self._listener.fileno(), self._accept)

    @property
    def used(self) -> int:
        """Bytes of all segments together."""
        return sum(size for _, size in self._segments.values())

    def close(self) -> None:
        """Stop serving and let go of every segment."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for client in tuple(self._clients.values()):
            self._drop(client)
        for name in tuple(self._segments):
            self._remove(name)

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
        """Answer one request; a client that ended, or that speaks something else, is dropped."""
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
            answer, descriptors = Answer(), [] if descriptor is None else [descriptor]
        except (RefusedError, OSError) as error:
            answer, descriptors = Answer(str(error)), []
        try:
            socket.send_fds(client, [msgspec.msgpack.encode(answer)], descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._drop(client)

    def _carry_out(self, request: Request, *, offered: int) -> int | None:
        match request:
            case Create(name=name, size=size):
                return self._create(name, size=size)
            case Offer(name=name, size=size):
                self._take(name, size=size, offered=offered)
                return None
            case Open(name=name):
                if name not in self._segments:
                    raise RefusedError(f"no segment {name}; there are {len(self._segments)} on this host")
                return self._segments[name][0]
            case Remove(name=name):
                self._remove(name)
                return None

    def _create(self, name: str, *, size: int) -> int:
        descriptor, old_size = self._segments.get(name, (-1, 0))
        if descriptor >= 0 and old_size == size:
            return descriptor
        self._check_room(name, size=size)
        made = _memory(name, size=size)
        self._remove(name)
        self._segments[name] = (made, size)
        return made

    def _take(self, name: str, *, size: int, offered: int) -> None:
        """Hold an offered segment, if it is what it claims to be; one that is there under this name is newer."""
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

    def _remove(self, name: str) -> None:
        descriptor, _ = self._segments.pop(name, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)


def _memory(name: str, *, size: int) -> int:
    """Anonymous memory whose size nobody can change: a client that shrank it would kill the others by SIGBUS."""
    descriptor = os.memfd_create(f"kintsugi-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it, at most one; for who knows that it is there."""
    content, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return content, descriptors


def user_of(peer: socket.socket) -> int:
    """Whose process is at the other end of a Unix socket, as the kernel says."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    assert isinstance(user, int)
    return user


class SegmentClient:
    """A thread's access to the segments of its host. The descriptors it gives belong to the caller.

    It holds what it created as well. When the agent has died, the next operation waits for the successor, offers it all
    of that, and is tried once more; after a successor that did not come, nothing is waited for until one is there.
    """

    def __init__(self, socket_name: str) -> None:
        self._name = socket_name
        self._created: dict[str, tuple[int, int]] = {}
        self._socket: socket.socket | None = None
        self._all_held = True
        """Whether the agent took everything that was offered to it."""
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
        """A descriptor of `size` bytes, zeroed unless the segment existed with that size."""
        descriptor = self._descriptor(Create(name, size))
        self._forget(name)
        self._created[name] = (os.dup(descriptor), size)
        return descriptor

    def open(self, name: str) -> int:
        """A descriptor of an existing segment; RefusedError when there is none."""
        return self._descriptor(Open(name))

    def remove(self, name: str) -> None:
        """Forget the segment; no such segment is fine, and so is an agent that is gone and took them all along."""
        self._forget(name)
        self._exchange(Remove(name))

    def renew(self) -> bool:
        """Offer what this client created to a new agent, if there is one; waits for nobody.

        For who has nothing else to ask: until it is offered again, only this process holds it. True when all of it is
        held; what was refused, or not answered in time, is offered again by the next call.
        """
        if self._socket is not None and _attempt_readable(self._socket, 0.0):
            # Nothing was asked, so nothing can have come but the end of the connection.
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

    def _descriptor(self, request: Create | Open) -> int:
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
            # It was sent, and the kernel found no place for it.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), request.name)
        return descriptors[0]

    # The connection.

    def _attempt_connect(self) -> bool | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A full queue of the service holds a connection up; the kernel gives up after this time.
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
        """Find the agent's successor and offer it what we hold; False when there is none in time."""

        def attempt(remaining_s: float) -> bool | None:
            try:
                return self._attempt_connect()
            except ConnectionRefusedError:
                # Nobody listens yet, and no descriptor could tell us when somebody does.
                time.sleep(min(remaining_s, _RECONNECT_INTERVAL_S))
                return None

        try:
            wait(attempt, whom="agent", what="its successor's segment service", timeout_s=timeout_s)
        except (OSError, DeadlineExceeded):
            return False
        self._offer_all()
        return self._socket is not None

    def _offer_all(self) -> bool:
        """Whether all of it was taken; one that is refused does not keep the others from being offered."""
        answers = [
            self._exchange(Offer(name, size), offered=descriptor)[0]
            for name, (descriptor, size) in self._created.items()
        ]
        self._all_held = all(answer is not None and not answer.refusal for answer in answers)
        return self._all_held

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, request: Request, *, offered: int = -1) -> tuple[Answer | None, list[int]]:
        """The answer and the descriptors that came with it; no answer when the agent is gone."""
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
            # Its answer may still come, and must not be taken for that to a later request.
            self._disconnect()
            raise
        if not content:
            self._disconnect()
            return None, []
        return msgspec.msgpack.decode(content, type=Answer), received


def _attempt_readable(connection: socket.socket, remaining_s: float) -> bool | None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(remaining_s * 1000)) or None
