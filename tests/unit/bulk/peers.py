"""Processes with bulk endpoints in this one: their control channel is a function call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.errors import RefusedError
from kintsugi.protocol.bulk import BulkMode, OpenBulk
from kintsugi.telemetry.events import NoteEvent
from kintsugi.transport import Reply
from kintsugi.types import Peer


class Processes:
    """An address book, and the bulk endpoint of every process in it."""

    def __init__(self, mode: BulkMode = "authenticated") -> None:
        self.mode: BulkMode = mode
        self.book: dict[str, Peer] = {}
        self.endpoints: dict[str, BulkEndpoint] = {}
        self.notes: list[NoteEvent] = []
        self.num_opened = 0

    def add(self, process: str, incarnation: str = "a") -> BulkEndpoint:
        self.book[process] = Peer(process, incarnation, "host-0", "", b"")
        self.endpoints[process] = endpoint = BulkEndpoint(
            process=process,
            mode=self.mode,
            peer_of=self.book.get,
            call=self._caller(process),
            emit=self.notes.append,
        )
        return endpoint

    def _caller(self, sender: str) -> Callable[[str, OpenBulk, float], Reply]:
        def call(process: str, request: OpenBulk, deadline_s: float) -> Reply:
            self.num_opened += 1
            if process not in self.endpoints:
                raise RefusedError(f"{process} is not in the address book")
            server = self.endpoints[process].server
            return Reply(server.open_session(self.book[sender], request.certificate))

        return call

    def kill(self, process: str) -> None:
        """Close everything of a process, and take it out of the address book."""
        del self.book[process]
        self.endpoints.pop(process).close()

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


@contextmanager
def processes(mode: BulkMode = "authenticated") -> Iterator[Processes]:
    made = Processes(mode)
    try:
        yield made
    finally:
        made.close()
