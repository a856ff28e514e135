"""The offering side of the bulk channel: a listener, sessions of other processes, and one thread per connection.

A connection that does not prove within `SET_UP_S` that it belongs to a session is closed. There are at most
`MAX_UNPROVEN` such connections; the oldest gives way to a new one. They hold a thread and no other memory.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from kintsugi.bulk.channel import (
    CLIENT,
    NONCE_BYTES,
    SERVER,
    Channel,
    TaggedChannel,
    TlsChannel,
    connection_keys,
    shut_down,
)
from kintsugi.bulk.credentials import Credentials
from kintsugi.bulk.exports import SLICE_BYTES, Export, Region
from kintsugi.errors import DeadlineExceeded, IntegrityError, RefusedError, WorldError
from kintsugi.protocol.bulk import BulkHeader, BulkMode, BulkOffer, BulkOpened, BulkRange, BulkRequest
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import WaitTable, join, wait
from kintsugi.telemetry.events import Note, NoteEvent
from kintsugi.types import Peer

SESSION_BYTES = 16
KEY_BYTES = 32
SET_UP_S = 5.0
MAX_UNPROVEN = 32
MAX_CONNECTIONS = 256
MAX_SESSIONS = 4096
MAX_RANGES = 4096
MAX_REFUSALS = 256
"""Bound of the refusals that are remembered, so that each is recorded once."""
PART_TIMEOUT_S = 60.0
"""Longest wait for a part that is still arriving from elsewhere."""
CHECK_S = 1.0
"""Interval at which unproven connections are checked while there are some."""
RECHECK_S = 0.1
"""Interval at which a thread that waits for a part checks whether the export was withdrawn."""
ACCEPT_PAUSE_S = 0.2
"""Pause after the host had no descriptor, memory or thread for a connection: it keeps waiting at the listener, which
stays readable."""
IDLE_S = 60.0
WITHDRAW_S = 5.0
CLOSE_S = 5.0

_request = msgspec.msgpack.Decoder(BulkRequest)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Session:
    """Right of one incarnation of one process to connect."""

    process: str
    incarnation: str
    key: bytes
    certificate: bytes


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    address: str
    since: float
    is_proven: bool = False
    channel: Channel | None = None
    export: str = ""
    """Export that is being sent."""


@dataclass(slots=True)
class _Exports:
    """Exports by name, and a condition that is notified whenever a transfer has ended."""

    by_name: dict[str, Export] = field(default_factory=dict)
    idle: threading.Condition = field(default_factory=threading.Condition)


class BulkServer:
    """Opened on the first session: a process to which no other connects has no listener and no threads."""

    def __init__(
        self,
        *,
        process: str,
        credentials: Callable[[], Credentials],
        mode: BulkMode,
        is_current: Callable[[str, str], bool],
        interface: str = "127.0.0.1",
        known_as: str = "",
        emit: Callable[[NoteEvent], object] = lambda event: None,
    ) -> None:
        """`credentials` are made when they are first needed. `is_current` says whether the address book lists this
        incarnation of a process; it is called by any thread. `emit` records a refused connection."""
        self._process = process
        self._credentials = credentials
        self._mode: BulkMode = mode
        self._is_current = is_current
        self._interface, self._known_as = interface, known_as
        self._emit = emit
        self._waits = WaitTable()  # Not the process's: threads here wait for requests all the time.
        self._sessions: dict[bytes, Session] = {}
        self._exports = _Exports()
        self._connections: list[_Connection] = []
        self._refusals: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._is_closing = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = -1

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    # For the owner.

    def open_session(self, peer: Peer, certificate: bytes) -> BulkOpened:
        """Open a session for this process; it replaces the one that an earlier incarnation had."""
        if self._is_closing:
            raise RefusedError(f"{self._process} is ending")
        with self._lock:
            listener = self._listener or self._listen()
        session = Session(peer.process, peer.incarnation, secrets.token_bytes(KEY_BYTES), certificate)
        name = secrets.token_bytes(SESSION_BYTES)
        with self._lock:
            for old, other in list(self._sessions.items()):
                if other.process == peer.process and other.incarnation != peer.incarnation:
                    del self._sessions[old]
            self._sessions[name] = session
            while len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        address = f"{self._known_as or self._interface}:{listener.getsockname()[1]}"
        return BulkOpened(address, name, session.key, self._credentials().certificate, self._mode)

    def offer(self, name: str, export: Export) -> BulkOffer:
        """Offer bytes under a name, until `withdraw`; an earlier export of this name is withdrawn."""
        self.withdraw(name)
        self._exports.by_name[name] = export
        return BulkOffer(self._process, name)

    def withdraw(self, name: str) -> None:
        """Stop offering; transfers of these bytes are ended before this returns, so that the memory may be reused."""
        exports = self._exports
        if exports.by_name.pop(name, None) is None:
            return

        def attempt(remaining_s: float) -> bool | None:
            with exports.idle:
                sending = self._sending_now(name)
                for connection in sending:
                    shut_down(connection.socket)
                if sending:
                    exports.idle.wait(remaining_s)
                return None if self._sending_now(name) else True

        wait(attempt, whom="bulk connections", what=f"the end of sending {name}", timeout_s=WITHDRAW_S)

    def _sending_now(self, name: str) -> list[_Connection]:
        with self._lock:  # A list that another thread shortens meanwhile would be read with a gap.
            return [each for each in self._connections if each.export == name]

    def close(self) -> None:
        self._is_closing = True
        if self._thread is None or self._listener is None:
            return
        os.eventfd_write(self._wake_fd, 1)
        join(self._thread, whom="its own bulk listener", timeout_s=CLOSE_S, waits=self._waits)
        with self._lock:
            for connection in self._connections:
                shut_down(connection.socket)
        self._listener.close()
        os.close(self._wake_fd)

    # The listener.

    def _listen(self) -> socket.socket:
        """Open the listener and start its thread, both or neither. OSError, or RefusedError without a thread."""
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((self._interface, 0), backlog=64))
            listener.setblocking(False)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            stack.callback(os.close, self._wake_fd)
            thread = threading.Thread(
                target=self._accept_all, args=(listener,), name="bulk-listener", daemon=True
            )
            _start(thread)
            stack.pop_all()
        self._listener, self._thread = listener, thread
        return listener

    def _accept_all(self, listener: socket.socket) -> None:
        """Accept connections until `close`. Waits for the listener, and is woken by `close`."""
        closing, arrival = select.poll(), select.poll()
        arrival.register(listener, select.POLLIN)
        for poller in (closing, arrival):
            poller.register(self._wake_fd, select.POLLIN)
        while not self._is_closing:
            limit_s = CHECK_S if any(not each.is_proven for each in self._connections.copy()) else IDLE_S
            self._await(arrival, "a bulk connection", timeout_s=limit_s)
            self._end_unproven()
            if not self._attempt_accept(listener):
                self._await(closing, "what a connection takes", timeout_s=ACCEPT_PAUSE_S)

    def _await(self, poller: select.poll, what: str, *, timeout_s: float) -> None:
        with suppress(DeadlineExceeded):
            wait(
                lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                whom="anyone",
                what=what,
                timeout_s=timeout_s,
                waits=self._waits,
            )

    def _attempt_accept(self, listener: socket.socket) -> bool:
        """Accept a connection if one is waiting; False if the host lacks what it takes."""
        try:
            accepted, (host, port, *_) = listener.accept()
        except (BlockingIOError, ConnectionError):  # None is waiting, or it has gone again.
            return True
        except OSError:  # No descriptor or no memory is free.
            COUNTERS.add("bulk.not_accepted")
            return False
        connection = _Connection(accepted, f"{host}:{port}", SYSTEM_CLOCK.monotonic())
        with self._lock:
            unproven = [each for each in self._connections if not each.is_proven]
            if len(self._connections) - len(unproven) >= MAX_CONNECTIONS:
                accepted.close()
                return True
            self._connections.append(connection)
        for oldest in unproven[: max(0, len(unproven) + 1 - MAX_UNPROVEN)]:
            self._refuse(oldest, "too many connections without a session")
        try:
            _start(threading.Thread(target=self._serve, args=(connection,), name="bulk", daemon=True))
        except RefusedError:
            with self._lock:
                self._connections.remove(connection)
            accepted.close()
            COUNTERS.add("bulk.not_accepted")
            return False
        return True

    def _end_unproven(self) -> None:
        since = SYSTEM_CLOCK.monotonic() - SET_UP_S
        for connection in [
            each for each in self._connections.copy() if not each.is_proven and each.since < since
        ]:
            self._refuse(connection, f"no proof of a session within {SET_UP_S:g} s")

    def _refuse(self, connection: _Connection, reason: str, *, process: str = "") -> None:
        """End a connection; the first of its kind is recorded with its address."""
        shut_down(connection.socket)
        COUNTERS.add("bulk.refused")
        sender = process or connection.address.rpartition(":")[0]
        with self._lock:
            if (sender, reason) in self._refusals or len(self._refusals) >= MAX_REFUSALS:
                return
            self._refusals.add((sender, reason))
        self._emit(Note(f"{self._process} refused a bulk connection of {sender}: {reason}"))

    # One connection.

    def _serve(self, connection: _Connection) -> None:
        """Answer the requests of one connection, until it ends; the outermost boundary of its thread."""
        process = ""
        try:
            session = self._attempt_session(connection)
            process = session.process
            while not self._is_closing:
                assert connection.channel is not None
                request = _request.decode(connection.channel.attempt_message())
                connection.is_proven = True
                if not self._is_current(session.process, session.incarnation):
                    raise RefusedError(f"{session.process} {session.incarnation} is not in the address book")
                self._answer(connection, request)
        except (RefusedError, IntegrityError, msgspec.MsgspecError, ssl.SSLError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, ssl.SSLError) else str(error)
            self._refuse(connection, reason, process=process if connection.is_proven else "")
        except (WorldError, OSError, ValueError) as error:
            if connection.export:  # It ended in the middle of a transfer.
                COUNTERS.add("bulk.broken")
                self._emit(Note(f"{self._process} could not send {connection.export} to {process}: {error}"))
        finally:
            with self._lock:
                self._connections.remove(connection)
            connection.socket.close()
            if connection.channel is not None:
                connection.channel.close()
            with self._exports.idle:
                self._exports.idle.notify_all()

    def _attempt_session(self, connection: _Connection) -> Session:
        """Set up a connection: look up its session, and agree on keys."""
        accepted = connection.socket
        accepted.settimeout(SET_UP_S)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = bytearray(SESSION_BYTES + NONCE_BYTES)
        filled = 0
        while filled < len(opening):
            count = accepted.recv_into(memoryview(opening)[filled:])
            if count == 0:
                raise RefusedError("it ended before it named a session")
            filled += count
        session = self._sessions.get(bytes(opening[:SESSION_BYTES]))
        if session is None or not self._is_current(session.process, session.incarnation):
            raise RefusedError("it named no session of a process in the address book")
        if self._mode == "encrypted":
            context = self._credentials().accepting(session.certificate)
            channel = TlsChannel(accepted, context, is_server=True)
            try:
                found = channel.attempt_handshake()
            except WorldError:
                raise RefusedError("it ended in the hand-shake") from None
            if found != session.certificate:
                raise RefusedError(f"its certificate is not that of {session.process}")
            connection.channel = channel
            return session
        nonce = secrets.token_bytes(NONCE_BYTES)
        accepted.sendall(nonce)
        keys = connection_keys(session.key, client_nonce=bytes(opening[SESSION_BYTES:]), server_nonce=nonce)
        connection.channel = TaggedChannel(accepted, own_key=keys[SERVER], other_key=keys[CLIENT])
        return session

    def _answer(self, connection: _Connection, request: BulkRequest) -> None:
        channel = connection.channel
        assert channel is not None
        with self._sending(connection, request.export) as export, ExitStack() as reading:
            try:
                if export is None:
                    raise RefusedError(f"{self._process} does not offer {request.export}")
                _check_ranges(request, export)
                reading.enter_context(export.reading())
            except RefusedError as error:
                channel.send_message(_encode(BulkHeader(refusal=str(error))))
                return
            channel.send_message(_encode(BulkHeader(tuple(part.size for part in request.ranges))))
            for part in request.ranges:
                channel.send_region(self._region(export, part, request.export))

    @contextmanager
    def _sending(self, connection: _Connection, name: str) -> Iterator[Export | None]:
        exports = self._exports
        with exports.idle:
            export = exports.by_name.get(name)
            connection.export = name if export is not None else ""
        yield export
        # Not after an error: it ends the connection, and is recorded with the export that was being sent.
        with exports.idle:
            connection.export = ""
            exports.idle.notify_all()

    def _region(self, export: Export, part: BulkRange, name: str) -> Region:
        def attempt(remaining_s: float) -> Region | None:
            if self._exports.by_name.get(name) is not export:
                raise RefusedError(f"{name} was withdrawn")
            return export.attempt_region(part, min(remaining_s, RECHECK_S))

        try:
            return wait(
                attempt,
                whom="its source",
                what=f"piece {part.index} of {name}",
                timeout_s=PART_TIMEOUT_S,
                waits=self._waits,
            )
        except RefusedError as error:
            # Its bytes were announced: only the end of the connection can say that they do not come.
            raise WorldError(str(error)) from error


def _start(thread: threading.Thread) -> None:
    """Start a thread; RefusedError if the host has none left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RefusedError(f"thread {thread.name} could not be started: {error}") from error


def _check_ranges(request: BulkRequest, export: Export) -> None:
    if len(request.ranges) > MAX_RANGES:
        raise RefusedError(f"expected at most {MAX_RANGES} ranges, got {len(request.ranges)}")
    for part in request.ranges:
        size = export.size_of(part.index)
        is_within = part.offset >= 0 and 0 <= part.size <= SLICE_BYTES and part.offset + part.size <= size
        if not is_within:
            raise RefusedError(
                f"piece {part.index} of {request.export} has {size} bytes, not {part.size} at {part.offset}"
            )
