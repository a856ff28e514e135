"""The launcher: starts one node agent per host, forwards stop requests, and outlives all of them.

    port and folder checked ─► keys, pipes ─► standby ─► agents ─► (the run) ─► agents end ─► no process is left

With a standby (`standby.py`; `kintsugi train` has one) the death of the launcher costs nothing: the standby becomes the
launcher and adopts the agents. Launchers that are killed with their standby leave nothing behind: only they hold the
write end of each agent's lifeline pipe, and only they and the agent those of the agent's children. No data is ever
written; the kernel closes them.

An agent that was killed, is stopped, or ends without announcing it is restarted with everything its predecessor had:
keys, pipes, the master's socket. Its processes continue; their parent is the launcher from then on, which reaps them.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from uuid import uuid4

import msgspec

from kintsugi.cluster.checkpoint_copier import CheckpointCopier
from kintsugi.cluster.child import end_orphans, read_table, tail
from kintsugi.cluster.diagnosis_process import DiagnosisProcess
from kintsugi.cluster.handover import (
    PROGRAMS,
    AgentEnded,
    AgentEnding,
    AgentHandover,
    AgentNotStarted,
    AgentReady,
    AgentReport,
    MasterDied,
    Programs,
)
from kintsugi.cluster.host_manager_process import HOST_MANAGER, HostManagerProcess
from kintsugi.cluster.namespaces import HostNamespaces, enter, listening_socket
from kintsugi.cluster.orphans import children_of, kill_children, reap_orphans, subreaper
from kintsugi.cluster.restart_policy import STOPPED_S, RestartLimit, StoppedProcessDetector
from kintsugi.cluster.spawn import execute, in_memory
from kintsugi.cluster.standby import AgentState, LauncherState, LostLauncher, Standby
from kintsugi.config.schema import Config
from kintsugi.config.stages import num_processes
from kintsugi.errors import (
    ConfigError,
    DeadlineExceeded,
    Fault,
    KintsugiError,
    ProcessDied,
    StartFailed,
    StorageError,
    UntrustedFile,
    UserError,
    fault_of,
)
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import living_launcher, write_launcher
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.descriptors import raise_descriptor_limit
from kintsugi.runtime.proc import process_start_time
from kintsugi.runtime.processes import Child, Processes, SystemProcesses, describe_status
from kintsugi.runtime.secrecy import private_process
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait_readable
from kintsugi.telemetry.disk_budget import DISK_BUDGET
from kintsugi.telemetry.events import EventLog, FaultSeen, OperationFailed, ProcessGone, RunAborted
from kintsugi.transport import new_key_pair
from kintsugi.types import Peer, Placement, Role, process_id

TICK_S = 0.2
LAUNCHER = process_id(Role.LAUNCHER, 0)
COPY_END_S = 600.0
"""Longest time for the copy of the last checkpoint after the end of a run."""
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
    standby: Standby | None = None,
    stop_requests: int = -1,
) -> int:
    """Run `config` in the existing folder `run_dir` to its end; return the master's exit code. Main thread only.

    With `resume` the master continues from the journal of the folder; without it there must be none.
    `hosts` are the namespaces of the agents, one each; empty: all agents run on this machine without namespaces.
    `on_tick` is called about five times a second. SIGINT or SIGTERM stops the run after its step, a second one
    immediately; so does each byte that arrives on the descriptor `stop_requests`. With a `standby` this function may
    return in another process than the caller's, which was forked and has taken over.
    Raises UserError (port taken, run folder in use), StartFailed and ProcessDied; no process is left.
    """
    processes = processes or SystemProcesses()
    assert resume or not RunFolder(run_dir).journal_file.exists(), (
        f"{run_dir} holds a run; it can only be resumed"
    )
    if (owner := living_launcher(run_dir)) is not None:
        raise UserError(f"run_dir {run_dir} is in use: process {owner.pid} runs it; stop that one first")
    if config.cluster.on:
        hosts = [HostNamespaces("host-0", address=config.cluster.address)]
    else:
        hosts = hosts or [HostNamespaces(f"host-{index}") for index in range(config.cluster.hosts)]
        assert len(hosts) == config.cluster.hosts, (hosts, config.cluster.hosts)
    raise_descriptor_limit(num_processes(config))
    DISK_BUDGET.divide(num_processes(config))
    with ExitStack() as stack:
        stack.enter_context(private_process())
        signals = Signals(signal.SIGINT, signal.SIGTERM)
        stack.callback(signals.close)
        listener = stack.enter_context(_listen(hosts[0], port=config.cluster.port))
        write_launcher(run_dir, pid=os.getpid())
        stack.callback(RunFolder(run_dir).launcher_file.unlink, missing_ok=True)
        stack.enter_context(subreaper())
        start_timeout_s = config.cluster.start_timeout_s
        launcher = Launcher(
            run_dir=run_dir,
            signals=signals,
            processes=processes,
            start_timeout_s=start_timeout_s,
            standby=standby,
            stop_requests=stop_requests,
        )
        stack.callback(launcher.clean_up)
        launcher.prepare(config, listener=listener, programs=programs, hosts=hosts)
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


class AgentHandle:
    """One agent in the launcher, over all its incarnations: process, reports, and the handover of the next one."""

    def __init__(self, handover: AgentHandover, *, place: HostNamespaces) -> None:
        self._handover = handover
        self._place = place
        self.process = handover.bootstrap.process
        self.limit = RestartLimit()
        self.restart_at = math.inf
        """When to start the next incarnation; infinite if none is due."""
        self._num_starts = 0
        self._child: Child | None = None
        self.pid = 0
        """Pid of the current incarnation; 0 before the first."""
        self._start_time = 0
        self.report, self._report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Pipe of the reports of all incarnations; the pipe of a dead one is read to its end before the next starts."""
        self.ready = False
        self.is_ending = False
        """It has announced an orderly end."""
        self.start_deadline = math.inf
        self.was_ready = False
        """At least one incarnation has started: its handover works."""
        self.exit_code: int | None = None
        """Exit code that it has reported."""
        self.status: int | None = None
        self.ended = True
        self._unread = b""

    @property
    def child(self) -> Child:
        assert self._child is not None, f"{self.process} was never started"
        return self._child

    @property
    def was_started(self) -> bool:
        return self._num_starts > 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended and is not restarted."""
        return self.ended and math.isinf(self.restart_at)

    def start(
        self, processes: Processes, *, stop_requested: bool, deadline: float, record: Callable[[], None]
    ) -> None:
        """Start the first or the next incarnation. They are numbered, so that peers know which one is later.

        It begins after `record` has returned: a successor of this launcher must know of every agent.
        """
        number = int(self._handover.bootstrap.incarnation) + self._num_starts
        own = msgspec.structs.replace(self._handover.bootstrap, incarnation=str(number))
        self.close()
        with ExitStack() as stack:
            try:
                gate, gate_write = os.pipe2(os.O_CLOEXEC)
                stack.callback(os.close, gate)
                stack.callback(os.close, gate_write)
                handover = msgspec.structs.replace(
                    self._handover,
                    bootstrap=own,
                    report=self._report_write,
                    gate=gate,
                    stop_requested=stop_requested,
                )
                handed_over = in_memory(msgspec.msgpack.encode(handover))
                stack.callback(os.close, handed_over)
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
            self._num_starts += 1
            self.restart_at = math.inf
            self.pid, self._start_time = self._child.pid, 0
            # No descriptor is left to read it: a successor of this launcher that is the agent's parent needs none.
            with contextlib.suppress(OSError):
                self._start_time = process_start_time(self.pid) or 0
            self.ready = self.ended = self.is_ending = False
            self.exit_code = None
            self.start_deadline = deadline
            record()
            os.write(gate_write, b".")

    def exit_event(self) -> ProcessGone:
        """Event for the end of the current incarnation, which only the launcher observes."""
        incarnation = str(int(self._handover.bootstrap.incarnation) + self._num_starts - 1)
        how = describe_status(self.status)
        return ProcessGone(self.process, incarnation, self.pid, self.status, how)

    def has_ended(self) -> bool:
        """Whether the current incarnation has ended, as far as this process can know."""
        return self._child is None or self._child.ended()

    def take_status(self) -> None:
        """Note the status of the current incarnation, which has ended; by its report where it has another parent."""
        status = None if self._child is None else self._child.status()
        self.status = self.exit_code if status is None else status
        self.ended = True

    def state(self) -> AgentState:
        """State for the standby."""
        return AgentState(
            self.pid,
            self._start_time,
            self._num_starts,
            self.ready,
            self.was_ready,
            self.is_ending,
            self.exit_code,
            self.ended,
            self.status,
            not math.isinf(self.restart_at),
        )

    def adopt(self, state: AgentState, *, processes: Processes, deadline: float) -> None:
        """Continue with the incarnation that another launcher has started."""
        self.close()
        self.pid, self._start_time, self._num_starts = state.pid, state.start_time, state.num_starts
        self.ready, self.was_ready, self.is_ending = state.ready, state.was_ready, state.is_ending
        self.exit_code, self.ended, self.status = state.exit_code, state.ended, state.status
        self.start_deadline = deadline
        self.restart_at = 0.0 if state.is_restarting else math.inf
        if self.ended or not self.was_started:
            return
        try:
            child = processes.adopt(state.pid)
        except ProcessLookupError:
            return  # It has ended, and its parent has reaped it.
        if process_start_time(state.pid) == state.start_time or child.is_ours():
            self._child = child
        else:
            child.close()

    def reports(self) -> list[AgentReport]:
        """Return the reports since the last call."""
        try:
            content = os.read(self.report, 65536)
        except BlockingIOError:
            return []
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [msgspec.json.decode(line, type=AgentReport) for line in lines]

    def close(self) -> None:
        """Release the current incarnation, which has ended."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._unread = b""

    def close_pipes(self) -> None:
        """Close the reports and the lifeline of its children."""
        os.close(self.report)
        os.close(self._report_write)
        os.close(self._handover.children_lifeline_read)
        os.close(self._handover.children_lifeline_write)


class Launcher:
    """The loop: waits for the ends of agents, their reports and signals; returns when the last agent has ended."""

    def __init__(
        self,
        *,
        run_dir: Path,
        signals: Signals,
        processes: Processes,
        start_timeout_s: float,
        standby: Standby | None,
        stop_requests: int = -1,
        own: str = LAUNCHER,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`own` is the name under which this process records events: the launcher, or the supervisor of a host."""
        self._standby = standby
        self._own = own
        self._recorded = (os.getpid(), 0)
        """Launcher and standby as they are recorded in the run folder."""
        self._stop_requests = stop_requests
        self._run_dir = run_dir
        self._signals = signals
        self._processes = processes
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._agents: list[AgentHandle] = []
        self._others = frozenset(children_of(os.getpid()))
        """Children that this process had before the run; they are left alone."""
        self._stopped = StoppedProcessDetector()
        self._diagnosis = DiagnosisProcess(run_dir, processes)
        self._copier: CheckpointCopier | None = None
        """Process that copies checkpoints; None without `checkpoint.copy_to`."""
        self._host_manager: HostManagerProcess | None = None
        """Process that manages the hosts on other machines; None if there are none."""
        self._log = EventLog(RunFolder(run_dir).events_file(own), process=own)
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._num_stops = 0
        """Requests to stop the run: after its step, and at the second one immediately."""
        self._kill_at: float | None = None
        """When agents are killed that have not ended after their lifeline was closed."""
        self._failure: KintsugiError | None = None
        self._checks_fail = False

    def prepare(
        self, config: Config, *, listener: socket.socket, programs: Programs, hosts: Sequence[HostNamespaces]
    ) -> None:
        """Create all keys and pipes; agent 0 also gets the master's bootstrap. `hosts` are those of this machine; those
        after them join through the host manager."""
        if config.actor.interpreter is not None:
            interpreters = {**programs.interpreters, Role.MODEL: config.actor.interpreter}
            programs = msgspec.structs.replace(programs, interpreters=interpreters)
        self._copier = self._copier_of(config)
        job = uuid4().hex[:12]
        host, port = listener.getsockname()[:2]
        names = [place.name for place in hosts]
        names += [f"host-{index}" for index in range(len(hosts), config.cluster.hosts)]
        keys = [new_key_pair() for _ in names]
        # Numbered from the time of day, so that an agent of an earlier session of this run has a smaller number.
        first = str(int(self._clock.wall()))
        peers = tuple(
            Peer(process_id(Role.AGENT, index), first, name, "", keys[index][0])
            for index, name in enumerate(names)
        )
        public_key, secret_key = new_key_pair()
        address = f"tcp://{hosts[0].known_as or host}:{port}"
        master_peer = Peer(process_id(Role.MASTER, 0), uuid4().hex[:8], names[0], address, public_key)
        places = {place.name: place for place in hosts}

        def bootstrap(peer: Peer, role: Role, *, secret: bytes) -> Bootstrap:
            place = places.get(peer.host, HostNamespaces(peer.host))
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
                bind=place.bind,
                known_as=place.known_as,
                bulk=config.cluster.bulk,
                num_processes=num_processes(config),
            )

        master = msgspec.structs.replace(
            bootstrap(master_peer, Role.MASTER, secret=secret_key),
            listener=listener.fileno(),
            peers=peers,
        )
        agents = [bootstrap(peer, Role.AGENT, secret=keys[index][1]) for index, peer in enumerate(peers)]
        for index, place in enumerate(hosts):
            self.add_agent(
                agents[index],
                programs=programs,
                spares=config.cluster.spares,
                place=place,
                master=master if index == 0 else None,
            )
        if len(names) > len(hosts):
            self._host_manager = HostManagerProcess(
                config,
                run_dir=self._run_dir,
                agents=tuple(agents[len(hosts) :]),
                programs=programs,
                address=host,
                lifeline=self._lifeline_read,
                processes=self._processes,
            )

    def _copier_of(self, config: Config) -> CheckpointCopier | None:
        target = config.checkpoint.copy_to
        return CheckpointCopier(self._run_dir, target=target, processes=self._processes) if target else None

    def add_agent(
        self,
        bootstrap: Bootstrap,
        *,
        programs: Programs,
        spares: int,
        place: HostNamespaces,
        master: Bootstrap | None = None,
    ) -> None:
        """Prepare the agent of a host, with the lifeline of its children."""
        children_read, children_write = os.pipe2(os.O_CLOEXEC)
        handover = AgentHandover(
            bootstrap=msgspec.structs.replace(bootstrap, lifeline=self._lifeline_read),
            children_lifeline_read=children_read,
            children_lifeline_write=children_write,
            report=-1,
            programs=programs,
            spares=spares,
            master=master,
        )
        self._agents.append(AgentHandle(handover, place=place))

    @property
    def is_ready(self) -> bool:
        """Whether all agents have started."""
        return bool(self._agents) and all(agent.ready for agent in self._agents)

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether a signal or a stop request has come."""
        return self._num_stops > 0

    def _start_agent(self, agent: AgentHandle) -> None:
        deadline = self._clock.monotonic() + self._start_timeout_s
        stop_requested = self._num_stops > 0
        agent.start(self._processes, stop_requested=stop_requested, deadline=deadline, record=self._publish)

    def run(self, on_tick: Callable[[], None]) -> int:
        """Start the agents, wait for the end of the run, and return the exit code of agent 0, which is the master's.

        An error of this process itself is left to the standby, as its death is.
        """
        try:
            return self._run(on_tick)
        except KintsugiError:
            raise
        except Exception as error:
            if self._standby is None or self._standby.pid == 0:
                raise
            self._log.emit(FaultSeen(fault_of(error, process=self._own, time=self._clock.wall())))
            traceback.print_exception(error)
            os._exit(EXIT_ERROR)

    def _run(self, on_tick: Callable[[], None]) -> int:
        self._ensure_standby()
        for agent in self._agents:
            if not agent.was_started:
                self._start_agent(agent)
        while any(not agent.is_over for agent in self._agents):
            try:
                self._turn(TICK_S)
                self._check_agents(self._clock.monotonic())
                self._publish()
                on_tick()
                self._ensure_standby()  # The last, because it may fail for hours: the host has no process left.
            except (OSError, StorageError) as error:
                self._check_failed(error)
            else:
                self._checks_fail = False
        if self._failure is not None and self._num_stops == 0:
            raise self._failure
        self._finish_copies()
        status = self._agents[0].status
        return status if status is not None and status >= 0 else 1

    # The standby.

    def _ensure_standby(self) -> None:
        """Fork a standby if there is none. Where this process was one, and its launcher has died, take over."""
        if self._standby is None:
            return
        while True:
            now = self._clock.monotonic()
            lost = self._standby.ensure(self._state(), signals=self._signals, now=now)
            if lost is None:
                break
            self._take_over(lost)
        # On a full disk the file stays as it is until there is space.
        pids = os.getpid(), self._standby.pid
        if pids != self._recorded:
            with contextlib.suppress(StorageError):
                write_launcher(self._run_dir, pid=pids[0], standby=pids[1])
                self._recorded = pids

    def _take_over(self, lost: LostLauncher) -> None:
        """Become the launcher: adopt the agents. Those that have died are restarted in the next round."""
        self._log.emit(ProcessGone(self._own, "", lost.pid, lost.status, describe_status(lost.status)))
        self._num_stops = lost.state.num_stops
        deadline = self._clock.monotonic() + self._start_timeout_s
        while True:
            try:
                for agent, state in zip(self._agents, lost.state.agents, strict=True):
                    agent.adopt(state, processes=self._processes, deadline=deadline)
                self._diagnosis.replace(*lost.state.diagnosis)
                if self._copier is not None:
                    self._copier.forget()
                if self._host_manager is not None:
                    self._host_manager.adopt(*lost.state.host_manager)
                return
            except OSError as error:  # An agent that is not held would be taken for dead.
                self._check_failed(error)

    def _state(self) -> LauncherState:
        agents = tuple(agent.state() for agent in self._agents)
        manager = self._host_manager.identity if self._host_manager is not None else (0, 0)
        return LauncherState(agents, self._num_stops, self._diagnosis.identity, manager)

    def _publish(self) -> None:
        if self._standby is not None:
            self._standby.publish(self._state())

    def _known_pids(self) -> frozenset[int]:
        """Children that are no orphans, besides the agents."""
        standby = {self._standby.pid} if self._standby is not None else set()
        manager = self._host_manager.pids if self._host_manager is not None else frozenset()
        copier = self._copier.pids if self._copier is not None else frozenset()
        return self._others | self._diagnosis.pids | manager | copier | standby

    # The loop.

    def _turn(self, timeout_s: float) -> None:
        """Run one round of the loop: wait for at most this long, then handle the events."""
        living = [agent.child.pidfd for agent in self._agents if not agent.ended and not agent.has_ended()]
        reports = [agent.report for agent in self._agents]
        requests = [self._stop_requests] if self._stop_requests >= 0 else []
        descriptors = self._signals.fileno(), *requests, *living, *reports
        at_once = any(not agent.ended and agent.has_ended() for agent in self._agents)
        ready = wait_readable(
            *descriptors, whom="agents", what="the end of the run", timeout_s=0.0 if at_once else timeout_s
        )
        for _ in self._signals.received():
            self._on_stop_request()
        if self._stop_requests in ready:
            self._read_stop_requests()
        for agent in self._agents:
            self._take_reports(agent)
            if not agent.ended and agent.has_ended():
                self._on_agent_ended(agent)
        if self._kill_at is not None and self._clock.monotonic() >= self._kill_at:
            self._signal_agents(signal.SIGKILL)

    def _check_agents(self, now: float) -> None:
        """Check what no descriptor shows: agents that are late or stopped, and zombies of a dead agent's processes."""
        for agent in self._agents:
            if now >= agent.restart_at:
                self._restart(agent)
        living = {agent.pid: agent for agent in self._agents if not agent.ended}
        late = [agent.process for agent in living.values() if not agent.ready and now > agent.start_deadline]
        if late and self._kill_at is None:
            why = f"not ready after {self._start_timeout_s:g} s (cluster.start_timeout_s)"
            phase = "starting the master" if late[0] == self._agents[0].process else "starting"
            self._fail(StartFailed(process=late[0], phase=phase, why=why))
        for pid in self._stopped.sample(living, now=now):
            self._log.emit(FaultSeen(stopped(living[pid].process, pid, time=self._clock.wall())))
            living[pid].child.send_signal(signal.SIGKILL)
        if self._agents[0].ready and self._kill_at is None and self._own == LAUNCHER:
            self._diagnosis.ensure_running(now)
        self._check_copies(now)
        if self._host_manager is not None and self._kill_at is None:
            self._check_host_manager(self._host_manager, now)
        reap_orphans(but=self._known_pids() | living.keys())

    def _check_copies(self, now: float) -> None:
        if self._copier is not None and (why := self._copier.turn(now)):
            message = f"checkpoints can not be copied: {why}; it is tried again"
            self._log.emit(OperationFailed(message, operation="copy of checkpoints", error=why))

    def _finish_copies(self) -> None:
        """Wait until the last checkpoint is copied, unless that fails, takes too long, or another stop is requested."""
        if self._copier is None:
            return
        copier, num_stops, num_failures = self._copier, self._num_stops, self._copier.num_failures
        copier.hurry()
        until = self._clock.monotonic() + COPY_END_S
        with contextlib.suppress(OSError):  # No process can be started: `resume` copies the rest.
            while not copier.is_done and self._clock.monotonic() < until:
                self._check_copies(self._clock.monotonic())
                if copier.num_failures > num_failures or self._num_stops > num_stops:
                    break
                wait_readable(self._signals.fileno(), whom="copies", what="their end", timeout_s=TICK_S)
                self._num_stops += len(self._signals.received())

    def _check_host_manager(self, manager: HostManagerProcess, now: float) -> None:
        """Keep the host manager running, and end the run if a host could not join it."""
        if not manager.ensure_running(now):
            log = tail(RunFolder(self._run_dir).log_file(HOST_MANAGER))
            self._fail(ProcessDied(f"{HOST_MANAGER} ends again and again; its log ends: {log or '(empty)'}"))
        for report in manager.reports():
            self._fail(StartFailed(process=report.host, phase="joining the run", why=report.why))

    def _check_failed(self, error: OSError | StorageError) -> None:
        """Record that rounds fail for lack of descriptors, memory or space, once until one succeeds. The next one tries
        it again."""
        if not self._checks_fail:
            self._checks_fail = True
            self._log.emit(FaultSeen(fault_of(error, process=self._own, time=self._clock.wall())))
        wait_readable(whom="the host", what="what it lacks", timeout_s=TICK_S)

    def _read_stop_requests(self) -> None:
        """Read stop requests, a byte each. At end of file no process can send one any more, and the run goes on."""
        requests = os.read(self._stop_requests, 256)
        if not requests:
            self._stop_requests = -1
        for _ in requests:
            self._on_stop_request()

    def _on_stop_request(self) -> None:
        """The first request stops the run after this step; the second one ends everything immediately. On a host of
        another machine, where the run does not stop, its supervisor decides about the first one."""
        self._num_stops += 1
        if self._own != LAUNCHER:
            if self._num_stops > 1:
                self.close_agents()
        elif self._num_stops == 1:
            self._signal_agents(signal.SIGTERM)
        else:
            if self._num_stops == 2:
                self._log.emit(RunAborted("a second request to stop ends the run at once"))
            self._signal_agents(signal.SIGINT)
            self.close_agents()

    def _take_reports(self, agent: AgentHandle) -> None:
        for report in agent.reports():
            match report:
                case AgentReady():
                    agent.ready = agent.was_ready = True
                case AgentEnding():
                    agent.is_ending = True
                case AgentEnded(exit_code=exit_code):
                    agent.exit_code = exit_code
                case AgentNotStarted(process=process, phase=phase, why=why):
                    self._fail(StartFailed(process=process, phase=phase, why=why))
                case MasterDied(how=how, last_output=last_output):
                    master = process_id(Role.MASTER, 0)
                    self._fail(ProcessDied(f"{master} was {how}; its log ends: {last_output or '(empty)'}"))

    def _on_agent_ended(self, agent: AgentHandle) -> None:
        """Handle the end of an agent. Agent 0 ends with the master's exit code, others after `Shutdown`, as announced.

        An agent that was killed or failed is restarted, within limits. One that failed before it had ever started would
        fail again, and is not.
        """
        self._take_reports(agent)  # Reports that arrived since the last round.
        agent.take_status()
        has_exited = agent.status is not None and agent.status >= 0
        failed = not has_exited or (agent.was_ready and not agent.is_ending)
        if self._kill_at is None and failed:
            self._log.emit(agent.exit_event())
        if self._kill_at is None and failed and self._order_restart(agent):
            return
        if self._kill_at is None and (failed or not agent.ready):
            how = describe_status(agent.status)
            often = f", {agent.limit.explain(self._clock.monotonic())}" if failed else ""
            log = tail(RunFolder(self._run_dir).log_file(agent.process))
            self._fail(ProcessDied(f"{agent.process} {how}{often}; its log ends: {log or '(empty)'}"))
        if agent is self._agents[0]:
            self.close_agents()

    def _order_restart(self, agent: AgentHandle, *, shortage: bool = False) -> bool:
        """Restart an agent, after a pause if that happens often; False if the limit is reached."""
        now = self._clock.monotonic()
        if not agent.limit.allows(now, shortage=shortage):
            return False
        agent.restart_at = now + agent.limit.pause_s(now)
        if now >= agent.restart_at:
            self._restart(agent)
        return True

    def _restart(self, agent: AgentHandle) -> None:
        """Restart an agent after killing the processes that it can not adopt, because its table does not list them."""
        tables = [read_table(RunFolder(self._run_dir).agent_file(each.process)) for each in self._agents]
        recorded = {record.pid for table in tables if table is not None for record in table.children}
        agents = {each.pid for each in self._agents if not each.ended}
        others = self._known_pids() | agents | recorded
        kill_children(self._processes, but=others, timeout_s=END_DEADLINE_S, clock=self._clock)
        try:
            self._start_agent(agent)
        except StartFailed as error:
            # The host has no memory or no descriptor left for it now; its processes go on without it.
            if not self._order_restart(agent, shortage=True):
                self._fail(error)

    def _fail(self, error: KintsugiError) -> None:
        """Record a failure and end the run. The first failure is kept; later ones follow from it."""
        self._failure = self._failure or error
        self.close_agents()

    def close_agents(self) -> None:
        """Close the agents' lifeline: they stop their children, with a grace, and end. One that does not is killed."""
        if self._standby is not None:
            self._standby.dismiss()
        if self._lifeline_write >= 0:
            os.close(self._lifeline_write)
            self._lifeline_write = -1
        for agent in self._agents:
            agent.restart_at = math.inf
        if self._kill_at is None:
            self._kill_at = self._clock.monotonic() + END_DEADLINE_S

    def _signal_agents(self, number: signal.Signals) -> None:
        for agent in self._agents:
            if not agent.has_ended():
                agent.child.send_signal(number)

    def clean_up(self) -> None:
        """Clean up after any outcome: no agent, no process of an agent and no pipe is left."""
        self._signal_agents(signal.SIGKILL)
        os.close(self._lifeline_read)
        self.close_agents()
        for agent in self._agents:
            if not agent.has_ended():
                self._attempt(partial(agent.child.wait_ended, whom=agent.process, timeout_s=END_DEADLINE_S))
            agent.close()
            # Before their lifeline ends: a child that ends on its own leaves the processes that it started.
            table = RunFolder(self._run_dir).agent_file(agent.process)
            self._attempt(partial(end_orphans, table, processes=self._processes, timeout_s=END_DEADLINE_S))
        if self._host_manager is not None:
            self._attempt(self._host_manager.close)
        self._attempt(self._diagnosis.close)
        if self._copier is not None:
            self._attempt(self._copier.close)
        self._attempt(
            partial(
                kill_children, self._processes, but=self._others, timeout_s=END_DEADLINE_S, clock=self._clock
            )
        )
        self._log.close()
        for agent in self._agents:
            agent.close_pipes()

    def _attempt(self, action: Callable[[], object]) -> None:
        """Carry out one part of the clean-up. A process that the kernel does not end, as one that waits for a disk,
        or a table that others could have written, does not keep the others from being ended; those that are left end
        by their lifeline."""
        try:
            action()
        except (DeadlineExceeded, UntrustedFile, OSError) as error:
            self._log.emit(FaultSeen(fault_of(error, process=self._own, time=self._clock.wall())))
