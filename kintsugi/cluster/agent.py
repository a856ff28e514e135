"""The node agent: starts, watches and stops the processes of one host, and holds its shared memory.

    python -m kintsugi.cluster.agent PROCESS DESCRIPTOR

It is the parent of all that it starts (also of forked ones and of their orphans, as a subreaper), so an exit reaches
it from the kernel, through a pidfd, with its status. It decides nothing about the run: the master orders, it reports.

An agent that dies, be it of its own error, leaves its children alive. The launcher starts a successor, which finds them
in the table, holds them by pidfd and lists them when it registers; only their status is not to be had: the launcher is
their parent now.
The agent in turn restarts a master that was killed, with the same keys on the same socket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from uuid import uuid4

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import (
    TEMPLATE,
    ChildRecord,
    Kept,
    Successor,
    find_alive,
    look_at,
    read_table,
    table_path,
    write_table,
)
from kintsugi.cluster.handover import (
    AgentHandover,
    AgentReport,
    Ending,
    MasterDied,
    NotStarted,
    Ready,
    child_bootstrap,
)
from kintsugi.cluster.keeper import NUM_STEPS, Keeper
from kintsugi.cluster.metaserver import MetaServer
from kintsugi.cluster.nursery import Nursery
from kintsugi.cluster.orphans import hold_descendants, kill_children, kill_group, reap_orphans, subreaper
from kintsugi.cluster.oversight import Oversight
from kintsugi.cluster.placement import Start, log_path, own_session_and_log
from kintsugi.cluster.restarts import RestartLimit
from kintsugi.cluster.segments import SegmentServer
from kintsugi.cluster.sharing import Sharing
from kintsugi.cluster.stopping import OwedStop
from kintsugi.errors import RefusedError, StartFailed
from kintsugi.messages import FetchWeights, Ok, UploadWeights
from kintsugi.operations import FetchState, KeepState
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Child, Clock, Processes, SystemProcesses, describe_status
from kintsugi.signals import Signals
from kintsugi.supervision import (
    Inspect,
    ProcessExited,
    ProcessStarted,
    StartProcess,
    StopProcess,
)
from kintsugi.transport import Delivery
from kintsugi.types import ChildReport, Placement
from kintsugi.worker import HEARTBEAT_S, Membership, open_endpoint, run_process

END_GRACE_S = 2.0
PATIENCE_S = 1.5
"""For children to end by themselves after the master has said `Shutdown` to everybody."""
LAST_WORDS_S = 0.1
FLUSH_S = 0.2  # For the last messages to a master that may be gone.


class Agent:
    """One loop over the endpoint, the children's pidfds and reports, the template, the launcher's pipe and signals.

    It ends when it is `ending` and the last child is gone. Ending begins with the end of its master (unless that was
    killed), with `Shutdown`, with the launcher's end of its pipe, or with a second signal. Children get SIGTERM, and
    SIGKILL after a grace. A master that said `Shutdown` is left to finish: its exit code is the agent's.
    """

    def __init__(self, handover: AgentHandover, *, processes: Processes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._handover = handover
        self._own = own = handover.bootstrap
        self._processes = processes
        self._clock = clock
        self._table = table_path(own.run_dir, own.process)
        self._kept: dict[str, Kept] = {}
        self._master: Kept | None = None
        self._master_limit = RestartLimit()
        self._owed_stop = OwedStop(requested=handover.stop_requested)
        self._left_behind: list[Child] = []
        self._ending = False
        self._exit_code = 0
        self._tick_at = 0.0
        self._endpoint = open_endpoint(own, clock=clock)
        self._membership = Membership(self._endpoint, own, capabilities={}, children=self._children)
        self._oversight = Oversight(
            self._kept, self._endpoint, self._membership, own=own, probe=handover.programs.probe, clock=clock
        )
        self._chips = self._oversight.chips
        self._leases = Sharing(
            self._kept, self._endpoint, self._membership, own=own, remember=self._write_table, clock=clock
        )
        self._signals = Signals(signal.SIGTERM, signal.SIGINT)
        capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self._segments = SegmentServer(self._endpoint, job=own.job, host=own.host, capacity=capacity)
        self._keeper = Keeper(capacity=capacity // NUM_STEPS)
        self._meta_server = MetaServer(self._endpoint, capacity=capacity)
        self._nursery = Nursery(
            self._endpoint,
            parent=self,
            programs=handover.programs,
            processes=processes,
            own=own,
            num_spares=handover.spares,
            template_name=f"{self._segments.name}-template",
            lifeline=handover.children_lifeline_read,
            clock=clock,
        )

    def run(self) -> int:
        """Until everything this agent answers for has ended; the exit code is the master's, where it has one."""
        self._endpoint.watch(self._signals.fileno(), self._signalled)
        self._endpoint.watch(self._own.lifeline, self._let_go_by_launcher)
        try:
            has_predecessor = self._adopt()
            self._oversight.begin()
            self._nursery.start_template()
            self._begin_master(has_predecessor=has_predecessor)
            while not self._ending or self._kept:
                for delivery in self._endpoint.poll(self._until_next_timer_s()):
                    self._handle(delivery)
                self._run_timers()
        finally:
            self._close()
        return self._exit_code

    # What a predecessor left.

    def _adopt(self) -> bool:
        """Hold the living children of the agent whose place this one takes; False if there was none."""
        table = read_table(self._table)
        if table is None or table.job != self._own.job:
            return False
        self._chips.adopt(table.broken_chips)
        for record, child in find_alive(self._table, processes=self._processes):
            if record.process == TEMPLATE:
                self._nursery.adopt_template(child)
            else:
                log = log_path(self._own.run_dir, record.process)
                kept = self._kept[record.process] = Kept.adopted(record, child, log=log)
                self._watch_end(kept)
        self._leases.succeed(table.leases)
        return True

    def _begin_master(self, *, has_predecessor: bool) -> None:
        if self._handover.master is None:
            self._report(Ready())
            return
        self._master = self._kept.get(self._handover.master.process)
        if has_predecessor:
            self._owed_stop.expect_master(after_epoch=self._endpoint.epoch)
        if self._master is not None:
            self._report(Ready())
        else:
            self._start_master(adopting=has_predecessor)

    def _children(self) -> tuple[ChildReport, ...]:
        """The living, as a master that takes over is told of them."""
        reports = (kept.report_to_master() for kept in self._kept.values() if kept is not self._master)
        return tuple(report for report in reports if report is not None)

    # What the master orders.

    def _handle(self, delivery: Delivery) -> None:
        match delivery.body:
            case _ if self._membership.handle(delivery):
                if self._membership.shutdown_reason is not None:
                    self._end(grace_s=END_GRACE_S, keep_master=True)
            case StartProcess() as order:
                self._start_for(delivery, order)
            case StopProcess() as order:
                self._stop_for(delivery, order)
            case Inspect(process=process, incarnation=incarnation):
                self._endpoint.reply(delivery, look_at(self._kept.get(process), incarnation=incarnation))
            case _ if self._leases.handle(delivery):
                pass
            case KeepState() | FetchState():
                self._keeper.handle(delivery, endpoint=self._endpoint)
            case UploadWeights() | FetchWeights():
                self._meta_server.handle(delivery)
            case body if delivery.wants_reply:
                self._endpoint.fail(delivery, RefusedError(f"an agent does not do {type(body).__name__}"))
            case _:
                pass

    def _start_for(self, delivery: Delivery, order: StartProcess) -> None:
        """Answered when it runs. One that runs already is answered for; an earlier incarnation has to end first."""
        kept = self._kept.get(order.process)
        if self._ending or order.role not in self._handover.programs.entries:
            why = "it is ending" if self._ending else f"it has no program for role {order.role.value}"
            self._refuse_start(delivery, order, why)
        elif kept is None and self._chips.num_healthy == 0 and order.role in self._handover.programs.forked:
            why = "; ".join(fault.summary for fault in self._chips.broken.values())
            error = StartFailed(process=order.process, phase="choosing an accelerator", why=why)
            self._endpoint.fail(delivery, error)
        elif kept is None:
            bootstrap = child_bootstrap(
                order,
                agent=self._own,
                # As it is known now: who ordered this may be a successor of the master this agent began with.
                master=self._endpoint.peers[self._own.master.process],
                lifeline=self._handover.children_lifeline_read,
                segments=self._segments.name,
                broken_chips=tuple(self._chips.broken),
                epoch=self._endpoint.epoch,
            )
            self._start(bootstrap, placement=order.placement, request=delivery)
        elif kept.incarnation != order.incarnation:
            if kept.successor is not None:
                self._refuse_start(kept.successor.delivery, kept.successor.order, "a later one was ordered")
            kept.successor = Successor(delivery, order)
            self._stop(kept, grace_s=0.0)
        elif kept.stopping:
            self._refuse_start(delivery, order, "it is being stopped")
        else:
            if kept.start_request is not None:
                self._refuse_start(kept.start_request, order, "it was ordered again")
            kept.start_request = delivery
            if kept.started:
                self.started(kept)

    def _refuse_start(self, delivery: Delivery, order: StartProcess, why: str) -> None:
        error = RefusedError(f"{self._own.process} starts no {order.process} {order.incarnation}: {why}")
        self._endpoint.fail(delivery, error)

    def _stop_for(self, delivery: Delivery, order: StopProcess) -> None:
        """Answered when the process has ended; one that is not here, or another incarnation, has ended."""
        kept = self._kept.get(order.process)
        if kept is None or kept.incarnation != order.incarnation:
            self._endpoint.reply(delivery, Ok())
            return
        kept.stop_requests.append(delivery)
        self._stop(kept, grace_s=order.grace_s)

    # Births.

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

    def _start(self, bootstrap: Bootstrap, *, placement: Placement, request: Delivery | None) -> Kept:
        program = self._handover.programs.entries[bootstrap.role]
        start = Start(program=program, placement=placement, bootstrap=bootstrap, report=-1)
        kept = self._kept[bootstrap.process] = Kept.ordered(start, request=request)
        self._nursery.bring_up(kept)
        return kept

    def known_pids(self) -> set[int]:
        return self._nursery.pids | {kept.child.pid for kept in self._kept.values() if kept.child is not None}

    def template_changed(self) -> None:
        self._write_table()

    def born(self, kept: Kept) -> None:
        self._watch_end(kept)
        self._write_table()
        kept.send_due_signals(self._clock.monotonic())

    def started(self, kept: Kept) -> None:
        """Tell who ordered it. A failure is told when the process has ended, so that nothing is left by then."""
        if kept is self._master:
            self._report(Ready())
        elif kept.start_request is not None and kept.child is not None:
            body = ProcessStarted(
                process=kept.process,
                incarnation=kept.incarnation,
                pid=kept.child.pid,
                public_key=kept.public_key,
            )
            self._endpoint.reply(kept.start_request, body)
            kept.start_request = None

    def start_failed(self, kept: Kept, error: StartFailed) -> None:
        """It was not born."""
        self._let_go(kept)
        self._tell_start_failed(kept, error)
        self._answer_stops(kept)

    def _tell_start_failed(self, kept: Kept, error: StartFailed) -> None:
        if kept.process == self._own.master.process:
            self._report(NotStarted(error.process, error.phase, error.why))
        elif kept.start_request is not None:
            self._endpoint.fail(kept.start_request, error)
            kept.start_request = None

    def _watch_end(self, kept: Kept) -> None:
        assert kept.child is not None
        self._endpoint.watch(kept.child.pidfd, lambda: self._ended(kept))

    def _write_table(self) -> bool:
        def records() -> list[ChildRecord | None]:
            return [self._nursery.template_record(), *(kept.record() for kept in self._kept.values())]

        leases, broken = self._leases.users, self._chips.broken
        return write_table(self._table, records, job=self._own.job, leases=leases, broken_chips=broken)

    # Deaths.

    def _stop(self, kept: Kept, *, grace_s: float, patience_s: float = 0.0) -> None:
        """SIGTERM after `patience_s`, SIGKILL `grace_s` later; without grace SIGKILL alone."""
        now = self._clock.monotonic()
        kept.stop(terminate_at=now + patience_s, kill_at=now + patience_s + grace_s)
        kept.send_due_signals(now)

    def _ended(self, kept: Kept) -> None:
        """The kernel says that a child has ended: take its status and tell everybody who asked."""
        assert kept.child is not None
        if not kept.child.ended():
            return
        if kept.child.is_ours():
            kill_group(kept.child.pid)
        status = self._oversight.take_status(kept)
        self._nursery.take_report(kept)
        self._let_go(kept)
        if kept is self._master:
            self._master_ended(kept, status)
        elif not kept.started:
            self._tell_start_failed(kept, kept.start_error(status))
        else:
            exited = ProcessExited(
                process=kept.process,
                incarnation=kept.incarnation,
                status=status,
                last_output=kept.last_output(),
            )
            self._membership.tell(exited)
        self._answer_stops(kept)

    def _let_go(self, kept: Kept) -> None:
        self._nursery.let_go(kept)
        if kept.child is not None:
            self._endpoint.unwatch(kept.child.pidfd)
            kept.child.close()
            kept.child = None
        del self._kept[kept.process]
        self._leases.ended(kept)
        self._write_table()

    def _answer_stops(self, kept: Kept) -> None:
        """Somebody may have waited for this end: who asked for it, and who ordered another in its place."""
        for delivery in kept.stop_requests:
            self._endpoint.reply(delivery, Ok())
        kept.stop_requests.clear()
        if kept.successor is not None:
            self._start_for(kept.successor.delivery, kept.successor.order)

    def _master_ended(self, kept: Kept, status: int | None) -> None:
        """Restarted if somebody killed it in the middle of the run; otherwise its end is that of the run."""
        by_itself = status is not None and status >= 0
        if status is None and self._membership.shutdown_reason is None:
            # The last words of an adopted one may lie there unread.
            for delivery in self._endpoint.poll(LAST_WORDS_S):
                self._handle(delivery)
        said_so = self._membership.shutdown_reason is not None
        stopped_by_us = kept.stopping or (self._owed_stop.was_requested and status == -signal.SIGTERM)
        if not (by_itself or said_so or stopped_by_us or self._ending):
            if self._master_limit.allows(self._clock.monotonic()):
                COUNTERS.add("agent.master_restarts")
                # What is told from now on is for the successor, who knows nobody until they have registered.
                self._membership.registered = False
                self._owed_stop.expect_master(after_epoch=self._endpoint.epoch)
                self._start_master(adopting=True)
                return
            self._report(MasterDied(describe_status(status), kept.last_output()))
        elif not kept.started:
            self._tell_start_failed(kept, kept.start_error(status))
        unknown = self._membership.shutdown_exit_code if said_so else 1
        self._exit_code = status if status is not None and status >= 0 else unknown
        self._end(grace_s=END_GRACE_S)

    def _end(self, *, grace_s: float, keep_master: bool = False) -> None:
        """Begin to end, or hurry up. Children that the master has told to end get a moment to do so by themselves."""
        if not self._ending:
            self._report(Ending())
        self._ending = True
        self._nursery.close()
        patience_s = PATIENCE_S if self._membership.shutdown_reason is not None and grace_s > 0 else 0.0
        for kept in tuple(self._kept.values()):
            if not (keep_master and kept is self._master):
                self._stop(kept, grace_s=grace_s, patience_s=patience_s)

    # Signals, the launcher, the master's epoch, time.

    def _signalled(self) -> None:
        for number in self._signals.received():
            if self._owed_stop.signalled(number):
                self._end(grace_s=0.0)
            else:
                self._pass_stop_on()

    def _pass_stop_on(self) -> None:
        """Ask the master to end after its step, with a checkpoint, as soon as it can be asked."""
        if self._master is None or self._master.child is None:
            return
        if self._owed_stop.is_due(epoch=self._endpoint.epoch, registered=self._membership.registered):
            self._master.child.send_signal(signal.SIGTERM)

    def _let_go_by_launcher(self) -> None:
        """Everything ends. The master ends first: it would take the deaths of its workers for the cause."""
        self._endpoint.unwatch(self._own.lifeline)
        self._exit_code = 1
        for kept in self._kept.values():
            if kept.child is not None:
                # What those leave behind that are not our children came to the launcher, which is no more.
                self._left_behind += hold_descendants(kept.child.pid, processes=self._processes)
        if self._master is not None:
            self._stop(self._master, grace_s=0.0)
        self._end(grace_s=END_GRACE_S)

    def _until_next_timer_s(self) -> float:
        due = min([self._tick_at, *(kept.signal_at for kept in self._kept.values())])
        return max(0.0, due - self._clock.monotonic())

    def _run_timers(self) -> None:
        now = self._clock.monotonic()
        for kept in self._kept.values():
            kept.send_due_signals(now)
        if not self._ending:
            self._membership.tick(now)
            self._pass_stop_on()
        if now < self._tick_at:
            return
        self._tick_at = now + HEARTBEAT_S / 2
        self._oversight.try_to(
            self._look_at_children, self._look_at_chips, self._oversight.tick, self._leases.tick, now=now
        )

    def _look_at_children(self, now: float) -> None:
        for kept in [kept for kept in self._kept.values() if kept.stopping or kept is self._master]:
            # The kernel tells of an end by itself, unless a debugger holds the remains.
            if kept.child is not None and kept.child.is_held():
                self._ended(kept)
        self._nursery.look_after(self._oversight.stopped(self.known_pids(), now), now)
        self._membership.load = os.getloadavg()[0]
        if not self._nursery.is_forking:
            reap_orphans(but=self.known_pids())

    def _look_at_chips(self, now: float) -> None:
        """Accelerators that broke are left alone: by spares, and by whoever is started."""
        if self._oversight.chips_broke():
            self._nursery.avoid(tuple(self._chips.broken))
            self._write_table()

    def _report(self, report: AgentReport) -> None:
        """Tell the launcher, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._handover.report, msgspec.json.encode(report) + b"\n")

    def _close(self) -> None:
        """An agent that broke in the middle of the run has a successor, who needs children and table as they are."""
        self._oversight.close()
        if self._ending:
            with contextlib.suppress(OSError):  # Whom it can not find is the launcher's to end.
                kill_children(self._processes, but=(), timeout_s=END_GRACE_S, clock=self._clock)
                self._table.unlink(missing_ok=True)
        for child in self._left_behind:
            child.send_signal(signal.SIGKILL)
        self._segments.close()
        self._signals.close()
        self._endpoint.close(flush_s=0.0 if self._master else FLUSH_S)


def main(arguments: list[str]) -> int:
    """Body of the agent's process; everything it knows comes through the descriptor."""
    process, descriptor = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        handover = msgspec.msgpack.decode(handed_over.read(), type=AgentHandover)
    for inherited in handover.descriptors:
        os.set_inheritable(inherited, False)
    own_session_and_log(process, log_path(handover.bootstrap.run_dir, process))
    with subreaper():
        return run_process(handover.bootstrap, lambda _: Agent(handover, processes=SystemProcesses()).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
