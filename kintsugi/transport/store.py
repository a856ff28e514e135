"""Key-value store at which the processes of a collective group meet: encrypted, and authenticated by the run's keys.

The store that torch provides (`TCPStore`) accepts every connection: each user of a host could read and replace the
addresses by which ranks find each other. This one is a ROUTER with CURVE in a thread of its own. Its address names its
public key, so a client talks to that process and no other; the server admits a key only if the address book of its
process lists it (`admit`). A key that is not listed yet waits, because the book may still be under way.

Values are small (device identities, socket addresses, a secret per group). Their number and size are bounded: the
oldest are dropped first, those of earlier groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils import z85

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.store import StoreOperation, StoreReply, StoreRequest
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import WaitTable, join, wait
from kintsugi.transport.sockets import NOBLOCK, is_readable, milliseconds, open_dealer, open_router, open_zap
from kintsugi.types import Peer

LARGEST_REQUEST_BYTES = 1 << 20
MAX_VALUES = 1 << 16
MAX_VALUE_BYTES = 64 << 20
"""Bounds of the store; a group of 512 ranks leaves about a thousand values, of two megabytes in all."""
MAX_UNKNOWN = 256
"""Bound of connections with unknown keys that wait for admission."""
RECHECK_S = 0.02
"""Time between two looks at the address book while an unknown key waits."""
IDLE_S = 5.0
ANSWER_S = 1.0
"""Time for the reply of an operation that waits, after its own time is over."""

_requests = msgspec.msgpack.Decoder(StoreRequest)
_replies = msgspec.msgpack.Decoder(StoreReply)
_encode = msgspec.msgpack.Encoder().encode


class StoreUnavailable(RuntimeError):
    """The store did not carry out an operation. A RuntimeError, as torch's own stores raise."""


def split_address(address: str) -> tuple[str, int, bytes]:
    """Split the address of a store into host, port and public key (Z85)."""
    endpoint, _, key = address.partition("#")
    host, _, port = endpoint.rpartition(":")
    return host, int(port), z85.encode(bytes.fromhex(key))


class _Values:
    """Values of a store, oldest first."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._values)

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str, default: bytes = b"") -> bytes:
        return self._values.get(key, default)

    def set(self, key: str, value: bytes) -> None:
        self.delete(key)
        self._values[key] = value
        self._size += len(key) + len(value)
        while len(self._values) > MAX_VALUES or self._size > MAX_VALUE_BYTES:
            self.delete(next(iter(self._values)))

    def delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._size -= len(key) + len(value)
        return True


class StoreServer:
    """Store of one process, served by a daemon thread from its construction until `close`.

    The thread consumes requests and questions for admission, and produces replies. It waits for its sockets and is
    woken by `admit` and `close`.
    """

    def __init__(self, host: str = "127.0.0.1", *, keys: tuple[bytes, bytes], known_as: str = "") -> None:
        """`keys` is the key pair of this process, (public, secret), both in Z85; its own key is always admitted."""
        self._own_key, secret = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = open_zap(self._context)
        self._router = open_router(
            self._context,
            public_key=self._own_key,
            secret_key=secret,
            bind=f"tcp://{host}:*",
            listener=-1,
            largest_bytes=LARGEST_REQUEST_BYTES,
        )
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{known_as or host}:{port}#{z85.decode(self._own_key).hex()}"
        self._is_admitted: Callable[[bytes], bool] = lambda key: False
        self._questions: list[tuple[bytes, list[bytes]]] = []
        """Connections that wait for admission: (key, ZeroMQ's question). One key may have several."""
        self._values = _Values()
        self._waiting: list[tuple[float, bytes, StoreRequest]] = []
        """Requests whose keys do not exist yet: (until, route, request)."""
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._zap, self._router, self._wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def admit(self, is_admitted: Callable[[bytes], bool]) -> None:
        """Admit the keys (Z85) for which the function is true, from now on. It is called by the store's thread."""
        self._is_admitted = is_admitted
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        join(self._thread, whom="its own store", timeout_s=IDLE_S)
        os.close(self._wake_fd)

    def _serve(self) -> None:
        # Not the process's: the store waits for requests all the time, and this says nothing.
        waits = WaitTable()
        while not self._is_closing:
            with suppress(DeadlineExceeded):
                wait(self._turn, whom="anyone", what="a request", timeout_s=IDLE_S, waits=waits)
        self._context.destroy(linger=0)

    def _turn(self, remaining_s: float) -> bool | None:
        now = SYSTEM_CLOCK.monotonic()
        until_s = min([remaining_s, *(until - now for until, _, _ in self._waiting)])
        until_s = max(min(until_s, RECHECK_S) if self._questions else until_s, 0.0)
        ready = {source for source, _ in self._poller.poll(milliseconds(until_s))}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._zap in ready:
            self._take_questions()
        self._admit_waiting()
        if self._router in ready:
            self._take_requests()
        self._settle()
        return True if self._is_closing else None

    def _take_questions(self) -> None:
        while is_readable(self._zap):
            question = self._zap.recv_multipart(NOBLOCK)
            is_curve = len(question) > 8 and question[7] == b"CURVE"
            self._questions.append((z85.encode(question[8]) if is_curve else b"", question))
        del self._questions[:-MAX_UNKNOWN]

    def _admit_waiting(self) -> None:
        asked, self._questions = self._questions, []
        for key, question in asked:
            if key and key != self._own_key and not self._is_admitted(key):
                self._questions.append((key, question))
            else:
                self._zap.send_multipart([*question[:4], b"200" if key else b"400", b"", key, b""])

    def _take_requests(self) -> None:
        while is_readable(self._router):
            route, *frames = self._router.recv_multipart(NOBLOCK)
            try:
                request = _requests.decode(frames[0])
            except (IndexError, msgspec.MsgspecError):
                continue
            if request.operation in (StoreOperation.GET, StoreOperation.AWAIT):
                self._waiting.append((SYSTEM_CLOCK.monotonic() + request.timeout_s, route, request))
            else:
                self._reply(route, self._carry_out(request))

    def _settle(self) -> None:
        """Answer the requests whose keys exist now, and those whose time is over."""
        now, still = SYSTEM_CLOCK.monotonic(), []
        for until, route, request in self._waiting:
            if self._values.has(request.keys):
                value = self._values.get(request.keys[0]) if request.keys else b""
                self._reply(route, StoreReply(request.number, value))
            elif now >= until:
                missing = next(key for key in request.keys if not self._values.has((key,)))
                self._reply(route, StoreReply(request.number, error=f"{missing} was not set in time"))
            else:
                still.append((until, route, request))
        self._waiting = still

    def _carry_out(self, request: StoreRequest) -> StoreReply:
        key = request.keys[0] if request.keys else ""
        match request.operation:
            case StoreOperation.SET:
                self._values.set(key, request.value)
            case StoreOperation.ADD:
                amount = int(self._values.get(key, b"0")) + request.amount
                self._values.set(key, str(amount).encode())
                return StoreReply(request.number, amount=amount)
            case StoreOperation.CHECK:
                return StoreReply(request.number, amount=int(self._values.has(request.keys)))
            case StoreOperation.COMPARE_AND_SET:
                if self._values.get(key) == request.expected:
                    self._values.set(key, request.value)
                return StoreReply(request.number, self._values.get(key))
            case StoreOperation.DELETE:
                return StoreReply(request.number, amount=int(self._values.delete(key)))
            case StoreOperation.COUNT:
                return StoreReply(request.number, amount=len(self._values))
        return StoreReply(request.number)

    def _reply(self, route: bytes, reply: StoreReply) -> None:
        with suppress(zmq.Again):  # A client that does not read asks again or gives up.
            self._router.send_multipart([route, _encode(reply)], NOBLOCK)


@dataclass(slots=True)
class _Connection:
    """Socket of one thread, and the number of its last request."""

    socket: zmq.Socket[bytes]
    number: int = 0


class StoreClient:
    """A process's connection to a store. It may be used by several threads: each has a socket of its own."""

    def __init__(self, address: str, *, keys: tuple[bytes, bytes], timeout_s: float) -> None:
        """Operations fail after `timeout_s`. The connection is made in the background. StoreUnavailable if no
        descriptor is left for it."""
        host, port, key = split_address(address)
        self._peer = Peer("store", "", host, f"tcp://{host}:{port}", key)
        self._keys = keys
        self._timeout_s = timeout_s
        try:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        except zmq.ZMQError as error:
            raise StoreUnavailable(f"the store at {self._peer.address}: {error}") from error
        self._connections: dict[int, _Connection] = {}
        """Thread → its connection."""

    def set(self, key: str, value: bytes) -> None:
        self._ask(StoreOperation.SET, (key,), value=value)

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is set."""
        return self._ask(StoreOperation.GET, (key,), timeout_s=self._timeout_s).value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._ask(StoreOperation.CHECK, keys).amount)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; return the sum."""
        return self._ask(StoreOperation.ADD, (key,), amount=amount).amount

    def compare_and_set(self, key: str, *, expected: bytes, value: bytes) -> bytes:
        """Set a value if it is the expected one; return the value afterwards."""
        return self._ask(StoreOperation.COMPARE_AND_SET, (key,), value=value, expected=expected).value

    def delete(self, key: str) -> bool:
        return bool(self._ask(StoreOperation.DELETE, (key,)).amount)

    def num_values(self) -> int:
        return self._ask(StoreOperation.COUNT, ()).amount

    def await_keys(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Return once all keys exist."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._ask(StoreOperation.AWAIT, keys, timeout_s=limit_s)

    def close(self) -> None:
        """Close the connection; an operation of another thread that is under way fails."""
        self._context.destroy(linger=0)

    def _connection(self) -> _Connection:
        thread = threading.get_ident()
        if thread not in self._connections:
            public_key, secret_key = self._keys
            socket = open_dealer(self._context, peer=self._peer, public_key=public_key, secret_key=secret_key)
            self._connections[thread] = _Connection(socket)
        return self._connections[thread]

    def _ask(
        self,
        operation: StoreOperation,
        keys: Sequence[str],
        *,
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> StoreReply:
        try:
            connection = self._connection()
            connection.number += 1
            request = StoreRequest(
                connection.number, operation, tuple(keys), value, expected, amount, timeout_s
            )
            connection.socket.send(_encode(request), NOBLOCK)
            reply = self._reply_to(request, connection.socket)
        except zmq.ZMQError as error:
            raise StoreUnavailable(f"the store at {self._peer.address}: {error}") from error
        if reply.error:
            raise StoreUnavailable(f"the store at {self._peer.address}: {reply.error}")
        return reply

    def _reply_to(self, request: StoreRequest, socket: zmq.Socket[bytes]) -> StoreReply:
        def attempt(remaining_s: float) -> StoreReply | None:
            if not socket.poll(milliseconds(remaining_s)):
                return None
            reply = _replies.decode(socket.recv(NOBLOCK))
            return reply if reply.number == request.number else None

        limit_s = request.timeout_s + ANSWER_S if request.timeout_s else self._timeout_s
        what = f"the store's reply to {request.operation} {', '.join(request.keys[:3])}"
        return wait(attempt, whom=self._peer.address, what=what, timeout_s=limit_s)
