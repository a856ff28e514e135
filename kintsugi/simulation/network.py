"""Simulated processes and the network between them: a small, faithful model of `transport/endpoint.py`.

A request keeps its number when it is sent again, and its answer is kept for that. The same `Directory` as in real
processes checks keys, incarnations and terms. The network loses, repeats and delays messages and cuts links in one
direction; messages overtake each other because of their delays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kintsugi.errors import Fault
from kintsugi.protocol import wire
from kintsugi.protocol.membership import AddressBook, Failed, Register
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.simulation.directory import BookIndex, SharedDirectory
from kintsugi.simulation.world import Action, World
from kintsugi.transport.directory import Caller, Directory
from kintsugi.transport.rpc import Delivery, RequestTimer, SavedReplies
from kintsugi.types import Peer, Role, kind_of

JOB = "simulated"
_REQUEST, _REPLY, _ONE_WAY = MessageKind.REQUEST, MessageKind.REPLY, MessageKind.ONE_WAY

OnDone = Callable[[Body | None, Fault | None], None]
"""Result of a request: an answer, or a fault."""


class NetworkConditions:
    """Conditions of the network, for all processes and between pairs."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.repetition = 0.0
        self.spike = 0.0
        """Share of messages that take `spike_s` longer."""
        self.spike_s = 0.5
        self.cuts: dict[tuple[str, str], int] = {}
        """(from, to) → number of active cuts: no message arrives in this direction."""

    @property
    def is_clear(self) -> bool:
        return not (self.loss or self.repetition or self.spike or self.cuts)

    def cut(self, source: str, target: str) -> None:
        self.cuts[source, target] = self.cuts.get((source, target), 0) + 1

    def restore(self, source: str, target: str) -> None:
        self.cuts[source, target] -= 1
        if not self.cuts[source, target]:
            del self.cuts[source, target]


class SimulatedNetwork:
    """Carries messages to the process that listens at an address."""

    def __init__(self, world: World, *, is_large: bool = False) -> None:
        """`is_large`: so many processes that they use one shared address book."""
        self._world = world
        self.is_large = is_large
        self._index: BookIndex | None = None
        self.conditions = NetworkConditions()
        self.listening: dict[str, SimulatedProcess] = {}
        self.num_lost = 0

    def index_of(self, book: AddressBook) -> BookIndex:
        if self._index is None or self._index.number != book.number:
            self._index = BookIndex(book)
        return self._index

    def carry(
        self, source: SimulatedProcess, target: SimulatedProcess | None, action: Action, *arguments: Any
    ) -> None:
        """Run `action` in the target process after a delay, or not, or twice."""
        if target is None or not target.alive:
            return
        conditions, draw = self.conditions, self._world.random.random
        delay_s = 0.0002 + 0.002 * draw()
        if conditions.cuts and (source.name, target.name) in conditions.cuts:
            self.num_lost += 1
            return
        if conditions.loss and draw() < conditions.loss:
            self.num_lost += 1
            return
        if conditions.spike and draw() < conditions.spike:
            delay_s += conditions.spike_s * draw()
        if conditions.repetition and draw() < conditions.repetition:
            self._world.after(delay_s + 0.05 * draw(), target.enter, action, arguments)
        self._world.after(delay_s + target.slowness_s, target.enter, action, arguments)


class SimulatedProcess:
    """One incarnation of a process: alive or not, stopped or not, and its endpoint.

    All its actions go through `enter`: a dead process does nothing, a stopped or kept one acts once it is continued.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        world: World,
        *,
        name: str,
        role: Role,
        host: str,
        incarnation: str,
        key: bytes,
        term: int = 0,
        address: str = "",
    ) -> None:
        self.world, self.network = world, network
        self.name, self.role, self.host, self.incarnation = name, role, host, incarnation
        self.key, self.address = key, address or f"sim://{name}/{incarnation}"
        self.alive, self.stopped = True, False
        self.kept_since: float | None = None
        """Time since which one call keeps it: it does nothing else, and is not stopped."""
        self.slowness_s = 0.0
        """Delay that is added to everything it receives and does."""
        self.on_exit: Callable[[SimulatedProcess, int], None] = lambda process, status: None
        self._held: list[tuple[Action, tuple[Any, ...]]] = []
        self.endpoint = SimulatedEndpoint(self, term=term)
        network.listening[self.address] = self

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.incarnation, self.host, self.address, self.key)

    def enter(self, action: Action, arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.stopped or self.kept_since is not None:
            self._held.append((action, arguments))
        else:
            action(*arguments)

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Schedule an action of this process."""
        self.world.after(delay_s + self.slowness_s, self.enter, action, arguments)

    def stop(self) -> None:
        self.stopped = True

    def keep(self) -> None:
        """Let one call keep the process until it is resumed."""
        self.kept_since = self.world.now

    def resume(self) -> None:
        """Continue a stopped or kept process: everything that arrived meanwhile is handled immediately."""
        self.stopped, self.kept_since = False, None
        held, self._held = self._held, []
        for action, arguments in held:
            self.enter(action, arguments)

    def end(self, status: int) -> None:
        if self.alive:
            self.alive = False
            if self.network.listening.get(self.address) is self:
                del self.network.listening[self.address]
            self.on_exit(self, status)

    def handle(self, delivery: Delivery) -> None:
        """Take a request or a one-way message; each kind of process has its own."""
        raise NotImplementedError


class SimulatedPending:
    """A pending request."""

    __slots__ = ("body", "done", "on_done", "process", "sequence", "timer")

    def __init__(
        self, process: str, body: Body, *, sequence: int, timer: RequestTimer, on_done: OnDone
    ) -> None:
        self.process, self.body, self.sequence = process, body, sequence
        self.timer, self.on_done, self.done = timer, on_done, False


class SimulatedEndpoint:
    """Endpoint of one process; the rules are those of `transport.Endpoint`."""

    def __init__(self, owner: SimulatedProcess, *, term: int) -> None:
        self._owner, self._world = owner, owner.world
        self.term = self.seen_term = term
        kind = SharedDirectory if owner.network.is_large else Directory
        self.directory = kind(job=JOB, process=owner.name)
        self._introduced: set[bytes] = set()
        self._sequences: dict[str, int] = {}
        self._pending: dict[str, dict[int, SimulatedPending]] = {}
        self._saved = SavedReplies()
        self.accepted: Callable[[Envelope, Body], None] | None = None
        """Called for every accepted message, for the invariants."""

    # Peers.

    def admit(self, peer: Peer) -> None:
        known = self.directory.peers.get(peer.process)
        if known == peer:
            return
        change = ""
        if known is not None and known.public_key != peer.public_key:
            change = f"{peer.process} was replaced by {peer.incarnation}"
            self.directory.remove(peer.process, self._fault(change))
        elif known is not None and known.address != peer.address:
            change = f"{peer.process} moved to {peer.address}"
        self.directory.add(peer)
        if change:
            self._close_link(peer.process, self._fault(change))
        self._introduced.add(peer.public_key)

    def set_book(self, book: AddressBook) -> bool:
        if not self.directory.accepts(book):
            return False
        if isinstance(self.directory, SharedDirectory):
            self._share_book(self.directory, self._owner.network.index_of(book))
            return True
        for process in self.directory.removed_by(book):
            self.forget(process, self._fault(f"{process} is no longer in the address book"))
        self.directory.number = book.number
        for peer in book.peers:
            if peer.process != self._owner.name:
                self.admit(peer)
        return True

    def _share_book(self, directory: SharedDirectory, index: BookIndex) -> None:
        """As `set_book`, for a shared book; processes without connections are skipped."""
        for process in list(self._pending):
            known, listed = directory.peers.get(process), index.by_name.get(process)
            if listed is None or (known is not None and known.public_key != listed.public_key):
                self.forget(process, self._fault(f"{process} is no longer in the address book"))
            elif known is not None and known.address != listed.address:
                self._close_link(process, self._fault(f"{process} moved to {listed.address}"))
        directory.use_book(index)

    def forget(self, process: str, fault: Fault) -> None:
        self.directory.remove(process, fault)
        self._close_link(process, fault)

    def _close_link(self, process: str, fault: Fault) -> None:
        for pending in list(self._pending.pop(process, {}).values()):
            self._settle(pending, None, fault)

    def _fault(self, message: str) -> Fault:
        return self._world.fault("ProcessDied", self._owner.name, message)

    # Sending.

    def request(self, process: str, body: Body, *, deadline_s: float, on_done: OnDone) -> None:
        peer = self.directory.peers.get(process)
        if peer is None or not peer.address:
            error = self.directory.unreachable_error(process)
            on_done(None, error.cause or self._world.fault(type(error).__name__, process, str(error)))
            return
        sequence = self._sequences[process] = self._sequences.get(process, 0) + 1
        now = self._world.now
        timer = RequestTimer.begin(now, deadline_s=deadline_s)
        pending = SimulatedPending(process, body, sequence=sequence, timer=timer, on_done=on_done)
        self._pending.setdefault(process, {})[sequence] = pending
        self._transmit(peer, sequence, _REQUEST, body)
        self._owner.after(timer.due - now, self._remind, pending)

    def send(self, process: str, body: Body) -> bool:
        peer = self.directory.peers.get(process)
        if peer is None or not peer.address:
            return False
        sequence = self._sequences[process] = self._sequences.get(process, 0) + 1
        self._transmit(peer, sequence, _ONE_WAY, body)
        return True

    def reply(self, delivery: Delivery, body: Body) -> None:
        """Answer a request, once; the route of a delivery is the process that it came from."""
        envelope = delivery.envelope
        delivery.running.pop(envelope.sequence, None)
        answer = self._reply_envelope(envelope.sequence)
        self._saved.put(envelope, wire.encode(answer, body), now=self._world.now)
        self._transmit_reply(delivery.route, answer, body)

    def fail(self, delivery: Delivery, kind: str, message: str, *, cause: Fault | None = None) -> None:
        self.reply(delivery, Failed(self._world.fault(kind, self._owner.name, message, cause=cause)))

    def _transmit(self, peer: Peer, sequence: int, kind: MessageKind, body: Body) -> None:
        owner = self._owner
        target = owner.network.listening.get(peer.address)
        if target is None:
            return
        envelope = Envelope(JOB, self.term, owner.name, owner.incarnation, sequence, kind)
        owner.network.carry(owner, target, target.endpoint.receive, owner, envelope, body)

    def _reply_envelope(self, sequence: int) -> Envelope:
        return Envelope(JOB, self.term, self._owner.name, self._owner.incarnation, sequence, _REPLY)

    def _transmit_reply(self, route: Any, envelope: Envelope, body: Body) -> None:
        owner, target = self._owner, route
        owner.network.carry(owner, target, target.endpoint.receive_reply, owner, envelope, body)

    def _remind(self, pending: SimulatedPending) -> None:
        if pending.done:
            return
        now = self._world.now
        peer = self.directory.peers.get(pending.process)
        if peer is None or not pending.timer.fire(now):
            self._pending.get(pending.process, {}).pop(pending.sequence, None)
            what = f"no answer to {type(pending.body).__name__} in time"
            fault = self._world.fault("DeadlineExceeded", pending.process, what)
            self._settle(pending, None, fault)
            return
        self._transmit(peer, pending.sequence, _REQUEST, pending.body)
        self._owner.after(pending.timer.due - now, self._remind, pending)

    @staticmethod
    def _settle(pending: SimulatedPending, body: Body | None, fault: Fault | None) -> None:
        assert not pending.done, f"{type(pending.body).__name__} to {pending.process} ended twice"
        pending.done = True
        pending.on_done(body, fault)

    # Receiving.

    def receive(self, source: SimulatedProcess, envelope: Envelope, body: Body) -> None:
        if source.key not in self._introduced and source.key.decode() not in self.directory.callers:
            return  # It waits until an address book introduces it; a request is sent again.
        why = self.directory.why_refused(source.key.decode(), envelope, term=self.seen_term, body=body)
        if why:
            self._refuse(source, envelope, why)
            return
        caller = self.directory.callers[source.key.decode()]
        if envelope.kind is _REQUEST and self._is_repeated(caller, envelope, source):
            return
        if envelope.term < self.term and type(body) is not Register:
            why = f"term {envelope.term} is over, it is {self.term}"
            self._refuse(source, envelope, why, kind="EpochOver")
            return
        self.seen_term = self.directory.newest_term(self.seen_term, by=envelope.sender, of=envelope)
        if self.accepted is not None:
            self.accepted(envelope, body)
        delivery = Delivery(envelope, body, caller.peer, source, caller.running)  # type: ignore[arg-type]
        if envelope.kind is _REQUEST:
            caller.running[envelope.sequence] = delivery
        self._owner.handle(delivery)

    def _is_repeated(self, caller: Caller, envelope: Envelope, source: SimulatedProcess) -> bool:
        if envelope.sequence in caller.running:
            return True
        saved = self._saved.get(envelope)
        if saved is None:
            return False
        assert saved.frame is not None
        answer = wire.decode(saved.frame)
        self._transmit_reply(source, answer.envelope, answer.body)
        return True

    def _refuse(
        self, source: SimulatedProcess, envelope: Envelope, why: str, *, kind: str = "RefusedError"
    ) -> None:
        fault = self._world.fault(kind, self._owner.name, why)
        self._transmit_reply(source, self._reply_envelope(envelope.sequence), Failed(fault))

    def receive_reply(self, source: SimulatedProcess, envelope: Envelope, body: Body) -> None:
        self.seen_term = self.directory.newest_term(self.seen_term, by=source.name, of=envelope)
        fault = body.fault if isinstance(body, Failed) else None
        if fault is not None and fault.kind == "EpochOver":
            return  # Not an answer: the request is sent again under the new term, once that is adopted.
        pending = self._pending.get(source.name, {}).pop(envelope.sequence, None)
        if pending is None:
            return
        if self._owner.role is not Role.MASTER:  # A message to the master is counted when it decides on it.
            self._world.note(self._owner.name, f"{kind_of(body)} from {source.name}")
        self._settle(pending, None if fault is not None else body, fault)
