"""The other side of the gateway: one thread that owns endpoint, manager and servers, and talks with HTTP by queues.

HTTP hands orders over (`submit`, `cancel`, …) and is told what came of them by callbacks in its own event loop, all of
one turn in one hop. Nothing is shared but immutable values.
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
from kintsugi.config import Strategy
from kintsugi.errors import (
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    ProcessDied,
    RefusedError,
    fault_of,
)
from kintsugi.generation.distribution import Loaded
from kintsugi.generation.manager import Job, Manager
from kintsugi.generation.router import Health
from kintsugi.messages import Generate, Generated, Heartbeat, LoadWeights, WeightsLoaded
from kintsugi.observe.events import EventLog, FaultSeen, Note, events_path
from kintsugi.runtime import SYSTEM_CLOCK, Processes, SystemProcesses, wait
from kintsugi.serving.metrics import ServerFigures
from kintsugi.serving.pool import Pool
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import Fragment, Role, process_id

PROCESS = process_id(Role.MANAGER, 0)
"""As the servers know the gateway: it is their manager, and the master that they report to."""
POLL_S = 0.25
FIGURES_S = 0.1
"""Between two pictures of the servers."""
LOAD_GRACE_S = 5.0
"""For other servers to take the first weights, when one has refused them."""
JOIN_S = 15.0
MOST_UNANSWERED = 1 << 16
"""The manager's own limit; the gateway's queue is bounded long before."""

Outcome = tuple[Fragment, ...] | Generated | KintsugiError
"""New tokens; the end; or why there is none."""


class Listener:
    """Who waits in the event loop for one `Generate`; an `Asker` for the manager."""

    def __init__(self, hear: Callable[[Outcome], None], tell: Callable[[Listener, Outcome], None]) -> None:
        """`hear` is called in the event loop, `tell` brings it there."""
        self.hear = hear
        self._tell = tell
        self.job: Job | None = None
        self.left = False
        """Nobody listens any more."""

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        self._tell(self, fragments)

    def done(self, generated: Generated) -> None:
        self._tell(self, generated)

    def failed(self, error: KintsugiError) -> None:
        self._tell(self, error)

    @property
    def is_gone(self) -> bool:
        return self.left


@dataclass(frozen=True)
class Picture:
    """The servers as they were a moment ago."""

    servers: tuple[ServerFigures, ...] = ()
    num_unanswered: int = 0
    version: int = -1
    """Of the current weights."""

    @property
    def is_ready(self) -> bool:
        return any(server.health in (Health.HEALTHY, Health.SUSPECT) for server in self.servers)

    @property
    def why_not(self) -> str:
        return ", ".join(f"{each.process} is {each.state} and {each.health}" for each in self.servers)


class Backstage:
    """Consumes orders and what servers say, produces answers for listeners; waits for either, and ends when it is
    closed or when no server can be had."""

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
        self._outgoing: list[tuple[Listener, Outcome]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_note: Callable[[str], None] = lambda message: None
        self._lock = threading.Lock()
        self._is_open = True
        """The endpoint may be woken; it is closed in another thread than those who wake it."""
        self._closing = False
        self._is_over = False
        self._figures_at = 0.0
        self._unloaded: tuple[KintsugiError, float] | None = None
        """Why the first weights were refused, and until when somebody else may take them."""
        self._thread = threading.Thread(target=self._run, name="backstage", daemon=True)
        self._failure: BaseException | None = None
        self.picture = Picture()
        """Replaced as a whole."""
        public_key, secret_key = new_key_pair()
        self._endpoint = Endpoint(
            job=uuid4().hex[:12],
            process=PROCESS,
            incarnation="0",
            public_key=public_key,
            secret_key=secret_key,
        )
        self._events = EventLog(events_path(run_dir, PROCESS), process=PROCESS)
        self._manager = Manager(
            self._endpoint, note=self._note, strategy=strategy, max_requests=MOST_UNANSWERED
        )
        self._lifeline, self._lifeline_writer = os.pipe2(os.O_CLOEXEC)
        self._pool = Pool(
            self._endpoint,
            run_dir=str(run_dir),
            programs=programs,
            processes=self._processes,
            lifeline=self._lifeline,
            note=self._tell_of_server,
            on_stop=self._retire,
        )

    # In the event loop.

    def start(
        self,
        num_servers: int,
        weights: LoadWeights,
        *,
        loop: asyncio.AbstractEventLoop,
        on_change: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        """`on_change` is called in the loop when the picture shows something new, and when the thread has ended;
        `on_note` with what befell a server."""
        self._loop, self._on_change, self._on_note = loop, on_change, on_note
        self._orders.append(lambda: self._pool.begin(num_servers))
        self._orders.append(lambda: self._manager.load_weights(weights, self._first_weights))
        self._thread.start()

    def submit(self, request: Generate, hear: Callable[[Outcome], None]) -> Listener:
        """Ask; `hear` is told of new tokens and of the end, in the event loop."""
        listener = Listener(hear, self._tell)
        self._order(lambda: self._submit(request, listener))
        return listener

    def cancel(self, listener: Listener) -> None:
        """Nobody waits for it any more; does nothing once it has ended."""
        listener.left = True
        self._order(lambda: self._cancel(listener))

    def resize(self, num_servers: int) -> None:
        self._order(lambda: self._pool.resize(num_servers))

    def load_weights(self, weights: LoadWeights, then: Loaded) -> None:
        """`then` is called in the event loop when every server has them, or with why not."""
        loop = self._loop
        assert loop is not None, "not started"

        def loaded(outcome: WeightsLoaded | KintsugiError) -> None:
            # Who is told that they are there asks at once, and must not find servers as they were before.
            self._take_picture()
            _call_soon(loop, lambda: then(outcome))

        self._order(lambda: self._manager.load_weights(weights, loaded))

    def record(self, error: BaseException) -> None:
        """Write a mistake of ours down, with where it was made; from any thread."""
        fault = fault_of(error, process=PROCESS, time=SYSTEM_CLOCK.wall())
        where = "".join(traceback.format_exception(error)[-3:])
        self._events.emit(FaultSeen(fault))
        self._note(f"a request ended by {fault.kind}: {where}")

    @property
    def is_over(self) -> bool:
        """Whether the thread does nothing any more."""
        return self._is_over

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if it was not `close`."""
        return self._failure

    def close(self) -> None:
        """End servers and thread; blocks until they are gone."""
        self._closing = True
        if self._loop is None:
            self._end()
        elif self._thread.is_alive():
            self._wake()
            wait(self._attempt_join, whom="the backstage thread", what="its end", timeout_s=JOIN_S)

    def _attempt_join(self, remaining_s: float) -> bool | None:
        self._thread.join(remaining_s)
        return None if self._thread.is_alive() else True

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._is_open:
                self._endpoint.wake()

    # In the thread.

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
        if SYSTEM_CLOCK.monotonic() >= self._figures_at:
            self._take_picture()
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

    def _submit(self, request: Generate, listener: Listener) -> None:
        if listener.left:
            return
        try:
            listener.job = self._manager.submit(request, listener)
        except RefusedError as error:
            self._tell(listener, error)

    def _cancel(self, listener: Listener) -> None:
        if listener.job is not None:
            self._manager.cancel(listener.job)

    def _retire(self, process: str) -> None:
        self._manager.retire(process, lambda: self._pool.dismiss(process))

    def _first_weights(self, outcome: object) -> None:
        """Who died is replaced, and what takes long may still come; but weights that are refused stay as they are."""
        if isinstance(outcome, KintsugiError) and not isinstance(outcome, ProcessDied):
            self._tell_of_server(f"the first weights were not loaded by all servers: {outcome}")
            if not isinstance(outcome, DeadlineExceeded):
                self._unloaded = outcome, SYSTEM_CLOCK.monotonic() + LOAD_GRACE_S

    def _check_weights(self) -> None:
        """End with the reason where no server takes the model; nothing would ever be answered."""
        if self._unloaded is None:
            return
        error, give_up_at = self._unloaded
        if self.picture.is_ready:
            self._unloaded = None
        elif SYSTEM_CLOCK.monotonic() >= give_up_at:
            raise IntegrityError(f"no generation server took the model's weights: {error}")

    def _tell(self, listener: Listener, outcome: Outcome) -> None:
        self._outgoing.append((listener, outcome))

    def _flush(self) -> None:
        """Everything that this turn has to tell goes over in one hop."""
        if not self._outgoing or self._loop is None:
            return
        outgoing, self._outgoing = self._outgoing, []
        _call_soon(self._loop, lambda: _hear_all(outgoing))

    def _note(self, message: str) -> None:
        self._events.emit(Note(message))

    def _tell_of_server(self, message: str) -> None:
        self._note(message)
        self._figures_at = 0.0  # The picture shows it with this turn.
        if self._loop is not None:
            _call_soon(self._loop, lambda: self._on_note(message))

    def _take_picture(self) -> None:
        self._figures_at = SYSTEM_CLOCK.monotonic() + FIGURES_S
        views = {view.process: view for view in self._manager.servers()}
        servers = []
        for process, place in self._pool.places.items():
            view = views.get(process)
            servers.append(
                ServerFigures(
                    process,
                    place.state.value,
                    view.health.value if view is not None else Health.DEAD.value,
                    view.version if view is not None else -1,
                    view.tokens_in_flight if view is not None else 0,
                    place.num_restarts,
                    place.pid,
                    _figures(place.heartbeat),
                    place.last_error,
                )
            )
        versions = self._manager.versions()
        picture = Picture(
            tuple(servers),
            self._manager.num_unanswered,
            versions[-1].version if versions else -1,
        )
        is_new = _essence(picture) != _essence(self.picture)
        self.picture = picture
        if is_new:
            self._changed()

    def _changed(self) -> None:
        if self._loop is not None:
            _call_soon(self._loop, self._on_change)


def _figures(heartbeat: Heartbeat | None) -> dict[str, float]:
    """What a server says of itself, by names that Prometheus takes."""
    if heartbeat is None:
        return {}
    counted = {
        f"{name.replace('.', '_')}_total": value for name, value in heartbeat.progress.counters.items()
    }
    return {**counted, **heartbeat.gauges}


def _essence(picture: Picture) -> object:
    """What of a picture is worth telling: not how much is under way."""
    return [(each.process, each.state, each.health, each.version) for each in picture.servers]


def _hear_all(outgoing: list[tuple[Listener, Outcome]]) -> None:
    for listener, outcome in outgoing:
        if not listener.left:
            listener.hear(outcome)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """In a loop that may have ended, when nobody wants to know any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
