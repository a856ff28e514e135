"""Who comes and goes: orders processes from their agents, takes them in, and notes their loss."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.layout import ProcessPlan
from kintsugi.control.protocol import Admit, Exited, Forget, Joined, ShareBook
from kintsugi.errors import Fault
from kintsugi.facts import ProcessJoined, ProcessLost, ProcessRequested
from kintsugi.messages import ProcessStarted, StartProcess
from kintsugi.runtime import describe_status
from kintsugi.types import Peer, Role


class Staff:
    """The processes of a run, as planned and as they are."""

    def __init__(self, layout: Sequence[ProcessPlan], *, draft: Draft, talk: Conversation) -> None:
        self.plans = {plan.process: plan for plan in layout if plan.role not in (Role.AGENT, Role.MASTER)}
        self._num_hosts = sum(plan.role is Role.AGENT for plan in layout)
        self._draft, self._talk = draft, talk

    @property
    def complete(self) -> bool:
        return not self.missing()

    def missing(self) -> list[str]:
        """Planned processes that have not registered."""
        return [name for name in self.plans if not self._draft.state.members.is_live(name)]

    def joined(self, event: Joined, now: float) -> bool:
        """A process registered: False if it is known already or was replaced meanwhile.

        When the last agent has come, everything else is ordered.
        """
        members, process = self._draft.state.members, event.peer.process
        fact = ProcessJoined(event.peer, event.role, event.pid, event.capabilities)
        refusal = members.accepts(fact)
        if refusal is not None:
            self._draft.because(f"{process} registered again: {refusal}")
            return False
        self._draft.fact(fact)
        self._draft.do(ShareBook())
        self._draft.because(f"{process} joined")
        if event.role is Role.AGENT and len(members.live(Role.AGENT)) == self._num_hosts:
            for name in self.plans:
                self.order(name, now)
        return True

    def order(self, process: str, now: float) -> None:
        """Have an agent start a process under a new incarnation."""
        plan, state = self.plans[process], self._draft.state
        agent = state.members.agent_of(plan.host)
        assert agent is not None, f"{plan.host} lost its agent, which ends the run"
        incarnation = f"{state.epoch}.{state.num_incarnations + 1}"
        self._draft.fact(ProcessRequested(process, plan.role, plan.host, incarnation))
        self._talk.ask(f"start:{incarnation}", agent, StartProcess(process, plan.role, incarnation), now)

    def started(self, answer: ProcessStarted) -> None:
        """It runs; from now on its key may speak."""
        host = self.plans[answer.process].host
        self._draft.do(Admit(Peer(answer.process, answer.incarnation, host, "", answer.public_key)))

    def exited(self, event: Exited) -> Fault | None:
        """The fault of a current process that ended; None if it is not current, or its loss is known."""
        members = self._draft.state.members
        member = members.members.get(event.process)
        if member is None or member.incarnation != event.incarnation:
            self._draft.because(f"{event.process} {event.incarnation} is not a current process")
            return None
        message = f"{event.process} (pid {member.pid}) was lost: {describe_status(event.status)}"
        if event.last_output:
            message += f"; its last words: {event.last_output[-600:].strip()}"
        name = f"{event.process}@{event.incarnation}"
        fault = Fault(name, "ProcessDied", event.process, message, event.time)
        fact = ProcessLost(event.process, member.incarnation, fault)
        if members.accepts(fact) is not None:
            return None
        self._draft.fact(fact)
        self._draft.do(Forget(event.process, fault))
        self._draft.do(ShareBook())
        self._draft.because(f"lost {event.process}: {message}")
        return fault
