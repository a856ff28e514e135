"""Registry of the run's processes. Its durable part is a fold over facts; load and heartbeats are volatile."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kintsugi.journal.facts import ProcessJoined, ProcessLost, ProcessRequested, ProcessRetired
from kintsugi.protocol.membership import TERM_BITS, AddressBook, Heartbeat
from kintsugi.runtime.peak_memory import PEAKS_REPORTED
from kintsugi.types import Peer, Progress, Role, Wait, role_of


class WorkerStatus(StrEnum):
    """Status of one incarnation of a process; a replacement begins with `requested`."""

    REQUESTED = "requested"
    LIVE = "live"
    LEAVING = "leaving"
    """Not needed any more: it is retired, and its end is no loss."""
    LOST = "lost"


MemberFact = ProcessRequested | ProcessJoined | ProcessRetired | ProcessLost

TRANSITIONS: dict[tuple[WorkerStatus | None, type], WorkerStatus] = {
    (None, ProcessRequested): WorkerStatus.REQUESTED,
    (None, ProcessJoined): WorkerStatus.LIVE,  # an agent: the launcher starts it, not the master
    (WorkerStatus.REQUESTED, ProcessJoined): WorkerStatus.LIVE,
    (WorkerStatus.REQUESTED, ProcessLost): WorkerStatus.LOST,
    (WorkerStatus.LIVE, ProcessLost): WorkerStatus.LOST,
    (WorkerStatus.REQUESTED, ProcessRetired): WorkerStatus.LEAVING,
    (WorkerStatus.LIVE, ProcessRetired): WorkerStatus.LEAVING,
    (WorkerStatus.LEAVING, ProcessLost): WorkerStatus.LOST,
    (WorkerStatus.LOST, ProcessRequested): WorkerStatus.REQUESTED,
    (WorkerStatus.LOST, ProcessJoined): WorkerStatus.LIVE,  # an agent again, which the master does not order
}


class WorkerRecord(msgspec.Struct, omit_defaults=True):
    """One process as the master knows it."""

    process: str
    role: Role
    host: str
    incarnation: str
    status: WorkerStatus
    pid: int = 0
    peer: Peer | None = None
    capabilities: dict[str, str] = {}
    load: float = 0.0
    last_heartbeat: float = 0.0
    progress: Progress = Progress({})
    waits: tuple[Wait, ...] = ()
    gauges: dict[str, float] = {}
    changed: int = 0
    """Number of the address book that first listed this incarnation, or no longer lists it."""


class _FoldedRegistry(msgspec.Struct):
    members: list[WorkerRecord]
    book_number: int
    previous_number: int = -1


class WorkerRegistry:
    """Registry of processes. Only `apply` changes its durable part."""

    def __init__(self) -> None:
        self.members: dict[str, WorkerRecord] = {}
        self.book_number = 0
        self.previous_number = -1
        """Number of the last address book of the term before this one; -1 if there was none."""
        self.peaks: dict[str, dict[str, float]] = {}
        """Largest reported peaks of memory by process, over its incarnations. A new master knows those of the processes
        that live."""
        self._live: dict[Role, list[str]] = {}
        """Live processes by role, cached until a process joins or is lost."""

    def apply(self, fact: MemberFact) -> None:
        process = fact.peer.process if isinstance(fact, ProcessJoined) else fact.process
        self._live.clear()
        member = self.members.get(process)
        after = TRANSITIONS[(member.status if member else None, type(fact))]
        if isinstance(fact, ProcessRequested):
            changed = 0 if member is None else member.changed  # A book that no longer lists its predecessor.
            self.members[process] = WorkerRecord(
                process, fact.role, fact.host, fact.incarnation, after, changed=changed
            )
        elif isinstance(fact, ProcessJoined):
            peer = fact.peer
            self.members[process] = WorkerRecord(
                process, fact.role, peer.host, peer.incarnation, after, fact.pid, peer, fact.capabilities
            )
        else:
            assert member is not None
            member.status = after
        if isinstance(fact, ProcessJoined | ProcessLost):
            self.book_number += 1
            self.members[process].changed = self.book_number

    def fold(self) -> bytes:
        """Encode the durable part."""
        durable = [
            WorkerRecord(
                m.process,
                m.role,
                m.host,
                m.incarnation,
                m.status,
                m.pid,
                m.peer,
                m.capabilities,
                changed=m.changed,
            )
            for m in self.members.values()
        ]
        return msgspec.msgpack.encode(_FoldedRegistry(durable, self.book_number, self.previous_number))

    def restore(self, folded: bytes) -> None:
        """Replace the durable part by one that `fold` encoded."""
        found = msgspec.msgpack.decode(folded, type=_FoldedRegistry)
        self.members = {member.process: member for member in found.members}
        self.book_number, self.previous_number = found.book_number, found.previous_number
        self._live.clear()

    def accepts(self, fact: MemberFact) -> str | None:
        """Return why a fact does not apply (late, repeated, of an older incarnation), or None if it does."""
        process = fact.peer.process if isinstance(fact, ProcessJoined) else fact.process
        incarnation = fact.peer.incarnation if isinstance(fact, ProcessJoined) else fact.incarnation
        member = self.members.get(process)
        if (member.status if member else None, type(fact)) not in TRANSITIONS:
            return f"{process} is {member.status if member else 'unknown'}"
        if member is None or isinstance(fact, ProcessRequested):
            return None
        if member.status is WorkerStatus.LOST:
            key = fact.peer.public_key if isinstance(fact, ProcessJoined) else b""
            known = member.peer.public_key if member.peer is not None else b""
            # Agents are counted per session, and each session has its own keys.
            is_restarted = member.role is Role.AGENT and (incarnation, key) != (member.incarnation, known)
            return None if is_restarted else f"{process} {incarnation} is lost"
        if member.incarnation != incarnation:
            return f"{process} is incarnation {member.incarnation}, not {incarnation}"
        return None

    def replaced(self, peer: Peer, role: Role) -> bool:
        """Return whether a registration is late: its process was lost or replaced meanwhile."""
        member = self.members.get(peer.process)
        if member is None:
            return False
        if role is Role.AGENT:
            same_key = member.peer is not None and member.peer.public_key == peer.public_key
            return same_key and int(peer.incarnation) < int(member.incarnation)
        return member.incarnation != peer.incarnation or member.status is WorkerStatus.LOST

    def on_heartbeat(self, process: str, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat."""
        member = self.members.get(process)
        if member is not None:
            member.load, member.last_heartbeat = heartbeat.load, now
            member.progress, member.waits = heartbeat.progress, heartbeat.waits
            member.gauges = heartbeat.gauges
            peaks = self.peaks.setdefault(process, {})
            for name in heartbeat.gauges.keys() & PEAKS_REPORTED:
                peaks[name] = max(heartbeat.gauges[name], peaks.get(name, 0.0))

    def queue(self) -> float:
        """Return how many samples wait at the servers per sample that is decoded, by their last heartbeats."""
        gauges = [self.members[name].gauges for name in self.live(Role.SERVER)]
        running = sum(each.get("running", 0.0) for each in gauges)
        return sum(each.get("waiting", 0.0) for each in gauges) / max(1.0, running)

    def live(self, role: Role) -> list[str]:
        """Return the live processes of a role, in index order."""
        if role not in self._live:
            names = [
                m.process for m in self.members.values() if m.role is role and m.status is WorkerStatus.LIVE
            ]
            self._live[role] = sorted(names, key=lambda name: int(name.rsplit("-", 1)[1]))
        return list(self._live[role])

    def is_live(self, process: str, incarnation: str | None = None) -> bool:
        member = self.members.get(process)
        if member is None or member.status is not WorkerStatus.LIVE:
            return False
        return incarnation is None or member.incarnation == incarnation

    def host_of(self, process: str) -> str:
        """Return the host of a process, or its last host; empty for one that never joined."""
        member = self.members.get(process)
        return member.host if member is not None else ""

    def agent_of(self, host: str) -> str | None:
        """Return the agent that starts processes on a host."""
        return next((name for name in self.live(Role.AGENT) if self.members[name].host == host), None)

    def begin_term(self, term: int) -> None:
        """Number the address books of a new master above all of its predecessor's, even if the journal lost the last of
        them."""
        self.previous_number, self.book_number = self.book_number, term << TERM_BITS

    def listed(self) -> list[str]:
        """Return the processes that the address book lists. A leaving server is still among them: its requests have to
        be taken back."""
        return [process for process in self.members if self.is_listed(process)]

    def is_listed(self, process: str) -> bool:
        member = self.members.get(process)
        here = (WorkerStatus.LIVE, WorkerStatus.LEAVING)
        return member is not None and member.status in here and member.peer is not None

    def address_book(self, master: Peer, *, since: int | None = None) -> AddressBook:
        """Return the addresses of all processes, the master included; or what changed after the book of this number,
        if that is known."""
        listed = [self.members[process] for process in self.listed()]
        if since is None or not self._knows_changes_since(since):
            return AddressBook(self.book_number, (master, *(m.peer for m in listed if m.peer is not None)))
        added = [m.peer for m in listed if m.peer is not None and m.changed > since]
        removed = [
            m.process for m in self.members.values() if m.changed > since and not self.is_listed(m.process)
        ]
        masters = (master,) if since >> TERM_BITS != self.book_number >> TERM_BITS else ()
        return AddressBook(self.book_number, (*masters, *added), since, tuple(removed))

    def _knows_changes_since(self, number: int) -> bool:
        """Return whether this is a book of this term, or of the one before as far as the journal has it: facts that a
        power cut took with it may have been in a later one."""
        term, previous_term = self.book_number >> TERM_BITS, self.previous_number >> TERM_BITS
        is_of_previous_term = number >> TERM_BITS == previous_term and number <= self.previous_number
        return number >= 0 and (number >> TERM_BITS == term or is_of_previous_term)

    def pids(self) -> dict[str, list[int]]:
        """Return role → pids of the live processes, for the summary."""
        pids: dict[str, list[int]] = {}
        for name, member in sorted(self.members.items()):
            if member.status is WorkerStatus.LIVE:
                pids.setdefault(role_of(name).value, []).append(member.pid)
        return pids
