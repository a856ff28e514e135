"""The gateway's own servers: started, stopped, scaled, and replaced when they die.

The gateway is to its servers what master and agent are to those of a run. They are its children, forked from a process
that has imported torch, and held by pidfd. They report to it with `Register` and `Heartbeat`, and exit when the
lifeline pipe closes, of which the gateway holds the only write end. Registered servers are in the address book, from
which the manager learns of them.

    ordered ─► starting ─► running ─► (ended) ─► waiting ─► starting …
                  └──────────────────────┴─► failed, after too many short-lived ones

A server that dies is replaced immediately; one that dies repeatedly, after growing pauses.
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

from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.orphans import children_of, kill_children, kill_group
from kintsugi.cluster.process_factory import ProcessFactory
from kintsugi.cluster.restart_policy import StoppedProcessDetector
from kintsugi.cluster.spawn import StartOrder
from kintsugi.errors import KintsugiError, ProcessDied, StartFailed, UserError, fault_of
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import AddressBook, Heartbeat, Register, Registered
from kintsugi.runtime.backoff import growing_pause
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.processes import Processes, describe_status
from kintsugi.transport import Delivery, Endpoint, new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id

HOST = "local"
MAX_SERVERS = 64
MAX_FAILURES = 8
"""Number of consecutive short-lived servers after which a slot is given up."""
STEADY_S = 10.0
"""A server that has run for this long is not short-lived: its end does not count as a failure."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
SILENCE_S = 60.0
"""A registered server without a heartbeat for this long is killed and replaced; one that is stopped, much earlier. A
single call of a library may keep it silent for as long."""
KILL_S = 2.0
"""Time between SIGTERM and SIGKILL."""
END_TIMEOUT_S = 5.0
CHECK_S = 0.25
"""Interval of checking for stopped and silent servers."""


class PoolSlotState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """Its server has ended; the next one is started after a pause."""
    STOPPING = "stopping"
    FAILED = "failed"


MOST_S = {PoolSlotState.STARTING: 120.0, PoolSlotState.STOPPING: 30.0}
"""Time for a server to build its engine and register; time for others to take over its requests."""


@dataclass(eq=False)
class PoolSlot:
    """One server of the pool, with its successive incarnations."""

    process: str
    state: PoolSlotState = PoolSlotState.WAITING
    child: ChildProcess | None = None
    peer: Peer | None = None
    since: float = 0.0
    """Time at which the state began."""
    heard_at: float = 0.0
    start_at: float = 0.0
    num_failures: int = 0
    num_starts: int = 0
    heartbeat: Heartbeat | None = None
    last_error: str = ""

    @property
    def pid(self) -> int:
        return self.child.handle.pid if self.child is not None and self.child.handle is not None else 0

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)


class ServerPool:
    """Never blocks except in `close`: `handle` processes messages of servers, `turn` does what is due. Used by one
    thread."""

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
        """`lifeline` is the read end of a pipe; only this process holds its write end. `on_stop` is called with a
        server that is about to be stopped, while it still responds."""
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._programs = programs
        self._processes = processes
        self._lifeline = lifeline
        self._note = note
        self._on_stop = on_stop
        self._clock = clock
        self._stopped = StoppedProcessDetector()
        self._check_at = 0.0
        self._num_incarnations = 0
        self._book_number = 0
        self._closing = False
        self._wanted = 0
        self._others = frozenset(children_of(os.getpid()))
        """Children of this process that do not belong to the pool."""
        self.slots: dict[str, PoolSlot] = {}
        self.fatal: KintsugiError | None = None
        """Error because of which no server can be started; set when the last slot was given up."""
        self._process_factory = ProcessFactory(
            endpoint,
            parent=self,
            programs=programs,
            processes=processes,
            own=self._bootstrap("gateway", "0", public_key=b"", secret_key=b""),
            num_spares=0,
            fork_server_name=f"kintsugi-{endpoint.job}-{uuid4().hex[:8]}-template",
            lifeline=lifeline,
            clock=clock,
        )

    def begin(self, size: int) -> None:
        """Start the fork server and `size` servers."""
        self._process_factory.start_fork_server()
        self.resize(size)

    def resize(self, size: int) -> None:
        """Change the number of servers. Surplus servers get no further requests and end."""
        assert 0 <= size <= MAX_SERVERS, size
        self._wanted = size
        for index in range(size):
            slot = self.slots.setdefault(
                process_id(Role.SERVER, index), PoolSlot(process_id(Role.SERVER, index))
            )
            if slot.state is PoolSlotState.FAILED:
                slot.num_failures = 0
                self._set(slot, PoolSlotState.WAITING)
        for slot in list(self.slots.values()):
            if not self._is_wanted(slot) and slot.state is not PoolSlotState.STOPPING:
                self._stop(slot)
        self.turn()

    def handle(self, delivery: Delivery) -> bool:
        """Process a message of a server; return False if it is not for the pool."""
        body = delivery.body
        slot = self.slots.get(delivery.peer.process)
        if isinstance(body, Register):
            self._register(delivery, body, slot)
        elif isinstance(body, Heartbeat):
            if slot is not None:
                slot.heard_at, slot.heartbeat = self._clock.monotonic(), body
        else:
            return False
        return True

    def turn(self) -> None:
        """Start servers that are due, and kill those that do not respond."""
        now = self._clock.monotonic()
        for slot in list(self.slots.values()):
            if slot.state is PoolSlotState.WAITING and now >= slot.start_at and not self._closing:
                self._start(slot, now=now)
            if slot.child is not None:
                slot.child.send_due_signals(now)
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            self._check_servers(now)

    def next_turn_s(self) -> float:
        """Time until `turn` has to be called if no message arrives."""
        now = self._clock.monotonic()
        due = [slot.start_at for slot in self.slots.values() if slot.state is PoolSlotState.WAITING]
        due += [slot.child.signal_at for slot in self.slots.values() if slot.child is not None]
        return max(0.0, min([*due, now + CHECK_S]) - now)

    def close(self) -> None:
        """End every server, which has no work left, and the fork server."""
        self._closing = True
        self._process_factory.close()
        for slot in self.slots.values():
            if slot.child is None:
                continue
            self._process_factory.close_report(slot.child)
            if (handle := slot.child.handle) is not None:
                self._endpoint.unwatch(handle.pidfd)
                handle.send_signal(signal.SIGKILL)
                handle.wait_ended(whom=slot.process, timeout_s=END_TIMEOUT_S)
                handle.close()
        # Processes that were being started, and children that a server may have left.
        kill_children(self._processes, but=self._others, timeout_s=END_TIMEOUT_S, clock=self._clock)
        self.slots.clear()

    # Start of a server.

    def _start(self, slot: PoolSlot, *, now: float) -> None:
        self._num_incarnations += 1
        slot.num_starts += 1
        public_key, secret_key = new_key_pair()
        bootstrap = self._bootstrap(
            slot.process, str(self._num_incarnations), public_key=public_key, secret_key=secret_key
        )
        slot.peer = Peer(slot.process, bootstrap.incarnation, HOST, "", public_key)
        self._endpoint.admit(slot.peer)
        start = StartOrder(self._programs.entries[Role.SERVER], Placement(), bootstrap, report=-1)
        slot.child = ChildProcess.ordered(start, request=None)
        slot.heartbeat = None
        self._set(slot, PoolSlotState.STARTING)
        self._process_factory.start_child(slot.child)

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

    def _register(self, delivery: Delivery, body: Register, slot: PoolSlot | None) -> None:
        """Add a server to the address book. A server repeats `Register` if it has not received the reply."""
        self._endpoint.reply(delivery, Registered(self._endpoint.term))
        if slot is None or slot.peer is None or slot.state is not PoolSlotState.STARTING:
            return
        slot.peer = Peer(slot.process, slot.peer.incarnation, HOST, body.peer.address, slot.peer.public_key)
        slot.heard_at = self._clock.monotonic()
        self._set(slot, PoolSlotState.RUNNING)
        self._issue_book()

    def _issue_book(self) -> None:
        peers = tuple(slot.peer for slot in self.slots.values() if slot.peer is not None)
        self._book_number += 1
        self._endpoint.set_book(AddressBook(self._book_number, peers))

    # End of a server.

    def _stop(self, slot: PoolSlot) -> None:
        if slot.child is None:
            del self.slots[slot.process]
            return
        self._set(slot, PoolSlotState.STOPPING)
        self._on_stop(slot.process)

    def dismiss(self, process: str) -> None:
        """End a server that is being stopped, after its last request has moved."""
        slot = self.slots.get(process)
        if slot is not None and slot.state is PoolSlotState.STOPPING and slot.child is not None:
            now = self._clock.monotonic()
            slot.child.stop(terminate_at=now, kill_at=now + KILL_S)

    def _ended(self, slot: PoolSlot, child: ChildProcess) -> None:
        assert child.handle is not None
        handle = child.handle
        kill_group(handle.pid)
        status = handle.status()
        self._endpoint.unwatch(handle.pidfd)
        self._process_factory.take_report(child)
        self._process_factory.close_report(child)
        output = child.last_output().strip().splitlines()
        handle.close()
        reason = describe_status(status) + (f": {output[-1]}" if output and status else "")
        self._gone(slot, reason, give_up=status == EXIT_USER_ERROR)

    def _gone(self, slot: PoolSlot, reason: str, *, give_up: bool = False) -> None:
        """Fail the requests of a server immediately, so that the manager moves them, and schedule its replacement."""
        ran = slot.state is PoolSlotState.RUNNING
        was_stopped = slot.state is PoolSlotState.STOPPING
        slot.child, slot.peer, slot.last_error = None, None, reason
        fault = fault_of(ProcessDied(f"{slot.process} {reason}"), process="gateway", time=self._clock.wall())
        self._endpoint.forget(slot.process, fault)
        if was_stopped:
            del self.slots[slot.process]
            self._issue_book()
            self._note(f"{slot.process} was stopped")
            if self._is_wanted(slot):
                self.resize(self._wanted)
            return
        self._issue_book()
        now = self._clock.monotonic()
        slot.num_failures = 1 if ran and now - slot.since > STEADY_S else slot.num_failures + 1
        if give_up or slot.num_failures > MAX_FAILURES:
            self._set(slot, PoolSlotState.FAILED)
            self._note(f"{slot.process} {reason}; it is given up")
            if all(each.state is PoolSlotState.FAILED for each in self.slots.values()):
                error = UserError if give_up else ProcessDied
                self.fatal = error(f"no generation server can be had: {slot.process} {reason}")
            return
        pause_s = growing_pause(slot.num_failures - 1, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        slot.start_at = now if slot.num_failures < 2 else now + pause_s
        self._set(slot, PoolSlotState.WAITING)
        self._note(f"{slot.process} {reason}; another one takes its place")

    def _check_servers(self, now: float) -> None:
        """Kill servers that are stopped, silent, or do not start: their end is then detected, and they are replaced."""
        pids = {slot.pid for slot in self.slots.values()} - {0}
        stopped = set(self._stopped.sample([*pids, *self._process_factory.pids], now=now))
        self._process_factory.maintain(stopped, now)
        for slot in self.slots.values():
            silent = slot.state is PoolSlotState.RUNNING and now - slot.heard_at > SILENCE_S
            late = now - slot.since > MOST_S.get(slot.state, math.inf)
            if slot.child is not None and (slot.pid in stopped or silent or late):
                slot.child.stop(terminate_at=now, kill_at=now)

    def _is_wanted(self, slot: PoolSlot) -> bool:
        return int(slot.process.rpartition("-")[2]) < self._wanted

    def _set(self, slot: PoolSlot, state: PoolSlotState) -> None:
        slot.state, slot.since = state, self._clock.monotonic()

    # Interface of the process factory to its parent.

    def on_spawned(self, child: ChildProcess) -> None:
        assert child.handle is not None
        slot = self.slots[child.process]
        self._endpoint.watch(child.handle.pidfd, partial(self._ended, slot, child))

    def on_started(self, child: ChildProcess) -> None:
        """Nothing to do: a started server registers."""

    def on_start_failed(self, child: ChildProcess, error: StartFailed) -> None:
        slot = self.slots.get(child.process)
        if slot is not None and not self._closing:
            self._gone(slot, str(error))

    def known_pids(self) -> set[int]:
        return ({slot.pid for slot in self.slots.values()} - {0}) | self._process_factory.pids | self._others

    def fork_server_changed(self) -> None:
        """Nothing to do: only the process factory uses the fork server."""
