"""The launcher, `kintsugi train` itself: starts one node agent per host, forwards signals, and outlives all of them.

    port and folder checked ─► keys, pipes ─► agents ─► (the run) ─► agents end ─► no process of the run is left

A killed launcher leaves nothing behind: only the launcher holds the write end of each agent's lifeline pipe, and only
the launcher and the agent those of the agent's children. No data is ever written; the kernel closes them.

An agent that was killed, is stopped, or ends without announcing it is restarted with everything its predecessor had:
keys, pipes, the master's socket. Its processes continue; their parent is the launcher from then on, which reaps them.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from uuid import uuid4

import msgspec

from kintsugi.cluster.child import end_orphans, read_table, tail
from kintsugi.cluster.diagnosis_process import DiagnosisProcess
from kintsugi.cluster.handover import (
    PROGRAMS,
    AgentEnding,
    AgentHandover,
    AgentNotStarted,
    AgentReady,
    AgentReport,
    MasterDied,
    Programs,
)
from kintsugi.cluster.namespaces import HostNamespaces, enter, listening_socket
from kintsugi.cluster.orphans import children_of, kill_children, reap_orphans, subreaper
from kintsugi.cluster.restart_policy import (
    MOST_RESTARTS,
    STOPPED_S,
    WITHIN_S,
    RestartLimit,
    StoppedProcessDetector,
)
from kintsugi.cluster.spawn import execute, in_memory
from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError, Fault, KintsugiError, ProcessDied, StartFailed, UserError, fault_of
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import living_launcher, write_launcher
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.processes import Child, Processes, SystemProcesses, describe_status
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import EventLog, FaultSeen, ProcessGone
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id

TICK_S = 0.2
END_DEADLINE_S = 5.0
"""Time for an agent to stop its children, which takes two graces of two seconds at worst."""


def launch(
    config: Config,
    *,
    run_dir: Path,
    on_tick: Callable[[], None],
    resume: bool = False,
    programs: Programs = PROGRAMS,
    processes: Processes | None = None,
    hosts: Sequence[HostNamespaces] = (),
) -> int:
    """Run `config` in the existing folder `run_dir` to its end; return the master's exit code. Main thread only.

    With `resume` the master continues from the journal of the folder; without it there must be none.
    `hosts` are the namespaces of the agents, one each; empty: all agents run on this machine without namespaces.
    `on_tick` is called about five times a second. SIGINT or SIGTERM stops the run after its step, a second one
    immediately. Raises UserError (port taken, run folder in use), StartFailed and ProcessDied; no process is left.
    """
    processes = processes or SystemProcesses()
    assert resume or not RunFolder(run_dir).journal_file.exists(), (
        f"{run_dir} holds a run; it can only be resumed"
    )
    if (owner := living_launcher(run_dir)) is not None:
        raise UserError(f"run_dir {run_dir} is in use: process {owner.pid} runs it; stop that one first")
    hosts = hosts or [HostNamespaces(f"host-{index}") for index in range(config.cluster.hosts)]
    assert len(hosts) == config.cluster.hosts, (hosts, config.cluster.hosts)
    with ExitStack() as stack:
        signals = Signals(signal.SIGINT, signal.SIGTERM)
        stack.callback(signals.close)
        listener = stack.enter_context(_listen(hosts[0], port=config.cluster.port))
        write_launcher(run_dir, pid=os.getpid())
        stack.callback(RunFolder(run_dir).launcher_file.unlink, missing_ok=True)
        stack.enter_context(subreaper())
        start_timeout_s = config.cluster.start_timeout_s
        launcher = _Launcher(
            run_dir=run_dir, signals=signals, processes=processes, start_timeout_s=start_timeout_s
        )
        stack.callback(launcher.clean_up)
        launcher.start(config, listener=listener, programs=programs, hosts=hosts)
        return launcher.run(on_tick)


def _listen(host: HostNamespaces, *, port: int) -> socket.socket:
    """Open the master's socket, before any process starts; it stays open when a master dies."""
    try:
        return listening_socket(host, port=port)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"cluster.port: port {port} of {host.address} {why}; expected a free one, or 0"
        ) from error


def stopped(process: str, pid: int, *, time: float) -> Fault:
    """Fault of an agent that is stopped and will be killed for it."""
    message = f"{process}: process {pid} is stopped (state T), for {STOPPED_S:g} s or more"
    return Fault(f"{process}@{pid}.Stopped", "Stopped", process, message, time)


class _AgentHandle:
    """One agent in the launcher, over all its incarnations: process, reports, and the handover of the next one."""

    def __init__(self, handover: AgentHandover, *, place: HostNamespaces) -> None:
        self._handover = handover
        self._place = place
        self.process = handover.bootstrap.process
        self.limit = RestartLimit()
        self._num_starts = 0
        self._child: Child | None = None
        self.report = -1
        self.ready = False
        self.is_ending = False
        """It has announced an orderly end."""
        self.start_deadline = math.inf
        self.was_ready = False
        """At least one incarnation has started: its handover works."""
        self.status: int | None = None
        self.ended = True
        self._unread = b""

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.process} was never started"
        return self._child

    def start(self, processes: Processes, *, stop_requested: bool, deadline: float) -> None:
        """Start the first or the next incarnation. They are numbered, so that peers know which one is later."""
        number = int(self._handover.bootstrap.incarnation) + self._num_starts
        own = msgspec.structs.replace(self._handover.bootstrap, incarnation=str(number))
        self.close()
        self.report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        handover = msgspec.structs.replace(
            self._handover, bootstrap=own, report=report_write, stop_requested=stop_requested
        )
        handed_over = in_memory(msgspec.msgpack.encode(handover))
        try:
            self._child = execute(
                processes,
                ["kintsugi.cluster.agent", self.process, str(handed_over)],
                placement=Placement(),
                pass_fds=(handed_over, *handover.descriptors),
                before_exec=partial(enter, self._place.namespaces) if self._place.namespaces else None,
            )
        except (OSError, SubprocessError) as error:
            phase = "executing the interpreter"
            raise StartFailed(process=self.process, phase=phase, why=str(error)) from error
        finally:
            os.close(handed_over)
            os.close(report_write)
        self._num_starts += 1
        self.ready = self.ended = self.is_ending = False
        self.start_deadline = deadline

    def exit_event(self) -> ProcessGone:
        """Event for the end of the current incarnation, which only the launcher observes."""
        incarnation = str(int(self._handover.bootstrap.incarnation) + self._num_starts - 1)
        how = describe_status(self.status)
        return ProcessGone(self.process, incarnation, self.child.pid, self.status, how)

    def reports(self) -> list[AgentReport]:
        """Return the reports since the last call; closes the pipe at end of file."""
        try:
            content = os.read(self.report, 65536)
        except BlockingIOError:
            return []
        if not content:
            os.close(self.report)
            self.report = -1
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [msgspec.json.decode(line, type=AgentReport) for line in lines]

    def close(self) -> None:
        """Release the current incarnation, which has ended."""
        if self._child is not None:
            self._child.close()
            self._child = None
        if self.report >= 0:
            os.close(self.report)
            self.report = -1
        self._unread = b""

    def close_lifeline(self) -> None:
        """Close the lifeline of its children."""
        os.close(self._handover.children_lifeline_read)
        os.close(self._handover.children_lifeline_write)


class _Launcher:
    """The loop: waits for the ends of agents, their reports and signals; returns when the last agent has ended."""

    def __init__(
        self,
        *,
        run_dir: Path,
        signals: Signals,
        processes: Processes,
        start_timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._run_dir = run_dir
        self._signals = signals
        self._processes = processes
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._agents: list[_AgentHandle] = []
        self._others = frozenset(children_of(os.getpid()))
        """Children that this process had before the run; they are left alone."""
        self._stopped = StoppedProcessDetector()
        self._diagnosis = DiagnosisProcess(run_dir, processes)
        own = process_id(Role.LAUNCHER, 0)
        self._log = EventLog(RunFolder(run_dir).events_file(own), process=own)
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._num_signals = 0
        self._kill_at: float | None = None
        """When agents are killed that have not ended after their lifeline was closed."""
        self._failure: KintsugiError | None = None
        self._checks_fail = False

    def start(
        self, config: Config, *, listener: socket.socket, programs: Programs, hosts: Sequence[HostNamespaces]
    ) -> None:
        """Create all keys and start the agents; agent 0 also gets the master's bootstrap."""
        job = uuid4().hex[:12]
        host, port = listener.getsockname()
        keys = [new_key_pair() for _ in hosts]
        # Numbered from the time of day, so that an agent of an earlier session of this run has a smaller number.
        first = str(int(self._clock.wall()))
        peers = tuple(
            Peer(process_id(Role.AGENT, index), first, place.name, "", keys[index][0])
            for index, place in enumerate(hosts)
        )
        public_key, secret_key = new_key_pair()
        address = f"tcp://{hosts[0].known_as or host}:{port}"
        master_peer = Peer(process_id(Role.MASTER, 0), uuid4().hex[:8], hosts[0].name, address, public_key)
        places = {place.name: place for place in hosts}

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
                bind=places[peer.host].bind,
                known_as=places[peer.host].known_as,
            )

        master = msgspec.structs.replace(
            bootstrap(master_peer, Role.MASTER, secret=secret_key),
            listener=listener.fileno(),
            peers=peers,
        )
        for index, peer in enumerate(peers):
            children_read, children_write = os.pipe2(os.O_CLOEXEC)
            handover = AgentHandover(
                bootstrap=bootstrap(peer, Role.AGENT, secret=keys[index][1]),
                children_lifeline_read=children_read,
                children_lifeline_write=children_write,
                report=-1,
                programs=programs,
                spares=config.cluster.spares,
                master=master if index == 0 else None,
            )
            agent = _AgentHandle(handover, place=hosts[index])
            self._agents.append(agent)
            self._start_agent(agent)

    def _start_agent(self, agent: _AgentHandle) -> None:
        deadline = self._clock.monotonic() + self._start_timeout_s
        agent.start(self._processes, stop_requested=self._num_signals > 0, deadline=deadline)

    def run(self, on_tick: Callable[[], None]) -> int:
        """Wait for the end of the run; return the exit code of agent 0, which is the master's."""
        while any(not agent.ended for agent in self._agents):
            self._turn(TICK_S)
            try:
                self._check_agents(self._clock.monotonic())
            except OSError as error:
                self._check_failed(error)
            on_tick()
        if self._failure is not None and self._num_signals == 0:
            raise self._failure
        status = self._agents[0].status
        return status if status is not None and status >= 0 else 1

    def _turn(self, timeout_s: float) -> None:
        """Run one round of the loop: wait for at most this long, then handle the events."""
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
            self._on_signal()
        for agent in self._agents:
            if agent.report >= 0:
                self._take_reports(agent)
            if not agent.ended and agent.child.ended():
                self._on_agent_ended(agent)
        if self._kill_at is not None and self._clock.monotonic() >= self._kill_at:
            self._signal_agents(signal.SIGKILL)

    def _check_agents(self, now: float) -> None:
        """Check what no descriptor shows: agents that are late or stopped, and zombies of a dead agent's processes."""
        living = {agent.child.pid: agent for agent in self._agents if not agent.ended}
        late = [agent.process for agent in living.values() if not agent.ready and now > agent.start_deadline]
        if late and self._kill_at is None:
            why = f"not ready after {self._start_timeout_s:g} s (cluster.start_timeout_s)"
            phase = "starting the master" if late[0] == self._agents[0].process else "starting"
            self._fail(StartFailed(process=late[0], phase=phase, why=why))
        for pid in self._stopped.sample(living, now=now):
            self._log.emit(FaultSeen(stopped(living[pid].process, pid, time=self._clock.wall())))
            living[pid].child.send_signal(signal.SIGKILL)
        if self._agents[0].ready and self._kill_at is None:
            self._diagnosis.ensure_running(now)
        reap_orphans(but=self._others | living.keys() | self._diagnosis.pids)

    def _check_failed(self, error: OSError) -> None:
        """Record once that checks fail, for lack of descriptors or memory; they are repeated."""
        if not self._checks_fail:
            self._checks_fail = True
            own = process_id(Role.LAUNCHER, 0)
            self._log.emit(FaultSeen(fault_of(error, process=own, time=self._clock.wall())))

    def _on_signal(self) -> None:
        """The first signal requests a stop after this step; the second one ends everything immediately."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._signal_agents(signal.SIGTERM)
        else:
            self._signal_agents(signal.SIGINT)
            self._close_agents()

    def _take_reports(self, agent: _AgentHandle) -> None:
        for report in agent.reports():
            match report:
                case AgentReady():
                    agent.ready = agent.was_ready = True
                case AgentEnding():
                    agent.is_ending = True
                case AgentNotStarted(process=process, phase=phase, why=why):
                    self._fail(StartFailed(process=process, phase=phase, why=why))
                case MasterDied(how=how, last_output=last_output):
                    master = process_id(Role.MASTER, 0)
                    self._fail(ProcessDied(f"{master} was {how}; its log ends: {last_output or '(empty)'}"))

    def _on_agent_ended(self, agent: _AgentHandle) -> None:
        """Handle the end of an agent. Agent 0 ends with the master's exit code, others after `Shutdown`, as announced.

        An agent that was killed or failed is restarted, within limits. One that failed before it had ever started would
        fail again, and is not.
        """
        agent.status = agent.child.status()
        agent.ended = True
        if agent.report >= 0:
            self._take_reports(agent)  # Reports that arrived since the last round.
        has_exited = agent.status is not None and agent.status >= 0
        failed = not has_exited or (agent.was_ready and not agent.is_ending)
        if self._kill_at is None and failed:
            self._log.emit(agent.exit_event())
        if self._kill_at is None and failed and agent.limit.allows(self._clock.monotonic()):
            self._restart(agent)
            return
        if self._kill_at is None and (failed or not agent.ready):
            how = describe_status(agent.status)
            often = f", more than {MOST_RESTARTS} times in {WITHIN_S:g} s" if failed else ""
            log = tail(RunFolder(self._run_dir).log_file(agent.process))
            self._fail(ProcessDied(f"{agent.process} {how}{often}; its log ends: {log or '(empty)'}"))
        if agent is self._agents[0]:
            self._close_agents()

    def _restart(self, agent: _AgentHandle) -> None:
        """Restart an agent after killing the processes that it can not adopt, because its table does not list them."""
        tables = [read_table(RunFolder(self._run_dir).agent_file(each.process)) for each in self._agents]
        recorded = {record.pid for table in tables if table is not None for record in table.children}
        agents = {each.child.pid for each in self._agents if not each.ended}
        others = self._others | agents | recorded | self._diagnosis.pids
        kill_children(self._processes, but=others, timeout_s=END_DEADLINE_S, clock=self._clock)
        try:
            self._start_agent(agent)
        except StartFailed as error:
            self._fail(error)

    def _fail(self, error: KintsugiError) -> None:
        """Record a failure and end the run. The first failure is kept; later ones follow from it."""
        self._failure = self._failure or error
        self._close_agents()

    def _close_agents(self) -> None:
        """Close the agents' lifeline: they stop their children, with a grace, and end. One that does not is killed."""
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
        """Clean up after any outcome: no agent, no process of an agent and no pipe is left."""
        self._signal_agents(signal.SIGKILL)
        os.close(self._lifeline_read)
        self._close_agents()
        for agent in self._agents:
            if not agent.ended:
                agent.child.wait_ended(whom=agent.process, timeout_s=END_DEADLINE_S)
            agent.close()
            # Before their lifeline ends: a child that ends on its own leaves the processes that it started.
            table = RunFolder(self._run_dir).agent_file(agent.process)
            end_orphans(table, processes=self._processes, timeout_s=END_DEADLINE_S)
        self._diagnosis.close()
        self._log.close()
        kill_children(self._processes, but=self._others, timeout_s=END_DEADLINE_S, clock=self._clock)
        for agent in self._agents:
            agent.close_lifeline()
