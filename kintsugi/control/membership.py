"""Who is there: the worker registry. Durable parts are a fold over facts; load and heartbeats are volatile."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.facts import ProcessJoined, ProcessLost, ProcessRequested, ProcessRetired
from kintsugi.messages import AddressBook, Heartbeat
from kintsugi.types import Peer, Progress, Role, Wait, role_of


class MemberStatus(StrEnum):
    """Life of one incarnation of a process; a replacement starts again at `requested`."""

    REQUESTED = "requested"
    LIVE = "live"
    LEAVING = "leaving"
    """Not needed any more: it ends, and nothing is lost with it."""
    LOST = "lost"


MemberFact = ProcessRequested | ProcessJoined | ProcessRetired | ProcessLost

TRANSITIONS: dict[tuple[MemberStatus | None, type], MemberStatus] = {
    (None, ProcessRequested): MemberStatus.REQUESTED,
    (None, ProcessJoined): MemberStatus.LIVE,  # an agent: the launcher started it, nobody ordered it
    (MemberStatus.REQUESTED, ProcessJoined): MemberStatus.LIVE,
    (MemberStatus.REQUESTED, ProcessLost): MemberStatus.LOST,
    (MemberStatus.LIVE, ProcessLost): MemberStatus.LOST,
    (MemberStatus.REQUESTED, ProcessRetired): MemberStatus.LEAVING,
    (MemberStatus.LIVE, ProcessRetired): MemberStatus.LEAVING,
    (MemberStatus.LEAVING, ProcessLost): MemberStatus.LOST,
    (MemberStatus.LOST, ProcessRequested): MemberStatus.REQUESTED,
    (MemberStatus.LOST, ProcessJoined): MemberStatus.LIVE,  # an agent again, which nobody orders
}


class Member(msgspec.Struct):
    """One process as the master knows it."""

    process: str
    role: Role
    host: str
    incarnation: str
    status: MemberStatus
    pid: int = 0
    peer: Peer | None = None
    capabilities: dict[str, str] = {}
    load: float = 0.0
    last_heartbeat: float = 0.0
    progress: Progress = Progress({})
    waits: tuple[Wait, ...] = ()
    gauges: dict[str, float] = {}


class Membership:
    """The registry. `apply` is the only way its durable part changes."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.book_number = 0
        self._live: dict[Role, list[str]] = {}
        """Living processes by role, until somebody comes or goes."""

    def apply(self, fact: MemberFact) -> None:
        process = fact.peer.process if isinstance(fact, ProcessJoined) else fact.process
        self._live.clear()
        member = self.members.get(process)
        after = TRANSITIONS[(member.status if member else None, type(fact))]
        if isinstance(fact, ProcessRequested):
            self.members[process] = Member(process, fact.role, fact.host, fact.incarnation, after)
        elif isinstance(fact, ProcessJoined):
            peer = fact.peer
            self.members[process] = Member(
                process, fact.role, peer.host, peer.incarnation, after, fact.pid, peer, fact.capabilities
            )
        else:
            assert member is not None
            member.status = after
        self.book_number += 1

    def accepts(self, fact: MemberFact) -> str | None:
        """Why a fact does not apply (late, repeated, of an older incarnation), or None if it does."""
        process = fact.peer.process if isinstance(fact, ProcessJoined) else fact.process
        incarnation = fact.peer.incarnation if isinstance(fact, ProcessJoined) else fact.incarnation
        member = self.members.get(process)
        if (member.status if member else None, type(fact)) not in TRANSITIONS:
            return f"{process} is {member.status if member else 'unknown'}"
        if member is None or isinstance(fact, ProcessRequested):
            return None
        if member.status is MemberStatus.LOST:
            key = fact.peer.public_key if isinstance(fact, ProcessJoined) else b""
            known = member.peer.public_key if member.peer is not None else b""
            # Agents are counted per session, and each session has its own keys.
            anew = member.role is Role.AGENT and (incarnation, key) != (member.incarnation, known)
            return None if anew else f"{process} {incarnation} is lost"
        if member.incarnation != incarnation:
            return f"{process} is incarnation {member.incarnation}, not {incarnation}"
        return None

    def replaced(self, peer: Peer, role: Role) -> bool:
        """Whether a registration is that of a process that was lost or replaced meanwhile, and is only late."""
        member = self.members.get(peer.process)
        if member is None:
            return False
        if role is Role.AGENT:
            same_key = member.peer is not None and member.peer.public_key == peer.public_key
            return same_key and int(peer.incarnation) < int(member.incarnation)
        return member.incarnation != peer.incarnation or member.status is MemberStatus.LOST

    def heard(self, process: str, heartbeat: Heartbeat, now: float) -> None:
        """Note a sign of life."""
        member = self.members.get(process)
        if member is not None:
            member.load, member.last_heartbeat = heartbeat.load, now
            member.progress, member.waits = heartbeat.progress, heartbeat.waits
            member.gauges = heartbeat.gauges

    def queue(self) -> float:
        """Samples that wait at the servers, per sample that is decoded, as these last said."""
        gauges = [self.members[name].gauges for name in self.live(Role.SERVER)]
        running = sum(each.get("running", 0.0) for each in gauges)
        return sum(each.get("waiting", 0.0) for each in gauges) / max(1.0, running)

    def live(self, role: Role) -> list[str]:
        """Living processes of a role, in index order."""
        if role not in self._live:
            names = [
                m.process for m in self.members.values() if m.role is role and m.status is MemberStatus.LIVE
            ]
            self._live[role] = sorted(names, key=lambda name: int(name.rsplit("-", 1)[1]))
        return list(self._live[role])

    def is_live(self, process: str, incarnation: str | None = None) -> bool:
        member = self.members.get(process)
        if member is None or member.status is not MemberStatus.LIVE:
            return False
        return incarnation is None or member.incarnation == incarnation

    def host_of(self, process: str) -> str:
        """Where a process lives, or lived last; empty for one that never joined."""
        member = self.members.get(process)
        return member.host if member is not None else ""

    def agent_of(self, host: str) -> str | None:
        """The agent to order processes from on a host."""
        return next((name for name in self.live(Role.AGENT) if self.members[name].host == host), None)

    def begin_epoch(self, epoch: int) -> None:
        """A new master's books are newer than all of its predecessor's, even if the journal lost the last of them."""
        self.book_number = epoch << 32

    def address_book(self, master: Peer) -> AddressBook:
        """Everyone alive, the master included; who is about to leave has to give back what it does."""
        here = (MemberStatus.LIVE, MemberStatus.LEAVING)
        peers = [m.peer for m in self.members.values() if m.status in here and m.peer is not None]
        return AddressBook(self.book_number, (master, *peers))

    def pids(self) -> dict[str, list[int]]:
        """Role → pids of the living, for the summary."""
        pids: dict[str, list[int]] = {}
        for name, member in sorted(self.members.items()):
            if member.status is MemberStatus.LIVE:
                pids.setdefault(role_of(name).value, []).append(member.pid)
        return pids
