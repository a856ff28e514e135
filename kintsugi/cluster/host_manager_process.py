"""The launcher's handle of the host manager (`host_manager.py`): starts it as a child, restarts it, reads its reports.

Everything that a host manager starts with is made before the launcher's standby is forked: keys, its listening socket,
its pipe of reports, and the machines of a hosts file. So a successor of the launcher goes on with the same host
manager, and a successor of the host manager with the same hosts, also where the hosts file was changed meanwhile or a
name in it does not resolve.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import msgspec

from kintsugi.cluster.backends.ssh import RemoteHost, other_machines
from kintsugi.cluster.handover import Programs
from kintsugi.cluster.restart_policy import RestartLimit, StoppedProcessDetector
from kintsugi.cluster.spawn import execute, in_memory
from kintsugi.config.schema import ENGINES, Config
from kintsugi.errors import ConfigError, DeadlineExceeded
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import Child, Processes
from kintsugi.transport import new_key_pair
from kintsugi.types import Placement, Role, process_id

HOST_MANAGER = process_id(Role.HOST_MANAGER, 0)
MODULE = "kintsugi.cluster.host_manager"
END_S = 20.0
"""Time for a host manager to end all hosts in order; those that it does not reach end by themselves."""


class HostFailed(msgspec.Struct, frozen=True, tag=True):
    """A host could not join the run; the run can not begin."""

    host: str
    why: str


class ManagerHandover(msgspec.Struct, frozen=True):
    """Everything that a host manager and its successors start with; holds secret keys."""

    config: Config
    run_dir: str
    agents: tuple[Bootstrap, ...]
    """Bootstraps of the agents, one for each host that is not of this machine."""
    programs: Programs
    public_key: bytes
    secret_key: bytes
    listener: int
    lifeline: int
    report: int
    machines: tuple[RemoteHost, ...] = ()
    """Machines of the hosts file, in the order of the agents; empty where an engine places the hosts."""

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.listener, self.lifeline, self.report


def _machines(config: Config, *, number: int) -> tuple[RemoteHost, ...]:
    """Read the machines of a hosts file, as many as the run has; none where an engine places the hosts."""
    if config.cluster.on in ENGINES:
        return ()
    machines = other_machines(Path(config.cluster.on))
    if len(machines) < number:
        raise ConfigError(
            f"{config.cluster.on}: expected {number} machines besides this one, as when the run was started, found "
            f"{len(machines)}"
        )
    return machines[:number]


class HostManagerProcess:
    """The host manager over all its incarnations."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        agents: tuple[Bootstrap, ...],
        programs: Programs,
        address: str,
        lifeline: int,
        processes: Processes,
    ) -> None:
        """`address` is that of the interface on which the hosts reach this machine. ConfigError for a hosts file that
        can not be read, or names too few machines."""
        machines = _machines(config, number=len(agents))
        self._processes = processes
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._report, self._report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        public_key, secret_key = new_key_pair()
        self._handover = ManagerHandover(
            config=config,
            run_dir=str(run_dir),
            agents=agents,
            programs=programs,
            public_key=public_key,
            secret_key=secret_key,
            listener=self._listener.fileno(),
            lifeline=lifeline,
            report=self._report_write,
            machines=machines,
        )
        self._limit = RestartLimit()
        self._stopped = StoppedProcessDetector()
        self._restart_at = 0.0
        self._child: Child | None = None
        self._unread = b""

    @property
    def pids(self) -> frozenset[int]:
        return frozenset() if self._child is None else frozenset({self._child.pid})

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time; 0 if it does not run."""
        if self._child is None:
            return 0, 0
        return self._child.pid, process_start_time(self._child.pid) or 0

    def ensure_running(self, now: float) -> bool:
        """Start it if it does not run, and kill one that is stopped; False if it ends too often."""
        if self._child is not None and self._stopped.sample(self.pids, now=now):
            self._child.send_signal(signal.SIGKILL)
        if self._child is not None and not self._child.ended():
            return True
        if self._child is not None:
            # What its start needs may be there later: space on a disk, an engine that does not answer.
            lacks_something = self._child.status() == EXIT_USER_ERROR
            self._forget()
            if not self._limit.allows(now, shortage=lacks_something):
                return False
            self._restart_at = now + self._limit.pause_s(now)
        if now >= self._restart_at:
            self._start()
        return True

    def _start(self) -> None:
        handed_over = in_memory(msgspec.msgpack.encode(self._handover))
        try:
            self._child = execute(
                self._processes,
                [MODULE, str(handed_over)],
                placement=Placement(),
                pass_fds=(handed_over, *self._handover.descriptors),
            )
        finally:
            os.close(handed_over)

    def adopt(self, pid: int, start_time: int) -> None:
        """Go on with the process that a launcher, which has died, had started."""
        if self._child is not None:
            self._forget()
        with contextlib.suppress(ProcessLookupError):
            if pid:
                child = self._processes.adopt(pid)
                if process_start_time(pid) == start_time:
                    self._child = child
                else:
                    child.close()

    def reports(self) -> list[HostFailed]:
        """Return the reports since the last call."""
        try:
            content = os.read(self._report, 65536)
        except BlockingIOError:
            return []
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [msgspec.json.decode(line, type=HostFailed) for line in lines]

    def close(self) -> None:
        """Wait for its end, which follows that of its lifeline, and release everything."""
        try:
            if self._child is not None:
                try:
                    self._child.wait_ended(whom=HOST_MANAGER, timeout_s=END_S)
                except DeadlineExceeded:
                    self._child.send_signal(signal.SIGKILL)
                    self._child.wait_ended(whom=HOST_MANAGER, timeout_s=END_S)
                self._forget()
        finally:
            self._listener.close()
            os.close(self._report)
            os.close(self._report_write)

    def _forget(self) -> None:
        assert self._child is not None
        self._child.status()
        self._child.close()
        self._child = None
        self._unread = b""
