"""The master's lookout: from heartbeats and answers to suspicions, which the shell records as events. Pure."""

from __future__ import annotations

from kintsugi.control.draft import Conversation
from kintsugi.control.membership import Membership, MemberStatus
from kintsugi.control.protocol import Event, Exited, Suspected
from kintsugi.messages import Body, CallDone, EpisodesDone, Heartbeat
from kintsugi.recovery.anomaly import Anomaly
from kintsugi.recovery.detection import OpenRequest, Suspicion, SuspicionKind, Watch
from kintsugi.supervision import ChipFault, ProcessExited, ProcessSuspected
from kintsugi.types import Peer, Role, role_of

TRAINING = "forward_backward"
COMPUTING = (TRAINING, "optimizer")
"""Parts of a training call in which a rank waits for nobody."""
MIN_STEPS = 10
"""Decoding steps between two heartbeats that are enough to tell a server's speed."""


def told_by(sender: Peer, body: ProcessExited | ProcessSuspected | ChipFault, *, time: float) -> Event:
    """What an agent has seen with its own eyes, as an event."""
    match body:
        case ProcessExited():
            return Exited(body.process, body.incarnation, body.status, body.last_output, time)
        case ProcessSuspected():
            return Suspected(body.process, body.incarnation, body.evidence, certain=True, time=time)
        case ChipFault():
            kind = SuspicionKind.CHIP
            who, which = sender.process, sender.incarnation
            return Suspected(who, which, body.summary, kind, certain=True, time=time, chip=body)


class Lookout:
    """Who is silent, who stands still, who has become far slower than its peers and its own past."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._anomaly = Anomaly()
        self._found: list[Suspicion] = []
        self._steps: dict[str, tuple[int, float]] = {}

    def joined(self, process: str, incarnation: str, now: float, *, host: str) -> None:
        self._watch.joined(process, incarnation, now, host=host)

    def adopt(self, members: Membership, now: float) -> None:
        """A new master expects to hear from everybody whom the journal says is there."""
        for member in members.members.values():
            if member.status is MemberStatus.LIVE:
                self.joined(member.process, member.incarnation, now, host=member.host)

    def forget(self, process: str) -> None:
        self._watch.forget(process)
        self._anomaly.forget(process)
        self._steps.pop(process, None)

    def heard(self, process: str, incarnation: str, heartbeat: Heartbeat, now: float) -> None:
        self._watch.heard(process, incarnation, heartbeat, now)
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
        """Answers say how long their parts took."""
        if isinstance(body, CallDone):
            # Calls that only look at samples are far quicker and would hide a slow one.
            if TRAINING in body.timing:
                seconds = sum(body.timing.get(part, 0.0) for part in COMPUTING)
                self._observe(process, incarnation, "a training call", seconds, now)
        elif isinstance(body, EpisodesDone):
            self._observe(process, incarnation, "scoring a group", body.timing.get("reward", 0.0), now)

    def check(self, now: float, talk: Conversation) -> list[Suspected]:
        """What is suspicious now; it comes again while it lasts."""
        asked: dict[str, list[OpenRequest]] = {}
        for token, process, kind, since in talk.open_requests():
            asked.setdefault(process, []).append(OpenRequest(token, kind, since, talk.longest_s(kind)))
        found = [*self._watch.check(now, asked=asked), *self._found]
        self._found = []
        return [
            Suspected(each.process, each.incarnation, each.evidence, each.kind, each.lasting_s)
            for each in found
        ]

    def _observe(self, process: str, incarnation: str, measure: str, value: float, now: float) -> None:
        role = role_of(process).value
        slow = self._anomaly.observe(
            process, incarnation, peers_key=role, measure=measure, value=value, now=now
        )
        if slow is not None:
            self._found.append(slow)
