"""A standby of the launcher: a second process with the same descriptors, which becomes the launcher when that one dies.

    launcher ── state, one message per change ──► standby
        └── starts another standby when that one has ended, within a tick

Both are forks of one process, so both hold the write ends of all lifelines, the listening socket, the keys and the
pipes of the agents' reports. The agents, and with them the run, end when the last of the two has ended.

The first standby is the parent of its launcher and a subreaper: the agents become its children. A later standby is a
child of its launcher; after the death of that one the agents have another parent, and their status is known by report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from contextlib import ExitStack

import msgspec

from kintsugi.cluster.orphans import become_subreaper
from kintsugi.cluster.restart_policy import RestartLimit, StoppedProcessDetector
from kintsugi.errors import DeadlineExceeded
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.processes import Child
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait_readable

TICK_S = 0.2
SETTLE_S = 0.2
"""Pause between the launcher's death and the takeover: processes that are killed together die within it."""
END_S = 5.0
"""Time for a standby that was killed to end."""
MOST_BYTES = 1 << 16
"""Maximum size of a state; that of an agent has about 40 bytes."""


class AgentState(msgspec.Struct, frozen=True, array_like=True):
    """One agent, as a successor of the launcher has to know it."""

    pid: int
    start_time: int
    """Clock ticks after boot: with the pid it names the process."""
    num_starts: int
    ready: bool
    was_ready: bool
    is_ending: bool
    exit_code: int | None
    """Exit code that it has reported."""
    ended: bool
    status: int | None
    is_restarting: bool = False
    """It has ended, and another incarnation is due."""


class LauncherState(msgspec.Struct, frozen=True, array_like=True):
    """Everything that changes after the fork and that a successor of the launcher has to know."""

    agents: tuple[AgentState, ...]
    num_stops: int
    """Requests to stop the run."""
    diagnosis: tuple[int, int]
    """Pid and start time of the diagnosis process; 0 if there is none."""
    host_manager: tuple[int, int] = (0, 0)
    """Pid and start time of the host manager; 0 if there is none."""


class LostLauncher(msgspec.Struct, frozen=True):
    """Returned in a standby whose launcher has died: this process is the launcher from then on."""

    pid: int
    status: int | None
    state: LauncherState
    """Last state that it sent, or that of the fork."""


class Standby:
    """Keeps one standby running. `ensure` returns in the process that is the launcher, which may be another one.

    The caller must have one thread: threads do not survive a fork.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._limit = RestartLimit()
        self._other: Child | None = None
        self._channel: socket.socket | None = None
        self._stopped = StoppedProcessDetector()
        self._is_first = True
        self._dismissed = False
        self._sent: LauncherState | None = None

    @property
    def pid(self) -> int:
        """Pid of the standby; 0 if there is none."""
        return self._other.pid if self._other is not None else 0

    def ensure(self, state: LauncherState, *, signals: Signals, now: float) -> LostLauncher | None:
        """Fork a standby unless one runs. Returns None in the launcher, and in a standby when its launcher has died.

        OSError if the host has no descriptor, memory or process left for it: nothing has changed then.
        """
        if self._dismissed or self._is_running(now):
            return None
        is_parent = self._is_first
        if not is_parent and not self._limit.allows(now):
            return None
        with ExitStack() as stack:
            if not is_parent:
                stack.callback(self._limit.withdraw)
            launchers_end, standbys_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(launchers_end.close)
            stack.callback(standbys_end.close)
            own = os.getpid(), os.pidfd_open(os.getpid())
            stack.callback(os.close, own[1])
            pid = os.fork()
            other = Child(pid=own[0], pidfd=own[1]) if pid == 0 else _hold_forked(pid)
            stack.pop_all()
        self._is_first = False
        if pid == 0:
            _set_up_forked(signals)
        else:
            os.close(own[1])
        is_standby = (pid > 0) if is_parent else (pid == 0)
        if is_standby:
            launchers_end.close()
            return self._follow_or_end(other, standbys_end, signals, state)
        standbys_end.close()
        launchers_end.setblocking(False)
        self._other, self._channel, self._sent = other, launchers_end, None
        return None

    def _is_running(self, now: float) -> bool:
        """Whether there is a standby; one that is stopped is killed, so that it can be replaced."""
        if self._other is None:
            return False
        if self._stopped.sample((self._other.pid,), now=now):
            self._other.send_signal(signal.SIGKILL)
        if not self._other.ended():
            return True
        self._forget()
        return False

    def publish(self, state: LauncherState) -> None:
        """Send the state if it has changed. A standby that does not take it is killed; `ensure` replaces it."""
        if self._channel is None or self._other is None or state == self._sent:
            return
        try:
            self._channel.send(msgspec.msgpack.encode(state))
            self._sent = state
        except OSError:
            self._other.send_signal(signal.SIGKILL)

    def dismiss(self) -> None:
        """End the standby for good, before the lifelines are closed."""
        self._dismissed = True
        if self._other is not None:
            self._other.send_signal(signal.SIGKILL)
            # One that the kernel can not end keeps the lifelines open; agents that do not end are killed then.
            with contextlib.suppress(DeadlineExceeded):
                self._other.wait_ended(whom="standby", timeout_s=END_S)
            self._forget()

    def _forget(self) -> None:
        assert self._other is not None and self._channel is not None
        self._other.status()  # Reaps it where this process is the parent.
        self._other.close()
        self._channel.close()
        self._other = self._channel = None

    def _follow_or_end(
        self, leader: Child, channel: socket.socket, signals: Signals, state: LauncherState
    ) -> LostLauncher:
        """Follow the launcher. An error here ends this process only, which the launcher replaces: it must not leave by
        the caller, whose clean-up ends the run."""
        try:
            return self._follow(leader, channel, signals, state)
        except BaseException as error:  # noqa: BLE001 - the standby's outermost boundary: printed to its log.
            traceback.print_exception(error)
            os._exit(EXIT_ERROR)

    def _follow(
        self, leader: Child, channel: socket.socket, signals: Signals, state: LauncherState
    ) -> LostLauncher:
        """Receive the launcher's state until it has died. Stop requests that arrive here are passed on to it."""
        channel.setblocking(False)
        stopped = StoppedProcessDetector()
        while not leader.ended():
            descriptors = leader.pidfd, channel.fileno(), signals.fileno()
            wait_readable(*descriptors, whom="launcher", what="its end", timeout_s=TICK_S)
            state = _received(channel) or state
            for number in signals.received():
                leader.send_signal(number)
            with contextlib.suppress(OSError):  # The host has no descriptor left: it is looked at again.
                if stopped.sample((leader.pid,), now=self._clock.monotonic()):
                    leader.send_signal(signal.SIGKILL)
        wait_readable(whom="processes that were killed together", what="their end", timeout_s=SETTLE_S)
        state = _received(channel) or state
        channel.close()
        lost = LostLauncher(leader.pid, leader.status(), state)
        leader.close()
        return lost


def _set_up_forked(signals: Signals) -> None:
    """Separate a process from the one that it was forked from. A host without descriptors ends this process, and the
    other one goes on alone: by the caller it would be a second launcher."""
    try:
        os.setsid()  # A signal to the process group of one does not reach the other.
        become_subreaper()
        signals.reopen()
    except BaseException as error:  # noqa: BLE001 - the boundary of a process that has just begun: printed.
        traceback.print_exception(error)
        os._exit(EXIT_ERROR)


def _hold_forked(pid: int) -> Child:
    """Hold a process that was just forked; one that can not be held is ended, because it would be a second standby."""
    try:
        return Child(pid=pid, pidfd=os.pidfd_open(pid))
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _received(channel: socket.socket) -> LauncherState | None:
    """Return the last state that has arrived since the last call."""
    last = b""
    while True:
        try:
            content = channel.recv(MOST_BYTES)
        except (BlockingIOError, ConnectionResetError):
            break
        if not content:
            break
        last = content
    return msgspec.msgpack.decode(last, type=LauncherState) if last else None
