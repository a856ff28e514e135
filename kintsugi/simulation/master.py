"""Process of the master in a simulated run: the real journal and the real decisions, in a process that can crash
anywhere.

It does what `control/process.py` does, in the same order: decide, append the facts, sync durable ones, carry out the
effects one by one. A planned crash ends it at any boundary between these. The journal is compacted at every checkpoint,
so that most takeovers begin with a folded state.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kintsugi.config.schema import Config
from kintsugi.control.book_sharing import BookSharing
from kintsugi.control.failure_detector import FailureDetector, event_of_report
from kintsugi.control.master import Master
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import ProcessPlan
from kintsugi.control.process import DURABLE, TICK_S, new_state
from kintsugi.control.protocol import (
    Admit,
    Began,
    Decision,
    Effect,
    Event,
    Finish,
    Forget,
    Joined,
    Replied,
    Request,
    RequestFailed,
    ScaleRequested,
    ShareBook,
    StopRequested,
    Tell,
    Tick,
)
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault, FencedError
from kintsugi.journal.facts import CheckpointSaved, Fact
from kintsugi.journal.journal import Journal, read_facts
from kintsugi.protocol.agents import ChipFault, ProcessExited, ProcessSuspected
from kintsugi.protocol.membership import AddressBook, Heartbeat, Ping, Register, Registered, Shutdown
from kintsugi.protocol.membership import Ok as OkBody
from kintsugi.protocol.messages import Body
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.runtime.disk import Disk
from kintsugi.simulation.network import SimulatedProcess
from kintsugi.transport.rpc import Delivery
from kintsugi.types import Role, kind_of, role_of

JOURNAL = Path("/run/journal")
LARGE = 200
"""Number of processes above which all share one address book: one for each process would take quadratic memory."""

NewMaster = Callable[..., Master]
Gate = Callable[["SimulatedMaster", str, Callable[..., None], tuple[Any, ...]], bool]
"""(master, kind of event, action, its arguments) → whether it is held back, to be done later."""

_GIVES: dict[type, str] = {
    Register: "Joined",
    ProcessExited: "Exited",
    ProcessSuspected: "Suspected",
    ChipFault: "Suspected",
}
"""Kind of message → kind of the event that it becomes."""


class Crash(msgspec.Struct):
    """Crash of the master at a boundary: in `state`, just before or after `what`."""

    state: str
    what: str
    """"append", "sync", or the kind of an effect."""
    after: bool
    happened: Callable[[], None]


class Observer(Protocol):
    """Observer of the master, for coverage and invariants."""

    def decided(self, master: SimulatedMaster, state: str, event: Event, decision: Decision) -> None: ...

    def journaled(self, master: SimulatedMaster, facts: tuple[Fact, ...], *, durable: bool) -> None:
        """Facts are in the journal; unless `durable`, a power cut loses them until `synced`."""

    def synced(self) -> None: ...

    def taken_over(self, facts: Sequence[Fact]) -> None:
        """A new master has found these facts in the journal."""

    def restored(self, state: MasterState, replayed: MasterState) -> None:
        """A new master has the first state, from the folded one and later facts; all facts lead to the second."""

    def crashed(self, state: str, what: str) -> None: ...

    def violated(self, what: str) -> None: ...


def from_facts(facts: Sequence[Fact], config: Config) -> MasterState:
    """Return the state that facts lead to."""
    state = new_state(config)
    for fact in facts:
        state.apply(fact)
    return state


def described(error: Exception) -> str:
    """Return the error and its location."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


class Killed(Exception):
    """The planned end of this process has come."""


class SimulatedMaster(SimulatedProcess):
    """One incarnation of the master."""

    def __init__(
        self,
        *arguments: Any,
        config: Config,
        layout: tuple[ProcessPlan, ...],
        disk: Disk,
        observer: Observer,
        num_rows: int,
        requests: dict[str, int],
        new_master: NewMaster = Master,
        on_finish: Callable[[str], None],
        **names: Any,
    ) -> None:
        super().__init__(*arguments, **names)
        self._config, self._disk, self._observer, self._requests = config, disk, observer, requests
        self._on_finish = on_finish
        self._is_large = len(layout) > LARGE
        self.finished = False
        self.crashes: list[Crash] = []
        self.gate: Gate | None = None
        self.detector = FailureDetector()
        self._current_book: AddressBook | None = None
        self._events: deque[Event] = deque()
        state = new_state(config)
        owner = f"master-0 {self.incarnation}"
        if disk.exists(JOURNAL):
            self.journal = Journal.restore(JOURNAL, owner=owner, take=state.apply, take_over=True, disk=disk)
            facts = read_facts(JOURNAL, disk=disk)
            observer.taken_over(facts)
            observer.restored(state, from_facts(facts, config))
        else:
            self.journal = Journal.create(JOURNAL, owner=owner, disk=disk)
        self.master = new_master(
            config,
            state=state,
            layout=layout,
            num_rows=num_rows,
            num_eval_rows=config.data.num_eval,
            checkpoint_folder=str(RELATIVE.checkpoints_folder),
        )
        self._sharing = BookSharing(state.members, master=self.peer)

    @property
    def state(self) -> str:
        """State for coverage: the phase, or during a recovery its state."""
        if self.master.phase is not Phase.RECOVERING:
            return self.master.phase.value
        return f"recovering: {self.master.recovery_state}"

    def begin(self, began: Began) -> None:
        """Take the run over; accept messages of every process in the journal."""
        state = self.master.state
        self.endpoint.term = self.endpoint.seen_term = state.term + 1
        self.feed(began)
        self.detector.adopt(state.members, self.world.now)
        self.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self.take_requests()
        for suspected in self.detector.check(self.world.now, self.master.pending):
            self.feed(suspected)
        self.feed(Tick())
        if not self.finished:
            self.after(TICK_S, self._tick)

    def request_stop(self) -> None:
        self.feed(StopRequested("asked to"))

    def take_requests(self) -> None:
        """Answer requests for servers, which stay in the run folder until the answer is durable."""
        for name, servers in sorted(self._requests.items()):
            self.feed(ScaleRequested(name, servers))
            if self.alive and not self.finished and name in self.master.state.answered:
                self.journal.sync()
                del self._requests[name]

    # Messages.

    def handle(self, delivery: Delivery) -> None:
        kind = _GIVES.get(type(delivery.body))
        if self.gate is None or kind is None or not self.gate(self, kind, self._handle, (delivery,)):
            self._handle(delivery)

    def _handle(self, delivery: Delivery) -> None:
        sender, body = delivery.envelope.sender, delivery.body
        match body:
            case Heartbeat():
                self.world.note(self.name, f"Heartbeat from {sender}")
                self._on_heartbeat(sender, delivery.envelope.incarnation, body)
            case Register() if delivery.wants_reply:
                self._register(delivery, body)
            case ProcessExited() | ProcessSuspected() | ChipFault() if role_of(sender) is Role.AGENT:
                self.feed(event_of_report(delivery.peer, body, time=0.0))
            case Ping():
                self.endpoint.reply(delivery, OkBody())
            case _ if delivery.wants_reply:
                self.endpoint.fail(
                    delivery, "RefusedError", f"the master does not answer {type(body).__name__}"
                )

    def _on_heartbeat(self, sender: str, incarnation: str, heartbeat: Heartbeat) -> None:
        now = self.world.now
        self.master.state.members.on_heartbeat(sender, heartbeat, now)
        self.detector.on_heartbeat(sender, incarnation, heartbeat, now)
        self._send_book([sender], self._sharing.after_heartbeat(sender, heartbeat.book, now))

    def _register(self, delivery: Delivery, register: Register) -> None:
        peer = register.peer
        if self.master.state.members.replaced(peer, register.role):
            self.endpoint.fail(delivery, "RefusedError", f"{peer.process} {peer.incarnation} was replaced")
            return
        self.endpoint.admit(peer)
        self.detector.joined(peer.process, peer.incarnation, self.world.now, host=peer.host)
        self.feed(Joined(peer, register.role, register.pid, register.capabilities, register.children))
        if self.alive and not self.finished:
            self.endpoint.reply(delivery, Registered(self.master.state.term))

    def _answered(self, request: Request, body: Body | None, fault: Fault | None) -> None:
        kind = "Replied" if fault is None else "RequestFailed"
        if self.gate is None or not self.gate(self, kind, self._take_answer, (request, body, fault)):
            self._take_answer(request, body, fault)

    def _take_answer(self, request: Request, body: Body | None, fault: Fault | None) -> None:
        if fault is None:
            assert body is not None
            peer = self.endpoint.directory.peers.get(request.to)
            if peer is not None:
                self.detector.answered(request.to, peer.incarnation, body, self.world.now)
            self.feed(Replied(request.token, request.to, body))
        else:
            self.feed(RequestFailed(request.token, request.to, fault))

    # Decide, journal, act.

    def feed(self, event: Event) -> None:
        """Process an event; an event that an effect causes immediately waits for the current one."""
        if self.finished or not self.alive:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events and not self.finished:
                self._take(self._events[0])
                self._events.popleft()
            for book, processes in self._sharing.due(self.world.now):
                self._send_book(processes, book)
        except Killed:
            self.end(-9)
        except FencedError:
            self.end(1)  # Another master owns the journal: this one must not act any more.

    def _take(self, event: Event) -> None:
        before = self.state
        self.world.note(self.name, f"{kind_of(event)} in {before}")
        try:
            decision = self.master.decide(event, self.world.now)
            if self.world.trace is not None and decision.reason:
                self.world.remark(self.name, f"{decision.reason} → {self.state}")
            self._observer.decided(self, before, event, decision)
            self._carry_out(decision)
        except (Killed, FencedError):
            raise
        except Exception as error:  # Any error of the code under test is a finding.
            self._observer.violated(f"{kind_of(event)} in {before} is not defined: {described(error)}")
            raise Killed from error

    def _carry_out(self, decision: Decision) -> None:
        if decision.facts:
            self._boundary("append", after=False)
            self.journal.append(decision.facts)
            self._current_book = None
            must_last = any(isinstance(fact, DURABLE) for fact in decision.facts)
            self._observer.journaled(self, decision.facts, durable=not must_last)
            self._boundary("append", after=True)
            if must_last:
                self._boundary("sync", after=False)
                self.journal.sync()
                self._observer.synced()
                self._boundary("sync", after=True)
            if any(isinstance(fact, CheckpointSaved) for fact in decision.facts):
                self.journal.compact(self.master.state.fold())
        for effect in decision.effects:
            if not self.crashes:
                self._act(effect)
            else:
                self._boundary(kind_of(effect), after=False)
                self._act(effect)
                self._boundary(kind_of(effect), after=True)

    def _boundary(self, what: str, *, after: bool) -> None:
        for crash in self.crashes:
            if (crash.what, crash.after, crash.state) == (what, after, self.state):
                self._observer.crashed(crash.state, what)
                crash.happened()
                raise Killed

    def _act(self, effect: Effect) -> None:
        match effect:
            case Request():
                self._share_before(effect.to)
                self.endpoint.request(
                    effect.to,
                    effect.body,
                    deadline_s=effect.deadline_s,
                    on_done=lambda body, fault: self._answered(effect, body, fault),
                )
            case Tell(to=to, body=body):
                self._share_before(to)
                self.endpoint.send(to, body)
            case Admit(peer=peer):
                self.endpoint.admit(peer)
            case Forget(process=process, fault=fault):
                self.detector.forget(process)
                self.endpoint.forget(process, fault)
            case ShareBook(lacking=lacking):
                self._sharing.changed(lacking=lacking)
            case Finish():
                self._finish(effect)
            case _:
                pass  # Records for users: no process of the run depends on them.

    def _share_before(self, process: str) -> None:
        self._send_book([process], self._sharing.before_request(process, self.world.now))

    def _send_book(self, processes: Sequence[str], book: AddressBook | None) -> None:
        """Send a book. In a large cluster it is a whole one, built once per change, that all of them share."""
        if book is None:
            return
        if self._is_large:
            if self._current_book is None:
                self._current_book = self.master.state.members.address_book(self.peer)
            book = self._current_book
        for process in processes:
            self.endpoint.send(process, book)

    def _finish(self, finish: Finish) -> None:
        self.finished = True
        for process in list(self.endpoint.directory.peers):
            self.endpoint.send(process, Shutdown(f"the run {finish.outcome}"))
        self._on_finish(finish.outcome)

    def end(self, status: int) -> None:
        if self.alive:
            self.journal.close()
        super().end(status)
