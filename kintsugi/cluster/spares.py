"""Spares: processes that are started in advance and become the replacement of one that was lost.

    requested ─► forked from the fork server ─► prepared (its device is ready) ─► taken by a start: no spare any more
                  └────────── ends, is stopped, or is not prepared in time: another one is started ─┘

After several failures in a row no more spares are started: the run continues without them.

The fork server saves the imports; a spare also saves the fork and what must not be done before a fork: the context on
the accelerator. It has no name, key or address until it is taken. Then the `StartOrder` of its process reaches it on an
inherited socket. Only the agent holds the other end, so spares end with their agent, and its successor starts new ones.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Collection
from typing import Protocol

import msgspec

from kintsugi.cluster.child import ChildProcess
from kintsugi.cluster.orphans import kill_group
from kintsugi.cluster.restart_policy import RestartLimit
from kintsugi.cluster.shared_memory import EventLoop
from kintsugi.cluster.spawn import PREPARED, StartOrder
from kintsugi.errors import StartFailed
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.processes import Child
from kintsugi.telemetry.events import Alert, EventLog
from kintsugi.types import Placement, Role, process_id

RESTOCK_S = 2.0
"""Pause after the start of a process, which needs the CPU more than a spare does."""
END_TIMEOUT_S = 2.0
"""Time for a process that was killed to end."""
PREPARE_S = 60.0
"""Time for a spare to be forked and prepared; one that takes longer counts as hung."""
MOST_FAILURES = 5
"""Spares in a row that may end before they are prepared."""


class _Spare:
    """One spare, from its start until it ends or is taken."""

    def __init__(self, child: ChildProcess, orders: socket.socket, *, since: float) -> None:
        self.child = child
        self.since = since
        self.prepared = False
        self.is_discarded = False
        """Whether it is killed for no fault of its own."""
        self.is_watched = True
        """Whether its socket is watched for the message that it is prepared."""
        self._socket = orders
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_prepared(self) -> None:
        """Read the message that it is prepared; end of file when it has ended."""
        self.is_watched = False
        with contextlib.suppress(ConnectionResetError):
            self.prepared = self._socket.recv(len(PREPARED)) == PREPARED

    def assign(self, start: StartOrder) -> bool:
        """Send it the order of the process that it becomes; False when it has ended."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], start.descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class SpareStarter(Protocol):
    """Starts spares (`ProcessFactory`); it calls `on_spawned`, `on_started` and `on_start_failed`."""

    def start_child(self, child: ChildProcess) -> None: ...

    def close_report(self, child: ChildProcess) -> None: ...


class Spares:
    """Keeps a number of prepared processes. Driven by the agent's loop, in which it handles their messages and ends."""

    def __init__(
        self,
        loop: EventLoop,
        *,
        number: int,
        own: Bootstrap,
        program: str,
        factory: SpareStarter,
        clock: Clock,
    ) -> None:
        """`own` is the agent's bootstrap, for host and run folder; `program` prepares a spare."""
        self._loop = loop
        self._factory = factory
        self._clock = clock
        self._number = number
        self._program = program
        self._anonymous = msgspec.structs.replace(
            own,
            role=Role.SPARE,
            incarnation="",
            public_key=b"",
            secret_key=b"",
            lifeline=-1,
            listener=-1,
            peers=(),
        )
        self._spares: dict[str, _Spare] = {}
        self._num_started = 0
        self._start_at = clock.monotonic()
        self._limit = RestartLimit()
        self._num_failures = 0
        """Failures since a spare was last prepared."""
        self._log = EventLog(RunFolder(own.run_dir).events_file(own.process), process=own.process)

    @property
    def pids(self) -> set[int]:
        return {spare.child.handle.pid for spare in self._spares.values() if spare.child.handle is not None}

    def maintain(self, stopped: Collection[int], now: float, *, can_start: bool) -> None:
        """Kill spares that are stopped or late, and start one that is missing. Called several times a second."""
        for spare in self._spares.values():
            handle = spare.child.handle
            late = not spare.prepared and now - spare.since > PREPARE_S
            if handle is not None and (late or handle.pid in stopped):
                handle.send_signal(signal.SIGKILL)
        missing = len(self._spares) < self._number
        if can_start and missing and now >= self._start_at and self._limit.allows(now):
            self._start_spare(now)

    def _start_spare(self, now: float) -> None:
        """Start one spare; the next one is started when this one is prepared or has failed."""
        self._start_at = now + PREPARE_S
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bootstrap = msgspec.structs.replace(
            self._anonymous, process=process_id(Role.SPARE, self._num_started)
        )
        self._num_started += 1
        start = StartOrder(
            program=self._program,
            placement=Placement(),
            bootstrap=bootstrap,
            report=-1,
            orders=theirs.fileno(),
        )
        child = ChildProcess.ordered(start, request=None)
        spare = self._spares[child.process] = _Spare(child, ours, since=now)
        self._loop.watch(spare.fileno(), lambda: self._on_readable(spare))
        with theirs:
            self._factory.start_child(child)
        COUNTERS.add("agent.spares_made")

    def _on_readable(self, spare: _Spare) -> None:
        # The socket of a spare that has ended stays readable.
        self._loop.unwatch(spare.fileno())
        spare.read_prepared()
        if spare.prepared:
            COUNTERS.add("agent.spares_prepared")
            self._num_failures = 0
            self._start_at = self._clock.monotonic()

    def postpone(self) -> None:
        """Delay the next spare, because a process is being started."""
        self._start_at = max(self._start_at, self._clock.monotonic() + RESTOCK_S)

    def take(self, start: StartOrder) -> Child | None:
        """Let a spare become the process of `start`; the caller watches its end. None when none is prepared."""
        for spare in [spare for spare in self._spares.values() if spare.prepared]:
            handle = spare.child.handle
            if handle is None or handle.ended() or not spare.assign(start):
                continue
            self._loop.unwatch(handle.pidfd)
            self._remove(spare)
            COUNTERS.add("agent.spares_taken")
            return handle
        return None

    def _remove(self, spare: _Spare) -> None:
        del self._spares[spare.child.process]
        self._factory.close_report(spare.child)
        if spare.is_watched:
            self._loop.unwatch(spare.fileno())
        spare.close()
        self._start_at = min(self._start_at, self._clock.monotonic() + RESTOCK_S)

    # Called by the factory.

    def on_spawned(self, child: ChildProcess) -> None:
        assert child.handle is not None
        self._loop.watch(child.handle.pidfd, lambda: self._ended(child))

    def on_started(self, child: ChildProcess) -> None:
        """Nothing to do: its preparation has begun."""

    def on_start_failed(self, child: ChildProcess, error: StartFailed) -> None:
        self._lose(self._spares[child.process])

    def _lose(self, spare: _Spare) -> None:
        """Remove a spare that has ended, and give up spares after too many failures."""
        self._remove(spare)
        if spare.prepared or spare.is_discarded:
            return
        self._num_failures += 1
        if self._num_failures == MOST_FAILURES:
            self._number = 0
            COUNTERS.add("agent.spares_given_up")
            why = f"{MOST_FAILURES} in a row could not be prepared; see logs/{spare.child.process}.log"
            self._log.emit(Alert(f"no more spares are started: {why}"))

    def _ended(self, child: ChildProcess) -> None:
        handle = child.handle
        assert handle is not None
        if not handle.ended():
            return
        if handle.is_ours():
            kill_group(handle.pid)
        handle.status()
        self._loop.unwatch(handle.pidfd)
        handle.close()
        self._lose(self._spares[child.process])
        COUNTERS.add("agent.spares_lost")

    def avoid(self, broken_chips: tuple[str, ...]) -> None:
        """Replace all spares by ones that do not use these accelerators, on which they may have a context."""
        if broken_chips == self._anonymous.broken_chips:
            return
        self._anonymous = msgspec.structs.replace(self._anonymous, broken_chips=broken_chips)
        for spare in self._spares.values():
            spare.is_discarded = True
            if spare.child.handle is not None:
                spare.child.handle.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End all spares; none is started any more."""
        self._number = 0
        for spare in tuple(self._spares.values()):
            handle = spare.child.handle
            if handle is not None:
                self._loop.unwatch(handle.pidfd)
                handle.send_signal(signal.SIGKILL)
                handle.wait_ended(whom=spare.child.process, timeout_s=END_TIMEOUT_S)
                handle.close()
                self._remove(spare)
        self._log.close()
