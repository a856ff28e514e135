"""Failure detection of the master: heartbeats and answers become suspicions, which are recorded as events. Pure."""

from __future__ import annotations

from kintsugi.control.membership import WorkerRegistry, WorkerStatus
from kintsugi.control.pending import PendingRequests
from kintsugi.control.protocol import Event, Exited, Suspected
from kintsugi.protocol.agents import ChipFault, ProcessExited, ProcessSuspected
from kintsugi.protocol.membership import Heartbeat
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.protocol.training import CallDone
from kintsugi.recovery.liveness import LivenessMonitor, OpenRequest, Suspicion, SuspicionKind
from kintsugi.recovery.straggler import StragglerDetector
from kintsugi.types import Peer, Role, role_of

TRAINING = "forward_backward"
COMPUTING = (TRAINING, "optimizer")
"""Parts of a training call in which a rank waits for no other process."""
MIN_STEPS = 10
"""Decoding steps between two heartbeats that suffice to measure the speed of a server."""


def event_of_report(
    sender: Peer, body: ProcessExited | ProcessSuspected | ChipFault, *, time: float
) -> Event:
    """Turn the report of an agent into an event."""
    match body:
        case ProcessExited():
            return Exited(body.process, body.incarnation, body.status, body.last_output, time, body.error)
        case ProcessSuspected():
            return Suspected(body.process, body.incarnation, body.evidence, certain=True, time=time)
        case ChipFault():
            kind = SuspicionKind.CHIP
            who, which = sender.process, sender.incarnation
            return Suspected(who, which, body.summary, kind, certain=True, time=time, chip=body)


class FailureDetector:
    """Finds silent and stuck processes, and those far slower than their peers and their own past."""

    def __init__(self) -> None:
        self._liveness = LivenessMonitor()
        self._stragglers = StragglerDetector()
        self._found: list[Suspicion] = []
        self._steps: dict[str, tuple[int, float]] = {}

    def joined(self, process: str, incarnation: str, now: float, *, host: str) -> None:
        self._liveness.joined(process, incarnation, now, host=host)

    def adopt(self, members: WorkerRegistry, now: float) -> None:
        """Expect heartbeats of every process that the journal lists as live (new master)."""
        for member in members.members.values():
            if member.status is WorkerStatus.LIVE:
                self.joined(member.process, member.incarnation, now, host=member.host)

    def forget(self, process: str) -> None:
        self._liveness.forget(process)
        self._stragglers.forget(process)
        self._steps.pop(process, None)

    def on_heartbeat(self, process: str, incarnation: str, heartbeat: Heartbeat, now: float) -> None:
        self._liveness.on_heartbeat(process, incarnation, heartbeat, now)
        if role_of(process) is not Role.SERVER:
            return
        steps = heartbeat.progress.counters.get("steps", 0)
        before, since = self._steps.get(process, (steps, now))
        if steps - before >= MIN_STEPS or before == steps:
            self._steps[process] = (steps, now)
        if steps - before >= MIN_STEPS and heartbeat.load > 0:
            self._observe(
                process, incarnation, "100 decoding steps", 100 * (now - since) / (steps - before), now
            )

    def answered(self, process: str, incarnation: str, body: Body, now: float) -> None:
        """Compare the times that an answer reports with those of other processes."""
        if isinstance(body, CallDone):
            # Calls without training are far quicker and would hide a slow one.
            if TRAINING in body.timing:
                seconds = sum(body.timing.get(part, 0.0) for part in COMPUTING)
                self._observe(process, incarnation, "a training call", seconds, now)
        elif isinstance(body, EpisodesDone):
            self._observe(process, incarnation, "scoring a group", body.timing.get("reward", 0.0), now)

    def check(self, now: float, pending: PendingRequests) -> list[Suspected]:
        """Return the current suspicions; each is repeated while it lasts."""
        asked: dict[str, list[OpenRequest]] = {}
        for token, process, kind, since in pending.open_requests():
            asked.setdefault(process, []).append(OpenRequest(token, kind, since, pending.longest_s(kind)))
        found = [*self._liveness.check(now, asked=asked), *self._found]
        self._found = []
        return [
            Suspected(each.process, each.incarnation, each.evidence, each.kind, each.lasting_s)
            for each in found
        ]

    def _observe(self, process: str, incarnation: str, measure: str, value: float, now: float) -> None:
        role = role_of(process).value
        slow = self._stragglers.observe(
            process, incarnation, peers_key=role, measure=measure, value=value, now=now
        )
        if slow is not None:
            self._found.append(slow)
