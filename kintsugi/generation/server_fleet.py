"""The servers that a generation manager knows: members of the address book, their weights and their load."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kintsugi.generation.router import ServerHealth, ServerView
from kintsugi.protocol.weights import WeightsLoaded
from kintsugi.telemetry.events import Note, NoteEvent
from kintsugi.transport import Endpoint
from kintsugi.types import Peer, Role, WeightManifest, role_of

SUSPICION_S = 1.0
"""Time between a fault reply of a server and its next probe."""

MAX_SENT = 2048
"""Largest number of requests at one server; further ones wait in the manager. An endpoint limits the messages per
caller, and beyond that limit would lose weights and cancellations."""

Identity = tuple[int, str]
"""Version and digest of weights."""


def identity(weights: WeightManifest | WeightsLoaded) -> Identity:
    return weights.version, weights.digest


class ManagedServer:
    """One server and the requests it has."""

    def __init__(self, peer: Peer, *, proven: bool) -> None:
        self.peer = peer
        self.proven = proven
        """False until a server that joined later has answered the probe."""
        self.held: Identity | None = None
        """Weights that it was last admitted with."""
        self.loading: Identity | None = None
        """Weights that it was last sent and has not acknowledged."""
        self.load_faults = 0
        self.suspect = False
        self.probe_at = 0.0
        """Time of the next probe of a suspect server."""
        self.retired = False
        self.dead = False
        self.sent: dict[int, int] = {}
        """Unanswered requests by number, in the order of sending, with the tokens that each may need."""
        self.tokens_in_flight = 0

    @property
    def process(self) -> str:
        return self.peer.process

    def add(self, number: int, num_tokens: int) -> None:
        self.sent[number] = num_tokens
        self.tokens_in_flight += num_tokens

    def remove(self, number: int) -> None:
        self.tokens_in_flight -= self.sent.pop(number)

    def doubt(self, now: float) -> None:
        """Mark the server as suspect: its last reply was a fault."""
        self.suspect = True
        self.probe_at = now + SUSPICION_S

    def view(self, current: Identity | None) -> ServerView:
        if self.dead:
            health = ServerHealth.DEAD
        elif current is None or self.held != current:
            health = ServerHealth.STALE
        else:
            health = ServerHealth.SUSPECT if self.suspect else ServerHealth.HEALTHY
        version = -1 if self.held is None else self.held[0]
        full = len(self.sent) >= MAX_SENT
        return ServerView(self.process, health, version, self.tokens_in_flight, self.retired, full)


class ServerFleet:
    """Follows the address book. A dead server stays listed until its name is reused, so that a reason to wait can name
    it; a retired one does not."""

    def __init__(self, endpoint: Endpoint, *, emit: Callable[[NoteEvent], object]) -> None:
        self._endpoint = endpoint
        self._emit = emit
        self._book_number = -1
        self._members: dict[str, ManagedServer] = {}
        self.current: Identity | None = None
        """The current weights."""

    def __iter__(self) -> Iterator[ManagedServer]:
        """Live servers."""
        return iter([member for member in self._members.values() if not member.dead])

    def views(self) -> list[ServerView]:
        return [member.view(self.current) for member in self._members.values()]

    def living(self, process: str) -> ManagedServer | None:
        member = self._members.get(process)
        return None if member is None or member.dead else member

    def in_use(self) -> list[ManagedServer]:
        """Live servers that are not being retired."""
        return [member for member in self if not member.retired]

    def is_known(self, peer: Peer) -> bool:
        """Whether this incarnation of a process is still in the address book."""
        known = self._endpoint.peers.get(peer.process)
        return known is not None and known.incarnation == peer.incarnation

    def follow_book(self) -> bool:
        """Add and remove servers by the address book; return whether it has changed. A server that joins after the
        first weights must answer a probe before it is used."""
        if self._endpoint.book_number == self._book_number:
            return False
        self._book_number = self._endpoint.book_number
        for member in self:
            if not self.is_known(member.peer):
                self._remove(member)
        for process, peer in self._endpoint.peers.items():
            if role_of(process) is Role.SERVER and peer.address and self.living(process) is None:
                self._members[process] = ManagedServer(peer, proven=self.current is None)
                self._emit(
                    Note(f"{process} {peer.incarnation} has joined, stale until it has loaded the weights")
                )
        return True

    def _remove(self, member: ManagedServer) -> None:
        member.dead = True
        if member.retired:
            del self._members[member.process]
        self._emit(Note(f"{member.process} {member.peer.incarnation} has left"))
