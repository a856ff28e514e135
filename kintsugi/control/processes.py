"""Lifecycle of the run's processes: start, registration, loss, restart with back-off, retirement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.membership import WorkerRecord, WorkerStatus
from kintsugi.control.pending import PendingRequests, Purpose, RequestId
from kintsugi.control.placement import ProcessPlan
from kintsugi.control.protocol import Admit, Exited, Forget, Joined, ShareBook
from kintsugi.errors import EndedByError, Fault, FaultDetail, is_shortage
from kintsugi.journal.facts import ProcessJoined, ProcessLost, ProcessRequested, ProcessRetired
from kintsugi.protocol.agents import ProcessStarted, StartProcess, StopProcess
from kintsugi.protocol.generation import Retire
from kintsugi.runtime.backoff import ShortagePauses, growing_pause
from kintsugi.runtime.shortages import SHORTAGES, describe_exit
from kintsugi.types import Peer, Role

_LEAVING = WorkerStatus.LEAVING
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
STOP_AGAIN_S = 1.0
LEAVE_S = 10.0
"""Longest time that a retired server keeps running until the manager has moved its requests."""
LEAVE_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL."""
RETIRED = "Retired"
"""Reason of the end of a retired process. It is no fault, though the journal stores it as one."""
ASK_AGAIN_S = 5.0
"""Time after which a start is requested again; longer than most starts take."""
COMPUTE = (Role.MODEL, Role.SERVER)
"""Roles that need an accelerator where the host has any."""
QUICK_RETRIES = 3
"""Starts of one process that may fail before others stop waiting for it; further attempts follow at long intervals."""


class Arrival(StrEnum):
    """Meaning of a registration."""

    NEW = "new"
    AGAIN = "again"
    REFUSED = "refused"


class ProcessManager:
    """Processes of a run: the planned ones and the actual ones."""

    def __init__(
        self,
        layout: Sequence[ProcessPlan],
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        start_timeout_s: float,
        no_slots: frozenset[str] = frozenset(),
        is_cut: bool = False,
    ) -> None:
        """`no_slots`: hosts that take no processes in place of others. `is_cut`: each rank holds a part of the
        state."""
        self._is_cut = is_cut
        self._start_timeout_s = start_timeout_s
        self._no_slots = no_slots
        self.plans = {plan.process: plan for plan in layout if plan.role not in (Role.AGENT, Role.MASTER)}
        self._num_hosts = sum(plan.role is Role.AGENT for plan in layout)
        self._decision, self._pending = decision, pending
        self._failed_starts: Counter[str] = Counter()
        self._order_at: dict[str, float] = {}
        """Process → when to start it (again)."""
        self._requested_at: dict[str, tuple[str, float]] = {}
        """Process → the incarnation that is expected to register, and since when."""
        self._ask_again_at: dict[str, float] = {}
        """Incarnation that has not registered → when to request its start again."""
        self._stop_at: dict[str, float] = {}
        """Process that could not be stopped → when to try again."""
        self._terminating: dict[str, Fault] = {}
        """Incarnation → fault for which the master terminates it."""
        self._shortages: dict[str, ShortagePauses] = {}
        """Process → its ends for a shortage of the host."""
        self._excluded_hosts: set[str] = set()
        """Hosts without a working accelerator."""

    def plan(self, role: Role, plans: Sequence[ProcessPlan]) -> None:
        """Replace the plan of a role; `adjust` carries it out."""
        planned = {plan.process: plan for plan in plans}
        for name in [n for n, plan in self.plans.items() if plan.role is role and n not in planned]:
            del self.plans[name], self._failed_starts[name]
            self._order_at.pop(name, None)
        self.plans |= planned

    def missing(self, role: Role | None = None) -> list[str]:
        """Return the planned processes that are not live."""
        members = self._decision.state.members
        return [
            n for n, p in self.plans.items() if (role is None or p.role is role) and not members.is_live(n)
        ]

    def cannot_start(self, role: Role) -> bool:
        """Return whether all missing processes of a role have failed to start several times."""
        missing = self.missing(role)
        return bool(missing) and all(self._failed_starts[name] >= QUICK_RETRIES for name in missing)

    def overdue(self, waited_s: float, *, retries: bool) -> str | None:
        """Return a description of the processes that should have registered by now. With `retries`, a process that
        hangs during its start is replaced first."""
        limit_s = self._start_timeout_s * (1 + QUICK_RETRIES if retries else 1)
        if waited_s <= limit_s:
            return None
        return f"not registered: {', '.join(self.missing())} after {waited_s:.0f} s (cluster.start_timeout_s)"

    # Registration.

    def joined(self, event: Joined) -> Arrival:
        """Take a registration: of a new process, of a live one that reports to a new master, or of one that was
        replaced."""
        members, process = self._decision.state.members, event.peer.process
        if event.role is Role.AGENT:
            self._retire_predecessor(event)
            self._excluded_hosts.discard(event.peer.host)  # A new agent reports broken accelerators again.
        if members.is_live(process, event.peer.incarnation):
            self._decision.explain(f"{process} reports again")
            return Arrival.AGAIN
        fact = ProcessJoined(event.peer, event.role, event.pid, event.capabilities)
        refusal = members.accepts(fact)
        if refusal is not None:
            self._decision.explain(f"{process} registered in vain: {refusal}")
            return Arrival.REFUSED
        self._decision.add_fact(fact)
        self._decision.add_effect(ShareBook())
        self._decision.explain(f"{process} joined")
        self._failed_starts.pop(process, None)
        self._requested_at.pop(process, None)
        self._ask_again_at.pop(event.peer.incarnation, None)
        return Arrival.NEW

    def _retire_predecessor(self, event: Joined) -> None:
        peer = event.peer
        member = self._decision.state.members.members.get(peer.process)
        if member is None or member.status is not WorkerStatus.LIVE or member.incarnation == peer.incarnation:
            return
        name = f"{peer.process}@{member.incarnation}"
        message = f"{peer.process} (pid {member.pid}) was lost and restarted as {peer.incarnation}"
        fault = Fault(name, "ProcessDied", peer.process, message, event.time)
        self._decision.add_fact(ProcessLost(peer.process, member.incarnation, fault))
        self._decision.explain(message)

    def reconcile(self, event: Joined, now: float) -> list[str]:
        """Compare the processes that an agent lists with the registry: request the missing starts again, and return the
        live processes that are not on the list.

        A registration may be delayed, so the list may be older than the registry.
        """
        host, living = event.peer.host, {child.process: child for child in event.children}
        missed: list[str] = []
        for member in list(self._decision.state.members.members.values()):
            if member.host != host or member.role is Role.AGENT or member.status is WorkerStatus.LOST:
                continue
            child = living.pop(member.process, None)
            if child is not None and child.incarnation == member.incarnation:
                if member.status is WorkerStatus.REQUESTED:
                    self._admit(child.process, child.incarnation, host, child.public_key)
            elif member.status is WorkerStatus.REQUESTED:
                self._ask_start(member, now)
            elif member.status is WorkerStatus.LIVE:
                missed.append(member.process)
        for child in living.values():
            self.stop(child.process, child.incarnation, now, host=host)
        return missed

    def adjust(self, now: float, *, first: bool) -> None:
        """Retire processes that are not planned, and start planned ones that are neither live nor starting; at the
        `first` start wait for all agents."""
        members = self._decision.state.members
        for known in list(members.members.values()):
            if known.process not in self.plans and known.role is not Role.AGENT:
                self._retire(known)
            if known.status is _LEAVING:
                self._stop_retired(known, now)
        if first and len(members.live(Role.AGENT)) < self._num_hosts:
            return
        for name in self.plans:
            member = members.members.get(name)
            if member is None or member.status is WorkerStatus.LOST:
                self.order(name, now)
            elif member.status is WorkerStatus.REQUESTED:
                self._ask_start(member, now)

    # Members of an earlier master.

    def lose_all(self) -> None:
        """Record every member of an earlier session as lost: none of its processes is live."""
        members = self._decision.state.members
        gone = Fault("resumed", "Stopped", "master-0", "the run was stopped and is resumed", 0.0)
        for member in list(members.members.values()):
            lost = ProcessLost(member.process, member.incarnation, gone)
            if members.accepts(lost) is None:
                self._decision.add_fact(lost)

    def readmit(self) -> None:
        """Accept messages of every live member, and send them the address of this master."""
        members = self._decision.state.members
        for member in members.members.values():
            if member.peer is not None and members.is_live(member.process):
                self._decision.add_effect(Admit(member.peer))
        self._decision.add_effect(ShareBook())

    # Start.

    def order(self, process: str, now: float) -> None:
        """Have an agent start a process under a new incarnation; without any agent, wait for one."""
        plan, state = self.plans[process], self._decision.state
        self._order_at.pop(process, None)
        host = self._host_for(plan)
        if host is None:
            self._order_at[process] = now + FIRST_RETRY_S
            return
        incarnation = f"{state.term}.{state.num_incarnations + 1}"
        self._decision.add_fact(ProcessRequested(process, plan.role, host, incarnation))
        self._ask_start(state.members.members[process], now)

    def _host_for(self, plan: ProcessPlan) -> str | None:
        """Return the planned host if its agent is live and it can run the role, else the host with the fewest
        processes. A rank that holds a part of the state prefers the host where its snapshot is."""
        members = self._decision.state.members
        hosts = [members.members[agent].host for agent in members.live(Role.AGENT)]
        if plan.role in COMPUTE:
            # If no host has a working accelerator, the start fails there, and recovery chooses another strategy.
            hosts = [host for host in hosts if host not in self._excluded_hosts] or hosts
        home = self._decision.state.homes.get(plan.process) if self._is_cut else None
        for preferred in (home, plan.host):
            if preferred in hosts:
                return preferred
        hosts = [host for host in hosts if host not in self._no_slots] or hosts
        busy = Counter(m.host for m in members.members.values() if m.status is not WorkerStatus.LOST)
        return min(hosts, key=lambda host: (busy[host], host), default=None)

    def exclude_host(self, host: str) -> None:
        """Place no more ranks and servers on a host without working accelerators, if there is another host."""
        self._excluded_hosts.add(host)

    def _ask_start(self, member: WorkerRecord, now: float) -> None:
        agent = self._decision.state.members.agent_of(member.host)
        request_id = RequestId(Purpose.START, member.incarnation)
        if agent is None or self._pending.is_open(request_id.token):
            return
        self._requested_at.setdefault(member.process, (member.incarnation, now))
        self._pending.ask(
            request_id, agent, StartProcess(member.process, member.role, member.incarnation), now
        )

    def started(self, answer: ProcessStarted) -> None:
        """Accept messages under the key of a started process. It may have registered before this answer arrived; the
        registry then knows more, including its address."""
        member = self._decision.state.members.members.get(answer.process)
        if member is None or member.incarnation != answer.incarnation:
            return
        if member.status is WorkerStatus.REQUESTED:
            self._admit(answer.process, answer.incarnation, member.host, answer.public_key)

    def _admit(self, process: str, incarnation: str, host: str, public_key: bytes) -> None:
        self._decision.add_effect(Admit(Peer(process, incarnation, host, "", public_key)))

    def start_failed(self, incarnation: str, fault: Fault, now: float) -> str | None:
        """Take the failure of a start; return the process if it is lost and has to be started again.

        If the agent died or did not answer, the start is requested again later.
        """
        member = self._by_incarnation(incarnation)
        if member is None or member.status is not WorkerStatus.REQUESTED:
            return None
        if fault.kind in ("ProcessDied", "DeadlineExceeded"):
            self._order_at[member.process] = now + FIRST_RETRY_S
            return None
        return member.process if self._lose(member, fault) else None

    def order_later(self, process: str, fault: Fault, now: float) -> None:
        """Start a process again after a pause that grows with every failed start. A shortage of the host may pass: only
        every fifth one counts as a failed start."""
        if is_shortage(fault):
            self._failed_starts[process] += self._order_after_shortage(process, now).is_failure
            return
        self._failed_starts[process] += 1
        self._order_at[process] = now + growing_pause(
            self._failed_starts[process], first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S
        )

    def order_again(self, process: str, fault: Fault, now: float) -> None:
        """Start a lost process again: immediately, or after a growing pause if the host did not give it what it
        needs."""
        if is_shortage(fault):
            self._order_after_shortage(process, now)
        else:
            self.order(process, now)

    def _order_after_shortage(self, process: str, now: float) -> ShortagePauses:
        """Start a process again after a pause; return its shortages so far."""
        shortages = self._shortages.setdefault(process, ShortagePauses())
        shortages.count(now)
        self._order_at[process] = now + shortages.pause_s
        return shortages

    def tick(self, now: float) -> None:
        """Request the starts and stops that are due."""
        for process, (incarnation, since) in self._requested_at.items():
            if now - since > self._start_timeout_s:
                self.stop(process, incarnation, now)
            elif now >= self._ask_again_at.get(incarnation, since + ASK_AGAIN_S):
                # It may have died unnoticed. An agent ignores the request if the process is running.
                self._ask_again_at[incarnation] = now + ASK_AGAIN_S
                self._ask_start(self._decision.state.members.members[process], now)
        for process in [name for name, due in self._stop_at.items() if now >= due]:
            del self._stop_at[process]
            self.stop(process, self._decision.state.members.members[process].incarnation, now)
        for process in [name for name, due in self._order_at.items() if now >= due]:
            del self._order_at[process]
            known = self._decision.state.members.members.get(process)
            if known is None or known.status is WorkerStatus.LOST:
                self.order(process, now)
            elif known.status is WorkerStatus.REQUESTED:
                self._ask_start(known, now)

    # Retirement, termination and loss.

    def _retire(self, member: WorkerRecord) -> None:
        """Retire a process: it gets no more work, ends, and is not replaced."""
        retired = ProcessRetired(member.process, member.incarnation)
        if self._decision.state.members.accepts(retired) is None:
            self._decision.add_fact(retired)
            self._decision.explain(f"{member.process} is not needed any more")
            self._stop_waiting_for(member)

    def _stop_retired(self, member: WorkerRecord, now: float) -> None:
        """Let the manager move the requests of a retired server, then stop it. A server that never registered has no
        requests, and without a manager there are none."""
        request_id = RequestId(Purpose.RETIRE, member.incarnation)
        stop_id = RequestId(Purpose.STOP, member.incarnation)
        if self._pending.is_open(request_id.token) or self._pending.is_open(stop_id.token):
            return
        managers = self._decision.state.members.live(Role.MANAGER)
        self._stop_at.setdefault(member.process, now + (LEAVE_S if member.peer and managers else 0.0))
        for manager in managers if member.peer is not None else ():
            self._pending.ask(request_id, manager, Retire(member.process, member.incarnation), now)

    def requests_moved(self, incarnation: str, now: float) -> None:
        """Stop a retired server: the manager has moved its requests, or cannot do so any more."""
        member = self._by_incarnation(incarnation)
        if member is not None:
            self._stop_at.pop(member.process, None)
            self.stop(member.process, member.incarnation, now)

    def stop(self, process: str, incarnation: str, now: float, *, host: str = "") -> None:
        """Stop a process: immediately, or with a grace period if it is retired. Its exit is reported as any other."""
        members = self._decision.state.members
        member = members.members.get(process)
        agent = members.agent_of(host or (member.host if member is not None else ""))
        request_id = RequestId(Purpose.STOP, incarnation)
        if agent is not None and not self._pending.is_open(request_id.token):
            is_leaving = member is not None and member.status is _LEAVING
            grace_s = LEAVE_GRACE_S if is_leaving else 0.0
            self._pending.ask(request_id, agent, StopProcess(process, incarnation, grace_s), now)

    def stop_failed(self, incarnation: str, now: float) -> None:
        """Try again later to stop a process; its agent could not be reached."""
        member = self._by_incarnation(incarnation)
        if member is not None:
            self._stop_at[member.process] = now + STOP_AGAIN_S

    def _by_incarnation(self, incarnation: str) -> WorkerRecord | None:
        """Return the member with this incarnation that is not lost."""
        members = self._decision.state.members.members.values()
        living = (member for member in members if member.status is not WorkerStatus.LOST)
        return next((member for member in living if member.incarnation == incarnation), None)

    def stopped(self, incarnation: str) -> list[tuple[str, Fault, bool]]:
        """Take the answer to a stop: the process has ended. If its exit has not been reported, return it with its fault
        and whether it had registered."""
        member = self._by_incarnation(incarnation)
        if member is None:
            return []
        was_live = member.status is WorkerStatus.LIVE
        fault = self._fault_of(member, "it has ended, seen by its agent when it was to be stopped")
        return [(member.process, fault, was_live)] if self._lose(member, fault) else []

    def terminate(self, process: str, fault: Fault, now: float) -> None:
        """Stop a process because of a fault, which becomes the cause of its loss."""
        member = self._decision.state.members.members[process]
        self._terminating.setdefault(member.incarnation, fault)
        self._decision.explain(f"ending {process}: {fault.message}")
        self.stop(process, member.incarnation, now)

    def is_terminating(self, process: str) -> bool:
        """Return whether the master has requested the end of a live process."""
        return self._decision.state.members.members[process].incarnation in self._terminating

    def exited(self, event: Exited) -> Fault | None:
        """Return the fault of a current process that ended; None if it is not current, or already lost."""
        member = self._decision.state.members.members.get(event.process)
        if member is None or member.incarnation != event.incarnation:
            self._decision.explain(f"{event.process} {event.incarnation} is not a current process")
            return None
        message = describe_exit(event.status)
        if event.last_output:
            message += f"; its last words: {event.last_output[-600:].strip()}"
        shortage = SHORTAGES.get(event.status or 0, "")
        detail = EndedByError(event.error, shortage) if event.error or shortage else None
        fault = self._fault_of(member, message, time=event.time, detail=detail)
        return fault if self._lose(member, fault) else None

    def lose(self, process: str, message: str, *, kind: str, time: float) -> Fault | None:
        """Declare an unreachable process lost; None if it already is."""
        member = self._decision.state.members.members[process]
        fault = self._fault_of(member, message, kind=kind, time=time)
        return fault if self._lose(member, fault) else None

    def _fault_of(
        self,
        member: WorkerRecord,
        why: str,
        *,
        kind: str = "ProcessDied",
        time: float = 0.0,
        detail: FaultDetail | None = None,
    ) -> Fault:
        verdict = self._terminating.pop(member.incarnation, None)
        what = (
            f"{member.process} (pid {member.pid}) was lost"
            if member.pid
            else f"{member.process} did not start"
        )
        message = f"{what}: {why}"
        name = f"{member.process}@{member.incarnation}"
        return Fault(name, kind, member.process, message, time, verdict, detail)

    def _lose(self, member: WorkerRecord, fault: Fault) -> bool:
        """Record the end of a process; return whether it is a loss. The end of a retired process is none."""
        is_lost = member.status is not _LEAVING
        if not is_lost:
            message = f"{member.process} (pid {member.pid}) was not needed any more and has ended"
            fault = Fault(fault.id, RETIRED, member.process, message, fault.time)
        fact = ProcessLost(member.process, member.incarnation, fault)
        if self._decision.state.members.accepts(fact) is not None:
            return False
        self._decision.add_fact(fact)
        self._pending.abandon(member.process)
        self._pending.withdraw(RequestId(Purpose.RETIRE, member.incarnation).token)
        self._stop_waiting_for(member)
        self._stop_at.pop(member.process, None)
        self._terminating.pop(member.incarnation, None)
        self._decision.add_effect(Forget(member.process, fault))
        self._decision.add_effect(ShareBook())
        self._decision.explain(f"lost {member.process}: {fault.message}" if is_lost else fault.message)
        if not is_lost and member.process in self.plans:  # The process is planned again.
            self._order_at[member.process] = 0.0
        if member.role is Role.MANAGER:  # The next manager has to move the requests of retired servers again.
            leaving = (m for m in self._decision.state.members.members.values() if m.status is _LEAVING)
            self._stop_at |= {each.process: 0.0 for each in leaving}
        return is_lost

    def _stop_waiting_for(self, member: WorkerRecord) -> None:
        """Do not wait for the registration of a process any more."""
        self._pending.withdraw(RequestId(Purpose.START, member.incarnation).token)
        self._requested_at.pop(member.process, None)
        self._ask_again_at.pop(member.incarnation, None)
