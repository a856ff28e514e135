"""Authentication: the processes that may connect to this one, and the identity that each key proves.

A key belongs to one incarnation of one process. A message is refused if its envelope names another sender than the key
that authenticated its connection.
"""

from __future__ import annotations

import msgspec
from zmq.utils import z85

from kintsugi.errors import Fault, KintsugiError, ProcessDied, UnknownPeer
from kintsugi.protocol.membership import TERM_BITS, AddressBook
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import ALLOWED_SENDERS, Envelope, MessageKind
from kintsugi.transport.rpc import Delivery
from kintsugi.types import Peer, Role, role_of

MAX_WAITING = 1024
"""Maximum of unknown keys that wait for their admission; the one that has waited longest is dropped."""


class Caller:
    """A process that may connect to this one, and its requests that are not answered yet."""

    __slots__ = ("peer", "role", "running")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.role = role_of(peer.process)
        self.running: dict[int, Delivery] = {}


class Directory:
    """The address book of this process, with the keys of all peers."""

    def __init__(self, *, job: str, process: str) -> None:
        self._job = job
        self._process = process
        self._gone: dict[str, Fault] = {}
        self._waiting: dict[bytes, list[bytes]] = {}
        self.number = -1
        """Number of the newest address book taken over."""
        self.peers: dict[str, Peer] = {}
        self.callers: dict[str, Caller] = {}
        """Public key (Z85), which is ZeroMQ's user id of a connection → caller."""

    def add(self, peer: Peer) -> None:
        """Admit this key as this process. An earlier process of the same name must have been removed.

        A process that only moved to another address keeps its unanswered requests: it repeats them under the same
        sequence numbers.
        """
        self._gone.pop(peer.process, None)
        self.peers[peer.process] = peer
        key, caller = peer.public_key.decode(), Caller(peer)
        known = self.callers.get(key)
        if known is not None and known.peer.incarnation == peer.incarnation:
            caller.running = known.running
        self.callers[key] = caller

    def remove(self, process: str, fault: Fault) -> None:
        """Remove a process that has ended for this reason; its key is refused from now on."""
        self._gone[process] = fault
        peer = self.peers.pop(process, None)
        if peer is not None:
            del self.callers[peer.public_key.decode()]

    def accepts(self, book: AddressBook) -> bool:
        """Whether a book is newer than this one, and whole or a difference from this one.

        A difference from an earlier book of the same master will do. One of another master may have changes that its
        journal lost in a power cut, and of which the book's master does not know.
        """
        if book.number <= self.number or book.since is None:
            return book.number > self.number
        is_of_same_term = self.number >> TERM_BITS == book.number >> TERM_BITS
        return book.since == self.number or (is_of_same_term and book.since < self.number)

    def removed_by(self, book: AddressBook) -> list[str]:
        """Return the processes that a newer book does not list any more."""
        if book.since is not None:
            return [process for process in book.removed if process in self.peers]
        listed = {peer.process for peer in book.peers}
        return [process for process in self.peers if process not in listed]

    def unreachable_error(self, process: str) -> KintsugiError:
        """Return the error for a request to a process that can not be reached."""
        fault = self._gone.get(process)
        if fault is not None:
            return ProcessDied(f"{process}: {fault.message}", cause=fault)
        return UnknownPeer(f"{process} is not in the address book of {self._process}")

    def admission(self, question: list[bytes]) -> list[bytes] | None:
        """Answer ZeroMQ's question (ZAP, RFC 27) whether a key may connect; None if the answer has to wait.

        An unknown key waits, because the address book that admits it may still be under way: it reaches different
        processes at different times. The connection times out if the key is never admitted.
        """
        key = z85.encode(question[8]) if len(question) > 8 and question[7] == b"CURVE" else b""
        if key.decode() in self.callers:
            return _zap_answer(question, status=b"200", key=key)
        if not key:
            return _zap_answer(question, status=b"400", key=key)
        self._waiting.pop(key, None)
        self._waiting[key] = question
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        return None

    def late_admission(self, key: bytes) -> list[bytes] | None:
        """Answer the question that has waited for this key, if there is one."""
        question = self._waiting.pop(key, None)
        return _zap_answer(question, status=b"200", key=key) if question else None

    def why_refused(self, key: str, envelope: Envelope, *, term: int, body: Body | None = None) -> str:
        """Return why a message with this key is refused; empty if it is not. `body` is None if it is not readable."""
        caller = self.callers.get(key)
        if caller is None:
            return f"{envelope.sender} {envelope.incarnation} is not in the address book"
        peer = caller.peer
        if envelope.sender != peer.process:
            return f"the key of {peer.process} does not belong to {envelope.sender}"
        if envelope.job != self._job:
            return f"expected job {self._job}, got {envelope.job}"
        if envelope.kind is MessageKind.REPLY:
            return "a reply without a request"
        if body is not None and caller.role not in ALLOWED_SENDERS[type(body)]:
            return f"{envelope.sender} may not send {type(body).__name__}"
        if envelope.incarnation != peer.incarnation:
            if not _took_over(peer, envelope, term=term):
                return f"{envelope.sender} {envelope.incarnation} is not {peer.incarnation}"
            self.add(msgspec.structs.replace(peer, incarnation=envelope.incarnation))
        return ""

    def newest_term(self, seen: int, *, by: str, of: Envelope) -> int:
        """Return the newest term: only the master begins one, so other senders do not change it.

        The sender of a newer term is the current master, also when the message is only a reply.
        """
        if of.term <= seen or role_of(by) is not Role.MASTER:
            return seen
        peer = self.peers.get(by)
        if peer is not None and peer.incarnation != of.incarnation:
            self.add(msgspec.structs.replace(peer, incarnation=of.incarnation))
        return of.term


def _took_over(peer: Peer, envelope: Envelope, *, term: int) -> bool:
    """Whether the sender is the successor of a master or agent, which keeps its predecessor's key pair.

    The master of the newer term is the current one. Incarnations of agents are numbered: the higher one is current.
    """
    match role_of(peer.process):
        case Role.MASTER:
            return envelope.term > term
        case Role.AGENT:
            ours, theirs = peer.incarnation, envelope.incarnation
            return ours.isdecimal() and theirs.isdecimal() and int(theirs) > int(ours)
        case _:
            return False


def _zap_answer(question: list[bytes], *, status: bytes, key: bytes) -> list[bytes]:
    """Build the answer for the route of a question, with its version and number; the key becomes the `User-Id`."""
    route, delimiter, version, number = question[:4]
    return [route, delimiter, version, number, status, b"", key, b""]
