"""The control thread of a worker that computes in its main thread.

`Shell` runs an endpoint and a membership in a thread of their own, so that the process answers pings and sends
heartbeats while its main thread computes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kintsugi.errors import DeadlineExceeded, fault_of
from kintsugi.process.exit_codes import EXIT_ORPHANED
from kintsugi.process.membership import (
    FLUSH_S,
    HEARTBEAT_S,
    ORPHANED,
    REGISTER_DEADLINE_S,
    ControlThreadService,
    Membership,
    ShuttingDown,
    open_endpoint,
    watch_lifeline,
)
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import (
    Failed,
)
from kintsugi.protocol.messages import Body
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS, IDLENESS
from kintsugi.runtime.waits import join, wait
from kintsugi.telemetry.events import EventLog, FaultSeen, ProcessEnded
from kintsugi.transport import Delivery, PendingReply, Reply
from kintsugi.types import Peer, Role

GRACE_S = 5.0


class ReplyHandle(Protocol):
    """A request that was sent: `Future`, or a stand-in for it in tests."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Reply: ...


class Mailbox(Protocol):
    """The part of `Shell` that the main thread of a worker uses: requests come in, replies and messages go out."""

    @property
    def process(self) -> str: ...

    @property
    def keys(self) -> tuple[bytes, bytes]: ...

    def peer(self, process: str) -> Peer | None: ...

    def next_request(self, timeout_s: float) -> Delivery | None: ...

    def take_all(self) -> list[Delivery]: ...

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> None: ...

    def send(self, process: str, body: Body) -> None: ...

    def submit(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle: ...

    def report(self, *, load: float, gauges: dict[str, float]) -> None: ...

    def wake(self) -> None: ...


class Future:
    """Result of a request that the control thread makes for another thread."""

    def __init__(self, *, process: str, what: str, deadline_s: float) -> None:
        self._process = process
        self._what = what
        self._deadline_s = deadline_s
        self._settled = threading.Event()
        self._reply: Reply | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._settled.is_set()

    def result(self) -> Reply:
        """Wait for the reply, at most until the request's deadline, and return it or raise its error."""
        wait(
            lambda remaining_s: self._settled.wait(remaining_s) or None,
            whom=self._process,
            what=self._what,
            timeout_s=self._deadline_s + GRACE_S,
        )
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def settle(self, reply: Reply | None, error: Exception | None) -> None:
        """Called in the control thread when the request is done, or when the process shuts down before."""
        if not self._settled.is_set():
            self._reply, self._error = reply, error
            self._settled.set()


class Shell:
    """The endpoint of a worker in a control thread, and the main thread's interface to it.

    The control thread consumes messages of the endpoint and orders of the main thread, produces requests for the main
    thread and results of its futures, waits for either or for the next heartbeat, and ends when the shell is closed.
    """

    def __init__(
        self, bootstrap: Bootstrap, *, capabilities: dict[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.bootstrap = bootstrap
        self.counters = COUNTERS
        self.events = EventLog(
            RunFolder(bootstrap.run_dir).events_file(bootstrap.process), process=bootstrap.process
        )
        self._clock = clock
        self._endpoint = open_endpoint(bootstrap, clock=clock)
        self._membership = Membership(self._endpoint, bootstrap, capabilities=capabilities)
        self._requests: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._orders: deque[Callable[[], object]] = deque()
        self._services: tuple[ControlThreadService, ...] = ()
        self._futures: dict[PendingReply, Future] = {}
        self._ended: str | None = None
        self._orphaned_at: float | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @classmethod
    def start(cls, bootstrap: Bootstrap, *, capabilities: dict[str, str] | None = None) -> Shell:
        """Create a shell and register with the master. ShuttingDown if this process is asked to end before that."""
        shell = cls(bootstrap, capabilities=capabilities or {})
        try:
            shell.join_run()
        except BaseException:
            shell.close()
            raise
        return shell

    def join_run(self) -> None:
        """Start the control thread and wait until this process is registered."""
        self._thread.start()
        wait(
            lambda remaining_s: self._registered.wait(remaining_s) or None,
            whom=self.bootstrap.master.process,
            what="Registered",
            timeout_s=REGISTER_DEADLINE_S,
        )
        self._raise_if_ended()

    @property
    def process(self) -> str:
        return self.bootstrap.process

    @property
    def address(self) -> str:
        return self._endpoint.address

    def report(self, *, load: float, gauges: dict[str, float]) -> None:
        """Set load and metrics for the next heartbeat."""
        self._membership.load = load
        self._membership.gauges = gauges

    def add_service(self, service: ControlThreadService) -> None:
        """Run a service in the control thread from now on."""
        self._services += (service,)

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Key pair of this process, (public, secret)."""
        return self.bootstrap.public_key, self.bootstrap.secret_key

    def peer(self, process: str) -> Peer | None:
        """Return the entry of a process in the address book."""
        return self._endpoint.peers.get(process)

    def role_of_key(self, key: bytes) -> Role | None:
        """Return the role of the process to which the address book assigns this public key. Any thread may ask."""
        return self._endpoint.role_of_key(key)

    # For the main thread.

    def next_request(self, timeout_s: float) -> Delivery | None:
        """Wait for the next request or message; None after `timeout_s` seconds, or when woken. ShuttingDown once the
        process is asked to end."""
        self._raise_if_ended()
        since = SYSTEM_CLOCK.monotonic()
        try:
            (delivery,) = wait(self._attempt_request, whom="anyone", what="a request", timeout_s=timeout_s)
        except DeadlineExceeded:
            return None
        finally:
            IDLENESS.add(SYSTEM_CLOCK.monotonic() - since)
        self._raise_if_ended()
        return delivery

    def wake(self) -> None:
        """Let `next_request` in the main thread return; for other threads of the process."""
        self._requests.put(None)

    def _attempt_request(self, remaining_s: float) -> tuple[Delivery | None] | None:
        try:
            return (self._requests.get(timeout=remaining_s),)
        except queue.Empty:
            return None
        finally:
            self._raise_if_ended()

    def take_all(self) -> list[Delivery]:
        """Return all requests that have arrived, without waiting."""
        self._raise_if_ended()
        deliveries: list[Delivery] = []
        while not self._requests.empty():
            delivery = self._requests.get_nowait()
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    def reply(self, delivery: Delivery, body: Body) -> None:
        """Answer a request."""
        self._order(lambda: self._endpoint.reply(delivery, body))

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Answer a request with the error that it ended in, and record the fault."""
        fault = fault_of(error, process=self.process, time=self._clock.wall())
        self.reply(delivery, Failed(fault))
        self.events.emit(FaultSeen(fault))

    def send(self, process: str, body: Body) -> None:
        """Send a one-way message."""
        self._order(lambda: self._endpoint.send(process, body))

    def submit(self, process: str, body: Body, *, deadline_s: float) -> Future:
        """Send a request without waiting for the reply."""
        self._raise_if_ended()
        future = Future(process=process, what=type(body).__name__, deadline_s=deadline_s)
        self._order(lambda: self._submit(future, process, body, deadline_s))
        return future

    def call(self, process: str, body: Body, *, deadline_s: float) -> Reply:
        """Send a request and wait for the reply."""
        return self.submit(process, body, deadline_s=deadline_s).result()

    def close(self) -> None:
        """End the control thread after all orders of the main thread have been carried out."""
        self._closing = True
        if self._thread.is_alive():
            self._endpoint.wake()
            join(self._thread, whom="control thread", what="its end", timeout_s=GRACE_S)
        self._membership.readings.close()
        self.events.close()

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended is not None:
            raise ShuttingDown(self._ended)

    def _order(self, order: Callable[[], object]) -> None:
        self._orders.append(order)
        self._endpoint.wake()

    # In the control thread.

    def _submit(self, future: Future, process: str, body: Body, deadline_s: float) -> None:
        if self._ended is not None:
            future.settle(None, ShuttingDown(self._ended))
            return
        pending = self._endpoint.request(process, body, deadline_s=deadline_s)
        if pending.done:
            future.settle(pending.reply, pending.error)
            return
        self._futures[pending] = future
        pending.on_done = self._settle

    def _settle(self, pending: PendingReply) -> None:
        self._futures.pop(pending).settle(pending.reply, pending.error)

    def _run(self) -> None:
        try:
            watch_lifeline(self._endpoint, self.bootstrap.lifeline, self._lifeline_ended)
            while not self._closing:
                self._turn()
            self._carry_out_orders()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost boundary: the main thread raises it.
            self._failure = error
            self._registered.set()
            self._requests.put(None)
        finally:
            # A process that was asked to end has no receiver any more; one that ends on its own flushes its messages.
            flush_s = FLUSH_S if self._ended is None else 0.0
            self._end("the control thread has ended")
            self._endpoint.close(flush_s=flush_s)

    def _turn(self) -> None:
        membership = self._membership
        now = self._clock.monotonic()
        membership.tick(now)
        for service in self._services:
            service.tick(now)
        if membership.registered:
            self._registered.set()
        if membership.shutdown_reason is not None and self._ended is None:
            self._end(membership.shutdown_reason)
        if self._orphaned_at is not None and now > self._orphaned_at + GRACE_S:
            self.events.emit(
                ProcessEnded(EXIT_ORPHANED, "the main thread did not end after the lifeline did")
            )
            os._exit(EXIT_ORPHANED)
        self._carry_out_orders()
        for delivery in self._endpoint.poll(HEARTBEAT_S / 2):
            if not any(each.handle(delivery) for each in (membership, *self._services)):
                self._requests.put(delivery)

    def _carry_out_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _lifeline_ended(self) -> None:
        self._orphaned_at = self._clock.monotonic()
        self._end(ORPHANED)

    def _end(self, reason: str) -> None:
        """Make the main thread end: every wait for the shell raises ShuttingDown."""
        if self._ended is None:
            self._ended = reason
        self._registered.set()
        self._requests.put(None)
        for future in self._futures.values():
            future.settle(None, ShuttingDown(reason))
