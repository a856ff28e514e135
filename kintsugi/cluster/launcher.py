"""The launcher: `kintsugi train` itself. Starts one node agent per host, passes signals on, and outlives them all.

    port and folder checked ─► keys, pipes ─► agents ─► (the run) ─► agents end ─► nothing of ours is left

What keeps a killed launcher from leaving anything: each agent reads a pipe that only the launcher can write, and each
other process one that only its agent and the launcher can write. Nobody ever writes; the kernel closes them.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.agent import descriptors_of
from kintsugi.cluster.children import (
    end_orphans,
    table_path,
    tail,
)
from kintsugi.cluster.handover import (
    PROGRAMS,
    AgentHandover,
    AgentReport,
    MasterDied,
    NotStarted,
    Programs,
    Ready,
)
from kintsugi.cluster.placement import execute, in_memory, log_path
from kintsugi.cluster.signals import Signals
from kintsugi.config import Config
from kintsugi.errors import ConfigError, KintsugiError, ProcessDied, StartFailed, UserError
from kintsugi.runs import JOURNAL_FILE, LAUNCHER_FILE, living_launcher, write_launcher
from kintsugi.runtime import SYSTEM_CLOCK, Child, Clock, Processes, SystemProcesses, describe_status, wait
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id

TICK_S = 0.2
END_DEADLINE_S = 5.0
"""For an agent to stop its children, which takes two graces of two seconds at worst."""
LOOPBACK = "127.0.0.1"


def launch(
    config: Config,
    *,
    run_dir: Path,
    on_tick: Callable[[], None],
    resume: bool = False,
    programs: Programs = PROGRAMS,
    processes: Processes | None = None,
) -> int:
    """Run `config` in the existing folder `run_dir` to its end; gives the master's exit code. Main thread only.

    The master continues from what the folder holds, which only a run that is to `resume` may find there.
    `on_tick` is called about five times a second. SIGINT or SIGTERM stops the run after its step, a second one at once.
    Raises UserError (port taken, run folder in use), StartFailed and ProcessDied; nothing is left in any case.
    """
    processes = processes or SystemProcesses()
    assert resume or not (run_dir / JOURNAL_FILE).exists(), f"{run_dir} holds a run; it can only be resumed"
    if (owner := living_launcher(run_dir)) is not None:
        raise UserError(f"run_dir {run_dir} is in use: process {owner.pid} runs it; stop that one first")
    with ExitStack() as stack:
        signals = Signals(signal.SIGINT, signal.SIGTERM)
        stack.callback(signals.close)
        listener = stack.enter_context(_listen(config.cluster.port))
        write_launcher(run_dir, pid=os.getpid())
        stack.callback((run_dir / LAUNCHER_FILE).unlink, missing_ok=True)
        launcher = _Launcher(run_dir=run_dir, signals=signals, processes=processes)
        stack.callback(launcher.clean_up)
        launcher.start(config, listener=listener, programs=programs)
        return launcher.run(on_tick, start_timeout_s=config.cluster.start_timeout_s)


def _listen(port: int) -> socket.socket:
    """The master's socket, opened before anything starts and kept when a master dies."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"cluster.port: port {port} of {LOOPBACK} {why}; expected a free one, or 0"
        ) from error
    return listener


class _AgentHandle:
    """One agent as the launcher sees it: its process, what it reports, and what its children live by."""

    def __init__(self, child: Child, *, process: str, report: int, children_lifeline: int) -> None:
        self.child = child
        self.process = process
        self.report = report
        self.children_lifeline = children_lifeline
        self.ready = False
        self.status: int | None = None
        self.ended = False
        self._unread = b""

    def reports(self) -> list[AgentReport]:
        """What it has said since the last call; empty, and the pipe closed, once it has ended."""
        try:
            content = os.read(self.report, 65536)
        except BlockingIOError:
            return []
        if not content:
            os.close(self.report)
            self.report = -1
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [msgspec.json.decode(line, type=AgentReport) for line in lines]


class _Launcher:
    """The loop: waits for agents' ends, their reports and signals; ends when the last agent is gone."""

    def __init__(
        self, *, run_dir: Path, signals: Signals, processes: Processes, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._run_dir = run_dir
        self._signals = signals
        self._processes = processes
        self._clock = clock
        self._agents: list[_AgentHandle] = []
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._num_signals = 0
        self._kill_at: float | None = None
        """When agents that were let go and have not ended are killed."""
        self._failure: KintsugiError | None = None

    def start(self, config: Config, *, listener: socket.socket, programs: Programs) -> None:
        """Make everybody's keys and start the agents; agent 0 also gets what the master needs."""
        job = uuid4().hex[:12]
        host, port = listener.getsockname()
        hosts = [f"host-{index}" for index in range(config.cluster.hosts)]
        keys = [new_key_pair() for _ in hosts]
        peers = tuple(
            Peer(process_id(Role.AGENT, index), uuid4().hex[:8], name, "", keys[index][0])
            for index, name in enumerate(hosts)
        )
        public_key, secret_key = new_key_pair()
        master_peer = Peer(
            process_id(Role.MASTER, 0), uuid4().hex[:8], hosts[0], f"tcp://{host}:{port}", public_key
        )

        def bootstrap(peer: Peer, role: Role, *, secret: bytes) -> Bootstrap:
            return Bootstrap(
                job=job,
                run_dir=str(self._run_dir),
                process=peer.process,
                role=role,
                host=peer.host,
                incarnation=peer.incarnation,
                public_key=peer.public_key,
                secret_key=secret,
                master=master_peer,
                lifeline=self._lifeline_read if role is Role.AGENT else -1,
            )

        master = msgspec.structs.replace(
            bootstrap(master_peer, Role.MASTER, secret=secret_key),
            listener=listener.fileno(),
            peers=peers,
        )
        for index, peer in enumerate(peers):
            own = bootstrap(peer, Role.AGENT, secret=keys[index][1])
            self._start_agent(own, master=master if index == 0 else None, programs=programs)

    def _start_agent(self, own: Bootstrap, *, master: Bootstrap | None, programs: Programs) -> None:
        children_read, children_write = os.pipe2(os.O_CLOEXEC)
        report_read, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        handover = AgentHandover(
            bootstrap=own,
            children_lifeline_read=children_read,
            children_lifeline_write=children_write,
            report=report_write,
            programs=programs,
            master=master,
        )
        handed_over = in_memory(msgspec.msgpack.encode(handover))
        try:
            child = execute(
                self._processes,
                ["kintsugi.cluster.agent", own.process, str(handed_over)],
                placement=Placement(),
                pass_fds=(handed_over, *descriptors_of(handover)),
            )
        except OSError as error:
            os.close(report_read)
            os.close(children_write)
            phase = "executing the interpreter"
            raise StartFailed(process=own.process, phase=phase, why=str(error)) from error
        finally:
            for descriptor in (handed_over, children_read, report_write):
                os.close(descriptor)
        handle = _AgentHandle(
            child, process=own.process, report=report_read, children_lifeline=children_write
        )
        self._agents.append(handle)

    def run(self, on_tick: Callable[[], None], *, start_timeout_s: float) -> int:
        """Wait for the end of the run; the exit code is that of agent 0, which is the master's."""
        start_deadline = self._clock.monotonic() + start_timeout_s
        while any(not agent.ended for agent in self._agents):
            self._turn(TICK_S)
            late = [agent.process for agent in self._agents if not (agent.ready or agent.ended)]
            if late and self._kill_at is None and self._clock.monotonic() > start_deadline:
                why = f"not ready after {start_timeout_s:g} s (cluster.start_timeout_s)"
                phase = "starting the master" if late[0] == self._agents[0].process else "starting"
                self._fail(StartFailed(process=late[0], phase=phase, why=why))
            on_tick()
        if self._failure is not None and self._num_signals == 0:
            raise self._failure
        status = self._agents[0].status
        return status if status is not None and status >= 0 else 1

    def _turn(self, timeout_s: float) -> None:
        """One round: wait for at most so long, then take in whatever happened."""
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        for agent in self._agents:
            if not agent.ended:
                poller.register(agent.child.pidfd, select.POLLIN)
            if agent.report >= 0:
                poller.register(agent.report, select.POLLIN)
        wait(
            lambda remaining_s: poller.poll(remaining_s * 1000),
            whom="agents",
            what="the end of the run",
            timeout_s=timeout_s,
        )
        for _ in self._signals.received():
            self._signalled()
        for agent in self._agents:
            if agent.report >= 0:
                self._take_reports(agent)
            if not agent.ended and agent.child.ended():
                self._agent_ended(agent)
        if self._kill_at is not None and self._clock.monotonic() >= self._kill_at:
            self._signal_agents(signal.SIGKILL)

    def _signalled(self) -> None:
        """The first one asks for a stop after this step; the second one ends everything at once."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._signal_agents(signal.SIGTERM)
        else:
            self._signal_agents(signal.SIGINT)
            self._let_go()

    def _take_reports(self, agent: _AgentHandle) -> None:
        for report in agent.reports():
            match report:
                case Ready():
                    agent.ready = True
                case NotStarted(process=process, phase=phase, why=why):
                    self._fail(StartFailed(process=process, phase=phase, why=why))
                case MasterDied(how=how, last_output=last_output):
                    master = process_id(Role.MASTER, 0)
                    self._fail(ProcessDied(f"{master} was {how}; its log ends: {last_output or '(empty)'}"))

    def _agent_ended(self, agent: _AgentHandle) -> None:
        """Agent 0 ends with the master's exit code, another one with 0 when the master said `Shutdown`."""
        agent.status = agent.child.status()
        agent.ended = True
        by_itself = agent.status is not None and agent.status >= 0
        expected = agent.ready and by_itself and (agent is self._agents[0] or agent.status == 0)
        if self._kill_at is None and not expected:
            how = describe_status(agent.status)
            log = tail(log_path(self._run_dir, agent.process))
            self._fail(ProcessDied(f"{agent.process} {how}; its log ends: {log or '(empty)'}"))
        if agent is self._agents[0]:
            self._let_go()

    def _fail(self, error: KintsugiError) -> None:
        """The first failure is the cause; what follows from it does not replace it."""
        self._failure = self._failure or error
        self._let_go()

    def _let_go(self) -> None:
        """Close the agents' pipe: they stop their children, with a grace, and end. One that does not is killed."""
        if self._lifeline_write >= 0:
            os.close(self._lifeline_write)
            self._lifeline_write = -1
        if self._kill_at is None:
            self._kill_at = self._clock.monotonic() + END_DEADLINE_S

    def _signal_agents(self, number: signal.Signals) -> None:
        for agent in self._agents:
            if not agent.ended:
                agent.child.send_signal(number)

    def clean_up(self) -> None:
        """Whatever happened: no agent, no process of an agent, no pipe is left after this."""
        self._signal_agents(signal.SIGKILL)
        os.close(self._lifeline_read)
        self._let_go()
        for agent in self._agents:
            agent.child.wait_ended(whom=agent.process, timeout_s=END_DEADLINE_S)
            agent.child.status()
            agent.child.close()
            # Before their lifeline ends: a child that ends by itself leaves what it started.
            table = table_path(self._run_dir, agent.process)
            end_orphans(table, processes=self._processes, timeout_s=END_DEADLINE_S)
            os.close(agent.children_lifeline)
            if agent.report >= 0:
                os.close(agent.report)
