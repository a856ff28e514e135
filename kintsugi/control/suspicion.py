"""From a suspicion to a verdict: what seems to stand still is looked at from outside before it is replaced."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.membership import MemberStatus
from kintsugi.control.protocol import Joined, Raise, Suspected
from kintsugi.control.staff import Staff
from kintsugi.errors import Fault
from kintsugi.facts import CauseDiagnosed
from kintsugi.recovery.detection import Resolution, SuspicionKind, confirm
from kintsugi.supervision import ChipFault, Inspect, Inspected, Verdict
from kintsugi.types import Role

INSPECT = "inspect"
CHIP = "chip"
"""The capability by which a process says which accelerator it uses."""
DIAGNOSED = "Diagnosed"
"""Kind of the fault of who is replaced because of a diagnosis."""
REPLACE_AGAIN_S = 60.0
"""A process is replaced because of a diagnosis at most this often."""
HOST_LOST_S = 15.0
"""A host whose agent and processes are all silent is given this long to come back: its agent may be restarting."""

_FAULTS = {"stopped": "Stopped", "link": "Unreachable", "hung": "Hung"}


class Suspicions:
    """Suspect → confirm → decide. Suspicions come again while they last, so each one is only a look."""

    def __init__(
        self,
        *,
        draft: Draft,
        talk: Conversation,
        staff: Staff,
        explain: Callable[[Fault, str, float], None],
    ) -> None:
        """`explain`: this fault is the cause of what processes of a host said about their device."""
        self._draft, self._talk, self._staff, self._explain = draft, talk, staff, explain
        self._looks: dict[str, tuple[Suspected, Inspected | None]] = {}
        """Incarnation → the latest suspicion and the look before."""
        self._broken: dict[tuple[str, str], Suspected] = {}
        """Host and accelerator → what its agent told; a new master is told again."""
        self._replaced: dict[str, float] = {}
        """Process → when a diagnosis last had it replaced."""

    def suspected(self, event: Suspected, now: float) -> list[tuple[str, Fault]]:
        """Look, or decide at once where the agent has looked; gives the processes of a host that is lost."""
        members = self._draft.state.members
        known = members.members.get(event.process)
        if event.chip is not None:
            if members.is_live(event.process, event.incarnation):
                self._chip_seen(event, event.chip, now)
            return []
        if event.verdict is not None:
            self._diagnosed(event, event.verdict, now)
            return []
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

    def _diagnosed(self, event: Suspected, verdict: Verdict, now: float) -> None:
        """A fact beside what was seen here. Who holds the run up by itself is replaced, and then left alone for a
        while: if its successor does no better, it was not the process."""
        kind, summary = verdict.kind, verdict.summary
        self._draft.fact(
            CauseDiagnosed(verdict.process, kind, verdict.onset, verdict.confidence, summary, verdict.path)
        )
        self._draft.because(f"diagnosed: {summary}")
        members = self._draft.state.members
        is_fresh = now - self._replaced.get(verdict.process, -REPLACE_AGAIN_S) < REPLACE_AGAIN_S
        if not verdict.replace or is_fresh or not members.is_live(verdict.process, verdict.incarnation):
            return
        if members.members[verdict.process].role not in (Role.AGENT, Role.MASTER):
            self._replaced[verdict.process] = now
            self._condemn(event, DIAGNOSED, f"{kind}: {summary}", now)

    def _chip_seen(self, event: Suspected, chip: ChipFault, now: float) -> None:
        """A worrying sign is told to people. From one that is broken its users go, and nobody is started on it."""
        self._draft.because(chip.summary)
        self._draft.do(Raise(chip.summary))
        if not chip.broken:
            return
        self._broken[chip.host, chip.uuid] = event
        if chip.num_healthy == 0:
            self._staff.has_no_chip(chip.host)
        self._explain(self._chip_fault(event, chip), chip.host, now)
        for member in list(self._draft.state.members.members.values()):
            uses = member.capabilities.get(CHIP)
            on_it = uses == chip.uuid
            # Who said that it uses another one knows that better than who goes by its number.
            named = not uses and chip.processes.get(member.process) == member.incarnation
            if member.host == chip.host and member.status is not MemberStatus.LOST and (on_it or named):
                self._staff.condemn(member.process, self._chip_fault(event, chip), now)

    def joined(self, event: Joined, now: float) -> None:
        """It may have been on its way to an accelerator that broke meanwhile. An agent that is new looks for itself."""
        host = event.peer.host
        if event.role is Role.AGENT:
            self._broken = {key: told for key, told in self._broken.items() if key[0] != host}
        told = self._broken.get((host, event.capabilities.get(CHIP, "")))
        if told is not None and told.chip is not None:
            self._staff.condemn(event.peer.process, self._chip_fault(told, told.chip), now)

    @staticmethod
    def _chip_fault(event: Suspected, chip: ChipFault) -> Fault:
        """One and the same for all whom it hits: they are lost for this one cause."""
        name = f"{event.process}@{event.incarnation}.{chip.uuid}.{chip.kind}"
        return Fault(name, ChipFault.__name__, event.process, chip.summary, event.time)

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
