"""Shared memory of one host, held by its node agent and handed out by descriptor.

A segment is anonymous memory (memfd) known by a name of this job. The agent keeps a descriptor of each, so the contents
survive whoever created or wrote them; nothing has a path, so nothing can be left behind. Clients reach the service over
an abstract Unix socket. Every user of the host can see its name; only processes of the agent's own user are answered.
Two hosts (two agents) share nothing.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

import msgspec

from kintsugi.errors import DeadlineExceeded, RefusedError, WorldError
from kintsugi.runtime import wait

_MOST_BYTES = 4096
"""Of one message."""
_MOST_SEGMENTS = 1024
_MOST_CLIENTS = 1024
_ANSWER_TIMEOUT_S = 10.0


class _Request(msgspec.Struct, frozen=True, tag=True):
    name: str


class Create(_Request, frozen=True):
    """Make the segment, or find it if it exists with this size; one of another size is replaced."""

    size: int


class Open(_Request, frozen=True):
    """Hand out an existing segment."""


class Remove(_Request, frozen=True):
    """Forget the segment; its memory goes when the last who mapped it is gone."""


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
        self.name = f"kintsugi-{job}-{host}-{uuid4().hex}"
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
        if _user_of(client) != os.getuid() or len(self._clients) >= _MOST_CLIENTS:
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
        try:
            content = client.recv(_MOST_BYTES)
            request = msgspec.msgpack.decode(content, type=Create | Open | Remove) if content else None
        except BlockingIOError:
            return
        except (ConnectionResetError, msgspec.DecodeError):
            request = None
        if request is None:
            self._drop(client)
            return
        try:
            descriptor = self._carry_out(request)
            answer, descriptors = Answer(), [] if descriptor is None else [descriptor]
        except (RefusedError, OSError) as error:
            answer, descriptors = Answer(str(error)), []
        try:
            socket.send_fds(client, [msgspec.msgpack.encode(answer)], descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._drop(client)

    def _carry_out(self, request: Create | Open | Remove) -> int | None:
        match request:
            case Create(name=name, size=size):
                return self._create(name, size=size)
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
        if size <= 0:
            raise RefusedError(f"expected a size of at least 1 byte for segment {name}, got {size}")
        if self.used - old_size + size > self.capacity:
            raise RefusedError(
                f"segment {name} of {size} bytes does not fit: {self.used - old_size} of {self.capacity} bytes are used"
            )
        if descriptor < 0 and len(self._segments) >= _MOST_SEGMENTS:
            raise RefusedError(f"segment {name} is one too many: {_MOST_SEGMENTS} exist")
        made = _memory(name, size=size)
        self._remove(name)
        self._segments[name] = (made, size)
        return made

    def _remove(self, name: str) -> None:
        descriptor, _ = self._segments.pop(name, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)


def _memory(name: str, *, size: int) -> int:
    """Anonymous memory whose size nobody can change: a client that shrank it would kill the others by SIGBUS."""
    descriptor = os.memfd_create(f"kintsugi-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _user_of(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    assert isinstance(user, int)
    return user


class SegmentClient:
    """A thread's access to the segments of its host. The descriptors it gives belong to the caller."""

    def __init__(self, socket_name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A full queue of the service holds a connection up; the kernel gives up after this time.
        timeout = struct.pack("ll", int(_ANSWER_TIMEOUT_S), int(_ANSWER_TIMEOUT_S % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            wait(
                lambda _: self._attempt_connect(socket_name),
                whom="agent",
                what="a connection to the segment service",
                timeout_s=_ANSWER_TIMEOUT_S,
            )
        except (OSError, DeadlineExceeded) as error:
            self._socket.close()
            raise WorldError(f"segment service {socket_name} of this host: {error}") from error
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def _attempt_connect(self, socket_name: str) -> bool | None:
        try:
            self._socket.connect(f"\0{socket_name}")
        except BlockingIOError:
            return None
        return True

    def create(self, name: str, size: int) -> int:
        """A descriptor of `size` bytes, zeroed unless the segment existed with that size."""
        return self._descriptor(Create(name, size))

    def open(self, name: str) -> int:
        """A descriptor of an existing segment; RefusedError when there is none."""
        return self._descriptor(Open(name))

    def remove(self, name: str) -> None:
        """Forget the segment; no such segment is fine, and so is an agent that is gone and took them all along."""
        self._exchange(Remove(name))

    def close(self) -> None:
        self._socket.close()

    def _descriptor(self, request: Create | Open) -> int:
        content, descriptors = self._exchange(request)
        if not content:
            raise WorldError(
                f"the agent of this host is gone: {type(request).__name__} of segment {request.name}"
            )
        answer = msgspec.msgpack.decode(content, type=Answer)
        if answer.refusal:
            raise RefusedError(answer.refusal)
        (descriptor,) = descriptors
        os.set_inheritable(descriptor, False)
        return descriptor

    def _exchange(self, request: Create | Open | Remove) -> tuple[bytes, list[int]]:
        """The answer and the descriptors that came with it; no bytes when the agent is gone."""
        try:
            self._socket.send(msgspec.msgpack.encode(request))
            wait(
                lambda remaining_s: self._poller.poll(remaining_s * 1000) or None,
                whom="agent",
                what=f"{type(request).__name__} of segment {request.name}",
                timeout_s=_ANSWER_TIMEOUT_S,
            )
            content, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
        except (BrokenPipeError, ConnectionResetError):
            return b"", []
        return content, descriptors
