"""Child processes: started or adopted, held by pidfd, signalled and waited for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Protocol

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.proc import has_ended
from kintsugi.runtime.waits import wait


def describe_status(status: int | None) -> str:
    """Describe an exit status: `describe_status(-9) == "killed by SIGKILL"`."""
    if status is None:
        return "ended, status unknown"
    if status >= 0:
        return f"exited with code {status}"
    # Most real-time signals have no name.
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


HELD_POLL_S = 0.25
"""Interval at which a wait for the end of a process checks whether a debugger holds its zombie."""


KILLED_S = 5.0
"""Time for a process that was killed to end."""


class Child:
    """A process that was started or adopted, held by pidfd: its end is an event, and its pid can not be reused."""

    def __init__(self, *, pid: int, pidfd: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        """Becomes readable when the process has ended, unless a debugger holds its zombie."""
        self._popen = popen
        self._status: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; does not block and does not reap it."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0)) or self.is_held()

    def is_held(self) -> bool:
        """Whether it is a zombie that a debugger holds. None of its threads will run again, but the kernel neither
        signals its pidfd nor reports its status to the parent until the debugger detaches."""
        return has_ended(self.pid)

    def status(self) -> int | None:
        """Exit code, or minus the signal. None while it runs, while a debugger holds it, and for an adopted process
        that another parent reaps."""
        if self._popen is not None:
            return self._popen.poll()
        if self._status is None:
            try:
                result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return None
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                self._status = result.si_status if exited else -result.si_status
        return self._status

    def is_ours(self) -> bool:
        """Whether this process is its parent, which has to reap it."""
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        """Send a signal to exactly this process; no effect once it has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return

    def wait_ended(self, *, whom: str, timeout_s: float) -> int | None:
        """Block until it has ended and return its status; DeadlineExceeded if it does not end in time."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(min(remaining_s, HELD_POLL_S) * 1000) or self.is_held() or None,
            whom=whom,
            what="its exit",
            timeout_s=timeout_s,
        )
        return self.status()

    def close(self) -> None:
        """Close the pidfd; the process itself is not affected."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def hold_started(popen: subprocess.Popen[bytes]) -> Child:
    """Hold a process that was just started. One that can not be held, as on a host without descriptors, is ended: no
    other part of the program would know of it."""
    try:
        return Child(pid=popen.pid, pidfd=os.pidfd_open(popen.pid), popen=popen)
    except OSError:
        popen.kill()

        def attempt(remaining_s: float) -> int | None:
            with suppress(subprocess.TimeoutExpired):
                return popen.wait(remaining_s)
            return None

        with suppress(DeadlineExceeded):
            wait(attempt, whom=f"process {popen.pid}", what="its end", timeout_s=KILLED_S)
        raise


class Processes(Protocol):
    """Starts and adopts processes."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child: ...

    def adopt(self, pid: int) -> Child: ...


class SystemProcesses:
    """Real processes of this machine."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child:
        """Start `argv`; standard input is empty, only `pass_fds` are inherited. `before_exec` runs in the child."""
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            pass_fds=tuple(pass_fds),
            preexec_fn=before_exec,  # noqa: PLW1509 - callers that pass one have a single thread
            start_new_session=new_session,
        )
        return hold_started(popen)

    def adopt(self, pid: int) -> Child:
        """Hold a process that another process started; raises ProcessLookupError when there is none."""
        return Child(pid=pid, pidfd=os.pidfd_open(pid))
