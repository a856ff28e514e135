"""The servers that a manager knows: who is in the address book, what each holds, how much it has to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kintsugi.generation.router import Health, ServerView
from kintsugi.messages import WeightsLoaded
from kintsugi.transport import Endpoint
from kintsugi.types import Peer, Role, WeightManifest, role_of

SUSPICION_S = 1.0
"""How long a server that answered with a fault is left alone before it is probed."""

MAX_SENT = 2048
"""Requests with one server; the others wait for it here. An endpoint takes only so many of one caller, and beyond them
loses what must not wait: weights, and who has left."""

Identity = tuple[int, str]
"""Version and digest of weights."""


def identity(weights: WeightManifest | WeightsLoaded) -> Identity:
    return weights.version, weights.digest


class Member:
    """One server, and what is under way on it."""

    def __init__(self, peer: Peer, *, proven: bool) -> None:
        self.peer = peer
        self.proven = proven
        """False until a server that joined later has answered the probe."""
        self.held: Identity | None = None
        """The weights that it was admitted with last."""
        self.loading: Identity | None = None
        """The weights that it was sent last and has not answered for."""
        self.load_faults = 0
        self.suspect = False
        self.probe_at = 0.0
        """When a suspect one is looked at again."""
        self.retired = False
        self.dead = False
        self.sent: dict[int, int] = {}
        """Unanswered requests by number, in the order of sending: the tokens that each may need."""
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
        """Its answer was a fault."""
        self.suspect = True
        self.probe_at = now + SUSPICION_S

    def view(self, current: Identity | None) -> ServerView:
        if self.dead:
            health = Health.DEAD
        elif current is None or self.held != current:
            health = Health.STALE
        else:
            health = Health.SUSPECT if self.suspect else Health.HEALTHY
        version = -1 if self.held is None else self.held[0]
        full = len(self.sent) >= MAX_SENT
        return ServerView(self.process, health, version, self.tokens_in_flight, self.retired, full)


class Fleet:
    """Follows the address book. A server that died is remembered until its name is taken again, so that a reason to
    wait can name it; one that was retired before is not missed."""

    def __init__(self, endpoint: Endpoint, *, note: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._note = note
        self._book_number = -1
        self._members: dict[str, Member] = {}
        self.current: Identity | None = None
        """The weights that count."""

    def __iter__(self) -> Iterator[Member]:
        """Those who live."""
        return iter([member for member in self._members.values() if not member.dead])

    def views(self) -> list[ServerView]:
        return [member.view(self.current) for member in self._members.values()]

    def living(self, process: str) -> Member | None:
        member = self._members.get(process)
        return None if member is None or member.dead else member

    def in_use(self) -> list[Member]:
        """Those who live and will go on to."""
        return [member for member in self if not member.retired]

    def is_known(self, peer: Peer) -> bool:
        """Whether this incarnation of a process is still in the address book."""
        known = self._endpoint.peers.get(peer.process)
        return known is not None and known.incarnation == peer.incarnation

    def follow_book(self) -> bool:
        """Let servers come and go with the address book; whether it has changed. Who comes while the run is under way
        must show that it can generate before it is used."""
        if self._endpoint.book_number == self._book_number:
            return False
        self._book_number = self._endpoint.book_number
        for member in self:
            if not self.is_known(member.peer):
                self._leaves(member)
        for process, peer in self._endpoint.peers.items():
            if role_of(process) is Role.SERVER and peer.address and self.living(process) is None:
                self._members[process] = Member(peer, proven=self.current is None)
                self._note(f"{process} {peer.incarnation} has joined, stale until it has loaded the weights")
        return True

    def _leaves(self, member: Member) -> None:
        member.dead = True
        if member.retired:
            del self._members[member.process]
        self._note(f"{member.process} {member.peer.incarnation} has left")
