"""The node agent: starts, watches and stops the processes of one host, and holds its shared memory.

    python -m kintsugi.cluster.agent PROCESS DESCRIPTOR

It is the parent of all of them (also of forked ones and of their orphans, as a subreaper), so an exit reaches it from
the kernel, through a pidfd, with its status. It decides nothing about the run: the master orders, the agent reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import deque

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.children import Kept, children_of, record_of, table_path, write_table
from kintsugi.cluster.handover import AgentHandover, AgentReport, MasterDied, NotStarted, Ready
from kintsugi.cluster.placement import Start, log_path, own_session_and_log, spawn
from kintsugi.cluster.segments import SegmentServer
from kintsugi.cluster.signals import Signals
from kintsugi.cluster.template import Template
from kintsugi.errors import RefusedError, StartFailed
from kintsugi.messages import Ok, ProcessExited, ProcessStarted, StartProcess, StopProcess
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock, Processes, SystemProcesses, describe_status
from kintsugi.transport import Delivery, new_key_pair
from kintsugi.types import Placement, Role
from kintsugi.worker import HEARTBEAT_S, Membership, open_endpoint, run_process

PR_SET_CHILD_SUBREAPER = 36
END_GRACE_S = 2.0
PATIENCE_S = 1.5
"""For children to end by themselves after the master has said `Shutdown` to everybody."""
FLUSH_S = 0.2
"""For the last messages to a master that may be gone."""


class Agent:
    """One loop over the endpoint, the children's pidfds and reports, the template, the launcher's pipe and signals.

    It ends when it is `ending` and the last child is reaped. Ending begins with the end of the master it started, with
    `Shutdown`, with the launcher's end of its pipe, or with a second signal. Children get SIGTERM, and SIGKILL after a
    grace. A master that said `Shutdown` is left to finish: its exit code is the agent's.
    """

    def __init__(self, handover: AgentHandover, *, processes: Processes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._handover = handover
        self._own = own = handover.bootstrap
        self._processes = processes
        self._clock = clock
        self._kept: dict[str, Kept] = {}
        self._forking: deque[Kept] = deque()
        """Asked of the template and not yet born, in order."""
        self._master: Kept | None = None
        self._template: Template | None = None
        self._ending = False
        self._exit_code = 0
        self._num_terminations = 0
        self._tick_at = 0.0
        self._endpoint = open_endpoint(own, clock=clock)
        self._membership = Membership(self._endpoint, own, capabilities={})
        self._signals = Signals(signal.SIGTERM, signal.SIGINT)
        capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self._segments = SegmentServer(self._endpoint, job=own.job, host=own.host, capacity=capacity)

    def run(self) -> int:
        """Until everything this agent answers for has ended; the exit code is the master's, where it has one."""
        self._endpoint.watch(self._signals.fileno(), self._signalled)
        self._endpoint.watch(self._own.lifeline, self._let_go_by_launcher)
        try:
            self._start_template()
            if self._handover.master is not None:
                self._start_master(self._handover.master)
            else:
                self._report(Ready())
            while not self._ending or self._kept:
                for delivery in self._endpoint.poll(self._until_next_timer_s()):
                    self._handle(delivery)
                self._run_timers()
        finally:
            self._close()
        return self._exit_code

    # What the master orders.

    def _handle(self, delivery: Delivery) -> None:
        match delivery.body:
            case _ if self._membership.handle(delivery):
                if self._membership.shutdown_reason is not None:
                    self._end(grace_s=END_GRACE_S, keep_master=True)
            case StartProcess() | StopProcess() if self._membership.refuse_unless_master(delivery):
                pass
            case StartProcess() as order:
                self._start_for(delivery, order)
            case StopProcess() as order:
                self._stop_for(delivery, order)
            case body if delivery.wants_reply:
                self._endpoint.fail(delivery, RefusedError(f"an agent does not do {type(body).__name__}"))
            case _:
                pass

    def _start_for(self, delivery: Delivery, order: StartProcess) -> None:
        program = self._handover.programs.entries.get(order.role)
        if self._ending or order.process in self._kept or program is None:
            why = "it is ending" if self._ending else f"{order.process} runs already"
            why = why if program is not None else f"it has no program for role {order.role.value}"
            self._endpoint.fail(
                delivery, RefusedError(f"{self._own.process} starts no {order.process}: {why}")
            )
            return
        public_key, secret_key = new_key_pair()
        bootstrap = Bootstrap(
            job=self._own.job,
            run_dir=self._own.run_dir,
            process=order.process,
            role=order.role,
            host=self._own.host,
            incarnation=order.incarnation,
            public_key=public_key,
            secret_key=secret_key,
            master=self._own.master,
            lifeline=self._handover.children_lifeline_read,
            segments=self._segments.name,
            epoch=self._endpoint.epoch,
        )
        self._start(bootstrap, program=program, placement=order.placement, request=delivery)

    def _stop_for(self, delivery: Delivery, order: StopProcess) -> None:
        """Answered when the process has ended; one that is not here, or another incarnation, has ended."""
        kept = self._kept.get(order.process)
        if kept is None or kept.incarnation != order.incarnation:
            self._endpoint.reply(delivery, Ok())
            return
        kept.stop_requests.append(delivery)
        self._stop(kept, grace_s=order.grace_s)

    # Births.

    def _start_master(self, bootstrap: Bootstrap) -> None:
        bootstrap = msgspec.structs.replace(
            bootstrap, lifeline=self._handover.children_lifeline_read, segments=self._segments.name
        )
        program = self._handover.programs.entries[Role.MASTER]
        self._master = self._start(bootstrap, program=program, placement=Placement(), request=None)

    def _start(
        self, bootstrap: Bootstrap, *, program: str, placement: Placement, request: Delivery | None
    ) -> Kept:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        start = Start(program=program, placement=placement, bootstrap=bootstrap, report=writer)
        kept = self._kept[bootstrap.process] = Kept(start, report=reader, request=request)
        self._endpoint.watch(reader, lambda: self._report_came(kept))
        forked = bootstrap.role in self._handover.programs.forked and not placement.environment
        if forked and self._template is not None and self._template.request(start):
            self._forking.append(kept)
        else:
            self._execute(kept)
        os.close(writer)
        return kept

    def _execute(self, kept: Kept) -> None:
        try:
            kept.child = spawn(self._processes, kept.start)
        except StartFailed as error:
            self._let_go(kept)
            self._start_failed(kept, error)
            return
        self._born(kept)

    def _born(self, kept: Kept) -> None:
        assert kept.child is not None
        self._endpoint.watch(kept.child.pidfd, lambda: self._ended(kept))
        self._write_table()
        kept.send_due_signals(self._clock.monotonic())

    def _write_table(self) -> None:
        template = self._template.child if self._template is not None else None
        records = [record_of(template, process="template"), *(kept.record() for kept in self._kept.values())]
        try:
            write_table(table_path(self._own.run_dir, self._own.process), records)
        except OSError:
            # The table is for who cleans up after a killed agent; a full disk must not be what kills it.
            COUNTERS.add("agent.table_not_written")

    def _report_came(self, kept: Kept) -> None:
        reader = kept.report
        if reader < 0 or not kept.read_report():
            return
        self._endpoint.unwatch(reader)
        os.close(reader)
        if kept.started:
            self._started(kept)

    def _started(self, kept: Kept) -> None:
        """Tell who ordered it. A failure is told when the process has ended, so that nothing is left by then."""
        if kept is self._master:
            self._report(Ready())
        elif kept.start_request is not None and kept.child is not None:
            body = ProcessStarted(
                process=kept.process,
                incarnation=kept.incarnation,
                pid=kept.child.pid,
                public_key=kept.start.bootstrap.public_key,
            )
            self._endpoint.reply(kept.start_request, body)
            kept.start_request = None

    def _start_failed(self, kept: Kept, error: StartFailed) -> None:
        if kept is self._master:
            self._report(NotStarted(error.process, error.phase, error.why))
        elif kept.start_request is not None:
            self._endpoint.fail(kept.start_request, error)
            kept.start_request = None

    # The template.

    def _start_template(self) -> None:
        if not self._handover.programs.preload:
            return
        self._template = Template(self._processes, preload=self._handover.programs.preload)
        self._endpoint.watch(self._template.fileno(), self._template_answered)
        self._write_table()

    def _template_answered(self) -> None:
        assert self._template is not None
        forked = self._template.receive()
        if forked is None:
            self._template_gone()
            return
        kept = self._forking.popleft()
        if forked.pid < 0:
            self._execute_instead(kept)
        else:
            kept.child = self._processes.adopt(forked.pid)
            self._born(kept)
            if kept.started:
                self._started(kept)

    def _template_gone(self) -> None:
        """Its log says why. What it had not forked is executed; what it forked unnoticed is a stranger, and killed."""
        self._close_template()
        self._kill_children(but=self._known_pids())
        while self._forking:
            self._execute_instead(self._forking.popleft())

    def _execute_instead(self, kept: Kept) -> None:
        """Start what the template did not, through a pipe of its own: the first one may have another holder."""
        self._let_go(kept)
        if self._ending or kept.stopping:
            self._start_failed(
                kept, StartFailed(process=kept.process, phase="starting", why="it was stopped")
            )
            self._answer_stops(kept)
            return
        bootstrap, placement = kept.start.bootstrap, kept.start.placement
        program = kept.start.program
        self._start(bootstrap, program=program, placement=placement, request=kept.start_request)

    def _close_template(self) -> None:
        if self._template is None:
            return
        template, self._template = self._template, None
        self._endpoint.unwatch(template.fileno())
        template.close()
        template.child.send_signal(signal.SIGKILL)
        template.child.wait_ended(whom="template", timeout_s=END_GRACE_S)
        template.child.close()

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
        # Its number is still taken by its remains, so this can only reach what it left behind in its own group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(kept.child.pid, signal.SIGKILL)
        status = kept.child.status()
        self._report_came(kept)
        self._let_go(kept)
        if not kept.started:
            self._start_failed(kept, kept.start_error(status))
        elif kept is not self._master:
            exited = ProcessExited(
                process=kept.process,
                incarnation=kept.incarnation,
                status=status,
                last_output=kept.last_output(),
            )
            self._endpoint.send(self._own.master.process, exited)
        self._answer_stops(kept)
        if kept is self._master:
            self._master_ended(kept, status)

    def _let_go(self, kept: Kept) -> None:
        if kept.report >= 0:
            self._endpoint.unwatch(kept.report)
            os.close(kept.report)
            kept.report = -1
        if kept.child is not None:
            self._endpoint.unwatch(kept.child.pidfd)
            kept.child.close()
            kept.child = None
        del self._kept[kept.process]
        self._write_table()

    def _answer_stops(self, kept: Kept) -> None:
        for delivery in kept.stop_requests:
            self._endpoint.reply(delivery, Ok())
        kept.stop_requests.clear()

    def _master_ended(self, kept: Kept, status: int | None) -> None:
        if kept.started and not kept.stopping and (status is None or status < 0):
            self._report(MasterDied(describe_status(status), kept.last_output()))
        self._exit_code = status if status is not None and status >= 0 else 1
        self._end(grace_s=END_GRACE_S)

    def _end(self, *, grace_s: float, keep_master: bool = False) -> None:
        """Begin to end, or hurry up. Children that the master has told to end get a moment to do so by themselves."""
        self._ending = True
        self._close_template()
        while self._forking:
            self._execute_instead(self._forking.popleft())
        patience_s = PATIENCE_S if self._membership.shutdown_reason is not None and grace_s > 0 else 0.0
        for kept in tuple(self._kept.values()):
            if not (keep_master and kept is self._master):
                self._stop(kept, grace_s=grace_s, patience_s=patience_s)

    def _kill_children(self, *, but: set[int]) -> None:
        """End what is ours and not in the table: our children's orphans, and what the template forked untold."""
        deadline = self._clock.monotonic() + END_GRACE_S
        while strangers := [pid for pid in children_of(os.getpid()) if pid not in but]:
            for pid in strangers:
                stranger = self._processes.adopt(pid)
                stranger.send_signal(signal.SIGKILL)
                remaining_s = deadline - self._clock.monotonic()
                stranger.wait_ended(whom=f"orphan {pid}", timeout_s=remaining_s)
                stranger.close()

    def _known_pids(self) -> set[int]:
        template = set() if self._template is None else {self._template.child.pid}
        return template | {kept.child.pid for kept in self._kept.values() if kept.child is not None}

    # Signals, the launcher, the master's epoch, time.

    def _signalled(self) -> None:
        for number in self._signals.received():
            self._num_terminations += 1
            if number == signal.SIGINT or self._num_terminations > 1:
                self._end(grace_s=0.0)
            elif self._master is not None and self._master.child is not None:
                self._master.child.send_signal(signal.SIGTERM)  # ends after its step, with a checkpoint

    def _let_go_by_launcher(self) -> None:
        """Everything ends. The master ends first: it would take the deaths of its workers for the cause."""
        self._endpoint.unwatch(self._own.lifeline)
        self._exit_code = 1
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
        if now < self._tick_at:
            return
        self._tick_at = now + HEARTBEAT_S / 2
        self._reap_orphans()
        if not self._ending:
            self._membership.load = os.getloadavg()[0]
            self._membership.tick(now)

    def _reap_orphans(self) -> None:
        """Take away the remains of our children's orphans; not while the template may have forked one of ours."""
        if self._forking:
            return
        known = self._known_pids()
        for pid in children_of(os.getpid()):
            if pid not in known:
                os.waitpid(pid, os.WNOHANG)

    def _report(self, report: AgentReport) -> None:
        """Tell the launcher, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._handover.report, msgspec.json.encode(report) + b"\n")

    def _close(self) -> None:
        self._kill_children(but=set())
        self._segments.close()
        self._signals.close()
        self._endpoint.close(flush_s=0.0 if self._master else FLUSH_S)
        table_path(self._own.run_dir, self._own.process).unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Body of the agent's process; everything it knows comes through the descriptor."""
    process, descriptor = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        handover = msgspec.msgpack.decode(handed_over.read(), type=AgentHandover)
    for inherited in descriptors_of(handover):
        os.set_inheritable(inherited, False)
    own_session_and_log(process, log_path(handover.bootstrap.run_dir, process))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the parent of orphans")
    return run_process(handover.bootstrap, lambda _: Agent(handover, processes=SystemProcesses()).run())


def descriptors_of(handover: AgentHandover) -> tuple[int, ...]:
    """What an agent inherits."""
    given = (
        handover.bootstrap.lifeline,
        handover.children_lifeline_read,
        handover.children_lifeline_write,
        handover.report,
        handover.master.listener if handover.master else -1,
    )
    return tuple(descriptor for descriptor in given if descriptor >= 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
