"""Our connections, one DEALER per process that we speak to: made, ended, and made anew where ZeroMQ would not.

ZeroMQ makes a connection that broke anew, except one on which it received what it could not understand: that is closed
for good, and takes nothing any more. So a DEALER that takes nothing for a while is replaced by another one.
"""

from __future__ import annotations

import zmq

from kintsugi.runtime import COUNTERS, Clock
from kintsugi.transport.exchange import PendingReply
from kintsugi.transport.sockets import open_dealer
from kintsugi.types import Peer

BLOCKED_S = 0.5
"""A connection that has refused every message for so long, be it closed or full, is made anew."""


class Link:
    """Our connection to one process, and our requests on it that are not answered yet."""

    __slots__ = ("blocked_since", "pending", "process", "sequence", "socket")

    def __init__(self, process: str, socket: zmq.Socket[bytes], sequence: int) -> None:
        self.process = process
        self.socket = socket
        self.sequence = sequence
        self.blocked_since: float | None = None
        """When it refused a message, unless it has taken one since."""
        self.pending: dict[int, PendingReply] = {}


class Links(dict[str, Link]):
    """Process → our connection to it. Every socket of them is in the poller."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        *,
        public_key: bytes,
        secret_key: bytes,
        clock: Clock,
    ) -> None:
        super().__init__()
        self._context, self._poller, self._clock = context, poller, clock
        self._public_key, self._secret_key = public_key, secret_key
        self._sequences: dict[str, int] = {}
        self.by_socket: dict[object, Link] = {}

    def open(self, peer: Peer) -> Link:
        """Connect to a process. Numbers go on where they stopped: it may still hold replies to the earlier ones."""
        link = Link(peer.process, self._dial(peer), self._sequences.get(peer.process, 0))
        self[peer.process] = self.by_socket[link.socket] = link
        return link

    def close(self, process: str) -> Link | None:
        """End a connection; whoever waits for an answer on it is the caller's to tell."""
        if (link := self.pop(process, None)) is not None:
            self._sequences[process] = link.sequence
            self._hang_up(link)
        return link

    def reopen_if_stuck(self, link: Link, peer: Peer) -> bool:
        """For a connection that has just refused a message: whether it was replaced, because it has for a while.

        Its requests have to be sent again. What else it held was one-way, and is lost as its senders must expect.
        """
        now = self._clock.monotonic()
        if link.blocked_since is None:
            link.blocked_since = now
        if now - link.blocked_since < BLOCKED_S:
            return False
        link.blocked_since = None
        try:
            socket = self._dial(peer)
        except zmq.ZMQError:  # No descriptor is left; later one may be.
            return False
        COUNTERS.add("transport.reopened")
        self._hang_up(link)
        link.socket = socket
        self.by_socket[socket] = link
        return True

    def _dial(self, peer: Peer) -> zmq.Socket[bytes]:
        socket = open_dealer(
            self._context, peer=peer, public_key=self._public_key, secret_key=self._secret_key
        )
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _hang_up(self, link: Link) -> None:
        del self.by_socket[link.socket]
        self._poller.unregister(link.socket)
        link.socket.close(0)
