"""The launcher: `kintsugi train` itself. Starts one node agent per host, passes signals on, and outlives them all.

    port and folder checked ─► keys, pipes ─► agents ─► (the run) ─► agents end ─► nothing of ours is left

What keeps a killed launcher from leaving anything: each agent reads a pipe that only the launcher can write, and each
other process one that only its agent and the launcher can write. Nobody ever writes; the kernel closes them.

An agent that was killed, that is stopped, or that ends without having to, is started again with all that its
predecessor had: keys, pipes, the master's socket. Its processes do not notice: their parent is the launcher from then
on, which takes their remains away.
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

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import end_orphans, read_table, table_path, tail
from kintsugi.cluster.handover import (
    PROGRAMS,
    AgentHandover,
    AgentReport,
    Ending,
    MasterDied,
    NotStarted,
    Programs,
    Ready,
)
from kintsugi.cluster.hosts import HostPlace, enter, listening_socket
from kintsugi.cluster.orphans import children_of, kill_children, reap_orphans, subreaper
from kintsugi.cluster.placement import execute, in_memory, log_path
from kintsugi.cluster.restarts import MOST_RESTARTS, STOPPED_S, WITHIN_S, RestartLimit, StoppedWatch
from kintsugi.cluster.watcher import WatcherHandle
from kintsugi.config import Config
from kintsugi.errors import ConfigError, Fault, KintsugiError, ProcessDied, StartFailed, UserError, fault_of
from kintsugi.observe.events import EventLog, FaultSeen, ProcessGone, events_path
from kintsugi.runs import JOURNAL_FILE, LAUNCHER_FILE, living_launcher, write_launcher
from kintsugi.runtime import SYSTEM_CLOCK, Child, Clock, Processes, SystemProcesses, describe_status, wait
from kintsugi.signals import Signals
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id

TICK_S = 0.2
END_DEADLINE_S = 5.0
"""For an agent to stop its children, which takes two graces of two seconds at worst."""


def launch(
    config: Config,
    *,
    run_dir: Path,
    on_tick: Callable[[], None],
    resume: bool = False,
    programs: Programs = PROGRAMS,
    processes: Processes | None = None,
    hosts: Sequence[HostPlace] = (),
) -> int:
    """Run `config` in the existing folder `run_dir` to its end; gives the master's exit code. Main thread only.

    The master continues from what the folder holds, which only a run that is to `resume` may find there.
    `hosts` are the places of the agents, one each; none: all of them are on this machine as it is.
    `on_tick` is called about five times a second. SIGINT or SIGTERM stops the run after its step, a second one at once.
    Raises UserError (port taken, run folder in use), StartFailed and ProcessDied; nothing is left in any case.
    """
    processes = processes or SystemProcesses()
    assert resume or not (run_dir / JOURNAL_FILE).exists(), f"{run_dir} holds a run; it can only be resumed"
    if (owner := living_launcher(run_dir)) is not None:
        raise UserError(f"run_dir {run_dir} is in use: process {owner.pid} runs it; stop that one first")
    hosts = hosts or [HostPlace(f"host-{index}") for index in range(config.cluster.hosts)]
    assert len(hosts) == config.cluster.hosts, (hosts, config.cluster.hosts)
    with ExitStack() as stack:
        signals = Signals(signal.SIGINT, signal.SIGTERM)
        stack.callback(signals.close)
        listener = stack.enter_context(_listen(hosts[0], port=config.cluster.port))
        write_launcher(run_dir, pid=os.getpid())
        stack.callback((run_dir / LAUNCHER_FILE).unlink, missing_ok=True)
        stack.enter_context(subreaper())
        start_timeout_s = config.cluster.start_timeout_s
        launcher = _Launcher(
            run_dir=run_dir, signals=signals, processes=processes, start_timeout_s=start_timeout_s
        )
        stack.callback(launcher.clean_up)
        launcher.start(config, listener=listener, programs=programs, hosts=hosts)
        return launcher.run(on_tick)


def _listen(host: HostPlace, *, port: int) -> socket.socket:
    """The master's socket, opened before anything starts and kept when a master dies."""
    try:
        return listening_socket(host, port=port)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise ConfigError(
            f"cluster.port: port {port} of {host.address} {why}; expected a free one, or 0"
        ) from error


def stopped(process: str, pid: int, *, time: float) -> Fault:
    """An agent that stands still, and is about to be ended for it."""
    message = f"{process}: process {pid} is stopped (state T), for {STOPPED_S:g} s or more"
    return Fault(f"{process}@{pid}.Stopped", "Stopped", process, message, time)


class _AgentHandle:
    """One agent as the launcher sees it, over all its incarnations: process, reports, and what a new one is handed."""

    def __init__(self, handover: AgentHandover, *, place: HostPlace) -> None:
        self._handover = handover
        self._place = place
        self.process = handover.bootstrap.process
        self.limit = RestartLimit()
        self._num_starts = 0
        self._child: Child | None = None
        self.report = -1
        self.ready = False
        self.is_ending = False
        """It has said that it ends because it is to."""
        self.start_deadline = math.inf
        self.was_ready = False
        """At least one incarnation came up: what it is started with is good."""
        self.status: int | None = None
        self.ended = True
        self._unread = b""

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.process} was never started"
        return self._child

    def start(self, processes: Processes, *, stop_requested: bool, deadline: float) -> None:
        """Start the first incarnation, or the next; they are counted: everybody knows which one is the later."""
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

    def obituary(self) -> ProcessGone:
        """How the present incarnation ended: nobody else sees the end of an agent."""
        incarnation = str(int(self._handover.bootstrap.incarnation) + self._num_starts - 1)
        how = describe_status(self.status)
        return ProcessGone(self.process, incarnation, self.child.pid, self.status, how)

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

    def close(self) -> None:
        """Let go of the present incarnation, which has ended."""
        if self._child is not None:
            self._child.close()
            self._child = None
        if self.report >= 0:
            os.close(self.report)
            self.report = -1
        self._unread = b""

    def close_lifeline(self) -> None:
        """Let go of what its children live by."""
        os.close(self._handover.children_lifeline_read)
        os.close(self._handover.children_lifeline_write)


class _Launcher:
    """The loop: waits for agents' ends, their reports and signals; ends when the last agent is gone."""

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
        """Children that this process had before; they are none of our business."""
        self._stopped = StoppedWatch()
        self._watcher = WatcherHandle(run_dir, processes)
        own = process_id(Role.LAUNCHER, 0)
        self._log = EventLog(events_path(run_dir, own), process=own)
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._num_signals = 0
        self._kill_at: float | None = None
        """When agents that were let go and have not ended are killed."""
        self._failure: KintsugiError | None = None
        self._is_blind = False

    def start(
        self, config: Config, *, listener: socket.socket, programs: Programs, hosts: Sequence[HostPlace]
    ) -> None:
        """Make everybody's keys and start the agents; agent 0 also gets what the master needs."""
        job = uuid4().hex[:12]
        host, port = listener.getsockname()
        keys = [new_key_pair() for _ in hosts]
        # Counted from the time of day: an agent of an earlier session of this run is not mistaken for one of this.
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
        """Wait for the end of the run; the exit code is that of agent 0, which is the master's."""
        while any(not agent.ended for agent in self._agents):
            self._turn(TICK_S)
            try:
                self._look_after(self._clock.monotonic())
            except OSError as error:
                self._could_not_look(error)
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

    def _look_after(self, now: float) -> None:
        """What no descriptor tells: agents that are late or stopped, and the remains of a dead agent's processes."""
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
            self._watcher.keep(now)
        reap_orphans(but=self._others | living.keys() | self._watcher.pids)

    def _could_not_look(self, error: OSError) -> None:
        """For want of descriptors or memory, which says nothing about the run: told once; it looks again next time."""
        if not self._is_blind:
            self._is_blind = True
            own = process_id(Role.LAUNCHER, 0)
            self._log.emit(FaultSeen(fault_of(error, process=own, time=self._clock.wall())))

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
                    agent.ready = agent.was_ready = True
                case Ending():
                    agent.is_ending = True
                case NotStarted(process=process, phase=phase, why=why):
                    self._fail(StartFailed(process=process, phase=phase, why=why))
                case MasterDied(how=how, last_output=last_output):
                    master = process_id(Role.MASTER, 0)
                    self._fail(ProcessDied(f"{master} was {how}; its log ends: {last_output or '(empty)'}"))

    def _agent_ended(self, agent: _AgentHandle) -> None:
        """Agent 0 ends with the master's exit code, another one when the master said `Shutdown`; both say so before.

        One that was killed, or broke, has decided nothing: it is started again, but not for ever. One that broke before
        it ever came up would not come up again either.
        """
        agent.status = agent.child.status()
        agent.ended = True
        if agent.report >= 0:
            self._take_reports(agent)  # Its last words may have come after we had listened.
        by_itself = agent.status is not None and agent.status >= 0
        failed = not by_itself or (agent.was_ready and not agent.is_ending)
        if self._kill_at is None and failed:
            self._log.emit(agent.obituary())
        if self._kill_at is None and failed and agent.limit.allows(self._clock.monotonic()):
            self._restart(agent)
            return
        if self._kill_at is None and (failed or not agent.ready):
            how = describe_status(agent.status)
            often = f", more than {MOST_RESTARTS} times in {WITHIN_S:g} s" if failed else ""
            log = tail(log_path(self._run_dir, agent.process))
            self._fail(ProcessDied(f"{agent.process} {how}{often}; its log ends: {log or '(empty)'}"))
        if agent is self._agents[0]:
            self._let_go()

    def _restart(self, agent: _AgentHandle) -> None:
        """Start an agent again, once all is gone that it can not adopt: who was born without being told of."""
        tables = [read_table(table_path(self._run_dir, each.process)) for each in self._agents]
        recorded = {record.pid for table in tables if table is not None for record in table.children}
        agents = {each.child.pid for each in self._agents if not each.ended}
        others = self._others | agents | recorded | self._watcher.pids
        kill_children(self._processes, but=others, timeout_s=END_DEADLINE_S, clock=self._clock)
        try:
            self._start_agent(agent)
        except StartFailed as error:
            self._fail(error)

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
            if not agent.ended:
                agent.child.wait_ended(whom=agent.process, timeout_s=END_DEADLINE_S)
            agent.close()
            # Before their lifeline ends: a child that ends by itself leaves what it started.
            table = table_path(self._run_dir, agent.process)
            end_orphans(table, processes=self._processes, timeout_s=END_DEADLINE_S)
        self._watcher.close()
        self._log.close()
        kill_children(self._processes, but=self._others, timeout_s=END_DEADLINE_S, clock=self._clock)
        for agent in self._agents:
            agent.close_lifeline()
