"""From a suspicion to a verdict: what seems to stand still is looked at from outside before it is replaced."""

from __future__ import annotations

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.membership import MemberStatus
from kintsugi.control.protocol import Raise, Suspected
from kintsugi.control.staff import Staff
from kintsugi.errors import Fault
from kintsugi.messages import Inspect, Inspected
from kintsugi.recovery.detection import Resolution, SuspicionKind, confirm
from kintsugi.types import Role

INSPECT = "inspect"
HOST_LOST_S = 15.0
"""A host whose agent and processes are all silent is given this long to come back: its agent may be restarting."""

_FAULTS = {"stopped": "Stopped", "link": "Unreachable", "hung": "Hung"}


class Suspicions:
    """Suspect → confirm → decide. Suspicions come again while they last, so each one is only a look."""

    def __init__(self, *, draft: Draft, talk: Conversation, staff: Staff) -> None:
        self._draft, self._talk, self._staff = draft, talk, staff
        self._looks: dict[str, tuple[Suspected, Inspected | None]] = {}
        """Incarnation → the latest suspicion and the look before."""

    def suspected(self, event: Suspected, now: float) -> list[tuple[str, Fault]]:
        """Look, or decide at once where the agent has looked; gives the processes of a host that is lost."""
        members = self._draft.state.members
        known = members.members.get(event.process)
        starting = MemberStatus.REQUESTED
        if event.certain and known and (known.status, known.incarnation) == (starting, event.incarnation):
            self._condemn(event, "Stopped", event.evidence, now)
            return []
        if not members.is_live(event.process, event.incarnation):
            self._draft.because(f"{event.process} {event.incarnation} is not a current process")
            return []
        member = members.members[event.process]
        self._draft.because(f"{event.process} is suspected: {event.evidence}")
        if member.role is Role.AGENT:
            lost = event.kind == SuspicionKind.HOST and event.lasting_s >= HOST_LOST_S
            return self._lose_host(member.host, event) if lost else []
        if event.kind == SuspicionKind.SLOW:
            self._draft.do(Raise(f"{event.process} is slow: {event.evidence}"))
        elif event.certain:
            self._condemn(event, "Stopped", event.evidence, now)
        else:
            before, look = self._looks.get(event.incarnation, (event, None))
            self._looks[event.incarnation] = (event, look if event.lasting_s >= before.lasting_s else None)
            agent, token = members.agent_of(member.host), f"{INSPECT}:{event.incarnation}"
            if agent is not None and not self._talk.is_open(token):
                self._talk.ask(token, agent, Inspect(event.process, event.incarnation), now)
        return []

    def missed(self, process: str, now: float, *, time: float) -> None:
        """Its agent did not list it: ask whether it is really not there, since the list may be old."""
        member = self._draft.state.members.members[process]
        evidence = f"{process} is not among the processes that its agent listed"
        self.suspected(Suspected(process, member.incarnation, evidence, time=time), now)

    def inspected(self, token: str, inspected: Inspected, now: float) -> list[tuple[str, Fault]]:
        """The agent has looked: clear it, wait, or end it so that it is replaced; gives it if it has ended already."""
        incarnation = token.removeprefix(f"{INSPECT}:")
        event, earlier = self._looks.pop(incarnation)
        if not self._draft.state.members.is_live(event.process, incarnation):
            return []
        speaks = event.kind == SuspicionKind.STUCK
        verdict = confirm(inspected, earlier, event.lasting_s, speaks=speaks)
        self._draft.because(f"{event.process}: {verdict.decision}, {verdict.reason}")
        if verdict.decision is Resolution.WAIT:
            self._looks[incarnation] = (event, inspected)
        elif verdict.decision is Resolution.REPLACE:
            evidence = f"{event.evidence}; seen from outside: {verdict.reason}"
            if verdict.fault == "dead":
                fault = self._staff.lose(event.process, evidence, kind="ProcessDied", time=event.time)
                return [] if fault is None else [(event.process, fault)]
            self._condemn(event, _FAULTS[verdict.fault], evidence, now)
        return []

    def not_inspected(self, token: str) -> None:
        """Its agent can not be asked: what that means shows when the agent comes back or its host is given up."""
        self._looks.pop(token.removeprefix(f"{INSPECT}:"), None)

    def _condemn(self, event: Suspected, kind: str, evidence: str, now: float) -> None:
        process, name = event.process, f"{event.process}@{event.incarnation}.{kind}"
        fault = Fault(name, kind, process, f"{process}: {evidence}", event.time)
        self._staff.condemn(process, fault, now)

    def _lose_host(self, host: str, event: Suspected) -> list[tuple[str, Fault]]:
        """Nobody there answers: its processes are replaced elsewhere, and refused should they come back."""
        members = self._draft.state.members
        everyone = members.members.values()
        here = [m.process for m in everyone if m.host == host and m.process != event.process]
        why = f"{host} is lost: {event.evidence}"
        lost = [self._staff.lose(p, why, kind="HostLost", time=event.time) for p in (event.process, *here)]
        return [(fault.process, fault) for fault in lost[1:] if fault is not None]
