"""The control side of a worker process: registration, heartbeats, requests in and out, and a clean end.

`Membership` keeps one process known to the master; a single loop (the generation manager) drives it with `tick`.
`Shell` runs an endpoint and a membership in a thread of their own, so that a process whose main thread computes still
answers pings and sends heartbeats. `run_process` is the outermost boundary of every process of ours.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.errors import DeadlineExceeded, UserError, fault_of
from kintsugi.messages import AddressBook, Body, Failed, Heartbeat, Ok, Ping, Register, Registered, Shutdown
from kintsugi.observe.events import EventLog, FaultSeen, Note, ProcessBegan, ProcessEnded, events_path
from kintsugi.observe.figures import Beat, FiguresLog
from kintsugi.observe.spans import SpanLog
from kintsugi.runtime import COUNTERS, IDLENESS, SYSTEM_CLOCK, WAITS, Clock, wait
from kintsugi.transport import Blob, Delivery, Endpoint, PendingReply, Reply
from kintsugi.types import ChildReport, Peer, Role

HEARTBEAT_S = 0.5
REGISTER_DEADLINE_S = 30.0
GRACE_S = 5.0
FLUSH_S = 1.0
MOST_UNTOLD = 1024
"""So much can be kept for a master that is being restarted; it is told of the living in any case."""
EXIT_ERROR, EXIT_USER_ERROR, EXIT_ORPHANED = 1, 2, 70

MAINS: dict[Role, str] = {
    Role.MASTER: "kintsugi.control.shell:main",
    Role.MODEL: "kintsugi.training.worker:main",
    Role.ROLLOUT: "kintsugi.rollout.worker:main",
    Role.MANAGER: "kintsugi.generation.manager:main",
    Role.SERVER: "kintsugi.generation.server:main",
}


class Attendant(Protocol):
    """Has business of its own with other processes, beside the main thread; lives in the control thread."""

    def tick(self, now: float) -> None:
        """Called at least every `HEARTBEAT_S` / 2."""
        ...

    def handle(self, delivery: Delivery) -> bool:
        """Take a message; False if it is someone else's business."""
        ...


class ShuttingDown(Exception):
    """Not an error: this process was told to end, and the main thread is to return."""


def open_endpoint(bootstrap: Bootstrap, *, clock: Clock = SYSTEM_CLOCK) -> Endpoint:
    """The endpoint of a process as its bootstrap describes it; master and first peers are admitted."""
    endpoint = Endpoint(
        job=bootstrap.job,
        process=bootstrap.process,
        incarnation=bootstrap.incarnation,
        public_key=bootstrap.public_key,
        secret_key=bootstrap.secret_key,
        bind=bootstrap.bind,
        listener=bootstrap.listener,
        clock=clock,
        epoch=bootstrap.epoch,
    )
    if bootstrap.known_as:
        endpoint.address = f"tcp://{bootstrap.known_as}:{endpoint.address.rpartition(':')[2]}"
    for peer in (bootstrap.master, *bootstrap.peers):
        if peer.process != bootstrap.process:
            endpoint.admit(peer)
    return endpoint


class Membership:
    """Keeps this process known to the master: registers (again for every new epoch), then sends heartbeats.

    `tick` does what is due; `handle` takes the messages that concern membership. Neither blocks. A master that says
    nothing is waited for: its agent restarts it, and the new one begins a new epoch. What a heartbeat says is recorded
    in the run folder too, also while there is nobody to send it to.
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
        """Asked anew for every registration: what an agent's list leaves out is lost to the new master."""
        self._master = bootstrap.master.process
        self._register = Register(
            endpoint.peer(host=bootstrap.host), bootstrap.role, os.getpid(), capabilities
        )
        self._pending: PendingReply | None = None
        self._next_beat = 0.0
        self.figures = FiguresLog(bootstrap.run_dir, process=bootstrap.process)
        """What is recorded of this process, and of others by it."""
        self._untold: deque[Body] = deque(maxlen=MOST_UNTOLD)
        self.registered = False
        self.shutdown_reason: str | None = None
        """Set once the master (or the end of the lifeline) tells this process to end."""
        self.shutdown_exit_code = 0
        """Of the run, as the master said it."""
        self.load = 0.0
        """How busy this process is, as it judges itself; sent with every heartbeat."""
        self.gauges: dict[str, float] = {}
        """What else it has to say about itself, as of now: "pages_free"."""

    def tick(self, now: float) -> None:
        """Register if the master does not know us or a newer epoch has begun; else send the heartbeat when due."""
        endpoint = self._endpoint
        if endpoint.seen_epoch > endpoint.epoch:
            endpoint.epoch = endpoint.seen_epoch
            self.registered = False
        is_due = now >= self._next_beat
        if not self.registered:
            self._try_register()
        if is_due:
            self._next_beat = now + HEARTBEAT_S
            self._beat()
        while self._untold and self.registered:
            endpoint.send(self._master, self._untold.popleft())

    def _beat(self) -> None:
        """Say how this process is: to the master, if it knows us, and to whoever asks later."""
        progress, waits = COUNTERS.snapshot(), WAITS.declared()
        gauges = self.gauges | IDLENESS.gauges()
        if self.registered:
            heartbeat = Heartbeat(progress, self.load, waits, self._endpoint.book_number, gauges)
            self._endpoint.send(self._master, heartbeat)
        self.figures.write(Beat(self._endpoint.incarnation, progress.counters, self.load, waits, gauges))

    def tell(self, body: Body) -> None:
        """Now, or when it knows us: a master of a new epoch takes nothing from who has not registered with it."""
        if self.registered:
            self._endpoint.send(self._master, body)
        else:
            self._untold.append(body)

    def _try_register(self) -> None:
        if self._pending is None:
            register = msgspec.structs.replace(self._register, children=self._children())
            self._pending = self._endpoint.request(self._master, register, deadline_s=REGISTER_DEADLINE_S)
        if not self._pending.done:
            return
        pending, self._pending = self._pending, None
        if isinstance(pending.error, DeadlineExceeded):
            return
        epoch = pending.result().expect(Registered).epoch
        # A master that has been replaced meanwhile may still have answered: that one's successor does not know us.
        if epoch >= self._endpoint.epoch:
            self._endpoint.epoch = epoch
            self._endpoint.seen_epoch = max(self._endpoint.seen_epoch, epoch)
            self.registered = True
            self._next_beat = 0.0  # So that it is heard of soon.

    def handle(self, delivery: Delivery) -> bool:
        """Take a message that concerns membership; False if it is someone else's business."""
        body = delivery.body
        if isinstance(body, Ping) and delivery.wants_reply:
            self._endpoint.reply(delivery, Ok())
        elif isinstance(body, AddressBook):
            # The master stays known even if the book leaves it out: it is whom we report to.
            listed = any(peer.process == self._master for peer in body.peers)
            peers = body.peers if listed else (*body.peers, self._endpoint.peers[self._master])
            self._endpoint.set_book(AddressBook(body.number, peers))
        elif isinstance(body, Shutdown):
            self.shutdown_reason, self.shutdown_exit_code = body.reason, body.exit_code
        else:
            return False
        return True


class Future:
    """A request that the control thread carries out for another thread."""

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
        """Wait for the reply (at most for the request's deadline) and give it, or raise what it ended with."""
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
        """Called in the control thread when the request is done, or when the process is to end before it is."""
        if not self._settled.is_set():
            self._reply, self._error = reply, error
            self._settled.set()


class Shell:
    """The endpoint of a worker in a thread of its own, and the main thread's way to it.

    The control thread consumes what arrives on the endpoint and what the main thread hands it, produces requests for
    the main thread and replies for its futures, waits for either (or for the next heartbeat), and ends when the shell
    is closed.
    """

    def __init__(
        self, bootstrap: Bootstrap, *, capabilities: dict[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.bootstrap = bootstrap
        self.counters = COUNTERS
        self.events = EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
        self._clock = clock
        self._endpoint = open_endpoint(bootstrap, clock=clock)
        self._membership = Membership(self._endpoint, bootstrap, capabilities=capabilities)
        self._requests: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._orders: deque[Callable[[], object]] = deque()
        self._attendants: tuple[Attendant, ...] = ()
        self._futures: dict[PendingReply, Future] = {}
        self._ended: str | None = None
        self._orphaned_at: float | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._registered = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @classmethod
    def start(cls, bootstrap: Bootstrap, *, capabilities: dict[str, str] | None = None) -> Shell:
        """A shell that the master knows. ShuttingDown if this process is to end before that."""
        shell = cls(bootstrap, capabilities=capabilities or {})
        try:
            shell.join_run()
        except BaseException:
            shell.close()
            raise
        return shell

    def join_run(self) -> None:
        """Start the control thread and wait until the master knows this process."""
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
        """How busy this process is, and what there is to say of it; sent with the next heartbeat."""
        self._membership.load, self._membership.gauges = load, gauges

    def attend(self, attendant: Attendant) -> None:
        """Let somebody live in the control thread from now on."""
        self._attendants += (attendant,)

    def peer(self, process: str) -> Peer | None:
        """What the address book says about a process."""
        return self._endpoint.peers.get(process)

    # For the main thread.

    def next_request(self, timeout_s: float) -> Delivery | None:
        """The next request or message; None after `timeout_s` seconds, or when woken. ShuttingDown once the process is
        to end."""
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
        """Let the main thread look up from waiting for requests; for its other threads."""
        self._requests.put(None)

    def _attempt_request(self, remaining_s: float) -> tuple[Delivery | None] | None:
        try:
            return (self._requests.get(timeout=remaining_s),)
        except queue.Empty:
            return None
        finally:
            self._raise_if_ended()

    def take_all(self) -> list[Delivery]:
        """Every request that is there, without waiting."""
        self._raise_if_ended()
        deliveries: list[Delivery] = []
        while not self._requests.empty():
            delivery = self._requests.get_nowait()
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    def reply(self, delivery: Delivery, body: Body, *, blobs: Sequence[Blob] = ()) -> None:
        """Answer a request."""
        self._order(lambda: self._endpoint.reply(delivery, body, blobs=blobs))

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        """Answer a request with the error that it ended in, and record it."""
        fault = fault_of(error, process=self.process, time=self._clock.wall())
        self.reply(delivery, Failed(fault))
        self.events.emit(FaultSeen(fault))

    def send(self, process: str, body: Body, *, blobs: Sequence[Blob] = ()) -> None:
        """Tell a process something, expecting no answer."""
        self._order(lambda: self._endpoint.send(process, body, blobs=blobs))

    def submit(self, process: str, body: Body, *, deadline_s: float, blobs: Sequence[Blob] = ()) -> Future:
        """Ask, without waiting."""
        self._raise_if_ended()
        future = Future(process=process, what=type(body).__name__, deadline_s=deadline_s)
        self._order(lambda: self._submit(future, process, body, deadline_s, blobs))
        return future

    def call(self, process: str, body: Body, *, deadline_s: float, blobs: Sequence[Blob] = ()) -> Reply:
        """Ask and wait for the answer."""
        return self.submit(process, body, deadline_s=deadline_s, blobs=blobs).result()

    def close(self) -> None:
        """End the control thread after everything handed to it has been sent."""
        self._closing = True
        if self._thread.is_alive():
            self._endpoint.wake()
            wait(self._attempt_join, whom="control thread", what="its end", timeout_s=GRACE_S)
        self._membership.figures.close()
        self.events.close()

    def _attempt_join(self, remaining_s: float) -> bool | None:
        self._thread.join(remaining_s)
        return None if self._thread.is_alive() else True

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended is not None:
            raise ShuttingDown(self._ended)

    def _order(self, order: Callable[[], object]) -> None:
        self._orders.append(order)
        self._endpoint.wake()

    # In the control thread.

    def _submit(
        self, future: Future, process: str, body: Body, deadline_s: float, blobs: Sequence[Blob]
    ) -> None:
        if self._ended is not None:
            future.settle(None, ShuttingDown(self._ended))
            return
        pending = self._endpoint.request(process, body, deadline_s=deadline_s, blobs=blobs)
        if pending.done:
            future.settle(pending.reply, pending.error)
            return
        self._futures[pending] = future
        pending.on_done = self._settle

    def _settle(self, pending: PendingReply) -> None:
        self._futures.pop(pending).settle(pending.reply, pending.error)

    def _run(self) -> None:
        try:
            self._endpoint.watch(self.bootstrap.lifeline, self._lifeline_readable)
            while not self._closing:
                self._turn()
            self._carry_out_orders()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost boundary: the main thread raises it.
            self._failure = error
            self._registered.set()
            self._requests.put(None)
        finally:
            # Whoever told us to end no longer listens; a process that ends by itself has last words to deliver.
            flush_s = FLUSH_S if self._ended is None else 0.0
            self._end("the control thread has ended")
            self._endpoint.close(flush_s=flush_s)

    def _turn(self) -> None:
        membership = self._membership
        now = self._clock.monotonic()
        membership.tick(now)
        for attendant in self._attendants:
            attendant.tick(now)
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
            if not any(each.handle(delivery) for each in (membership, *self._attendants)):
                self._requests.put(delivery)

    def _carry_out_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _lifeline_readable(self) -> None:
        """Nobody ever writes to the lifeline: readable means that its last writer is gone."""
        self._endpoint.unwatch(self.bootstrap.lifeline)
        self._orphaned_at = self._clock.monotonic()
        self._end("agent and launcher are gone")

    def _end(self, reason: str) -> None:
        """Make the main thread end: whatever it waits for raises ShuttingDown."""
        if self._ended is None:
            self._ended = reason
        self._registered.set()
        self._requests.put(None)
        for future in self._futures.values():
            future.settle(None, ShuttingDown(reason))


def run_worker(
    bootstrap: Bootstrap, body: Callable[[Shell], None], *, capabilities: dict[str, str] | None = None
) -> int:
    """Run the main part of a worker under a shell; being told to end is a clean end."""
    shell = Shell(bootstrap, capabilities=capabilities or {})
    try:
        shell.join_run()
        body(shell)
    except ShuttingDown as reason:
        shell.events.emit(Note(f"shutting down: {reason}"))
    finally:
        shell.close()
    return 0


def run_process(bootstrap: Bootstrap, main: Callable[[Bootstrap], int]) -> int:
    """The outermost boundary of a process: events for its beginning and end, and its exit code.

    0 from a clean end, 2 for the user's mistake (one sentence), 1 for everything else (with its trace).
    """
    log = EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    log.emit(ProcessBegan(bootstrap.role.value, bootstrap.incarnation, os.getpid()))
    spans = SpanLog(bootstrap.run_dir, bootstrap.process)
    reason = ""
    try:
        code = main(bootstrap)
    except BaseException as error:  # noqa: BLE001 - the outermost boundary: recorded with its cause, then reported.
        fault = fault_of(error, process=bootstrap.process, time=SYSTEM_CLOCK.wall())
        log.emit(FaultSeen(fault))
        reason = f"{fault.kind}: {fault.message}"
        code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR
        with contextlib.suppress(OSError):  # where the log can not be written, the event may still be
            if code == EXIT_USER_ERROR:
                sys.stderr.write(f"{error}\n")
            else:
                traceback.print_exc()
    spans.close()
    log.emit(ProcessEnded(code, reason))
    log.close()
    return code
