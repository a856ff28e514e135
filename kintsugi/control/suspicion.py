"""Confirmation of suspicions: an agent inspects a process that seems stuck before the master replaces it."""

from __future__ import annotations

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.membership import WorkerStatus
from kintsugi.control.pending import PendingRequests, Purpose, RequestId
from kintsugi.control.processes import ProcessManager
from kintsugi.control.protocol import Joined, Raise, Suspected
from kintsugi.errors import Fault
from kintsugi.journal.facts import CauseDiagnosed
from kintsugi.protocol.agents import ChipFault, DiagnosisVerdict, Inspect, Inspected
from kintsugi.recovery.liveness import (
    CALLS,
    UNREACHABLE_S,
    Activity,
    Inspection,
    LivenessDecision,
    SuspicionKind,
    SuspicionResolution,
    confirm,
)
from kintsugi.telemetry.events import AcceleratorWarning, ProcessBusy, SlowProcess
from kintsugi.types import Role

CHIP = "chip"
"""Capability with the accelerator that a process uses."""
DIAGNOSED = "Diagnosed"
"""Fault kind of a process that is replaced because of a diagnosis."""
REPLACE_AGAIN_S = 60.0
"""Shortest time between two replacements of a process because of a diagnosis."""
HOST_LOST_S = 15.0
"""Time that a host has to come back after its agent and processes all fell silent: its agent may be restarting."""

_FAULTS = {"stopped": "Stopped", "link": "Unreachable", "hung": "Hung"}


class Suspicions:
    """Suspect → inspect → decide. A suspicion is repeated while it lasts, so each one leads to a single inspection."""

    def __init__(
        self,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        processes: ProcessManager,
    ) -> None:
        self._decision, self._pending, self._processes = decision, pending, processes
        self._inspections: dict[str, tuple[Suspected, Inspection | None]] = {}
        """Incarnation → the latest suspicion and the inspection before."""
        self._broken: dict[tuple[str, str], Suspected] = {}
        """(Host, accelerator) → report of its agent. Agents repeat their reports to a new master."""
        self._replaced: dict[str, float] = {}
        """Process → time of its last replacement because of a diagnosis."""

    def suspected(self, event: Suspected, now: float) -> list[tuple[str, Fault]]:
        """Have the process inspected, or terminate it if its agent has already seen the cause; return the lost
        processes of a lost host."""
        members = self._decision.state.members
        known = members.members.get(event.process)
        if event.verdict is not None:
            self._diagnosed(event, event.verdict, now)
            return []
        starting = WorkerStatus.REQUESTED
        if event.certain and known and (known.status, known.incarnation) == (starting, event.incarnation):
            self._terminate(event, "Stopped", event.evidence, now)
            return []
        if not members.is_live(event.process, event.incarnation):
            self._decision.explain(f"{event.process} {event.incarnation} is not a current process")
            return []
        member = members.members[event.process]
        self._decision.explain(f"{event.process} is suspected: {event.evidence}")
        if member.role is Role.AGENT:
            of_host = event.kind == SuspicionKind.HOST
            lost = of_host and (event.certain or event.lasting_s >= HOST_LOST_S)
            return self._lose_host(member.host, event) if lost else []
        if event.kind == SuspicionKind.SLOW:
            message = f"{event.process} is slow: {event.evidence}"
            self._decision.add_effect(Raise.of(SlowProcess(message, of=event.process)))
        elif event.certain:
            self._terminate(event, "Stopped", event.evidence, now)
        else:
            before, look = self._inspections.get(event.incarnation, (event, None))
            self._inspections[event.incarnation] = (
                event,
                look if event.lasting_s >= before.lasting_s else None,
            )
            agent = members.agent_of(member.host)
            request_id = RequestId(Purpose.INSPECT, event.incarnation)
            if agent is not None and not self._pending.is_open(request_id.token):
                self._pending.ask(request_id, agent, Inspect(event.process, event.incarnation), now)
        return []

    def _diagnosed(self, event: Suspected, verdict: DiagnosisVerdict, now: float) -> None:
        """Journal a diagnosis, and replace the process that it blames. The process is then spared for a while: if its
        successor is no better, the process was not the cause."""
        kind, summary = verdict.kind, verdict.summary
        self._decision.add_fact(
            CauseDiagnosed(verdict.process, kind, verdict.onset, verdict.confidence, summary, verdict.path)
        )
        self._decision.explain(f"diagnosed: {summary}")
        members = self._decision.state.members
        is_fresh = now - self._replaced.get(verdict.process, -REPLACE_AGAIN_S) < REPLACE_AGAIN_S
        if not verdict.replace or is_fresh or not members.is_live(verdict.process, verdict.incarnation):
            return
        if members.members[verdict.process].role not in (Role.AGENT, Role.MASTER):
            self._replaced[verdict.process] = now
            self._terminate(event, DIAGNOSED, f"{kind}: {summary}", now)

    def accelerator_reported(self, event: Suspected, chip: ChipFault, now: float) -> Fault | None:
        """Alert the operator to a report of an agent. If the accelerator is broken, terminate its users, start no
        process on it, and return the fault."""
        if not self._decision.state.members.is_live(event.process, event.incarnation):
            return None
        self._decision.explain(chip.summary)
        warning = AcceleratorWarning(
            chip.summary, of=event.process, device=chip.uuid, signal=chip.kind, is_broken=chip.broken
        )
        self._decision.add_effect(Raise.of(warning))
        if not chip.broken:
            return None
        self._broken[chip.host, chip.uuid] = event
        if chip.num_healthy == 0:
            self._processes.exclude_host(chip.host)
        for member in list(self._decision.state.members.members.values()):
            uses = member.capabilities.get(CHIP)
            on_it = uses == chip.uuid
            # A process that reported its accelerator is right about it; the list of the agent goes by device numbers.
            named = not uses and chip.processes.get(member.process) == member.incarnation
            if member.host == chip.host and member.status is not WorkerStatus.LOST and (on_it or named):
                self._processes.terminate(member.process, self._chip_fault(event, chip), now)
        return self._chip_fault(event, chip)

    def joined(self, event: Joined, now: float) -> None:
        """Terminate a process that has started on an accelerator that is broken. A new agent reports broken
        accelerators again."""
        host = event.peer.host
        if event.role is Role.AGENT:
            self._broken = {key: told for key, told in self._broken.items() if key[0] != host}
        told = self._broken.get((host, event.capabilities.get(CHIP, "")))
        if told is not None and told.chip is not None:
            self._processes.terminate(event.peer.process, self._chip_fault(told, told.chip), now)

    @staticmethod
    def _chip_fault(event: Suspected, chip: ChipFault) -> Fault:
        """Return the fault of an accelerator, the same one for all processes that it terminates."""
        name = f"{event.process}@{event.incarnation}.{chip.uuid}.{chip.kind}"
        return Fault(name, ChipFault.__name__, event.process, chip.summary, event.time)

    def missed(self, process: str, now: float, *, time: float) -> None:
        """Have a process inspected that is not on the list of its agent: the list may be old."""
        member = self._decision.state.members.members[process]
        evidence = f"{process} is not among the processes that its agent listed"
        self.suspected(Suspected(process, member.incarnation, evidence, time=time), now)

    def inspected(self, incarnation: str, inspected: Inspected, now: float) -> list[tuple[str, Fault]]:
        """Decide after an inspection: clear the suspicion, wait, or terminate the process; return it if it has already
        ended."""
        event, earlier = self._inspections.pop(incarnation)
        if not self._decision.state.members.is_live(event.process, incarnation):
            return []
        speaks = event.kind == SuspicionKind.STUCK
        verdict = confirm(inspected, earlier, event.lasting_s, speaks=speaks)
        self._decision.explain(f"{event.process}: {verdict.decision}, {verdict.reason}")
        if verdict.decision is SuspicionResolution.WAIT:
            self._inspections[incarnation] = (event, verdict.inspection)
            if not speaks:
                self._tell_busy(event, earlier, verdict)
        elif verdict.decision is SuspicionResolution.REPLACE:
            evidence = f"{event.evidence}; seen from outside: {verdict.reason}"
            if verdict.fault == "dead":
                fault = self._processes.lose(event.process, evidence, kind="ProcessDied", time=event.time)
                return [] if fault is None else [(event.process, fault)]
            self._terminate(event, _FAULTS[verdict.fault], evidence, now)
        return []

    def _tell_busy(self, event: Suspected, earlier: Inspection | None, verdict: LivenessDecision) -> None:
        """Alert the operator, once in a suspicion, to a process that one call keeps silent for long."""
        before_s = 0.0 if earlier is None else earlier.lasting_s
        if verdict.inspection.activity in CALLS and before_s < UNREACHABLE_S <= event.lasting_s:
            message = f"{event.process} is kept by one call and can not be heard: {verdict.reason}"
            computes = verdict.inspection.activity is Activity.COMPUTING
            busy = ProcessBusy(
                message, {"silent_s": round(event.lasting_s, 1)}, of=event.process, computes=computes
            )
            self._decision.add_effect(Raise.of(busy))

    def not_inspected(self, incarnation: str) -> None:
        """Forget the suspicion: the agent could not be reached. It returns, or its host will be given up."""
        self._inspections.pop(incarnation, None)

    def _terminate(self, event: Suspected, kind: str, evidence: str, now: float) -> None:
        process, name = event.process, f"{event.process}@{event.incarnation}.{kind}"
        fault = Fault(name, kind, process, f"{process}: {evidence}", event.time)
        self._processes.terminate(process, fault, now)

    def _lose_host(self, host: str, event: Suspected) -> list[tuple[str, Fault]]:
        """Declare all processes of a silent host lost. They are replaced on other hosts, and refused if they come
        back."""
        members = self._decision.state.members
        everyone = members.members.values()
        here = [m.process for m in everyone if m.host == host and m.process != event.process]
        why = f"{host} is lost: {event.evidence}"
        lost = [
            self._processes.lose(p, why, kind="HostLost", time=event.time) for p in (event.process, *here)
        ]
        return [(fault.process, fault) for fault in lost[1:] if fault is not None]
