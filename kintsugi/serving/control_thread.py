"""The control thread of the gateway: owns endpoint, manager and servers, and exchanges messages with HTTP by queues.

The HTTP side hands over orders (`submit`, `cancel`, …) and receives results by callbacks in its own event loop, all
results of one turn in one call. The two threads share only immutable values.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kintsugi.cluster.handover import Programs
from kintsugi.cluster.orphans import subreaper
from kintsugi.config.schema import Strategy
from kintsugi.errors import (
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    ProcessDied,
    RefusedError,
    fault_of,
)
from kintsugi.generation.manager import GenerationManager, ManagerJob
from kintsugi.generation.router import ServerHealth
from kintsugi.generation.weight_distribution import Loaded
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.membership import Heartbeat
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Processes, SystemProcesses
from kintsugi.runtime.waits import join
from kintsugi.serving.metrics import ServerMetrics
from kintsugi.serving.pool import ServerPool
from kintsugi.telemetry.events import EventLog, FaultSeen, Note
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import Fragment, Role, process_id

PROCESS = process_id(Role.MANAGER, 0)
"""Name of the gateway towards its servers: it is their manager, and the master that they register with."""
POLL_S = 0.25
SNAPSHOT_S = 0.1
"""Interval between two snapshots of the servers."""
LOAD_GRACE_S = 5.0
"""Time for other servers to load the first weights after one has refused them."""
JOIN_S = 15.0
MOST_UNANSWERED = 1 << 16
"""Limit of the manager; the gateway's own queue limit is much lower."""

Outcome = tuple[Fragment, ...] | Generated | KintsugiError
"""New tokens, the final result, or an error."""


class TokenListener:
    """A `Requester` in the event loop that waits for one `Generate`."""

    def __init__(
        self, on_outcome: Callable[[Outcome], None], deliver: Callable[[TokenListener, Outcome], None]
    ) -> None:
        """`on_outcome` is called in the event loop; `deliver` schedules that call."""
        self.on_outcome = on_outcome
        self._deliver = deliver
        self.job: ManagerJob | None = None
        self.left = False
        """True once the client has left."""

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        self._deliver(self, fragments)

    def done(self, generated: Generated) -> None:
        self._deliver(self, generated)

    def failed(self, error: KintsugiError) -> None:
        self._deliver(self, error)

    @property
    def is_gone(self) -> bool:
        return self.left


@dataclass(frozen=True)
class ServerSnapshot:
    """State of the servers a moment ago."""

    servers: tuple[ServerMetrics, ...] = ()
    num_unanswered: int = 0
    version: int = -1
    """Version of the current weights."""

    @property
    def is_ready(self) -> bool:
        return any(server.health in (ServerHealth.HEALTHY, ServerHealth.SUSPECT) for server in self.servers)

    @property
    def why_not(self) -> str:
        """`server-0 is starting, server-1 is running (suspect)`."""
        return ", ".join(
            f"{each.process} is {each.state}{'' if each.health == ServerHealth.DEAD else f' ({each.health})'}"
            for each in self.servers
        )


class ControlThread:
    """Consumes orders of the HTTP side and messages of servers, produces results for listeners. Waits for either; ends
    when it is closed or when no server can be started."""

    def __init__(
        self,
        *,
        run_dir: Path,
        programs: Programs,
        strategy: Strategy = "least_loaded",
        processes: Processes | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._programs = programs
        self._strategy: Strategy = strategy
        self._processes = processes or SystemProcesses()
        self._orders: deque[Callable[[], None]] = deque()
        self._outgoing: list[tuple[TokenListener, Outcome]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_note: Callable[[str], None] = lambda message: None
        self._lock = threading.Lock()
        self._is_open = True
        """False once the endpoint is closed; it is closed in another thread than those that wake it."""
        self._closing = False
        self._is_over = False
        self._snapshot_at = 0.0
        self._unloaded: tuple[KintsugiError, float] | None = None
        """Error with which the first weights were refused, and the time until which another server may still load
        them."""
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._failure: BaseException | None = None
        self.snapshot = ServerSnapshot()
        """Replaced as a whole."""
        public_key, secret_key = new_key_pair()
        self._endpoint = Endpoint(
            job=uuid4().hex[:12],
            process=PROCESS,
            incarnation="0",
            public_key=public_key,
            secret_key=secret_key,
        )
        self._events = EventLog(RunFolder(run_dir).events_file(PROCESS), process=PROCESS)
        self._manager = GenerationManager(
            self._endpoint, emit=self._events.emit, strategy=strategy, max_requests=MOST_UNANSWERED
        )
        self._lifeline, self._lifeline_writer = os.pipe2(os.O_CLOEXEC)
        self._pool = ServerPool(
            self._endpoint,
            run_dir=str(run_dir),
            programs=programs,
            processes=self._processes,
            lifeline=self._lifeline,
            note=self._report_server,
            on_stop=self._retire,
        )

    # Called in the event loop.

    def start(
        self,
        num_servers: int,
        weights: LoadWeights,
        *,
        loop: asyncio.AbstractEventLoop,
        on_change: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        """Start the thread. `on_change` is called in the loop when the snapshot has changed, and when the thread has
        ended; `on_note` with every event of a server."""
        self._loop = loop
        self._on_change = on_change
        self._on_note = on_note
        self._orders.append(lambda: self._pool.begin(num_servers))
        self._orders.append(lambda: self._manager.load_weights(weights, self._first_weights))
        self._thread.start()

    def submit(self, request: Generate, on_outcome: Callable[[Outcome], None]) -> TokenListener:
        """Send a request; `on_outcome` is called with new tokens and with the result, in the event loop."""
        listener = TokenListener(on_outcome, self._deliver)
        self._order(lambda: self._submit(request, listener))
        return listener

    def cancel(self, listener: TokenListener) -> None:
        """Drop a request; without effect once it has ended."""
        listener.left = True
        self._order(lambda: self._cancel(listener))

    def resize(self, num_servers: int) -> None:
        self._order(lambda: self._pool.resize(num_servers))

    def load_weights(self, weights: LoadWeights, then: Loaded) -> None:
        """Load weights into all servers; `then` is called in the event loop when every server has them, or with the
        error."""
        loop = self._loop
        assert loop is not None, "not started"

        def loaded(outcome: WeightsLoaded | KintsugiError) -> None:
            # The caller may read the snapshot immediately, which must show the new weights.
            self._take_snapshot()
            _call_soon(loop, lambda: then(outcome))

        self._order(lambda: self._manager.load_weights(weights, loaded))

    def record(self, error: BaseException) -> None:
        """Record an internal error with its traceback; callable from any thread."""
        fault = fault_of(error, process=PROCESS, time=SYSTEM_CLOCK.wall())
        where = "".join(traceback.format_exception(error)[-3:])
        self._events.emit(FaultSeen(fault))
        self._note(f"a request ended by {fault.kind}: {where}")

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return self._is_over

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the thread; None after `close`."""
        return self._failure

    def close(self) -> None:
        """End the servers and the thread; blocks until they are gone."""
        self._closing = True
        if self._loop is None:
            self._end()
        elif self._thread.is_alive():
            self._wake()
            join(self._thread, whom="the control thread", what="its end", timeout_s=JOIN_S)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._is_open:
                self._endpoint.wake()

    # Called in the thread.

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(closing(self._events))
                stack.callback(self._end)
                stack.enter_context(subreaper())
                while not self._closing and self._pool.fatal is None:
                    self._turn()
        except BaseException as error:  # noqa: BLE001 - the thread's outermost boundary: the main thread raises it.
            self._failure = error
        finally:
            self._failure = self._failure or self._pool.fatal
            self._is_over = True
            self._changed()

    def _turn(self) -> None:
        while self._orders:
            self._orders.popleft()()
        self._pool.turn()
        self._manager.turn()
        self._flush()
        for delivery in self._endpoint.poll(0.0 if self._orders else min(POLL_S, self._pool.next_turn_s())):
            self._handle(delivery)
        self._manager.turn()
        self._flush()
        if SYSTEM_CLOCK.monotonic() >= self._snapshot_at:
            self._take_snapshot()
            self._check_weights()

    def _handle(self, delivery: Delivery) -> None:
        if not self._pool.handle(delivery):
            self._manager.handle(delivery)

    def _end(self) -> None:
        with self._lock:
            self._is_open = False
        self._pool.close()
        self._endpoint.close()
        for descriptor in (self._lifeline, self._lifeline_writer):
            os.close(descriptor)
        self._flush()

    def _submit(self, request: Generate, listener: TokenListener) -> None:
        if listener.left:
            return
        try:
            listener.job = self._manager.submit(request, listener)
        except RefusedError as error:
            self._deliver(listener, error)

    def _cancel(self, listener: TokenListener) -> None:
        if listener.job is not None:
            self._manager.cancel(listener.job)

    def _retire(self, process: str) -> None:
        self._manager.retire(process, lambda: self._pool.dismiss(process))

    def _first_weights(self, outcome: object) -> None:
        """Handle the result of the first load. Dead servers are replaced, and slow ones may still load; refused weights
        are an error."""
        if isinstance(outcome, KintsugiError) and not isinstance(outcome, ProcessDied):
            self._report_server(f"the first weights were not loaded by all servers: {outcome}")
            if not isinstance(outcome, DeadlineExceeded):
                self._unloaded = outcome, SYSTEM_CLOCK.monotonic() + LOAD_GRACE_S

    def _check_weights(self) -> None:
        """Raise the error if no server could load the model."""
        if self._unloaded is None:
            return
        error, give_up_at = self._unloaded
        if self.snapshot.is_ready:
            self._unloaded = None
        elif SYSTEM_CLOCK.monotonic() >= give_up_at:
            raise IntegrityError(f"no generation server took the model's weights: {error}")

    def _deliver(self, listener: TokenListener, outcome: Outcome) -> None:
        self._outgoing.append((listener, outcome))

    def _flush(self) -> None:
        """Schedule one call in the event loop with all outcomes of this turn."""
        if not self._outgoing or self._loop is None:
            return
        outgoing, self._outgoing = self._outgoing, []
        _call_soon(self._loop, lambda: _deliver_all(outgoing))

    def _note(self, message: str) -> None:
        self._events.emit(Note(message))

    def _report_server(self, message: str) -> None:
        self._note(message)
        self._snapshot_at = 0.0  # The snapshot of this turn shows it.
        if self._loop is not None:
            _call_soon(self._loop, lambda: self._on_note(message))

    def _take_snapshot(self) -> None:
        self._snapshot_at = SYSTEM_CLOCK.monotonic() + SNAPSHOT_S
        views = {view.process: view for view in self._manager.servers()}
        servers = []
        for process, slot in self._pool.slots.items():
            view = views.get(process)
            servers.append(
                ServerMetrics(
                    process,
                    slot.state.value,
                    view.health.value if view is not None else ServerHealth.DEAD.value,
                    view.version if view is not None else -1,
                    view.tokens_in_flight if view is not None else 0,
                    slot.num_restarts,
                    slot.pid,
                    _server_gauges(slot.heartbeat),
                    slot.last_error,
                )
            )
        versions = self._manager.versions()
        snapshot = ServerSnapshot(
            tuple(servers),
            self._manager.num_unanswered,
            versions[-1].version if versions else -1,
        )
        is_new = _status_of(snapshot) != _status_of(self.snapshot)
        self.snapshot = snapshot
        if is_new:
            self._changed()

    def _changed(self) -> None:
        if self._loop is not None:
            _call_soon(self._loop, self._on_change)


def _server_gauges(heartbeat: Heartbeat | None) -> dict[str, float]:
    """Counters and gauges of a server, under names that Prometheus accepts."""
    if heartbeat is None:
        return {}
    counted = {
        f"{name.replace('.', '_')}_total": value for name, value in heartbeat.progress.counters.items()
    }
    return {**counted, **heartbeat.gauges}


def _status_of(snapshot: ServerSnapshot) -> object:
    """Part of a snapshot that is reported when it changes: without load."""
    return [(each.process, each.state, each.health, each.version) for each in snapshot.servers]


def _deliver_all(outgoing: list[tuple[TokenListener, Outcome]]) -> None:
    for listener, outcome in outgoing:
        if not listener.left:
            listener.on_outcome(outcome)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Call back in a loop that may have ended, in which case the call is dropped."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
