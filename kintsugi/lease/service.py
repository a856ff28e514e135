"""The arbiter in the agent: carries out what the machine of each device decides, and says who does not answer.

Its successor has no memory of tokens and needs none: a token is at least the monotonic time of the host, in
nanoseconds, at which its arbiter began, so that those of a later one are greater. Whom it has ever let in is in the
agent's table before that one hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kintsugi.lease import arbiter as deciding
from kintsugi.lease.arbiter import GRACE_S, Arbiter, Decision, Fence, Member, Send
from kintsugi.lease.states import CLAIM_MOVES, Claim
from kintsugi.leasing import ToArbiter, ToHolder
from kintsugi.observe.events import Alert, Event, Note
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock
from kintsugi.transport import Delivery

UNANSWERED_S = 1.0
"""A message was said some times by then, and is answered in a millisecond; who has not answered it is named."""

_UNANSWERED = {Claim.GRANTED: "LeaseGranted", Claim.RECALLED: "LeaseRecalled"}


class LeaseUser(msgspec.Struct, frozen=True, order=True):
    """Who may have been granted a device: `LeaseUser("cpu", "model-0", "1.4")`. A line of the agent's table."""

    device: str
    process: str
    incarnation: str


class LeaseService:
    """Consumes what holders say, the ends of processes and time; produces answers, events, and the end of who does not
    give a device back. Never waits."""

    def __init__(
        self,
        *,
        send: Callable[[str, ToHolder], object],
        fence: Callable[[str, str, str], object],
        remember: Callable[[], bool],
        emit: Callable[[Event], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`fence` ends a process (its name, incarnation, and why); `remember` writes `users` down, or gives False."""
        self._send = send
        self._fence = fence
        self._remember = remember
        self._emit = emit
        self._clock = clock
        self._first_token = int(clock.monotonic() * 1e9)
        self._arbiters: dict[str, Arbiter] = {}
        self._named: dict[tuple[str, str], tuple[int, str]] = {}
        """Process and incarnation → token and message that it has not answered, as people have been told."""

    @property
    def users(self) -> tuple[LeaseUser, ...]:
        return tuple(
            LeaseUser(arbiter.device, member.process, member.incarnation)
            for arbiter in self._arbiters.values()
            for member in arbiter.members
        )

    def succeed(self, users: Iterable[LeaseUser]) -> None:
        """Take over from an arbiter that let these in, of those that live."""
        by_device: dict[str, list[Member]] = {}
        now = self._clock.monotonic()
        for user in sorted(users):
            member = Member(user.process, user.incarnation, since=now, until=now + deciding.LEASE_S)
            by_device.setdefault(user.device, []).append(member)
        for device, members in by_device.items():
            names = ", ".join(member.process for member in members)
            self._emit(Note(f"{device} was shared by {names}: asked back before anyone is let in"))
            self._adopt(deciding.succeed(device, token=self._first_token, members=members))

    def handle(self, delivery: Delivery) -> bool:
        """Take what a process of this host says about its lease; False if it is something else."""
        body = delivery.body
        if not isinstance(body, ToArbiter):
            return False
        arbiter = self._arbiters.get(body.device) or Arbiter(body.device, self._first_token)
        sender = Member(delivery.peer.process, delivery.peer.incarnation)
        self._adopt(deciding.hear(arbiter, sender, body, now=self._clock.monotonic()))
        return True

    def ended(self, process: str, incarnation: str) -> None:
        """A process of this host has ended, by itself or because it was fenced."""
        now = self._clock.monotonic()
        self._named.pop((process, incarnation), None)
        for arbiter in tuple(self._arbiters.values()):
            member = _find(arbiter, process, incarnation)
            if member is None:
                continue
            if member.occupies and any(each.claim is Claim.WAITING for each in arbiter.members):
                given_on = f"its token {member.token} is fenced and the device given on"
                self._emit(Note(f"{process} ended while it held {arbiter.device}: {given_on}"))
            self._adopt(deciding.end(arbiter, member, now=now))

    def tick(self, now: float) -> None:
        """Say again what is not answered, name who does not answer, and end who was asked until its time was over."""
        for arbiter in tuple(self._arbiters.values()):
            for member in arbiter.members:
                self._name_if_silent(arbiter, member, now)
                if _is_overdue(arbiter, member, now):
                    self._end(arbiter, member, now)
            self._carry_out(deciding.remind(self._arbiters[arbiter.device]))

    def _name_if_silent(self, arbiter: Arbiter, member: Member, now: float) -> None:
        key, what = (member.process, member.incarnation), _UNANSWERED.get(member.claim)
        named = self._named.get(key)
        if what is None:
            if named is not None:
                del self._named[key]
                self._emit(Note(f"{member.process} has answered {named[1]} {named[0]} after all"))
        elif now - member.since >= UNANSWERED_S and named != (member.token, what):
            self._named[key] = (member.token, what)
            COUNTERS.add("lease.unanswered")
            self._emit(Alert(_silence(arbiter, member, now), {"seconds": round(now - member.since, 3)}))

    def _adopt(self, decision: Decision) -> None:
        """Who is new is written down before it hears anything; if that fails, nothing was said and nothing decided."""
        arbiter, effects = decision
        before = self._arbiters.get(arbiter.device)
        self._arbiters[arbiter.device] = arbiter
        known = {(member.process, member.incarnation) for member in before.members} if before else set()
        is_new = any((each.process, each.incarnation) not in known for each in arbiter.members)
        if is_new and not self._remember():
            self._arbiters[arbiter.device] = before or Arbiter(arbiter.device, self._first_token)
            return
        self._carry_out(effects)

    def _carry_out(self, effects: Iterable[deciding.Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(process=process, body=body):
                    self._send(process, body)
                case Fence(member=member):
                    self._fence(member.process, member.incarnation, "")

    def _end(self, arbiter: Arbiter, member: Member, now: float) -> None:
        """It was told what it did not answer, and that is why it is ended."""
        COUNTERS.add("lease.fenced")
        why = _silence(arbiter, member, now)
        self._emit(Alert(f"{why}; its lease is over, so it is ended"))
        self._fence(member.process, member.incarnation, why)
        self._adopt(deciding.overdue(self._arbiters[arbiter.device], member, now=now))


def _find(arbiter: Arbiter, process: str, incarnation: str) -> Member | None:
    names = (process, incarnation)
    return next((each for each in arbiter.members if (each.process, each.incarnation) == names), None)


def _is_overdue(arbiter: Arbiter, member: Member, now: float) -> bool:
    """Only where somebody waits: who is alone may be silent."""
    waits = any(each.claim is Claim.WAITING and each.side is not member.side for each in arbiter.members)
    presumed = member.is_presumed and any(each.claim is Claim.WAITING for each in arbiter.members)
    can_be = (member.claim, "overdue") in CLAIM_MOVES
    return can_be and (waits or presumed) and now >= member.until + GRACE_S


def _silence(arbiter: Arbiter, member: Member, now: float) -> str:
    what = _UNANSWERED.get(member.claim, "LeaseRecalled")
    waiting = ", ".join(
        f"{each.process} (for {now - each.since:.1f} s)"
        for each in arbiter.members
        if each.claim is Claim.WAITING
    )
    return (
        f"{member.process} has not answered {what} {member.token} of {arbiter.device} "
        f"for {now - member.since:.1f} s; "
        f"waiting for it: {waiting or 'nobody'}"
    )
