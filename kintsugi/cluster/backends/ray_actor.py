"""The actor on each node of a Ray cluster: it starts a supervisor, looks at it, and gives the node back.

    driver ── key, start(sealed ticket), look, end ──► HostActor ── double fork ──► supervisor

The supervisor is no child of the actor, because Ray kills the children of its workers; it outlives this actor and a
dead raylet. The actor is detached: it outlives the driver, so that the node stays reserved while the supervisor runs.
When no driver has asked for a while and the supervisor has ended, the actors leave one after the other, and the last
one removes the placement group: nothing of a run whose launcher was lost stays in the cluster.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.backends.ray_protocol import TicketKey, supervisor_environment
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.proc import has_ended, process_start_time
from kintsugi.runtime.processes import Child
from kintsugi.runtime.waits import wait_readable

START_S = 30.0
"""Time for the interpreter between this actor and a supervisor."""
LEASE_POLL_S = 1.0
_BETWEEN = """
import contextlib, os, pathlib, signal, subprocess, sys
raylet = sys.argv[1]
signal.pthread_sigmask(signal.SIG_SETMASK, ())
with contextlib.suppress(OSError):
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, int(raylet)))
with contextlib.suppress(OSError):
    score = pathlib.Path(f"/proc/{raylet}/oom_score_adj").read_text()
    pathlib.Path("/proc/self/oom_score_adj").write_text(score)
supervisor = subprocess.Popen(sys.argv[2:], stdout=2, stderr=2, start_new_session=True)
print(supervisor.pid, flush=True)
os._exit(0)
"""
"""The process between an actor and a supervisor. Ray's workers have a low priority, and are the first that the kernel
kills for memory; what a supervisor starts has the priority and the score of the raylet, where that is allowed."""


class HostActor:
    """One node: at most one supervisor, which may have been started by an earlier actor of this node."""

    def __init__(
        self, *, name: str, lease_s: float, supervisor: tuple[int, int] | None, leave: Callable[[str], None]
    ) -> None:
        """`supervisor` is the pid and start time of one that runs already. `leave(name)` is called again and again once
        the lease is over."""
        self._key = TicketKey()
        self._supervisor = supervisor
        self._started: EngineCommand | None = None
        """The process between this actor and the supervisor, which has ended; it keeps what the supervisor writes."""
        self._lease_s, self._heard_at = lease_s, SYSTEM_CLOCK.monotonic()
        threading.Thread(target=self._watch_lease, args=(name, leave), name="lease", daemon=True).start()

    def key(self) -> bytes:
        """Public key for which a ticket is sealed."""
        return self._key.public

    def start(self, sealed: bytes, command: Sequence[str]) -> tuple[int, int]:
        """Start a supervisor in place of one that still runs; return its pid and start time. OSError."""
        self._heard_at = SYSTEM_CLOCK.monotonic()
        self.end(0.0)
        self._release()
        argv = tuple(command) or (sys.executable, "-P", "-m", "kintsugi", "agent", "--join", "-")
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._started = EngineCommand(
                [sys.executable, "-P", "-c", _BETWEEN, str(os.getppid()), *argv],
                secret=self._key.open(sealed),
                environment=supervisor_environment(dict(os.environ)),
                stdout=writer,
            )
            self._started.close(timeout_s=START_S, keep_output=True)
            if self._started.status != 0:
                raise OSError(self._started.explain())
            pid = int(os.read(reader, 64))
        finally:
            os.close(reader)
            os.close(writer)
        self._supervisor = pid, process_start_time(pid) or 0
        return self._supervisor

    def look(self) -> tuple[tuple[int, int] | None, str]:
        """Return the supervisor that runs, or None and the last line that it wrote."""
        self._heard_at = SYSTEM_CLOCK.monotonic()
        if self._supervisor is not None and not _runs(self._supervisor):
            self._supervisor = None
            return None, self._last_line()
        return self._supervisor, ""

    def end(self, grace_s: float) -> None:
        """End the supervisor: most of them are ending by themselves, and get a grace; others a signal, then force."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None or not _runs(supervisor):
            return
        with suppress(ProcessLookupError):
            child = Child(pid=supervisor[0], pidfd=os.pidfd_open(supervisor[0]))
            try:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if not wait_readable(
                        child.pidfd, whom="the supervisor", what="its end", timeout_s=grace_s
                    ):
                        child.send_signal(number)
            finally:
                child.close()

    def _last_line(self) -> str:
        lines = self._started.output().splitlines() if self._started is not None else []
        return lines[-1].strip() if lines else "its supervisor has ended"

    def _release(self) -> None:
        if self._started is not None:
            self._started.release()
            self._started = None

    def lease_is_over(self) -> bool:
        """Whether no driver has asked for so long."""
        return SYSTEM_CLOCK.monotonic() - self._heard_at > self._lease_s

    def _watch_lease(self, name: str, leave: Callable[[str], None]) -> None:
        """Body of a thread: waits for the end of the lease; nothing but the end of this process ends it."""
        told = ""
        while True:
            wait_readable(whom="the driver", what="its next question", timeout_s=LEASE_POLL_S)
            try:
                supervisor = self._supervisor
                if self.lease_is_over() and (supervisor is None or not _runs(supervisor)):
                    leave(name)
            except Exception as error:  # noqa: BLE001 - Ray raises errors of any type; it is tried again.
                if str(error) != told:
                    told = str(error)
                    sys.stderr.write(f"{name} can not be given back: {told}\n")


def _runs(supervisor: tuple[int, int]) -> bool:
    pid, start_time = supervisor
    return process_start_time(pid) == start_time and not has_ended(pid)


def leave_in_turn(name: str) -> None:
    """Leave the cluster, unless a host of a higher number is still there: the last one removes the placement group,
    which ends its actor."""
    import ray
    from ray.util import get_placement_group, list_named_actors, remove_placement_group

    others = [int(each.rpartition("-")[2]) for each in list_named_actors() if each != name]
    own = int(name.rpartition("-")[2])
    if any(other > own for other in others):
        ray.kill(ray.get_actor(name))
    elif not others:
        remove_placement_group(get_placement_group(ray.get_runtime_context().namespace))
