"""Lease service of the agent: carries out the decisions of each device's arbiter, and reports silent processes.

A successor needs no record of fencing tokens: a token is at least the host's monotonic time, in nanoseconds, at which
its arbiter started, so tokens of a later arbiter are greater. Every process that is granted a lease is written to the
agent's table before it is sent the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kintsugi.device_lease import arbiter as deciding
from kintsugi.device_lease.arbiter import GRACE_S, Arbiter, Decision, Fence, LeaseMember, Send
from kintsugi.device_lease.states import CLAIM_MOVES, Claim
from kintsugi.protocol.device_lease import ToArbiter, ToHolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import Event, LeaseUnanswered, Note
from kintsugi.transport import Delivery

UNANSWERED_S = 1.0
"""Time after which a process that has not answered is reported. By then the message was sent several times; an answer
normally takes a millisecond."""

KEPT_S = 60.0
"""Time after the end of a lease for a process that one call of a library keeps: it can not answer, and replacing it
costs more than waiting."""

_UNANSWERED = {Claim.GRANTED: "LeaseGranted", Claim.RECALLED: "LeaseRecalled"}


class LeaseUser(msgspec.Struct, frozen=True, order=True):
    """Process that may hold a device, a line of the agent's table: `LeaseUser("cpu", "model-0", "1.4")`."""

    device: str
    process: str
    incarnation: str


class LeaseService:
    """Consumes messages of holders, ends of processes and ticks; produces replies and events, and kills processes that
    do not release a device. Never waits."""

    def __init__(
        self,
        *,
        send: Callable[[str, ToHolder], object],
        fence: Callable[[str, str, str], object],
        remember: Callable[[], bool],
        emit: Callable[[Event], None],
        is_kept: Callable[[str, str], bool] = lambda process, incarnation: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`fence` kills a process (name, incarnation, reason); `remember` stores `users`, or returns False; `is_kept`
        tells whether one call keeps a process, so that none of its threads runs its program."""
        self._send = send
        self._fence = fence
        self._remember = remember
        self._emit = emit
        self._is_kept = is_kept
        self._clock = clock
        self._first_token = int(clock.monotonic() * 1e9)
        self._arbiters: dict[str, Arbiter] = {}
        self._named: dict[tuple[str, str], tuple[int, str]] = {}
        """Process and incarnation → token and message that were reported as unanswered."""

    @property
    def users(self) -> tuple[LeaseUser, ...]:
        return tuple(
            LeaseUser(arbiter.device, member.process, member.incarnation)
            for arbiter in self._arbiters.values()
            for member in arbiter.members
        )

    def succeed(self, users: Iterable[LeaseUser]) -> None:
        """Take over from an arbiter that granted leases to these processes, which are alive."""
        by_device: dict[str, list[LeaseMember]] = {}
        now = self._clock.monotonic()
        for user in sorted(users):
            member = LeaseMember(user.process, user.incarnation, since=now, until=now + deciding.LEASE_S)
            by_device.setdefault(user.device, []).append(member)
        for device, members in by_device.items():
            names = ", ".join(member.process for member in members)
            self._emit(Note(f"{device} was shared by {names}: asked back before anyone is let in"))
            self._adopt(deciding.succeed(device, token=self._first_token, members=members))

    def handle(self, delivery: Delivery) -> bool:
        """Handle a lease message of a process of this host; False if it is another kind of message."""
        body = delivery.body
        if not isinstance(body, ToArbiter):
            return False
        arbiter = self._arbiters.get(body.device) or Arbiter(body.device, self._first_token)
        sender = LeaseMember(delivery.peer.process, delivery.peer.incarnation)
        self._adopt(deciding.receive(arbiter, sender, body, now=self._clock.monotonic()))
        return True

    def ended(self, process: str, incarnation: str) -> None:
        """Handle the end of a process of this host, fenced or not."""
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
        """Send unanswered messages again, report silent processes, and kill those that are overdue."""
        for arbiter in tuple(self._arbiters.values()):
            for member in arbiter.members:
                self._name_if_silent(arbiter, member, now)
                if _is_overdue(arbiter, member, now) and not self._is_spared(member, now):
                    self._end(arbiter, member, now)
            self._carry_out(deciding.remind(self._arbiters[arbiter.device]))

    def _is_spared(self, member: LeaseMember, now: float) -> bool:
        return now < member.until + KEPT_S and self._is_kept(member.process, member.incarnation)

    def _name_if_silent(self, arbiter: Arbiter, member: LeaseMember, now: float) -> None:
        key, what = (member.process, member.incarnation), _UNANSWERED.get(member.claim)
        named = self._named.get(key)
        if what is None:
            if named is not None:
                del self._named[key]
                self._emit(Note(f"{member.process} has answered {named[1]} {named[0]} after all"))
        elif now - member.since >= UNANSWERED_S and named != (member.token, what):
            self._named[key] = (member.token, what)
            COUNTERS.add("lease.unanswered")
            self._emit(
                LeaseUnanswered(
                    _silence(arbiter, member, now),
                    {"seconds": round(now - member.since, 3)},
                    of=member.process,
                    device=arbiter.device,
                    request=what,
                )
            )

    def _adopt(self, decision: Decision) -> None:
        """Apply a decision. New processes are stored before anything is sent; if that fails, nothing is applied."""
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

    def _end(self, arbiter: Arbiter, member: LeaseMember, now: float) -> None:
        """Kill an overdue process, with the unanswered message as the reason."""
        COUNTERS.add("lease.fenced")
        why = _silence(arbiter, member, now)
        self._emit(
            LeaseUnanswered(
                f"{why}; its lease is over, so it is ended",
                of=member.process,
                device=arbiter.device,
                request=_UNANSWERED.get(member.claim, "LeaseRecalled"),
                is_fenced=True,
            )
        )
        self._fence(member.process, member.incarnation, why)
        self._adopt(deciding.overdue(self._arbiters[arbiter.device], member, now=now))


def _find(arbiter: Arbiter, process: str, incarnation: str) -> LeaseMember | None:
    names = (process, incarnation)
    return next((each for each in arbiter.members if (each.process, each.incarnation) == names), None)


def _is_overdue(arbiter: Arbiter, member: LeaseMember, now: float) -> bool:
    """Whether a process has to be killed; only if another process waits for the device."""
    waits = any(each.claim is Claim.WAITING and each.side is not member.side for each in arbiter.members)
    presumed = member.is_presumed and any(each.claim is Claim.WAITING for each in arbiter.members)
    can_be = (member.claim, "overdue") in CLAIM_MOVES
    return can_be and (waits or presumed) and now >= member.until + GRACE_S


def _silence(arbiter: Arbiter, member: LeaseMember, now: float) -> str:
    what = _UNANSWERED.get(member.claim, "LeaseRecalled")
    waiting = ", ".join(
        f"{each.process} (for {now - each.since:.1f} s)"
        for each in arbiter.members
        if each.claim is Claim.WAITING
    )
    return (
        f"{member.process} has not answered {what} {member.token} of {arbiter.device} "
        f"for {now - member.since:.1f} s; "
        f"waiting for it: {waiting or 'no process'}"
    )
