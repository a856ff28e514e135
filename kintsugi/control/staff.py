"""Who comes and goes: orders processes from their agents, takes them in, notes their loss, and orders them again; sees
off who is not needed any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.layout import ProcessPlan
from kintsugi.control.membership import Member, MemberStatus
from kintsugi.control.protocol import Admit, Exited, Forget, Joined, ShareBook
from kintsugi.errors import Fault
from kintsugi.facts import ProcessJoined, ProcessLost, ProcessRequested, ProcessRetired
from kintsugi.messages import Retire
from kintsugi.runtime import describe_status
from kintsugi.supervision import ProcessStarted, StartProcess, StopProcess
from kintsugi.types import Peer, Role

_LEAVING = MemberStatus.LEAVING
START = "start"
STOP = "stop"
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
STOP_AGAIN_S = 1.0
RETIRE = "retire"
LEAVE_S = 10.0
"""The longest time for which who is not needed any more lives on, until the manager has taken back what it does."""
LEAVE_GRACE_S = 2.0
"""From SIGTERM to SIGKILL."""
RETIRED = "Retired"
"""Why a process ended that was not needed any more: no fault, though the journal tells of it as of one."""
ASK_AGAIN_S = 5.0
"""Longer than most starts take."""
COMPUTE = (Role.MODEL, Role.SERVER)
"""Roles that need an accelerator where there are any."""
QUICK_RETRIES = 3
"""Starts of one process that may fail before others stop waiting for it; it is tried on, but seldom."""


class Arrival(StrEnum):
    """What a registration means."""

    NEW = "new"
    AGAIN = "again"
    REFUSED = "refused"


class Staff:
    """The processes of a run, as planned and as they are."""

    def __init__(
        self, layout: Sequence[ProcessPlan], *, draft: Draft, talk: Conversation, start_timeout_s: float
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self.plans = {plan.process: plan for plan in layout if plan.role not in (Role.AGENT, Role.MASTER)}
        self._num_hosts = sum(plan.role is Role.AGENT for plan in layout)
        self._draft, self._talk = draft, talk
        self._failed_starts: Counter[str] = Counter()
        self._order_at: dict[str, float] = {}
        """Processes that are to be ordered (again), and when."""
        self._requested_at: dict[str, tuple[str, float]] = {}
        """Process → the incarnation that is awaited, and since when."""
        self._ask_again_at: dict[str, float] = {}
        """Incarnation that has not come → when its agent is asked again."""
        self._stop_at: dict[str, float] = {}
        """Processes that could not be stopped, and when it is tried again."""
        self._verdicts: dict[str, Fault] = {}
        """Incarnation → why it was ended by us."""
        self._without_chip: set[str] = set()
        """Hosts whose accelerators are all broken."""

    def plan(self, role: Role, plans: Sequence[ProcessPlan]) -> None:
        """From now on these are the processes of a role; `adjust` sees to it."""
        planned = {plan.process: plan for plan in plans}
        for name in [n for n, plan in self.plans.items() if plan.role is role and n not in planned]:
            del self.plans[name], self._failed_starts[name]
            self._order_at.pop(name, None)
        self.plans |= planned

    def missing(self, role: Role | None = None) -> list[str]:
        """Planned processes that are not there."""
        members = self._draft.state.members
        return [
            n for n, p in self.plans.items() if (role is None or p.role is role) and not members.is_live(n)
        ]

    def do_not_come(self, role: Role) -> bool:
        """Whether replacements of a role were tried several times in vain."""
        missing = self.missing(role)
        return bool(missing) and all(self._failed_starts[name] >= QUICK_RETRIES for name in missing)

    def overdue(self, waited_s: float, *, retries: bool) -> str | None:
        """Who should have been there by now. With `retries`, who hangs as it starts is replaced first."""
        limit_s = self._start_timeout_s * (1 + QUICK_RETRIES if retries else 1)
        if waited_s <= limit_s:
            return None
        return f"not registered: {', '.join(self.missing())} after {waited_s:.0f} s (cluster.start_timeout_s)"

    # Arrivals.

    def joined(self, event: Joined) -> Arrival:
        """A process registered: it is new, or reports to a new master, or was replaced meanwhile."""
        members, process = self._draft.state.members, event.peer.process
        if event.role is Role.AGENT:
            self._retire_predecessor(event)
            self._without_chip.discard(event.peer.host)  # It tells again what it finds.
        if members.is_live(process, event.peer.incarnation):
            self._draft.because(f"{process} reports again")
            return Arrival.AGAIN
        fact = ProcessJoined(event.peer, event.role, event.pid, event.capabilities)
        refusal = members.accepts(fact)
        if refusal is not None:
            self._draft.because(f"{process} registered in vain: {refusal}")
            return Arrival.REFUSED
        self._draft.fact(fact)
        self._draft.do(ShareBook())
        self._draft.because(f"{process} joined")
        self._failed_starts.pop(process, None)
        self._requested_at.pop(process, None)
        self._ask_again_at.pop(event.peer.incarnation, None)
        return Arrival.NEW

    def _retire_predecessor(self, event: Joined) -> None:
        peer = event.peer
        member = self._draft.state.members.members.get(peer.process)
        if member is None or member.status is not MemberStatus.LIVE or member.incarnation == peer.incarnation:
            return
        name = f"{peer.process}@{member.incarnation}"
        message = f"{peer.process} (pid {member.pid}) was lost and restarted as {peer.incarnation}"
        fault = Fault(name, "ProcessDied", peer.process, message, event.time)
        self._draft.fact(ProcessLost(peer.process, member.incarnation, fault))
        self._draft.because(message)

    def reconcile(self, event: Joined, now: float) -> list[str]:
        """An agent says who lives on its host: order what never came there, and give whom we miss.

        The list may be older than what we know, for a registration may be long on its way.
        """
        host, living = event.peer.host, {child.process: child for child in event.children}
        missed: list[str] = []
        for member in list(self._draft.state.members.members.values()):
            if member.host != host or member.role is Role.AGENT or member.status is MemberStatus.LOST:
                continue
            child = living.pop(member.process, None)
            if child is not None and child.incarnation == member.incarnation:
                if member.status is MemberStatus.REQUESTED:
                    self._admit(child.process, child.incarnation, host, child.public_key)
            elif member.status is MemberStatus.REQUESTED:
                self._ask_start(member, now)
            elif member.status is MemberStatus.LIVE:
                missed.append(member.process)
        for child in living.values():
            self.stop(child.process, child.incarnation, now, host=host)
        return missed

    def adjust(self, now: float, *, first: bool) -> None:
        """See off who is not planned; order everything that is planned and neither there nor on its way, at `first`
        once all agents have come."""
        members = self._draft.state.members
        for known in list(members.members.values()):
            if known.process not in self.plans and known.role is not Role.AGENT:
                self._retire(known)
            if known.status is _LEAVING:
                self._see_off(known, now)
        if first and len(members.live(Role.AGENT)) < self._num_hosts:
            return
        for name in self.plans:
            member = members.members.get(name)
            if member is None or member.status is MemberStatus.LOST:
                self.order(name, now)
            elif member.status is MemberStatus.REQUESTED:
                self._ask_start(member, now)

    # Orders.

    def order(self, process: str, now: float) -> None:
        """Have an agent start a process under a new incarnation; without any agent, wait for one."""
        plan, state = self.plans[process], self._draft.state
        self._order_at.pop(process, None)
        host = self._host_for(plan)
        if host is None:
            self._order_at[process] = now + FIRST_RETRY_S
            return
        incarnation = f"{state.epoch}.{state.num_incarnations + 1}"
        self._draft.fact(ProcessRequested(process, plan.role, host, incarnation))
        self._ask_start(state.members.members[process], now)

    def _host_for(self, plan: ProcessPlan) -> str | None:
        """The planned host while its agent lives and it can run the role, else the one with the fewest processes."""
        members = self._draft.state.members
        hosts = [members.members[agent].host for agent in members.live(Role.AGENT)]
        if plan.role in COMPUTE:
            # Where none is left that could, its agent says so, again and again, and the ladder goes on.
            hosts = [host for host in hosts if host not in self._without_chip] or hosts
        if plan.host in hosts:
            return plan.host
        busy = Counter(m.host for m in members.members.values() if m.status is not MemberStatus.LOST)
        return min(hosts, key=lambda host: (busy[host], host), default=None)

    def has_no_chip(self, host: str) -> None:
        """Every accelerator of a host is broken: what computes goes elsewhere, if there is an elsewhere."""
        self._without_chip.add(host)

    def _ask_start(self, member: Member, now: float) -> None:
        agent, token = self._draft.state.members.agent_of(member.host), f"{START}:{member.incarnation}"
        if agent is None or self._talk.is_open(token):
            return
        self._requested_at.setdefault(member.process, (member.incarnation, now))
        self._talk.ask(token, agent, StartProcess(member.process, member.role, member.incarnation), now)

    def started(self, answer: ProcessStarted) -> None:
        """It runs; from now on its key may speak. It may have done so before this answer came: then it is known better
        than the agent knows it, with its address."""
        member = self._draft.state.members.members.get(answer.process)
        if member is None or member.incarnation != answer.incarnation:
            return
        if member.status is MemberStatus.REQUESTED:
            self._admit(answer.process, answer.incarnation, member.host, answer.public_key)

    def _admit(self, process: str, incarnation: str, host: str, public_key: bytes) -> None:
        self._draft.do(Admit(Peer(process, incarnation, host, "", public_key)))

    def start_failed(self, token: str, fault: Fault, now: float) -> str | None:
        """A start was refused or failed: gives the process that is lost with it and will be ordered again.

        An agent that died or was restarted in the middle is asked again when it reports.
        """
        member = self._by_incarnation(token.removeprefix(f"{START}:"))
        if member is None or member.status is not MemberStatus.REQUESTED:
            return None
        if fault.kind in ("ProcessDied", "DeadlineExceeded"):
            self._order_at[member.process] = now + FIRST_RETRY_S
            return None
        return member.process if self._lose(member, fault) else None

    def order_later(self, process: str, now: float) -> None:
        """Order again after a pause that grows with every start that failed."""
        self._failed_starts[process] += 1
        pause_s = FIRST_RETRY_S * 2.0 ** min(self._failed_starts[process] - 1, 8)
        self._order_at[process] = now + min(pause_s, LONGEST_RETRY_S)

    def tick(self, now: float) -> None:
        """Order what is due."""
        for process, (incarnation, since) in self._requested_at.items():
            if now - since > self._start_timeout_s:
                self.stop(process, incarnation, now)
            elif now >= self._ask_again_at.get(incarnation, since + ASK_AGAIN_S):
                # It may have died, and the report of it was lost: an agent starts only what does not run.
                self._ask_again_at[incarnation] = now + ASK_AGAIN_S
                self._ask_start(self._draft.state.members.members[process], now)
        for process in [name for name, due in self._stop_at.items() if now >= due]:
            del self._stop_at[process]
            self.stop(process, self._draft.state.members.members[process].incarnation, now)
        for process in [name for name, due in self._order_at.items() if now >= due]:
            del self._order_at[process]
            known = self._draft.state.members.members.get(process)
            if known is None or known.status is MemberStatus.LOST:
                self.order(process, now)
            elif known.status is MemberStatus.REQUESTED:
                self._ask_start(known, now)

    # Departures.

    def _retire(self, member: Member) -> None:
        """It is not needed any more: nobody gives it work, it ends, and it is not replaced."""
        retired = ProcessRetired(member.process, member.incarnation)
        if self._draft.state.members.accepts(retired) is None:
            self._draft.fact(retired)
            self._draft.because(f"{member.process} is not needed any more")
            self._expect_no_more(member)

    def _see_off(self, member: Member, now: float) -> None:
        """Let the manager take back what a leaving server does, then end it; one that never came has nothing to give
        back, and without a manager nobody has given it anything."""
        token = f"{RETIRE}:{member.incarnation}"
        if self._talk.is_open(token) or self._talk.is_open(f"{STOP}:{member.incarnation}"):
            return
        managers = self._draft.state.members.live(Role.MANAGER)
        self._stop_at.setdefault(member.process, now + (LEAVE_S if member.peer and managers else 0.0))
        for manager in managers if member.peer is not None else ():
            self._talk.ask(token, manager, Retire(member.process, member.incarnation), now)

    def given_back(self, token: str, now: float) -> None:
        """The manager has taken back what a leaving server did, or can not any more."""
        member = self._by_incarnation(token.removeprefix(f"{RETIRE}:"))
        if member is not None:
            self._stop_at.pop(member.process, None)
            self.stop(member.process, member.incarnation, now)

    def stop(self, process: str, incarnation: str, now: float, *, host: str = "") -> None:
        """End a process that must not go on, at once, or one that is leaving; its exit is reported as any other."""
        members = self._draft.state.members
        member = members.members.get(process)
        agent = members.agent_of(host or (member.host if member is not None else ""))
        token = f"{STOP}:{incarnation}"
        if agent is not None and not self._talk.is_open(token):
            is_leaving = member is not None and member.status is _LEAVING
            grace_s = LEAVE_GRACE_S if is_leaving else 0.0
            self._talk.ask(token, agent, StopProcess(process, incarnation, grace_s), now)

    def stop_failed(self, token: str, now: float) -> None:
        """Its agent could not be asked: try again while the process is still ours."""
        member = self._by_incarnation(token.removeprefix(f"{STOP}:"))
        if member is not None:
            self._stop_at[member.process] = now + STOP_AGAIN_S

    def _by_incarnation(self, incarnation: str) -> Member | None:
        """The member that is not lost under this incarnation."""
        members = self._draft.state.members.members.values()
        living = (member for member in members if member.status is not MemberStatus.LOST)
        return next((member for member in living if member.incarnation == incarnation), None)

    def stopped(self, token: str) -> list[tuple[str, Fault, bool]]:
        """A process that was to end has ended; its exit has been reported, unless the report was lost. Gives it then,
        with its fault and whether it had registered."""
        member = self._by_incarnation(token.removeprefix(f"{STOP}:"))
        if member is None:
            return []
        was_live = member.status is MemberStatus.LIVE
        fault = self._fault_of(member, "it has ended, seen by its agent when it was to be stopped")
        return [(member.process, fault, was_live)] if self._lose(member, fault) else []

    def condemn(self, process: str, fault: Fault, now: float) -> None:
        """End a process of ours because of this fault, which is then the cause of its loss."""
        member = self._draft.state.members.members[process]
        self._verdicts.setdefault(member.incarnation, fault)
        self._draft.because(f"ending {process}: {fault.message}")
        self.stop(process, member.incarnation, now)

    def is_condemned(self, process: str) -> bool:
        """Whether a living process is about to be ended by us."""
        return self._draft.state.members.members[process].incarnation in self._verdicts

    def exited(self, event: Exited) -> Fault | None:
        """The fault of a current process that ended; None if it is not current, or its loss is known."""
        member = self._draft.state.members.members.get(event.process)
        if member is None or member.incarnation != event.incarnation:
            self._draft.because(f"{event.process} {event.incarnation} is not a current process")
            return None
        message = describe_status(event.status)
        if event.last_output:
            message += f"; its last words: {event.last_output[-600:].strip()}"
        fault = self._fault_of(member, message, time=event.time)
        return fault if self._lose(member, fault) else None

    def lose(self, process: str, message: str, *, kind: str, time: float) -> Fault | None:
        """Declare a process lost that nobody can reach; None if it is lost already."""
        member = self._draft.state.members.members[process]
        fault = self._fault_of(member, message, kind=kind, time=time)
        return fault if self._lose(member, fault) else None

    def _fault_of(self, member: Member, why: str, *, kind: str = "ProcessDied", time: float = 0.0) -> Fault:
        verdict = self._verdicts.pop(member.incarnation, None)
        what = (
            f"{member.process} (pid {member.pid}) was lost"
            if member.pid
            else f"{member.process} did not start"
        )
        message = f"{what}: {why}"
        name = f"{member.process}@{member.incarnation}"
        return Fault(name, kind, member.process, message, time, verdict)

    def _lose(self, member: Member, fault: Fault) -> bool:
        """Note the end of a process; whether something is lost with it. One that was to leave has left."""
        is_lost = member.status is not _LEAVING
        if not is_lost:
            message = f"{member.process} (pid {member.pid}) was not needed any more and has ended"
            fault = Fault(fault.id, RETIRED, member.process, message, fault.time)
        fact = ProcessLost(member.process, member.incarnation, fault)
        if self._draft.state.members.accepts(fact) is not None:
            return False
        self._draft.fact(fact)
        self._talk.abandon(member.process)
        self._talk.withdraw(f"{RETIRE}:{member.incarnation}")
        self._expect_no_more(member)
        self._stop_at.pop(member.process, None)
        self._verdicts.pop(member.incarnation, None)
        self._draft.do(Forget(member.process, fault))
        self._draft.do(ShareBook())
        self._draft.because(f"lost {member.process}: {fault.message}" if is_lost else fault.message)
        if not is_lost and member.process in self.plans:  # It is needed again.
            self._order_at[member.process] = 0.0
        if member.role is Role.MANAGER:  # What it had given to those who leave is asked of the next one anew.
            leaving = (m for m in self._draft.state.members.members.values() if m.status is _LEAVING)
            self._stop_at |= {each.process: 0.0 for each in leaving}
        return is_lost

    def _expect_no_more(self, member: Member) -> None:
        """Nobody waits for this one to come any more."""
        self._talk.withdraw(f"{START}:{member.incarnation}")
        self._requested_at.pop(member.process, None)
        self._ask_again_at.pop(member.incarnation, None)
