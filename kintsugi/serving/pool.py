"""The gateway's own servers: started, stopped, counted up and down, and replaced when they die.

The gateway is to its servers what master and agent are to those of a run: they are its children, forked from a process
that has imported torch already, held by pidfd; they report to it with `Register` and `Heartbeat`, and end by themselves
when the lifeline pipe ends, whose only writer the gateway is. Who has registered is in the address book, which is how
the manager learns of servers.

    ordered ─► starting ─► running ─► (ended) ─► waiting ─► starting …
                  └──────────────────────┴─► failed, after too many that did not last

A server that dies is replaced at once; one that dies again and again, after growing pauses.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from uuid import uuid4

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.nursery import Nursery
from kintsugi.cluster.orphans import children_of, kill_children, kill_group
from kintsugi.cluster.placement import Start
from kintsugi.cluster.restarts import StoppedWatch
from kintsugi.errors import KintsugiError, ProcessDied, StartFailed, UserError, fault_of
from kintsugi.messages import AddressBook, Heartbeat, Register, Registered
from kintsugi.runtime import SYSTEM_CLOCK, Clock, Processes, describe_status
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id
from kintsugi.worker import EXIT_USER_ERROR

HOST = "local"
MAX_SERVERS = 64
MAX_FAILURES = 8
"""Ends in a row of servers that did not last; then the place is given up."""
STEADY_S = 10.0
"""Who has run for so long has lasted: its end is not held against the next one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
SILENCE_S = 15.0
"""A registered server that sends no heartbeat for so long is killed, and replaced."""
KILL_S = 2.0
"""Between SIGTERM and SIGKILL."""
END_TIMEOUT_S = 5.0
LOOK_S = 0.25
"""Between two looks at who stands still."""


class PlaceState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """Its server has ended; the next one is started after a pause."""
    STOPPING = "stopping"
    FAILED = "failed"


MOST_S = {PlaceState.STARTING: 120.0, PlaceState.STOPPING: 30.0}
"""For a server to build its engine and register; for others to take over what it does."""


@dataclass(eq=False)
class Place:
    """One server's place, which its incarnations take one after the other."""

    process: str
    state: PlaceState = PlaceState.WAITING
    kept: Kept | None = None
    peer: Peer | None = None
    since: float = 0.0
    """When the state began."""
    heard_at: float = 0.0
    start_at: float = 0.0
    num_failures: int = 0
    num_starts: int = 0
    heartbeat: Heartbeat | None = None
    last_error: str = ""

    @property
    def pid(self) -> int:
        return self.kept.child.pid if self.kept is not None and self.kept.child is not None else 0

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)


class Pool:
    """Never blocks but in `close`: `handle` takes what servers say, `turn` does what is due. One thread's."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        run_dir: str,
        programs: Programs,
        processes: Processes,
        lifeline: int,
        note: Callable[[str], None],
        on_stop: Callable[[str], None] = lambda process: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`lifeline` is the read end of a pipe whose write end only this process holds. `on_stop` is told of a server
        that is about to be stopped, while it still answers."""
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._programs = programs
        self._processes = processes
        self._lifeline = lifeline
        self._note = note
        self._on_stop = on_stop
        self._clock = clock
        self._stopped = StoppedWatch()
        self._look_at = 0.0
        self._num_incarnations = 0
        self._book_number = 0
        self._closing = False
        self._wanted = 0
        self._others = frozenset(children_of(os.getpid()))
        """Children of this process that are nobody's business here."""
        self.places: dict[str, Place] = {}
        self.fatal: KintsugiError | None = None
        """Why no server can be had; set when the last place was given up."""
        self._nursery = Nursery(
            endpoint,
            parent=self,
            programs=programs,
            processes=processes,
            own=self._bootstrap("gateway", "0", public_key=b"", secret_key=b""),
            num_spares=0,
            template_name=f"kintsugi-{endpoint.job}-{uuid4().hex[:8]}-template",
            lifeline=lifeline,
            clock=clock,
        )

    def begin(self, size: int) -> None:
        """Start the process that servers are forked from, and `size` servers."""
        self._nursery.start_template()
        self.resize(size)

    def resize(self, size: int) -> None:
        """Have so many servers, now or soon. Those that are too many get nothing more to do, and end."""
        assert 0 <= size <= MAX_SERVERS, size
        self._wanted = size
        for index in range(size):
            place = self.places.setdefault(
                process_id(Role.SERVER, index), Place(process_id(Role.SERVER, index))
            )
            if place.state is PlaceState.FAILED:
                place.num_failures = 0
                self._set(place, PlaceState.WAITING)
        for place in list(self.places.values()):
            if not self._is_wanted(place) and place.state is not PlaceState.STOPPING:
                self._stop(place)
        self.turn()

    def handle(self, delivery: Delivery) -> bool:
        """Take what a server says of itself; False if it is somebody else's business."""
        body = delivery.body
        place = self.places.get(delivery.peer.process)
        if isinstance(body, Register):
            self._register(delivery, body, place)
        elif isinstance(body, Heartbeat):
            if place is not None:
                place.heard_at, place.heartbeat = self._clock.monotonic(), body
        else:
            return False
        return True

    def turn(self) -> None:
        """Start what is to be started, end what does not answer."""
        now = self._clock.monotonic()
        for place in list(self.places.values()):
            if place.state is PlaceState.WAITING and now >= place.start_at and not self._closing:
                self._start(place, now=now)
            if place.kept is not None:
                place.kept.send_due_signals(now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look(now)

    def next_turn_s(self) -> float:
        """How long `turn` need not be called if nothing happens."""
        now = self._clock.monotonic()
        due = [place.start_at for place in self.places.values() if place.state is PlaceState.WAITING]
        due += [place.kept.signal_at for place in self.places.values() if place.kept is not None]
        return max(0.0, min([*due, now + LOOK_S]) - now)

    def close(self) -> None:
        """End every server, which has nothing to lose, and the process they are forked from."""
        self._closing = True
        self._nursery.close()
        for place in self.places.values():
            if place.kept is None:
                continue
            self._nursery.let_go(place.kept)
            if (child := place.kept.child) is not None:
                self._endpoint.unwatch(child.pidfd)
                child.send_signal(signal.SIGKILL)
                child.wait_ended(whom=place.process, timeout_s=END_TIMEOUT_S)
                child.close()
        # Who was being born, and what a server may have left.
        kill_children(self._processes, but=self._others, timeout_s=END_TIMEOUT_S, clock=self._clock)
        self.places.clear()

    # How a server comes.

    def _start(self, place: Place, *, now: float) -> None:
        self._num_incarnations += 1
        place.num_starts += 1
        public_key, secret_key = new_key_pair()
        bootstrap = self._bootstrap(
            place.process, str(self._num_incarnations), public_key=public_key, secret_key=secret_key
        )
        place.peer = Peer(place.process, bootstrap.incarnation, HOST, "", public_key)
        self._endpoint.admit(place.peer)
        start = Start(self._programs.entries[Role.SERVER], Placement(), bootstrap, report=-1)
        place.kept = Kept.ordered(start, request=None)
        place.heartbeat = None
        self._set(place, PlaceState.STARTING)
        self._nursery.bring_up(place.kept)

    def _bootstrap(
        self, process: str, incarnation: str, *, public_key: bytes, secret_key: bytes
    ) -> Bootstrap:
        return Bootstrap(
            job=self._endpoint.job,
            run_dir=self._run_dir,
            process=process,
            role=Role.SERVER,
            host=HOST,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            master=self._endpoint.peer(host=HOST),
            lifeline=self._lifeline,
        )

    def _register(self, delivery: Delivery, body: Register, place: Place | None) -> None:
        """From now on the manager knows it. It says the same again when it has not heard our answer."""
        self._endpoint.reply(delivery, Registered(self._endpoint.epoch))
        if place is None or place.peer is None or place.state is not PlaceState.STARTING:
            return
        place.peer = Peer(
            place.process, place.peer.incarnation, HOST, body.peer.address, place.peer.public_key
        )
        place.heard_at = self._clock.monotonic()
        self._set(place, PlaceState.RUNNING)
        self._issue_book()

    def _issue_book(self) -> None:
        peers = tuple(place.peer for place in self.places.values() if place.peer is not None)
        self._book_number += 1
        self._endpoint.set_book(AddressBook(self._book_number, peers))

    # How a server goes.

    def _stop(self, place: Place) -> None:
        if place.kept is None:
            del self.places[place.process]
            return
        self._set(place, PlaceState.STOPPING)
        self._on_stop(place.process)

    def dismiss(self, process: str) -> None:
        """Nothing is left to lose on a server that is being stopped: end it."""
        place = self.places.get(process)
        if place is not None and place.state is PlaceState.STOPPING and place.kept is not None:
            now = self._clock.monotonic()
            place.kept.stop(terminate_at=now, kill_at=now + KILL_S)

    def _ended(self, place: Place, kept: Kept) -> None:
        assert kept.child is not None
        child = kept.child
        kill_group(child.pid)
        status = child.status()
        self._endpoint.unwatch(child.pidfd)
        self._nursery.take_report(kept)
        self._nursery.let_go(kept)
        words = kept.last_output().strip().splitlines()
        child.close()
        why = describe_status(status) + (f": {words[-1]}" if words and status else "")
        self._gone(place, why, give_up=status == EXIT_USER_ERROR)

    def _gone(self, place: Place, why: str, *, give_up: bool = False) -> None:
        """Its requests fail at once, for the manager to give to others; somebody takes its place."""
        ran = place.state is PlaceState.RUNNING
        was_stopped = place.state is PlaceState.STOPPING
        place.kept, place.peer, place.last_error = None, None, why
        fault = fault_of(ProcessDied(f"{place.process} {why}"), process="gateway", time=self._clock.wall())
        self._endpoint.forget(place.process, fault)
        if was_stopped:
            del self.places[place.process]
            self._issue_book()
            self._note(f"{place.process} was stopped")
            if self._is_wanted(place):
                self.resize(self._wanted)
            return
        self._issue_book()
        now = self._clock.monotonic()
        place.num_failures = 1 if ran and now - place.since > STEADY_S else place.num_failures + 1
        if give_up or place.num_failures > MAX_FAILURES:
            self._set(place, PlaceState.FAILED)
            self._note(f"{place.process} {why}; it is given up")
            if all(each.state is PlaceState.FAILED for each in self.places.values()):
                error = UserError if give_up else ProcessDied
                self.fatal = error(f"no generation server can be had: {place.process} {why}")
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (place.num_failures - 2))
        place.start_at = now if place.num_failures < 2 else now + pause_s
        self._set(place, PlaceState.WAITING)
        self._note(f"{place.process} {why}; another one takes its place")

    def _look(self, now: float) -> None:
        """Kill who is stopped, silent, or does not come up: its end is seen, and it is replaced."""
        pids = {place.pid for place in self.places.values()} - {0}
        stopped = set(self._stopped.sample([*pids, *self._nursery.pids], now=now))
        self._nursery.look_after(stopped, now)
        for place in self.places.values():
            silent = place.state is PlaceState.RUNNING and now - place.heard_at > SILENCE_S
            late = now - place.since > MOST_S.get(place.state, math.inf)
            if place.kept is not None and (place.pid in stopped or silent or late):
                place.kept.stop(terminate_at=now, kill_at=now)

    def _is_wanted(self, place: Place) -> bool:
        return int(place.process.rpartition("-")[2]) < self._wanted

    def _set(self, place: Place, state: PlaceState) -> None:
        place.state, place.since = state, self._clock.monotonic()

    # What the nursery asks of a parent.

    def born(self, kept: Kept) -> None:
        assert kept.child is not None
        place = self.places[kept.process]
        self._endpoint.watch(kept.child.pidfd, partial(self._ended, place, kept))

    def started(self, kept: Kept) -> None:
        """It says so itself when it can be spoken to."""

    def start_failed(self, kept: Kept, error: StartFailed) -> None:
        place = self.places.get(kept.process)
        if place is not None and not self._closing:
            self._gone(place, str(error))

    def known_pids(self) -> set[int]:
        return ({place.pid for place in self.places.values()} - {0}) | self._nursery.pids | self._others

    def template_changed(self) -> None:
        """Nobody but the nursery has to know."""
