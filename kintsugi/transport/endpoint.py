"""Requests, replies and one-way messages of one process.

Every process has one `Endpoint`: a ROUTER socket that receives requests and one-way messages, and one DEALER socket per
peer that it sends to. Both ends are authenticated: a DEALER knows its peer's public key, and the ROUTER looks up in the
directory which process a key belongs to.

A request is sent again, under the same sequence number, until it is answered or its deadline has passed. The receiver
drops the repetition of a request that it is still working on and answers that of a finished one from its saved reply.

ZeroMQ reconnects a broken connection, except after data that it could not parse: then it closes the connection and the
socket accepts no further message. So a DEALER that accepts nothing for a while is replaced (`PeerConnections`).

Only `poll`, `call` and `close` block, through `runtime.wait`. All methods but `wake` belong to one thread.
"""

from __future__ import annotations

import heapq
import math
import os
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from kintsugi.errors import (
    DeadlineExceeded,
    EpochOver,
    Fault,
    KintsugiError,
    ProcessDied,
    RefusedError,
    RemoteError,
    fault_of,
)
from kintsugi.protocol import wire
from kintsugi.protocol.membership import AddressBook, Failed, Register
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import wait
from kintsugi.transport.directory import Caller, Directory
from kintsugi.transport.rpc import (
    Delivery,
    PendingReply,
    Reply,
    RequestTimer,
    SavedReplies,
)
from kintsugi.transport.sockets import (
    NOBLOCK,
    QUEUED_MESSAGES,
    drop_rest,
    is_readable,
    is_readable_soon,
    milliseconds,
    open_context,
    open_dealer,
    open_monitor,
    open_router,
    open_zap,
    send_frame,
    take_events,
)
from kintsugi.types import Peer, Role

DRAINED_MESSAGES = 256
"""Maximum of messages that are taken from one socket before the other sockets are served."""

_REQUEST, _REPLY, _ONE_WAY = MessageKind.REQUEST, MessageKind.REPLY, MessageKind.ONE_WAY


class Endpoint:
    """The sockets of one process and the loop that serves them.

    Only keys that were admitted (`admit`, `set_book`) can connect. An envelope of an older term than `term` is
    refused, except `Register`. A newer term of a master is noted in `seen_term`, on which the owner of the endpoint
    acts: a worker adopts it and registers again, a master knows that it was replaced.
    """

    def __init__(
        self,
        *,
        job: str,
        process: str,
        incarnation: str,
        public_key: bytes,
        secret_key: bytes,
        bind: str = "tcp://127.0.0.1:*",
        listener: int = -1,
        clock: Clock = SYSTEM_CLOCK,
        term: int = 0,
        num_peers: int = 0,
    ) -> None:
        self.job = job
        self.process = process
        self.incarnation = incarnation
        self.term = term
        self.seen_term = term
        self._clock = clock
        self._public_key = public_key
        self._secret_key = secret_key
        self._directory = Directory(job=job, process=process)
        self._saved = SavedReplies(num_peers=num_peers)
        self._timers: list[tuple[float, int, PendingReply]] = []
        self._num_timers = 0
        self._inbox: deque[Delivery] = deque()
        self._watched: dict[object, Callable[[], None]] = {}
        self._context = open_context(num_peers=num_peers)
        self._poller = zmq.Poller()
        self._links = PeerConnections(
            self._context, self._poller, public_key=public_key, secret_key=secret_key, clock=clock
        )
        self._zap = open_zap(self._context)
        self._poller.register(self._zap, zmq.POLLIN)
        self._router = open_router(
            self._context, public_key=public_key, secret_key=secret_key, bind=bind, listener=listener
        )
        self._poller.register(self._router, zmq.POLLIN)
        self._monitor: zmq.Socket[bytes] | None = None
        """Monitor of inbound connections, once `closed_connections` is asked for."""
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where peers reach this process."""
        self._connect_error = ""
        """Why the last attempt to open a connection failed; empty if it did not, or if there was no address."""
        self._closing: Fault | None = None
        """Set by `close`."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake_fd, self._woken)

    def closed_connections(self) -> int:
        """Return how many inbound connections were closed since the last call. The kernel closes those of a process
        that has died; a link that is cut closes none."""
        if self._monitor is None:
            self._monitor = open_monitor(self._router)
        return take_events(self._monitor)

    # The address book.

    @property
    def peers(self) -> dict[str, Peer]:
        """The address book: process → peer. It changes through `admit`, `forget` and `set_book`."""
        return self._directory.peers

    @property
    def book_number(self) -> int:
        """Number of the newest address book taken over; -1 before the first."""
        return self._directory.number

    def role_of_key(self, key: bytes) -> Role | None:
        """Return the role of the process that this public key is admitted as; None if it is not. Any thread may ask."""
        caller = self._directory.callers.get(key.decode())
        return caller.role if caller is not None else None

    def peer(self, *, host: str) -> Peer:
        """Entry of this process in an address book."""
        return Peer(self.process, self.incarnation, host, self.address, self._public_key)

    def admit(self, peer: Peer) -> None:
        """Admit a process with its key. A new key replaces the old one, and requests to the old process fail."""
        known = self._directory.peers.get(peer.process)
        if known == peer:
            return
        moved = known is not None and known.address != peer.address
        change = f"{peer.process} moved to {peer.address}" if moved else ""
        if known is not None and known.public_key != peer.public_key:
            change = f"{peer.process} was replaced by {peer.incarnation}"
            self._directory.remove(peer.process, self._fault(change))
        self._directory.add(peer)
        if change:  # After the new one was added: a callback of a failed request may repeat it immediately.
            self._close_link(peer.process, self._fault(change))
        answer = self._directory.late_admission(peer.public_key)
        if answer is not None:
            self._zap.send_multipart(answer)

    def set_book(self, book: AddressBook) -> bool:
        """Take over a newer address book, or what changed in it, and forget processes that are not in it any more.

        False for an older one, and for changes of a book that this process does not have: its heartbeats show that.
        """
        if not self._directory.accepts(book):
            return False
        for process in self._directory.removed_by(book):
            self.forget(process, self._fault(f"{process} is no longer in the address book"))
        self._directory.number = book.number
        for peer in book.peers:
            if peer.process != self.process:
                self.admit(peer)
        return True

    def forget(self, process: str, fault: Fault) -> None:
        """Remove a process that has ended: its key is refused from now on, and requests to it fail with this cause."""
        self._directory.remove(process, fault)
        self._close_link(process, fault)

    def _close_link(self, process: str, fault: Fault) -> None:
        if (link := self._links.close(process)) is None:
            return
        for pending in list(link.pending.values()):
            pending.settle(None, ProcessDied(f"{process}: {fault.message}", cause=fault))

    def _fault(self, message: str) -> Fault:
        return fault_of(ProcessDied(message), process=self.process, time=self._clock.wall())

    # Sending.

    def request(
        self,
        process: str,
        body: Body,
        *,
        deadline_s: float,
        on_done: Callable[[PendingReply], None] | None = None,
        cause_id: str | None = None,
    ) -> PendingReply:
        """Send a request without blocking. A later `poll` settles it and calls `on_done`.

        A request to a process that can not be reached is settled before this returns.
        """
        now = self._clock.monotonic()
        timer = RequestTimer.begin(now, deadline_s=deadline_s)
        pending = PendingReply(self, process, body, cause_id, on_done, now, timer)
        if self._closing is not None:
            pending.settle(None, ProcessDied(self._closing.message, cause=self._closing))
            return pending
        link = self._links.get(process) or self._connect(process)
        if link is None:
            pending.settle(None, self._unreachable_error(process))
            return pending
        pending.sequence = link.sequence = link.sequence + 1
        link.pending[pending.sequence] = pending
        self._transmit(link, pending.sequence, _REQUEST, body, cause_id)
        self._set_timer(pending)
        return pending

    def call(self, process: str, body: Body, *, deadline_s: float) -> Reply:
        """Send a request and wait for its reply or deadline. Messages that arrive meanwhile stay in the inbox."""
        pending = self.request(process, body, deadline_s=deadline_s)
        if (link := self._links.get(process)) is not None and is_readable_soon(
            link.socket, clock=self._clock
        ):
            self._drain_link(link)
        while not pending.done:
            left_s = pending.timer.deadline - self._clock.monotonic()
            wait(pending.attempt, whom=process, what=pending.what, timeout_s=left_s + 1.0, clock=self._clock)
        return pending.result()

    def send(self, process: str, body: Body, *, cause_id: str | None = None) -> bool:
        """Send a one-way message. False if the process is unknown or its queue is full."""
        link = self._links.get(process) or self._connect(process)
        if link is None:
            return False
        link.sequence += 1
        return self._transmit(link, link.sequence, _ONE_WAY, body, cause_id)

    def send_to_all(self, processes: Iterable[str], body: Body) -> None:
        """Send one one-way message to many processes; it is encoded once."""
        encoded = wire.encode_body(body)
        for process in processes:
            link = self._links.get(process) or self._connect(process)
            if link is not None:
                link.sequence += 1
                self._transmit(link, link.sequence, _ONE_WAY, encoded, None)

    def reply(self, delivery: Delivery, body: Body) -> None:
        """Answer a request, once. The reply is saved for repetitions of the request."""
        envelope = delivery.envelope
        assert envelope.kind is _REQUEST, f"{type(delivery.body).__name__} is one-way and has no reply"
        delivery.running.pop(envelope.sequence, None)
        frame = self._transmit_reply(delivery.route, envelope.sequence, body)
        self._saved.put(envelope, frame, now=self._clock.monotonic())

    def fail(self, delivery: Delivery, error: BaseException) -> Fault:
        """Answer a request with the error that it ended in; return the fault as it was sent."""
        fault = fault_of(error, process=self.process, time=self._clock.wall())
        self.reply(delivery, Failed(fault))
        return fault

    def _connect(self, process: str) -> PeerConnection | None:
        """Return a connection; None if the process is unknown, or if this one has no descriptor or socket left."""
        peer = self._directory.peers.get(process)
        self._connect_error = ""
        if peer is None or not peer.address:
            return None
        try:
            return self._links.open(peer)
        except zmq.ZMQError as error:
            COUNTERS.add("transport.not_connected")
            self._connect_error = str(error)
            return None

    def _unreachable_error(self, process: str) -> KintsugiError:
        """Return the error for a request to a process to which there is no connection."""
        if process in self._directory.peers and self._connect_error:
            return RefusedError(f"{process} can not be reached by {self.process}: {self._connect_error}")
        return self._directory.unreachable_error(process)

    def _transmit(
        self,
        link: PeerConnection,
        sequence: int,
        kind: MessageKind,
        body: Body | msgspec.Raw,
        cause_id: str | None,
    ) -> bool:
        envelope = Envelope(self.job, self.term, self.process, self.incarnation, sequence, kind, cause_id)
        try:
            send_frame(link.socket, wire.encode(envelope, body))
        except zmq.Again:
            COUNTERS.add("transport.queue_full")
            if not self._links.reopen_if_stuck(link, self._directory.peers[link.process]):
                return False
            for pending in link.pending.values():  # Including this one, if it is a request.
                self._transmit_request(link, pending)
            return kind is _REQUEST or self._transmit(link, sequence, kind, body, cause_id)
        link.blocked_since = None
        return True

    def _transmit_request(self, link: PeerConnection, pending: PendingReply) -> bool:
        return self._transmit(link, pending.sequence, _REQUEST, pending.body, pending.cause_id)

    def _transmit_reply(self, route: bytes, sequence: int, body: Body) -> bytes:
        envelope = Envelope(self.job, self.term, self.process, self.incarnation, sequence, _REPLY)
        frame = wire.encode(envelope, body)
        send_frame(self._router, frame, route=route)
        return frame

    # The loop.

    def poll(self, timeout_s: float) -> list[Delivery]:
        """Run the loop for at most `timeout_s` seconds or until an event; return the inbound messages in order.

        Admits connections, settles replies, repeats due requests and calls the callbacks of watched descriptors.
        """
        if not self._inbox:
            wait(self._attempt_turn, whom="anyone", what="a message", timeout_s=timeout_s, clock=self._clock)
        deliveries = list(self._inbox)
        self._inbox.clear()
        return deliveries

    def _attempt_turn(self, remaining_s: float) -> bool:
        self.turn(remaining_s)
        return True

    def turn(self, timeout_s: float) -> None:
        """Run one round of the loop; messages that arrive go to the inbox, for the next `poll`. Replies that have
        arrived are read before requests expire."""
        timeout_s = min(timeout_s, self._until_timer_s())
        # A callback may close a descriptor and another one open a new file under its number. An event is therefore only
        # delivered to the callback that was watching when it was polled; the poller reports a readable file again.
        events = self._poller.poll(milliseconds(timeout_s))
        for socket, watcher in [(socket, self._watched.get(socket)) for socket, _ in events]:
            if socket is self._router:
                self._drain_router()
            elif socket is self._zap:
                self._answer_zap()
            elif (link := self._links.by_socket.get(socket)) is not None:
                self._drain_link(link)
            elif watcher is not None and self._watched.get(socket) is watcher:
                watcher()
        self._run_timers()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop whenever the descriptor is readable (a pidfd, a signalfd, a pipe)."""
        self._watched[descriptor] = callback
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor; to be called before it is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def wake(self) -> None:
        """Make the current or next `poll` return; from any thread, as long as the endpoint is open."""
        os.eventfd_write(self._wake_fd, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def close(self, *, flush_s: float = 0.0) -> None:
        """Fail all pending requests and close; sent messages are flushed for at most `flush_s` seconds.

        Requests fail while the sockets are still open, because a callback may send replies. A request that a callback
        makes fails as well.
        """
        fault = self._closing = self._fault(f"{self.process} closed its endpoint")
        for link in list(self._links.values()):
            failed, link.pending = tuple(link.pending.values()), {}
            for pending in failed:
                pending.settle(None, ProcessDied(fault.message, cause=fault))
        self.unwatch(self._wake_fd)
        os.close(self._wake_fd)
        wait(self._attempt_flush, whom="its peers", what="the last messages to be taken", timeout_s=flush_s)

    def _attempt_flush(self, remaining_s: float) -> bool:
        self._context.destroy(linger=milliseconds(remaining_s))
        return True

    def _set_timer(self, pending: PendingReply) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (pending.timer.due, self._num_timers, pending))

    def _until_timer_s(self) -> float:
        """Return how long the loop may wait for events."""
        timers = self._timers
        while timers and timers[0][2].done:
            heapq.heappop(timers)
        return max(0.0, timers[0][0] - self._clock.monotonic()) if timers else math.inf

    def _run_timers(self) -> None:
        """Repeat or expire the requests that are due."""
        now = self._clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, pending = heapq.heappop(self._timers)
            if not pending.done:
                self._repeat_or_expire(pending, now)

    def _repeat_or_expire(self, pending: PendingReply, now: float) -> None:
        link = self._links[pending.process]
        if pending.timer.fire(now):
            COUNTERS.add("transport.resent")
            self._transmit_request(link, pending)
            self._set_timer(pending)
        else:
            del link.pending[pending.sequence]
            waited_s = now - pending.since
            pending.settle(None, DeadlineExceeded(whom=pending.process, what=pending.what, waited_s=waited_s))

    # Receiving.

    def _answer_zap(self) -> None:
        while True:
            try:
                question = self._zap.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            answer = self._directory.admission(question)
            if answer is None:
                COUNTERS.add("transport.not_admitted_yet")
            else:
                self._zap.send_multipart(answer)

    def _drain_router(self) -> None:
        router = self._router
        for _ in range(DRAINED_MESSAGES):
            try:
                route = router.recv(NOBLOCK)
            except zmq.Again:
                return
            frame = router.recv(NOBLOCK, copy=False)
            drop_rest(router, frame)
            self._receive(route, str(frame.get("User-Id")), frame.buffer)
            if not is_readable(router):
                return

    def _receive(self, route: bytes, key: str, frame: memoryview) -> None:
        """Check one inbound message and put it into the inbox. Never raises, whatever the message holds."""
        try:
            message = wire.decode(frame)
        except msgspec.MsgspecError as error:
            self._receive_malformed(route, key, frame, str(error))
            return
        envelope, body = message.envelope, message.body
        if why := self._directory.why_refused(key, envelope, term=self.seen_term, body=body):
            self._refuse(route, envelope, RefusedError(why))
            return
        caller = self._directory.callers[key]
        if envelope.kind is _REQUEST and self._is_repeated(caller, envelope, route):
            return
        if envelope.term < self.term and type(body) is not Register:
            self._refuse(route, envelope, EpochOver(f"term {envelope.term} is over, it is {self.term}"))
            return
        self.seen_term = self._directory.newest_term(self.seen_term, by=envelope.sender, of=envelope)
        if len(self._inbox) >= QUEUED_MESSAGES or len(caller.running) >= QUEUED_MESSAGES:
            # A request will be repeated; a one-way message may be lost.
            COUNTERS.add("transport.inbox_full")
            return
        delivery = Delivery(envelope, body, caller.peer, route, caller.running)
        if envelope.kind is _REQUEST:
            caller.running[envelope.sequence] = delivery
        self._inbox.append(delivery)

    def _receive_malformed(self, route: bytes, key: str, frame: memoryview, error: str) -> None:
        """Refuse a message with an unreadable body; a frame without an envelope is only counted."""
        COUNTERS.add("transport.malformed")
        try:
            envelope = wire.decode_envelope(frame)
        except msgspec.MsgspecError:
            return
        why = self._directory.why_refused(key, envelope, term=self.seen_term)
        self._refuse(route, envelope, RefusedError(why or f"malformed body: {error}"))

    def _is_repeated(self, caller: Caller, envelope: Envelope, route: bytes) -> bool:
        if (running := caller.running.get(envelope.sequence)) is not None:
            running.route = route
            return True
        if (saved := self._saved.get(envelope)) is None:
            return False
        if saved.frame is not None:
            COUNTERS.add("transport.answered_again")
            send_frame(self._router, saved.frame, route=route)
            return True
        if self._clock.monotonic() < saved.until:
            return True
        self._saved.drop(envelope)
        return False

    def _refuse(self, route: bytes, envelope: Envelope, error: RefusedError) -> None:
        """Reply with the reason. A one-way message gets a reply too, so that its sender learns of a newer term."""
        COUNTERS.add("transport.refused")
        if envelope.kind is not _REPLY:
            fault = fault_of(error, process=self.process, time=self._clock.wall())
            self._transmit_reply(route, envelope.sequence, Failed(fault))

    def _drain_link(self, link: PeerConnection) -> None:
        socket = link.socket
        for _ in range(DRAINED_MESSAGES):
            try:
                frame = socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return
            drop_rest(socket, frame)
            self._receive_reply(link, frame.buffer)
            # A callback may have closed the connection. Without a pending request no further reply is expected.
            if socket.closed or not link.pending or not is_readable(socket):
                return

    def _receive_reply(self, link: PeerConnection, frame: memoryview) -> None:
        """Settle the request that this frame answers: the connection proves the sender, its number the request."""
        try:
            message = wire.decode(frame)
        except msgspec.MsgspecError:
            COUNTERS.add("transport.malformed")
            return
        envelope, body = message.envelope, message.body
        if envelope.kind is not _REPLY:
            COUNTERS.add("transport.refused")
            return
        self.seen_term = self._directory.newest_term(self.seen_term, by=link.process, of=envelope)
        if isinstance(body, Failed) and body.fault.kind == EpochOver.__name__:
            # Not a reply: the request is repeated under the new term, once that is adopted.
            return
        if (pending := link.pending.pop(envelope.sequence, None)) is None:
            return
        if isinstance(body, Failed):
            pending.settle(None, RemoteError(body.fault))
        else:
            pending.settle(Reply(body), None)


BLOCKED_S = 0.5
"""A connection that has accepted no message for this long, because it is closed or full, is replaced."""


class PeerConnection:
    """Connection to one peer, and the unanswered requests on it."""

    __slots__ = ("blocked_since", "pending", "process", "sequence", "socket")

    def __init__(self, process: str, socket: zmq.Socket[bytes], sequence: int) -> None:
        self.process = process
        self.socket = socket
        self.sequence = sequence
        self.blocked_since: float | None = None
        """When it first refused a message after the last one that it accepted."""
        self.pending: dict[int, PendingReply] = {}


class PeerConnections(dict[str, PeerConnection]):
    """Process → connection. All of their sockets are in the poller."""

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
        self._context = context
        self._poller = poller
        self._clock = clock
        self._public_key = public_key
        self._secret_key = secret_key
        self._sequences: dict[str, int] = {}
        self.by_socket: dict[object, PeerConnection] = {}

    def open(self, peer: Peer) -> PeerConnection:
        """Connect to a peer. Sequence numbers continue, because it may still hold replies to earlier ones."""
        link = PeerConnection(peer.process, self._open_socket(peer), self._sequences.get(peer.process, 0))
        self[peer.process] = self.by_socket[link.socket] = link
        return link

    def close(self, process: str) -> PeerConnection | None:
        """Close a connection; the caller settles the requests on it."""
        if (link := self.pop(process, None)) is not None:
            self._sequences[process] = link.sequence
            self._close_socket(link)
        return link

    def reopen_if_stuck(self, link: PeerConnection, peer: Peer) -> bool:
        """Replace a connection that has refused messages for a while; True if it was replaced.

        The caller repeats its requests. One-way messages that it held are lost.
        """
        now = self._clock.monotonic()
        if link.blocked_since is None:
            link.blocked_since = now
        if now - link.blocked_since < BLOCKED_S:
            return False
        link.blocked_since = None
        try:
            socket = self._open_socket(peer)
        except zmq.ZMQError:  # No file descriptor is free; the next attempt may succeed.
            return False
        COUNTERS.add("transport.reopened")
        self._close_socket(link)
        link.socket = socket
        self.by_socket[socket] = link
        return True

    def _open_socket(self, peer: Peer) -> zmq.Socket[bytes]:
        socket = open_dealer(
            self._context, peer=peer, public_key=self._public_key, secret_key=self._secret_key
        )
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _close_socket(self, link: PeerConnection) -> None:
        del self.by_socket[link.socket]
        self._poller.unregister(link.socket)
        link.socket.close(0)
