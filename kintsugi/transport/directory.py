"""Who may speak to this process, and as whom.

The key that a connection was authenticated with decides: it belongs to one incarnation of one process, or to nobody. A
message whose envelope claims anything else is refused.
"""

from __future__ import annotations

import msgspec
from zmq.utils import z85

from kintsugi.errors import Fault, KintsugiError, ProcessDied, RefusedError
from kintsugi.messages import Envelope, MessageKind
from kintsugi.transport.exchange import Delivery
from kintsugi.types import Peer, Role, role_of

MAX_WAITING = 1024
"""So many unknown keys may wait to be introduced; the one that waits longest makes room."""


class Caller:
    """A process that may speak to us, and its requests that we have not answered yet."""

    __slots__ = ("peer", "running")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
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
        """Let this key speak as this process. Whoever had the name before must have been removed."""
        self._gone.pop(peer.process, None)
        self.peers[peer.process] = peer
        self.callers[peer.public_key.decode()] = Caller(peer)

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

    def why_refused(self, key: str, envelope: Envelope, *, epoch: int) -> str:
        """Why a message that came with this key is refused; empty when it is not."""
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
        if envelope.incarnation != peer.incarnation:
            took_over = role_of(peer.process) is Role.MASTER and envelope.epoch > epoch
            if not took_over:
                return f"{envelope.sender} {envelope.incarnation} is not {peer.incarnation}"
            # A master that took over keeps its predecessor's key pair; the newer epoch shows which one is alive.
            self.add(msgspec.structs.replace(peer, incarnation=envelope.incarnation))
        return ""


def _zap_answer(question: list[bytes], *, status: bytes, key: bytes) -> list[bytes]:
    """The answer goes back on its route, with version and number of the question; the key becomes the `User-Id`."""
    route, delimiter, version, number = question[:4]
    return [route, delimiter, version, number, status, b"", key, b""]
