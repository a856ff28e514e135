"""Starts the children of an agent: from a spare where there is one, else from the fork server, else by execution.

A role that needs the imports of the fork server waits until it has imported them; other roles are executed until then.
Afterwards every child is forked, so a replacement runs a tenth of a second after it was requested.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Collection
from typing import Protocol

import msgspec

from kintsugi.cluster.child import FORK_SERVER, ChildProcess, ChildRecord, record_of
from kintsugi.cluster.fork_server import ForkServer, ImportsDone
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.orphans import kill_children
from kintsugi.cluster.restart_policy import RestartLimit
from kintsugi.cluster.shared_memory import EventLoop
from kintsugi.cluster.spares import Spares
from kintsugi.cluster.spawn import StartOrder, spawn
from kintsugi.errors import DeadlineExceeded, StartFailed
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.clock import Clock
from kintsugi.runtime.processes import Child, Processes
from kintsugi.types import Role, role_of

END_TIMEOUT_S = 2.0
"""Time for a process that was killed to end."""
IMPORT_S = 60.0
"""Time for a fork server to import everything that its children need."""
FORK_S = 5.0
"""Time for a fork server that is ready to fork one child."""
EXIT_S = 0.5
"""Time for a fork server to exit after its connection has ended, so that its status is available."""


class ChildOwner(Protocol):
    """Owner of a child, which the factory informs about its start."""

    def on_spawned(self, child: ChildProcess) -> None:
        """The process exists: `child.handle` is set."""

    def on_started(self, child: ChildProcess) -> None:
        """The process exists, and its program has begun."""

    def on_start_failed(self, child: ChildProcess, error: StartFailed) -> None:
        """The process could not be created."""


class ProcessParent(ChildOwner, Protocol):
    """Owner of all children but the spares."""

    def known_pids(self) -> set[int]:
        """Pids of all children; any other descendant of this process is unknown and may be killed."""

    def fork_server_changed(self) -> None:
        """The fork server was started, replaced or has ended."""


class ProcessFactory:
    """Starts children, one after the other, and keeps the fork server running."""

    def __init__(
        self,
        loop: EventLoop,
        *,
        parent: ProcessParent,
        programs: Programs,
        processes: Processes,
        own: Bootstrap,
        num_spares: int,
        fork_server_name: str,
        lifeline: int,
        clock: Clock,
    ) -> None:
        """`own` is the agent's bootstrap."""
        self._loop = loop
        self._parent = parent
        self._programs = programs
        self._processes = processes
        self._fork_server_name = fork_server_name
        self._lifeline = lifeline
        self._clock = clock
        self._fork_server: ForkServer | None = None
        self._fork_server_ready = False
        self._fork_server_limit = RestartLimit()
        self._forking: deque[ChildProcess] = deque()
        """Children that are requested from the fork server and not forked yet, in order."""
        self._last_reply_at = 0.0
        """When the fork server last answered, or the first of those was requested."""
        self._closed = False
        self._spares = Spares(
            loop, number=num_spares, own=own, program=programs.prepare, factory=self, clock=clock
        )

    @property
    def is_forking(self) -> bool:
        """Whether a process may exist that the fork server has not reported yet."""
        return bool(self._forking)

    @property
    def pids(self) -> set[int]:
        """Pids of fork server and spares, which no request has asked for."""
        return self._spares.pids | (
            {self._fork_server.handle.pid} if self._fork_server is not None else set()
        )

    def fork_server_record(self) -> ChildRecord | None:
        """Entry of the fork server in the table."""
        return record_of(
            self._fork_server.handle if self._fork_server is not None else None, process=FORK_SERVER
        )

    def start_fork_server(self) -> None:
        """Start a fork server, unless there is one or the programs need none."""
        if self._fork_server is not None or self._closed or not self._programs.preload:
            return
        fork_server = ForkServer.start(
            self._processes,
            preload=self._programs.preload,
            name=self._fork_server_name,
            lifeline=self._lifeline,
        )
        self._use(fork_server)
        self._parent.fork_server_changed()

    def adopt_fork_server(self, handle: Child) -> None:
        """Use the fork server of an earlier agent; one that does not listen is killed."""
        try:
            self._use(ForkServer.adopt(handle, name=self._fork_server_name))
        except OSError:
            handle.send_signal(signal.SIGKILL)
            handle.wait_ended(whom=FORK_SERVER, timeout_s=END_TIMEOUT_S)
            handle.close()

    def _use(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._fork_server_ready = False
        self._loop.watch(fork_server.fileno(), self._on_fork_server_readable)

    def start_child(self, child: ChildProcess) -> None:
        """Begin to start a child, which reports the result on a pipe of its own."""
        start = self._with_report(child)
        if start is None:
            return
        if self._take_spare(child):
            self._owner_of(child).on_spawned(child)
        elif self._is_forked(child) and self._fork_server is not None and self._fork_server.request(start):
            if not self._forking:
                self._last_reply_at = self._clock.monotonic()
            self._forking.append(child)
        else:
            self._execute(child)
        os.close(start.report)

    def _owner_of(self, child: ChildProcess) -> ChildOwner:
        return self._spares if role_of(child.process) is Role.SPARE else self._parent

    def _take_spare(self, child: ChildProcess) -> bool:
        """Use a spare, if one is prepared and the order sets neither an environment, which libraries have read already,
        nor another interpreter."""
        assert child.start is not None
        role = role_of(child.process)
        if role is not Role.SPARE:
            self._spares.postpone()
        if role in self._programs.forked and not (child.start.placement.environment or child.start.python):
            child.handle = self._spares.take(child.start)
        return child.handle is not None

    def avoid(self, broken_chips: tuple[str, ...]) -> None:
        """Keep spares off these accelerators."""
        self._spares.avoid(broken_chips)

    def _with_report(self, child: ChildProcess) -> StartOrder | None:
        """Complete the order with a new report pipe; None if there is no descriptor for one, which fails the start."""
        assert child.start is not None
        try:
            child.report, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            failed = StartFailed(process=child.process, phase="opening a pipe for its report", why=str(error))
            self._owner_of(child).on_start_failed(child, failed)
            return None
        child.start = msgspec.structs.replace(child.start, report=writer)
        self._loop.watch(child.report, lambda: self.take_report(child))
        return child.start

    def _is_forked(self, child: ChildProcess) -> bool:
        assert child.start is not None
        role = role_of(child.process)
        if role is Role.MASTER and self._fork_server is not None and self._fork_server.is_adopted:
            # Its status is the run's exit code, so it has to be a child of this agent.
            return False
        if child.start.python:
            return False
        awaits_fork_server = role in self._programs.forked or role is Role.SPARE
        return (awaits_fork_server or self._fork_server_ready) and not child.start.placement.environment

    def _execute(self, child: ChildProcess) -> None:
        assert child.start is not None
        try:
            child.handle = spawn(self._processes, child.start)
        except StartFailed as error:
            self._owner_of(child).on_start_failed(child, error)
            return
        self._owner_of(child).on_spawned(child)

    def take_report(self, child: ChildProcess) -> None:
        """Read the start report of a child, if it has arrived."""
        reader = child.report
        if reader < 0 or not child.read_report():
            return
        self._loop.unwatch(reader)
        os.close(reader)
        if child.started and child.handle is not None:
            self._owner_of(child).on_started(child)

    def close_report(self, child: ChildProcess) -> None:
        """Close the report pipe of a child."""
        if child.report >= 0:
            self._loop.unwatch(child.report)
            os.close(child.report)
            child.report = -1

    # The fork server.

    def _on_fork_server_readable(self) -> None:
        assert self._fork_server is not None
        self._last_reply_at = self._clock.monotonic()
        answer = self._fork_server.receive()
        if answer is None:
            self._on_fork_server_ended()
        elif isinstance(answer, ImportsDone):
            self._fork_server_ready = True
        elif answer.pid < 0:
            self._execute_instead(self._forking.popleft())
        else:
            self._forked(self._forking.popleft(), answer.pid)

    def _forked(self, child: ChildProcess, pid: int) -> None:
        try:
            child.handle = self._processes.adopt(pid)
        except ProcessLookupError:
            # It has ended already, and the launcher has reaped it.
            self.take_report(child)
            self._owner_of(child).on_start_failed(child, child.start_error(None))
            return
        self._owner_of(child).on_spawned(child)
        if child.started:
            self._owner_of(child).on_started(child)

    def _on_fork_server_ended(self) -> None:
        """Replace a fork server that was killed; after one that could not import or fork, children are executed.

        Requested children that it had not forked are executed; a child that it forked without an answer is killed.
        """
        was_ready = self._fork_server_ready
        status = self._close_fork_server(grace_s=EXIT_S)
        kill_children(
            self._processes, but=self._parent.known_pids(), timeout_s=END_TIMEOUT_S, clock=self._clock
        )
        waiting = tuple(self._forking)
        self._forking.clear()
        was_killed = status is not None and status < 0
        if (was_ready or was_killed) and self._fork_server_limit.allows(self._clock.monotonic()):
            self.start_fork_server()
        for child in waiting:
            self._execute_instead(child)

    def _execute_instead(self, child: ChildProcess) -> None:
        """Execute a child that the fork server did not fork, with a new pipe: the first may be open elsewhere."""
        self.close_report(child)
        is_spare = role_of(child.process) is Role.SPARE
        if self._closed or child.stopping or is_spare:
            why = "it was stopped" if not is_spare else "its fork server has ended"
            error = StartFailed(process=child.process, phase="starting", why=why)
            self._owner_of(child).on_start_failed(child, error)
            return
        start = self._with_report(child)
        if start is not None:
            self._execute(child)
            os.close(start.report)

    def maintain(self, stopped: Collection[int], now: float) -> None:
        """Kill a fork server or spare that hangs, and start a missing spare. Called several times a second."""
        fork_server = self._fork_server
        if fork_server is not None and (fork_server.handle.pid in stopped or self.fork_server_is_late(now)):
            fork_server.handle.send_signal(signal.SIGKILL)  # Its end is handled, and another one is started.
        can_start = not self._closed and (self._fork_server is None or self._fork_server_ready)
        self._spares.maintain(stopped, now, can_start=can_start)

    def fork_server_is_late(self, now: float) -> bool:
        """Whether the fork server hangs: it has not answered a request in time."""
        most_s = FORK_S if self._fork_server_ready else IMPORT_S
        return self.is_forking and now - self._last_reply_at > most_s

    def _close_fork_server(self, *, grace_s: float) -> int | None:
        """End the fork server; return its status if it had ended before."""
        if self._fork_server is None:
            return None
        fork_server, self._fork_server = self._fork_server, None
        self._fork_server_ready = False
        self._loop.unwatch(fork_server.fileno())
        fork_server.close()
        if grace_s > 0:
            with contextlib.suppress(DeadlineExceeded):
                fork_server.handle.wait_ended(whom=FORK_SERVER, timeout_s=grace_s)
        status = fork_server.handle.status()
        fork_server.handle.send_signal(signal.SIGKILL)
        fork_server.handle.wait_ended(whom=FORK_SERVER, timeout_s=END_TIMEOUT_S)
        fork_server.handle.close()
        return status

    def close(self) -> None:
        """End fork server and spares; pending starts fail."""
        self._closed = True
        self._spares.close()
        self._close_fork_server(grace_s=0.0)
        while self._forking:
            self._execute_instead(self._forking.popleft())
