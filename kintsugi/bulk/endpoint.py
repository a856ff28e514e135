"""The bulk channel of one process: what it offers, and what it fetches."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kintsugi.bulk.client import OPEN_TIMEOUT_S, BulkClient
from kintsugi.bulk.credentials import Credentials
from kintsugi.bulk.server import BulkServer
from kintsugi.errors import RefusedError
from kintsugi.process.shell import Shell
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.bulk import BulkMode, BulkOpened, OpenBulk
from kintsugi.telemetry.events import NoteEvent
from kintsugi.transport import Delivery, Reply
from kintsugi.types import Peer

Call = Callable[[str, OpenBulk, float], Reply]
"""Sends a request over the control channel and waits for the reply: (process, request, deadline in seconds)."""


class BulkEndpoint:
    """Server and client, with one certificate."""

    def __init__(
        self,
        *,
        process: str,
        mode: BulkMode,
        peer_of: Callable[[str], Peer | None],
        call: Call,
        interface: str = "127.0.0.1",
        known_as: str = "",
        emit: Callable[[NoteEvent], object] = lambda event: None,
    ) -> None:
        """`peer_of` returns the entry of a process in the address book; like `call`, it may be used by any thread."""
        made, lock = list[Credentials](), threading.Lock()

        def credentials() -> Credentials:
            """Create the certificate when it is first needed: few processes of a run on one host ever need it."""
            with lock:
                if not made:
                    made.append(Credentials.create(process))
            return made[0]

        def is_current(other: str, incarnation: str) -> bool:
            peer = peer_of(other)
            return peer is not None and peer.incarnation == incarnation

        def open_session(other: str, request: OpenBulk) -> BulkOpened:
            return call(other, request, OPEN_TIMEOUT_S).expect(BulkOpened)

        self.server = BulkServer(
            process=process,
            credentials=credentials,
            mode=mode,
            is_current=is_current,
            interface=interface,
            known_as=known_as,
            emit=emit,
        )
        self.client = BulkClient(open_session, credentials=credentials)

    @classmethod
    def described(
        cls,
        bootstrap: Bootstrap,
        *,
        peer_of: Callable[[str], Peer | None],
        call: Call,
        emit: Callable[[NoteEvent], object],
    ) -> BulkEndpoint:
        """Create the bulk endpoint of the process that a bootstrap describes."""
        return cls(
            process=bootstrap.process,
            mode=bootstrap.bulk,
            peer_of=peer_of,
            call=call,
            interface=bootstrap.bind.removeprefix("tcp://").rpartition(":")[0],
            known_as=bootstrap.known_as,
            emit=emit,
        )

    def close(self) -> None:
        self.client.close()
        self.server.close()


class BulkService:
    """Opens sessions in the control thread, so that other processes can fetch while the main thread computes."""

    def __init__(self, shell: Shell, bulk: BulkEndpoint) -> None:
        self._shell = shell
        self._bulk = bulk

    def tick(self, now: float) -> None:
        """Nothing is due."""

    def handle(self, delivery: Delivery) -> bool:
        if not isinstance(delivery.body, OpenBulk):
            return False
        try:
            self._shell.reply(
                delivery, self._bulk.server.open_session(delivery.peer, delivery.body.certificate)
            )
        except (RefusedError, OSError) as error:
            self._shell.fail(delivery, error)
        return True


def open_bulk(shell: Shell) -> BulkEndpoint:
    """Open the bulk endpoint of a worker; its sessions are served by the control thread."""
    bulk = BulkEndpoint.described(
        shell.bootstrap,
        peer_of=shell.peer,
        call=lambda process, request, deadline_s: shell.call(process, request, deadline_s=deadline_s),
        emit=shell.events.emit,
    )
    shell.add_service(BulkService(shell, bulk))
    return bulk
