"""The fetching side of the bulk channel: sessions with other processes, and connections that are used again."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from kintsugi.bulk.channel import (
    CLIENT,
    NONCE_BYTES,
    SERVER,
    STALL_S,
    Channel,
    TaggedChannel,
    TlsChannel,
    connection_keys,
)
from kintsugi.bulk.credentials import Credentials
from kintsugi.errors import IntegrityError, RefusedError, WorldError
from kintsugi.protocol.bulk import BulkHeader, BulkOffer, BulkOpened, BulkRange, BulkRequest, OpenBulk
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import wait

OPEN_TIMEOUT_S = 10.0
"""Deadline of the hand-shake over the control channel, and of a connection's set-up."""
FETCH_TIMEOUT_S = 300.0
"""Deadline of one request; without any progress it fails after `STALL_S`."""
MAX_IDLE = 4
"""Connections to one process that are kept for later requests."""

_header = msgspec.msgpack.Decoder(BulkHeader)
_encode = msgspec.msgpack.Encoder().encode

Watch = Callable[[Channel | None], object]
Open = Callable[[str, OpenBulk], BulkOpened]
"""Opens a session with a process, over the control channel; called by any thread, which it blocks."""


class BulkClient:
    """Fetches parts of exports; every method may be called by any thread."""

    def __init__(self, open_session: Open, *, credentials: Callable[[], Credentials]) -> None:
        """`credentials` are made when they are first needed."""
        self._open_session = open_session
        self._credentials = credentials
        self._lock = threading.Lock()
        self._sessions: dict[str, BulkOpened] = {}
        self._idle: dict[str, list[Channel]] = {}

    def fetch(
        self,
        offer: BulkOffer,
        ranges: Sequence[BulkRange],
        targets: Sequence[memoryview],
        *,
        watch: Watch = lambda channel: None,
        arrived: Callable[[BulkRange], object] = lambda part: None,
    ) -> None:
        """Fetch parts into their places. `watch` receives the connection, which it may interrupt until it receives
        None: another request may use the connection then. `arrived` is called for every part that is in its place.
        Contents of the places are undefined after an error."""
        request = BulkRequest(offer.export, tuple(ranges))
        fill = partial(_attempt_fill, places=tuple(zip(ranges, targets, strict=True)), arrived=arrived)
        try:
            channel = self._take_idle(offer.process)
            if channel is not None and self._fetch(channel, offer, request, fill, watch, is_idle=True):
                return
            channel = self._connect(offer.process)
            self._fetch(channel, offer, request, fill, watch, is_idle=False)
        except RefusedError:
            raise
        except (OSError, WorldError) as error:
            # The session may be over, which the other side does not say: the next connection has a new one.
            self._sessions.pop(offer.process, None)
            if isinstance(error, WorldError):
                raise
            reason = error.strerror or str(error) or type(error).__name__
            raise WorldError(f"bulk connection to {offer.process}: {reason}") from error

    def close(self) -> None:
        with self._lock:
            idle, self._idle = [each for some in self._idle.values() for each in some], {}
        for channel in idle:
            channel.close()

    def _fetch(
        self,
        channel: Channel,
        offer: BulkOffer,
        request: BulkRequest,
        fill: Callable[[Channel], bool],
        watch: Watch,
        *,
        is_idle: bool,
    ) -> bool:
        """False if a connection that was kept has ended meanwhile: no header came, and another one may be used."""
        watch(channel)
        try:
            try:
                header = self._ask(channel, offer, request)
            except (OSError, WorldError):
                if not is_idle:
                    raise
                channel.close()
                return False
            if not header.refusal:
                _check_sizes(header, request, process=offer.process)
                wait(
                    lambda _: fill(channel),
                    whom=offer.process,
                    what=f"bytes of {offer.export}",
                    timeout_s=FETCH_TIMEOUT_S,
                )
        except BaseException:
            channel.close()
            raise
        watch(None)
        self._keep(offer.process, channel)
        if header.refusal:
            raise RefusedError(f"{offer.process}: {header.refusal}")
        COUNTERS.add("bulk.bytes_fetched", sum(header.sizes))
        return True

    def _ask(self, channel: Channel, offer: BulkOffer, request: BulkRequest) -> BulkHeader:
        channel.send_message(_encode(request))
        return wait(
            lambda _: _attempt_header(channel),
            whom=offer.process,
            what=offer.export,
            timeout_s=OPEN_TIMEOUT_S + STALL_S,
        )

    def _take_idle(self, process: str) -> Channel | None:
        with self._lock:
            kept = self._idle.get(process)
            return kept.pop() if kept else None

    def _keep(self, process: str, channel: Channel) -> None:
        with self._lock:
            kept = self._idle.setdefault(process, [])
            if len(kept) < MAX_IDLE:
                kept.append(channel)
                return
        channel.close()

    def _connect(self, process: str) -> Channel:
        """Connect under the known session; under a new one if that is over, as after a restart of the process."""
        known = self._sessions.get(process)
        if known is not None:
            with suppress(OSError, WorldError):
                return self._attempt_connect(process, known)
        opened = self._open_session(process, OpenBulk(self._credentials().certificate))
        channel = self._attempt_connect(process, opened)
        self._sessions[process] = opened
        return channel

    def _attempt_connect(self, process: str, opened: BulkOpened) -> Channel:
        """Connect, with both sides proven: TLS by the certificates. Tags prove the first message and its answer."""
        host, _, port = opened.address.rpartition(":")
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection = socket.create_connection((host, int(port)), timeout=OPEN_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(opened.session + nonce)
            if opened.mode == "encrypted":
                context = self._credentials().connecting(opened.certificate)
                channel = TlsChannel(connection, context, is_server=False)
                if channel.attempt_handshake() != opened.certificate:
                    raise IntegrityError(f"the certificate of the bulk connection is not that of {process}")
                return channel
            server_nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            if len(server_nonce) != NONCE_BYTES:
                raise WorldError(f"{process} ended the bulk connection at its set-up")
            keys = connection_keys(opened.key, client_nonce=nonce, server_nonce=server_nonce)
            return TaggedChannel(connection, own_key=keys[CLIENT], other_key=keys[SERVER])
        except BaseException:
            connection.close()
            raise


def _attempt_header(channel: Channel) -> BulkHeader:
    try:
        return _header.decode(channel.attempt_message())
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"a bulk connection: malformed header: {error}") from error


def _attempt_fill(
    channel: Channel,
    *,
    places: Sequence[tuple[BulkRange, memoryview]],
    arrived: Callable[[BulkRange], object],
) -> bool:
    for part, target in places:
        assert target.nbytes == part.size, "places do not fit the request"
        channel.attempt_fill(target)
        arrived(part)
    return True


def _check_sizes(header: BulkHeader, request: BulkRequest, *, process: str) -> None:
    """Check the announced sizes before any byte is received."""
    expected = tuple(part.size for part in request.ranges)
    if header.sizes != expected:
        raise IntegrityError(f"{process} announced parts of {header.sizes} bytes, expected {expected}")
