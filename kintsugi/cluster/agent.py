"""The node agent: starts, watches and stops the processes of one host, and holds its shared memory.

    python -m kintsugi.cluster.agent PROCESS DESCRIPTOR

It is the parent of every process that it starts, and as a subreaper also of forked processes and of orphans, so the
kernel reports each exit to it through a pidfd, with the status. It makes no decision about the run: it carries out the
master's requests and reports.

An agent that dies, also of an error of its own, leaves its children alive. The launcher starts a successor, which finds
them in the table on disk, holds them by pidfd and lists them when it registers. Their exit status is not available to
it: their parent is the launcher now.

The agent in turn restarts a master that was killed, with the same keys on the same socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.checkpoint.snapshot import outdated
from kintsugi.cluster.checkpoint_receiver import CheckpointReceiver
from kintsugi.cluster.child import (
    FORK_SERVER,
    STACK_DUMP_S,
    ChildProcess,
    ChildRecord,
    Successor,
    find_alive,
    read_table,
    write_table,
)
from kintsugi.cluster.device_arbiter import DeviceArbiter
from kintsugi.cluster.handover import (
    AgentEnded,
    AgentEnding,
    AgentHandover,
    AgentNotStarted,
    AgentReady,
    AgentReport,
    MasterDied,
    child_bootstrap,
)
from kintsugi.cluster.host_monitor import HostMonitor
from kintsugi.cluster.orphans import hold_descendants, kill_children, kill_group, reap_orphans, subreaper
from kintsugi.cluster.peer_snapshots import NUM_STEPS, PeerSnapshotStore
from kintsugi.cluster.process_factory import ProcessFactory
from kintsugi.cluster.restart_policy import RestartLimit
from kintsugi.cluster.shared_memory import OwnSegments, SegmentServer
from kintsugi.cluster.spawn import StartOrder, await_readable, own_session_and_log
from kintsugi.cluster.weight_holder import WeightHolder
from kintsugi.errors import KintsugiError, RefusedError, StartFailed, UserError
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_ORPHANED
from kintsugi.process.loop_calls import LoopCalls
from kintsugi.process.main import run_process
from kintsugi.process.membership import HEARTBEAT_S, Membership, open_endpoint
from kintsugi.protocol.agents import Inspect, ProcessExited, ProcessStarted, StartProcess, StopProcess
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.bulk import OpenBulk
from kintsugi.protocol.hosts import KeepCheckpoint, ListFiles, StoreFile
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.recovery import FetchState, ForgetStates, KeepState
from kintsugi.protocol.weights import HoldDelta, HoldWeights, UploadWeights
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.descriptors import raise_descriptor_limit
from kintsugi.runtime.processes import Child, Processes, SystemProcesses
from kintsugi.runtime.shortages import EXIT_UNFIT, SHORTAGES, describe_exit
from kintsugi.runtime.signals import Signals
from kintsugi.telemetry.disk_budget import bound_log
from kintsugi.telemetry.events import Note, ProcessGone, fault_at_end
from kintsugi.telemetry.verdict_files import WATCHER
from kintsugi.transport import Delivery
from kintsugi.types import ChildReport, Placement, Role, process_id

BOUND_LOGS_S = 10.0
END_GRACE_S = 2.0
PATIENCE_S = 1.5
"""Time for children to end on their own after the master has sent `Shutdown` to all processes."""
LAST_MESSAGES_S = 0.25
"""Time to receive the last messages of a master that has ended."""
FLUSH_S = 0.2
"""Time for the last messages to a master that may have ended."""


class Agent:
    """One loop over the endpoint, the children's pidfds and reports, the fork server, the launcher's pipe and signals.

    It returns when it is ending and the last child has ended. Ending begins with the end of its master (unless that
    was killed), with `Shutdown`, with the end of the launcher, or with a second signal. Children get SIGTERM, and
    SIGKILL after a grace. A master that sent `Shutdown` may finish: its exit code is the agent's.
    """

    def __init__(self, handover: AgentHandover, *, processes: Processes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._handover = handover
        self._own = own = handover.bootstrap
        self._processes = processes
        self._clock = clock
        self._table = RunFolder(own.run_dir).agent_file(own.process)
        self._children: dict[str, ChildProcess] = {}
        self._master: ChildProcess | None = None
        self._master_limit = RestartLimit()
        self._master_at = math.inf
        """When to start the next master; infinite while one runs."""
        self._has_begun = False
        """A master of this run has registered this agent, or an earlier agent of this host."""
        self._pending_stop = PendingStop(requested=handover.stop_requested)
        self._descendants: list[Child] = []
        self._ending = False
        self._exit_code = 0
        self._tick_at = self._bound_logs_at = 0.0
        self._endpoint = open_endpoint(own, clock=clock)
        self._membership = Membership(self._endpoint, own, capabilities={}, children=self._child_reports)
        self._monitor = HostMonitor(
            self._children,
            self._endpoint,
            self._membership,
            own=own,
            probe=handover.programs.probe,
            clock=clock,
        )
        self._accelerators = self._monitor.accelerators
        self._arbiter = DeviceArbiter(
            self._children,
            self._endpoint,
            self._membership,
            own=own,
            remember=self._write_table,
            inspect=self._monitor.inspect,
            clock=clock,
        )
        self._signals = Signals(signal.SIGTERM, signal.SIGINT)
        capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self._segments = SegmentServer(self._endpoint, job=own.job, host=own.host, capacity=capacity)
        self._calls = LoopCalls(self._endpoint)
        self._bulk = BulkEndpoint.described(
            own, peer_of=self._endpoint.peers.get, call=self._calls.call, emit=self._monitor.log.emit
        )
        self._peer_snapshots = PeerSnapshotStore(
            self._endpoint, self._bulk, self._calls, capacity=capacity // NUM_STEPS
        )
        self._weight_holder = WeightHolder(
            self._endpoint,
            self._bulk,
            self._calls,
            process=own.process,
            segments=OwnSegments(self._segments),
            emit=self._monitor.log.emit,
        )
        self._checkpoints = self._checkpoint_receiver()
        self._factory = ProcessFactory(
            self._endpoint,
            parent=self,
            programs=handover.programs,
            processes=processes,
            own=own,
            num_spares=handover.spares,
            fork_server_name=f"{self._segments.name}-template",
            lifeline=handover.children_lifeline_read,
            clock=clock,
        )

    def _checkpoint_receiver(self) -> CheckpointReceiver | None:
        """For ranks of hosts that do not have the run folder; None where this agent is not beside the master."""
        if self._handover.master is None:
            return None
        folder = RunFolder(self._own.run_dir).checkpoints_folder
        return CheckpointReceiver(self._endpoint, self._bulk, self._calls, folder=folder)

    def run(self) -> int:
        """Run until all children have ended; return the exit code, which is the master's where there is one."""
        self._endpoint.watch(self._signals.fileno(), self._on_signal)
        self._endpoint.watch(self._own.lifeline, self._on_launcher_ended)
        try:
            has_predecessor = self._adopt()
            self._monitor.begin()
            self._factory.start_fork_server()
            self._begin_master(has_predecessor=has_predecessor)
            while not self._ending or self._children:
                for delivery in self._endpoint.poll(self._until_next_timer_s()):
                    self._handle(delivery)
                self._run_timers()
        finally:
            self._close()
        self._report(AgentEnded(self._exit_code))
        return self._exit_code

    # Children of a predecessor.

    def _adopt(self) -> bool:
        """Adopt the living children of this agent's predecessor; False if there was none."""
        table = read_table(self._table)
        if table is None or table.job != self._own.job:
            return False
        self._accelerators.adopt(table.broken_chips)
        for record, handle in find_alive(self._table, processes=self._processes):
            if record.process == FORK_SERVER:
                self._factory.adopt_fork_server(handle)
            else:
                log = RunFolder(self._own.run_dir).log_file(record.process)
                child = self._children[record.process] = ChildProcess.adopted(record, handle, log=log)
                self._watch_end(child)
                self._hold_descendants(child)
        self._arbiter.succeed(table.leases)
        self._weight_holder.succeed()
        return True

    def _begin_master(self, *, has_predecessor: bool) -> None:
        if self._handover.master is None:
            self._report(AgentReady())
            return
        self._master = self._children.get(self._handover.master.process)
        self._has_begun = has_predecessor
        if has_predecessor:
            self._pending_stop.expect_master(after_term=self._endpoint.term)
        if self._master is not None:
            self._report(AgentReady())
        else:
            self._start_master(adopting=has_predecessor)

    def _child_reports(self) -> tuple[ChildReport, ...]:
        """Living children, for the registration with a master that takes over."""
        reports = (child.report_to_master() for child in self._children.values() if child is not self._master)
        return tuple(report for report in reports if report is not None)

    # Requests of the master.

    def _handle(self, delivery: Delivery) -> None:
        match delivery.body:
            case _ if self._membership.handle(delivery):
                if self._membership.shutdown_reason is not None:
                    self._end(grace_s=END_GRACE_S, keep_master=True)
            case StartProcess() as order:
                self._handle_start(delivery, order)
            case StopProcess() as order:
                self._handle_stop(delivery, order)
            case Inspect(process=process, incarnation=incarnation):
                self._endpoint.reply(delivery, self._monitor.inspect(process, incarnation))
            case _ if self._arbiter.handle(delivery):
                pass
            case KeepState() | FetchState():
                self._peer_snapshots.handle(delivery)
            case ForgetStates(step=step):
                self._forget_before(step)
            case UploadWeights() | HoldWeights() | HoldDelta():
                self._weight_holder.handle(delivery)
            case OpenBulk(certificate=certificate):
                self._open_bulk(delivery, certificate)
            case ListFiles() | StoreFile() | KeepCheckpoint() if self._checkpoints is not None:
                self._checkpoints.handle(delivery)
            case body if delivery.wants_reply:
                self._endpoint.fail(delivery, RefusedError(f"an agent does not do {type(body).__name__}"))
            case _:
                pass

    def _forget_before(self, step: int) -> None:
        """Drop states to which the run does not return: copies, and snapshots of ranks that are not here any more."""
        self._peer_snapshots.forget_before(step)
        segments = OwnSegments(self._segments)
        try:
            for name in outdated(self._segments.names, segments=segments, before=step, living=self._children):
                segments.remove(name)
        except (OSError, KintsugiError) as error:  # The next message of this kind repeats it.
            self._monitor.log.emit(Note(f"snapshots before step {step} are not removed yet: {error}"))

    def _open_bulk(self, delivery: Delivery, certificate: bytes) -> None:
        try:
            self._endpoint.reply(delivery, self._bulk.server.open_session(delivery.peer, certificate))
        except (RefusedError, OSError) as error:
            self._endpoint.fail(delivery, error)

    def _handle_start(self, delivery: Delivery, order: StartProcess) -> None:
        """Start a process and answer when it runs. For one that runs already the answer is repeated; an earlier
        incarnation has to end first."""
        child = self._children.get(order.process)
        if self._ending or order.role not in self._handover.programs.entries:
            why = "it is ending" if self._ending else f"it has no program for role {order.role.value}"
            self._refuse_start(delivery, order, why)
        elif (
            child is None
            and self._accelerators.num_healthy == 0
            and order.role in self._handover.programs.forked
        ):
            why = "; ".join(fault.summary for fault in self._accelerators.broken.values())
            error = StartFailed(process=order.process, phase="choosing an accelerator", why=why)
            self._endpoint.fail(delivery, error)
        elif child is None:
            bootstrap = child_bootstrap(
                order,
                agent=self._own,
                # The current one, which may be a successor of the master that this agent started with.
                master=self._endpoint.peers[self._own.master.process],
                lifeline=self._handover.children_lifeline_read,
                segments=self._segments.name,
                broken_chips=tuple(self._accelerators.broken),
                term=self._endpoint.term,
            )
            self._start(bootstrap, placement=order.placement, request=delivery)
        elif child.incarnation != order.incarnation:
            if child.successor is not None:
                self._refuse_start(child.successor.delivery, child.successor.order, "a later one was ordered")
            child.successor = Successor(delivery, order)
            self._stop(child, grace_s=0.0)
        elif child.stopping:
            self._refuse_start(delivery, order, "it is being stopped")
        else:
            if child.start_request is not None:
                self._refuse_start(child.start_request, order, "it was ordered again")
            child.start_request = delivery
            if child.started:
                self.on_started(child)

    def _refuse_start(self, delivery: Delivery, order: StartProcess, why: str) -> None:
        error = RefusedError(f"{self._own.process} starts no {order.process} {order.incarnation}: {why}")
        self._endpoint.fail(delivery, error)

    def _handle_stop(self, delivery: Delivery, order: StopProcess) -> None:
        """Stop a process and answer when it has ended; an unknown process or incarnation has ended."""
        child = self._children.get(order.process)
        if child is None or child.incarnation != order.incarnation:
            self._endpoint.reply(delivery, Ok())
            return
        child.stop_requests.append(delivery)
        # Without grace the master ends a process that hangs or must not continue: its stacks show what it was doing.
        is_first = order.grace_s <= 0 and not child.stopping
        has_dump = is_first and child.request_stack_dump(time=self._clock.wall())
        self._stop(child, grace_s=order.grace_s, patience_s=STACK_DUMP_S if has_dump else 0.0)

    # Starts.

    def _start_master(self, *, adopting: bool) -> None:
        bootstrap = self._handover.master
        assert bootstrap is not None
        bootstrap = msgspec.structs.replace(
            bootstrap,
            incarnation=uuid4().hex[:8] if adopting else bootstrap.incarnation,
            lifeline=self._handover.children_lifeline_read,
            segments=self._segments.name,
            adopting=adopting,
        )
        self._master = self._start(bootstrap, placement=Placement(), request=None)

    def _start(self, bootstrap: Bootstrap, *, placement: Placement, request: Delivery | None) -> ChildProcess:
        programs = self._handover.programs
        start = StartOrder(
            program=programs.entries[bootstrap.role],
            placement=placement,
            bootstrap=bootstrap,
            report=-1,
            python=programs.interpreters.get(bootstrap.role, ""),
        )
        child = self._children[bootstrap.process] = ChildProcess.ordered(start, request=request)
        self._factory.start_child(child)
        return child

    def known_pids(self) -> set[int]:
        return self._factory.pids | {
            child.handle.pid for child in self._children.values() if child.handle is not None
        }

    def fork_server_changed(self) -> None:
        self._write_table()

    def on_spawned(self, child: ChildProcess) -> None:
        self._watch_end(child)
        self._write_table()
        child.send_due_signals(self._clock.monotonic())

    def on_started(self, child: ChildProcess) -> None:
        """Answer the start request. A failure is answered when the process has ended and nothing of it is left."""
        if child is self._master:
            self._report(AgentReady())
        elif child.start_request is not None and child.handle is not None:
            body = ProcessStarted(
                process=child.process,
                incarnation=child.incarnation,
                pid=child.handle.pid,
                public_key=child.public_key,
            )
            self._endpoint.reply(child.start_request, body)
            child.start_request = None

    def on_start_failed(self, child: ChildProcess, error: StartFailed) -> None:
        """Answer the start request of a process that could not be spawned; try again if it is a later master."""
        self._remove(child)
        is_master = child.process == self._own.master.process
        if is_master and self._run_has_begun() and self._replace_master(shortage=True):
            return
        self._report_start_failure(child, error)
        self._answer_stops(child)

    def _report_start_failure(self, child: ChildProcess, error: StartFailed) -> None:
        if child.process == self._own.master.process:
            self._report(AgentNotStarted(error.process, error.phase, error.why))
        elif child.start_request is not None:
            self._endpoint.fail(child.start_request, error)
            child.start_request = None

    def _watch_end(self, child: ChildProcess) -> None:
        assert child.handle is not None
        self._endpoint.watch(child.handle.pidfd, lambda: self._on_ended(child))

    def _write_table(self) -> bool:
        def records() -> list[ChildRecord | None]:
            return [
                self._factory.fork_server_record(),
                *(child.record() for child in self._children.values()),
            ]

        leases, broken = self._arbiter.users, self._accelerators.broken
        return write_table(self._table, records, job=self._own.job, leases=leases, broken_chips=broken)

    # Ends.

    def _stop(self, child: ChildProcess, *, grace_s: float, patience_s: float = 0.0) -> None:
        """Send SIGTERM after `patience_s` and SIGKILL `grace_s` later; without grace SIGKILL alone.

        A process that is ending anyway is left alone: its end was not ordered, and is recorded with its own cause.
        """
        if child.ending_status() is not None:
            return
        if child.is_adopted and not child.stopping:
            self._hold_descendants(child)
        now = self._clock.monotonic()
        child.stop(terminate_at=now + patience_s, kill_at=now + patience_s + grace_s)
        child.send_due_signals(now)

    def _on_ended(self, child: ChildProcess) -> None:
        """Reap a child that has ended, report its exit, and answer the requests that wait for it."""
        assert child.handle is not None
        if not child.handle.ended():
            return
        if child.handle.is_ours():
            kill_group(child.handle.pid)
        status = self._monitor.take_status(child)
        self._factory.take_report(child)
        self._remove(child)
        if child is self._master:
            self._on_master_ended(child, status)
        elif not child.started:
            self._report_start_failure(child, child.start_error(status))
        elif not child.exit_reported:
            self._report_exit(child, status)
        self._answer_stops(child)

    def _report_exit(self, child: ChildProcess, status: int | None) -> None:
        fault = fault_at_end(self._own.run_dir, child.process) if status else None
        exited = ProcessExited(
            process=child.process,
            incarnation=child.incarnation,
            status=status,
            last_output=child.last_output(),
            error=fault.kind if fault is not None else "",
        )
        child.exit_reported = True
        self._membership.send_to_master(exited)

    def _report_ending(self) -> None:
        """Report exits whose pidfd is not readable yet, because the kernel frees the memory of the process first. The
        successor of such a process is started after its end, so that it finds the memory free."""
        for child in self._children.values():
            if child is self._master or child.stopping or child.exit_reported or not child.started:
                continue
            status = child.ending_status()
            if status is not None:
                self._report_exit(child, status)

    def _remove(self, child: ChildProcess) -> None:
        self._factory.close_report(child)
        if child.handle is not None:
            self._endpoint.unwatch(child.handle.pidfd)
            child.handle.close()
            child.handle = None
        del self._children[child.process]
        self._arbiter.ended(child)
        self._write_table()

    def _answer_stops(self, child: ChildProcess) -> None:
        """Answer the requests that wait for this end: to stop it, or to start another incarnation."""
        for delivery in child.stop_requests:
            self._endpoint.reply(delivery, Ok())
        child.stop_requests.clear()
        if child.successor is not None:
            self._handle_start(child.successor.delivery, child.successor.order)

    def _on_master_ended(self, child: ChildProcess, status: int | None) -> None:
        """Start another master if that may help; otherwise its end is the end of the run."""
        if (status is None or status >= 0) and self._membership.shutdown_reason is None:
            self._read_last_messages()
        announced = self._membership.shutdown_reason is not None
        stopped_by_us = child.stopping or (self._pending_stop.was_requested and status == -signal.SIGTERM)
        if not (announced or stopped_by_us or self._ending) and self._is_replaceable(child, status):
            if self._replace_master(shortage=status in SHORTAGES):
                return
            now = self._clock.monotonic()
            how = f"{describe_exit(status)}, {self._master_limit.explain(now)}"
            self._report(MasterDied(how, child.last_output()))
        elif not child.started:
            self._report_start_failure(child, child.start_error(status))
        unknown = self._membership.shutdown_exit_code if announced else EXIT_ERROR
        decided = status is not None and status >= 0 and status not in SHORTAGES
        self._exit_code = status if status is not None and decided else unknown
        self._end(grace_s=END_GRACE_S)

    def _read_last_messages(self) -> None:
        """Read what a master that has ended may have sent before: without its `Shutdown` children would not get time to
        end. They may end at the same moment, and each end is an event of the loop too."""
        until = self._clock.monotonic() + LAST_MESSAGES_S
        while self._membership.shutdown_reason is None and self._clock.monotonic() < until:
            for delivery in self._endpoint.poll(max(0.0, until - self._clock.monotonic())):
                self._handle(delivery)

    def _is_replaceable(self, child: ChildProcess, status: int | None) -> bool:
        """Whether another master may do better: after a kill, after an error of the host, and after a start that failed
        in the middle of the run. With its other exit codes a master has decided the end of the run."""
        if status is None or status < 0:
            return True
        return (status in SHORTAGES and status != EXIT_UNFIT) or (
            self._run_has_begun() and (status == EXIT_UNFIT or not child.started)
        )

    def _run_has_begun(self) -> bool:
        return self._has_begun or self._endpoint.term > 0

    def _replace_master(self, *, shortage: bool) -> bool:
        """Start another master, after a pause if that happens often; False if the limit is reached or this agent ends.
        `shortage`: the host did not give it what it needs."""
        now = self._clock.monotonic()
        if self._ending or not self._master_limit.allows(now, shortage=shortage):
            return False
        COUNTERS.add("agent.master_restarts")
        # Messages from now on are for the successor, which accepts them only after registration.
        self._membership.registered = False
        self._pending_stop.expect_master(after_term=self._endpoint.term)
        self._master_at = now + self._master_limit.pause_s(now)
        self._start_due_master(now)
        return True

    def _start_due_master(self, now: float) -> None:
        if now >= self._master_at and not self._ending:
            self._master_at = math.inf
            self._start_master(adopting=True)

    def _end(self, *, grace_s: float, keep_master: bool = False) -> None:
        """Begin to end, or end sooner. Children that the master has asked to end get a moment to do so."""
        if not self._ending:
            self._report(AgentEnding())
        self._ending = True
        self._factory.close()
        patience_s = PATIENCE_S if self._membership.shutdown_reason is not None and grace_s > 0 else 0.0
        for child in tuple(self._children.values()):
            if not (keep_master and child is self._master):
                self._stop(child, grace_s=grace_s, patience_s=patience_s)

    # Signals, the launcher, timers.

    def _on_signal(self) -> None:
        for number in self._signals.received():
            if self._pending_stop.signalled(number):
                self._end(grace_s=0.0)
            else:
                self._forward_stop()

    def _forward_stop(self) -> None:
        """Send SIGTERM to the master, once it can receive it, so that it ends after its step with a checkpoint."""
        if self._master is None or self._master.handle is None:
            return
        if self._pending_stop.is_due(term=self._endpoint.term, registered=self._membership.registered):
            self._master.handle.send_signal(signal.SIGTERM)

    def _on_launcher_ended(self) -> None:
        """End everything. The master ends first: it would take the ends of its workers for faults."""
        self._endpoint.unwatch(self._own.lifeline)
        # Only a record: whatever keeps it from being made, also a file of another user, must not keep the processes.
        with contextlib.suppress(OSError, UserError):
            self._record_lost_launcher()
        self._exit_code = 1
        for child in self._children.values():
            self._hold_descendants(child)
        if self._master is not None:
            self._stop(self._master, grace_s=0.0)
        self._end(grace_s=END_GRACE_S)

    def _record_lost_launcher(self) -> None:
        """Record that launcher and standby were killed, unless the run ends in order."""
        # Imported here: no other part of an agent reads a run folder.
        from kintsugi.run_folder.reader import is_running, recorded_launcher

        is_ordered = self._ending or self._membership.shutdown_reason is not None
        launcher = recorded_launcher(Path(self._own.run_dir))
        if is_ordered or launcher is None or is_running(Path(self._own.run_dir)):
            return
        how = "ended together with its standby"
        gone = ProcessGone(process_id(Role.LAUNCHER, 0), "", launcher.pid, None, how)
        self._monitor.log.emit(gone)

    def _hold_descendants(self, child: ChildProcess) -> None:
        """Hold the processes that a child has started, until the end. Orphans of an adopted child do not become
        children of this agent, nor of a launcher that has taken over from its predecessor."""
        if child.handle is not None:
            with contextlib.suppress(OSError):  # No descriptor is left: the launcher ends what it can.
                self._descendants += hold_descendants(child.handle.pid, processes=self._processes)

    def _until_next_timer_s(self) -> float:
        due = min([self._tick_at, self._master_at, *(child.signal_at for child in self._children.values())])
        return max(0.0, due - self._clock.monotonic())

    def _run_timers(self) -> None:
        now = self._clock.monotonic()
        for child in self._children.values():
            child.send_due_signals(now)
        self._start_due_master(now)
        if not self._ending:
            self._membership.tick(now)
            self._forward_stop()
        if now < self._tick_at:
            return
        self._tick_at = now + HEARTBEAT_S / 2
        self._monitor.run_checks(
            self._check_children, self._check_accelerators, self._monitor.tick, self._arbiter.tick, now=now
        )
        if now >= self._bound_logs_at:
            self._bound_logs_at = now + BOUND_LOGS_S
            self._bound_logs()

    def _check_children(self, now: float) -> None:
        self._report_ending()
        for child in tuple(self._children.values()):
            # A pidfd shows every end, except of a process that a debugger holds.
            is_to_end = child.stopping or child.exit_reported or child is self._master
            if is_to_end and child.handle is not None and child.handle.is_held():
                self._on_ended(child)
        self._factory.maintain(self._monitor.report_stopped(self.known_pids(), now), now)
        self._membership.load = os.getloadavg()[0]
        if not self._factory.is_forking:
            reap_orphans(but=self.known_pids())

    def _bound_logs(self) -> None:
        """Bound what processes of this host print: its children, this agent, and beside the master the launcher."""
        others = (process_id(Role.LAUNCHER, 0), WATCHER) if self._handover.master is not None else ()
        for process in (self._own.process, *self._children, *others):
            bound_log(RunFolder(self._own.run_dir).log_file(process))

    def _check_accelerators(self, now: float) -> None:
        """Keep spares and new processes off accelerators that broke."""
        if self._monitor.report_accelerator_faults():
            self._factory.avoid(tuple(self._accelerators.broken))
            self._write_table()

    def _report(self, report: AgentReport) -> None:
        """Send a report to the launcher, if it still runs."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._handover.report, msgspec.json.encode(report) + b"\n")

    def _close(self) -> None:
        """Release everything. Children and table stay as they are unless the run ends: a successor needs them."""
        self._monitor.close()
        if self._ending:
            with contextlib.suppress(OSError):  # The launcher ends what this agent can not.
                kill_children(self._processes, but=(), timeout_s=END_GRACE_S, clock=self._clock)
                self._table.unlink(missing_ok=True)
            for handle in self._descendants:
                handle.send_signal(signal.SIGKILL)
        self._calls.close()
        self._peer_snapshots.close()
        self._weight_holder.close()
        self._bulk.close()
        self._segments.close()
        self._signals.close()
        self._endpoint.close(flush_s=0.0 if self._master else FLUSH_S)


class PendingStop:
    """Stop requests on their way to the master: the first is forwarded once the master can receive it, the second ends
    the run immediately.

    A master that was adopted or restarted receives signals from the moment at which it uses a term of its own.
    """

    def __init__(self, *, requested: bool) -> None:
        """`requested`: an earlier agent of this host has received a request."""
        self._is_pending = requested
        self._num_requests = int(requested)
        self._after_term: int | None = None

    @property
    def was_requested(self) -> bool:
        return self._num_requests > 0

    def signalled(self, number: signal.Signals) -> bool:
        """Count a signal; True if it asks for an immediate end."""
        self._num_requests += 1
        is_immediate = number == signal.SIGINT or self._num_requests > 1
        self._is_pending = self._is_pending or not is_immediate
        return is_immediate

    def expect_master(self, *, after_term: int) -> None:
        """The master was restarted, or started by another agent: it is ready in a later term than this."""
        self._after_term = after_term
        self._is_pending = self._is_pending or self.was_requested

    def is_due(self, *, term: int, registered: bool) -> bool:
        """Whether to forward the request now; it counts as forwarded then."""
        can_receive = self._after_term is None or (registered and term > self._after_term)
        is_due = self._is_pending and can_receive
        self._is_pending = self._is_pending and not can_receive
        return is_due


def _may_begin(gate: int) -> bool:
    """Wait until the launcher has recorded this process; False if it died before: its successor starts another."""
    if gate < 0:
        return True
    await_readable(gate, what="the launcher's record of this agent")
    allowed = bool(os.read(gate, 1))
    os.close(gate)
    return allowed


def main(arguments: list[str]) -> int:
    """Body of the agent's process; its handover is read from the descriptor."""
    process, descriptor = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        handover = msgspec.msgpack.decode(handed_over.read(), type=AgentHandover)
    for inherited in handover.descriptors:
        os.set_inheritable(inherited, False)
    raise_descriptor_limit(handover.bootstrap.num_processes)
    own_session_and_log(process, RunFolder(handover.bootstrap.run_dir).log_file(process))
    if not _may_begin(handover.gate):
        return EXIT_ORPHANED
    with subreaper():
        return run_process(handover.bootstrap, lambda _: Agent(handover, processes=SystemProcesses()).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
