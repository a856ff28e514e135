"""Membership of a process in the run: registration with the master, heartbeats, and shutdown.

`Membership` does not block: a loop drives it with `tick` and `handle`. That is the process's own loop (master's agents,
the generation manager, rollout workers), or the control thread of `process/shell.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import (
    AddressBook,
    Heartbeat,
    Ok,
    Ping,
    Register,
    Registered,
    Shutdown,
)
from kintsugi.protocol.messages import Body
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS, IDLENESS, SAVE_PROGRESS
from kintsugi.runtime.peak_memory import PEAKS
from kintsugi.runtime.waits import WAITS
from kintsugi.telemetry.readings import HeartbeatReading, ReadingsLog
from kintsugi.transport import Delivery, Endpoint, PendingReply
from kintsugi.types import ChildReport

HEARTBEAT_S = 0.5
ORPHANED = "agent and launcher are gone"
REGISTER_DEADLINE_S = 30.0
FLUSH_S = 1.0
MAX_UNSENT = 1024
"""Messages kept for a master that is being restarted. It can do without them: a registration lists living children."""


class ControlThreadService(Protocol):
    """Part of a process that exchanges messages in the control thread, independently of the main thread."""

    def tick(self, now: float) -> None:
        """Called at least every `HEARTBEAT_S` / 2."""
        ...

    def handle(self, delivery: Delivery) -> bool:
        """Handle a message; False if it belongs to another part."""
        ...


class ShuttingDown(Exception):
    """Not an error: this process was asked to end, and its main thread has to return."""


def open_endpoint(bootstrap: Bootstrap, *, clock: Clock = SYSTEM_CLOCK) -> Endpoint:
    """Open the endpoint that a bootstrap describes; the master and the first peers are admitted."""
    endpoint = Endpoint(
        job=bootstrap.job,
        process=bootstrap.process,
        incarnation=bootstrap.incarnation,
        public_key=bootstrap.public_key,
        secret_key=bootstrap.secret_key,
        bind=bootstrap.bind,
        listener=bootstrap.listener,
        clock=clock,
        term=bootstrap.term,
        num_peers=bootstrap.num_processes,
    )
    if bootstrap.known_as:
        endpoint.address = f"tcp://{bootstrap.known_as}:{endpoint.address.rpartition(':')[2]}"
    for peer in (bootstrap.master, *bootstrap.peers):
        if peer.process != bootstrap.process:
            endpoint.admit(peer)
    return endpoint


def watch_lifeline(endpoint: Endpoint, descriptor: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once, when the last write end of this process's lifeline pipe is closed: agent and launcher have
    ended. No data is ever written to a lifeline."""

    def ended() -> None:
        endpoint.unwatch(descriptor)
        on_end()

    endpoint.watch(descriptor, ended)


class Membership:
    """Registers this process with the master, again for every new term, and sends heartbeats.

    `tick` does what is due; `handle` takes the messages that concern membership. Neither blocks. There is no deadline
    for a silent master: its agent restarts it, and the new one begins a new term. Heartbeats are recorded in the run
    folder too, also while there is no master to send them to.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        bootstrap: Bootstrap,
        *,
        capabilities: dict[str, str],
        children: Callable[[], tuple[ChildReport, ...]] = tuple,
    ) -> None:
        IDLENESS.begin()
        self._endpoint = endpoint
        self._children = children
        """Called for every registration: a new master takes a child that an agent does not list for lost."""
        self._master = bootstrap.master.process
        self._register = Register(
            endpoint.peer(host=bootstrap.host), bootstrap.role, os.getpid(), capabilities
        )
        self._pending: PendingReply | None = None
        self._next_beat = 0.0
        self.readings = ReadingsLog(bootstrap.run_dir, process=bootstrap.process)
        """Log of this process's heartbeats and, for an agent, of its host's readings."""
        self._unsent: deque[Body] = deque(maxlen=MAX_UNSENT)
        self.registered = False
        self.shutdown_reason: str | None = None
        """Set once the master, or the end of the lifeline, asks this process to end."""
        self.shutdown_exit_code = 0
        """Exit code of the run, as the master sent it."""
        self.load = 0.0
        """Load of this process by its own measure; sent with every heartbeat."""
        self.gauges: dict[str, float] = {}
        """Further metrics of this moment, sent with every heartbeat: "pages_free"."""

    def end_with_lifeline(self, descriptor: int) -> None:
        """Ask this process to shut down when its lifeline ends."""

        def ended() -> None:
            self.shutdown_reason = ORPHANED

        watch_lifeline(self._endpoint, descriptor, ended)

    def tick(self, now: float) -> None:
        """Register if the master does not know this process or a newer term has begun; else send a due heartbeat."""
        endpoint = self._endpoint
        if endpoint.seen_term > endpoint.term:
            endpoint.term = endpoint.seen_term
            self.registered = False
        is_due = now >= self._next_beat
        if not self.registered:
            self._try_register()
        if is_due:
            self._next_beat = now + HEARTBEAT_S
            self._beat()
        while self._unsent and self.registered:
            endpoint.send(self._master, self._unsent.popleft())

    def _beat(self) -> None:
        """Send a heartbeat to the master, if this process is registered, and record it in the run folder."""
        progress, waits = COUNTERS.snapshot(), WAITS.declared()
        gauges = self.gauges | IDLENESS.gauges() | PEAKS.gauges() | SAVE_PROGRESS.gauges()
        if self.registered:
            heartbeat = Heartbeat(progress, self.load, waits, self._endpoint.book_number, gauges)
            self._endpoint.send(self._master, heartbeat)
        self.readings.write(
            HeartbeatReading(self._endpoint.incarnation, progress.counters, self.load, waits, gauges)
        )

    def send_to_master(self, body: Body) -> None:
        """Send now, or after the next registration: a new master refuses messages of unregistered processes."""
        if self.registered:
            self._endpoint.send(self._master, body)
        else:
            self._unsent.append(body)

    def _try_register(self) -> None:
        if self._pending is None:
            register = msgspec.structs.replace(self._register, children=self._children())
            self._pending = self._endpoint.request(self._master, register, deadline_s=REGISTER_DEADLINE_S)
        if not self._pending.done:
            return
        pending, self._pending = self._pending, None
        if isinstance(pending.error, DeadlineExceeded):
            return
        term = pending.result().expect(Registered).term
        # The reply may be of a master that has been replaced since; its successor does not know this process.
        if term >= self._endpoint.term:
            self._endpoint.term = term
            self._endpoint.seen_term = max(self._endpoint.seen_term, term)
            self.registered = True
            self._next_beat = 0.0

    def handle(self, delivery: Delivery) -> bool:
        """Handle a message that concerns membership; False for any other."""
        body = delivery.body
        if isinstance(body, Ping) and delivery.wants_reply:
            self._endpoint.reply(delivery, Ok())
        elif isinstance(body, AddressBook):
            # The master stays admitted even if the book does not list it.
            listed = body.since is not None or any(peer.process == self._master for peer in body.peers)
            peers = body.peers if listed else (*body.peers, self._endpoint.peers[self._master])
            self._endpoint.set_book(msgspec.structs.replace(body, peers=peers))
        elif isinstance(body, Shutdown):
            self.shutdown_reason, self.shutdown_exit_code = body.reason, body.exit_code
        else:
            return False
        return True
