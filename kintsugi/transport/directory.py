"""Who may speak to this process, and as whom.

The key that a connection was authenticated with decides: it belongs to one incarnation of one process, or to nobody. A
message whose envelope claims anything else is refused.
"""

from __future__ import annotations

import msgspec
from zmq.utils import z85

from kintsugi.errors import Fault, KintsugiError, ProcessDied, RefusedError
from kintsugi.messages import Body
from kintsugi.transport.exchange import Delivery
from kintsugi.types import Peer, Role, role_of
from kintsugi.wire import SPOKEN_BY, Envelope, MessageKind

MAX_WAITING = 1024
"""So many unknown keys may wait to be introduced; the one that waits longest makes room."""


class Caller:
    """A process that may speak to us, and its requests that we have not answered yet."""

    __slots__ = ("peer", "role", "running")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.role = role_of(peer.process)
        self.running: dict[int, Delivery] = {}


class Directory:
    """The address book as this process holds it."""

    def __init__(self, *, job: str, process: str) -> None:
        self._job = job
        self._process = process
        self._gone: dict[str, Fault] = {}
        self._waiting: dict[bytes, list[bytes]] = {}
        self.number = -1
        """Of the newest address book taken over."""
        self.peers: dict[str, Peer] = {}
        self.callers: dict[str, Caller] = {}
        """By public key (Z85), as ZeroMQ names the user of a connection."""

    def add(self, peer: Peer) -> None:
        """Let this key speak as this process. Whoever had the name before must have been removed.

        Who only moved to another address asks again under the same numbers for what is still being worked on.
        """
        self._gone.pop(peer.process, None)
        self.peers[peer.process] = peer
        key, caller = peer.public_key.decode(), Caller(peer)
        known = self.callers.get(key)
        if known is not None and known.peer.incarnation == peer.incarnation:
            caller.running = known.running
        self.callers[key] = caller

    def remove(self, process: str, fault: Fault) -> None:
        """The process is gone for this reason; its key is nobody's from now on."""
        self._gone[process] = fault
        peer = self.peers.pop(process, None)
        if peer is not None:
            del self.callers[peer.public_key.decode()]

    def why_unreachable(self, process: str) -> KintsugiError:
        """The error for who asks a process that we can not reach."""
        fault = self._gone.get(process)
        if fault is not None:
            return ProcessDied(f"{process}: {fault.message}", cause=fault)
        return RefusedError(f"{process} is not in the address book of {self._process}")

    def admission(self, question: list[bytes]) -> list[bytes] | None:
        """Answer ZeroMQ's question (ZAP, RFC 27) whether a key may connect; None if the answer has to wait.

        A key that we do not know yet waits at the door, because its introduction may still be on the way: address books
        reach different processes at different times. The connection gives up by itself if nobody introduces it.
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
        """The answer to a question that waited until its key was added, if there is one."""
        question = self._waiting.pop(key, None)
        return _zap_answer(question, status=b"200", key=key) if question else None

    def why_refused(self, key: str, envelope: Envelope, *, epoch: int, body: Body | None = None) -> str:
        """Why a message that came with this key is refused; empty when it is not. Without a body: one not readable."""
        caller = self.callers.get(key)
        if caller is None:
            return f"{envelope.sender} {envelope.incarnation} is not in the address book"
        peer = caller.peer
        if envelope.sender != peer.process:
            return f"the key of {peer.process} does not speak for {envelope.sender}"
        if envelope.job != self._job:
            return f"expected job {self._job}, got {envelope.job}"
        if envelope.kind is MessageKind.REPLY:
            return "a reply that was not asked for"
        if body is not None and caller.role not in SPOKEN_BY[type(body)]:
            return f"{type(body).__name__} is not for {envelope.sender} to say"
        if envelope.incarnation != peer.incarnation:
            if not _took_over(peer, envelope, epoch=epoch):
                return f"{envelope.sender} {envelope.incarnation} is not {peer.incarnation}"
            self.add(msgspec.structs.replace(peer, incarnation=envelope.incarnation))
        return ""

    def newest_epoch(self, seen: int, *, by: str, of: Envelope) -> int:
        """The newest epoch that we may believe in: the master begins them, everybody else only follows.

        Who speaks in it is the master from now on, also when it only answered: the next it says is of this epoch too.
        """
        if of.epoch <= seen or role_of(by) is not Role.MASTER:
            return seen
        peer = self.peers.get(by)
        if peer is not None and peer.incarnation != of.incarnation:
            self.add(msgspec.structs.replace(peer, incarnation=of.incarnation))
        return of.epoch


def _took_over(peer: Peer, envelope: Envelope, *, epoch: int) -> bool:
    """Whether this is the successor of a master or an agent, which keeps its predecessor's key pair.

    Of two masters the one of the newer epoch is alive; of two agents the one that was started later: they are counted.
    """
    match role_of(peer.process):
        case Role.MASTER:
            return envelope.epoch > epoch
        case Role.AGENT:
            ours, theirs = peer.incarnation, envelope.incarnation
            return ours.isdecimal() and theirs.isdecimal() and int(theirs) > int(ours)
        case _:
            return False


def _zap_answer(question: list[bytes], *, status: bytes, key: bytes) -> list[bytes]:
    """The answer goes back on its route, with version and number of the question; the key becomes the `User-Id`."""
    route, delimiter, version, number = question[:4]
    return [route, delimiter, version, number, status, b"", key, b""]
