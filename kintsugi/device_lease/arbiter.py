"""Arbiter of one device, as a pure state machine: `receive`, `end` and `overdue` return the next state and effects.

Safety does not depend on clocks: the other side is granted the device only when every process that may be using it has
released it or has ended. Time only decides when to give up: a holder that was sent a recall, and did not acknowledge it
before its lease expired, is killed.

A successor does not know the fencing tokens of its predecessor. It treats every process that the predecessor may have
granted a lease as a holder, recalls all tokens older than its own, and grants the device when all have answered.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kintsugi.device_lease.states import CLAIM_MOVES, OCCUPIED, Claim, Side, side_of
from kintsugi.protocol.device_lease import (
    LeaseAcknowledged,
    LeaseExtended,
    LeaseGranted,
    LeaseRecalled,
    LeaseReleased,
    LeaseRequested,
    ToArbiter,
    ToHolder,
)

LEASE_S = 5.0
"""Duration of a lease; extended by every message of the holder."""
GRACE_S = 3.0
"""Time after the end of a lease for the holder's running work; then the process is killed."""


class LeaseMember(msgspec.Struct, frozen=True):
    """A process that uses the device: `LeaseMember("model-0", "1.4")`."""

    process: str
    incarnation: str
    claim: Claim = Claim.IDLE
    number: int = 0
    order: int = -1
    token: int = 0
    since: float = 0.0
    """Time at which it entered this state."""
    until: float = 0.0

    @property
    def side(self) -> Side:
        return side_of(self.process)

    @property
    def occupies(self) -> bool:
        return self.claim in OCCUPIED

    @property
    def is_presumed(self) -> bool:
        """Whether a previous arbiter may have granted it the device; it has sent no request to this one."""
        return self.occupies and self.number == 0


class Arbiter(msgspec.Struct, frozen=True):
    """State of the arbiter of one device."""

    device: str
    last_token: int
    """Last fencing token; tokens increase over all arbiters of the device."""
    members: tuple[LeaseMember, ...] = ()
    turn: Side | None = None
    """Side that has the device, or had it last; None while only holders of a predecessor are known."""
    reached: int = -1
    """Highest order of work that a process has started in this turn."""


class Send(msgspec.Struct, frozen=True):
    process: str
    body: ToHolder


class Fence(msgspec.Struct, frozen=True):
    """Kill this process; `end` is called when it has ended."""

    member: LeaseMember


Effect = Send | Fence
Decision = tuple[Arbiter, tuple[Effect, ...]]


def succeed(device: str, *, token: int, members: Iterable[LeaseMember]) -> Decision:
    """Create the arbiter of a device for which tokens up to `token` may have been granted; these are recalled."""
    presumed = tuple(
        msgspec.structs.replace(member, claim=Claim.RECALLED, token=token, number=0, order=-1)
        for member in members
    )
    arbiter = Arbiter(device, token, presumed)
    return arbiter, remind(arbiter)


def receive(arbiter: Arbiter, sender: LeaseMember, message: ToArbiter, *, now: float) -> Decision:
    """Handle a message; only process and incarnation of `sender` are used."""
    member = _find(arbiter, sender)
    match message:
        case LeaseRequested():
            return _requested(arbiter, member or sender, message, now=now)
        case LeaseAcknowledged() if member is not None:
            return _acknowledged(arbiter, member, message, now=now)
        case LeaseReleased(token=token) if member is not None and member.occupies and member.token <= token:
            return _settled(_moved(arbiter, member, "released", now=now), now=now)
        case _:
            return arbiter, ()


def end(arbiter: Arbiter, member: LeaseMember, *, now: float) -> Decision:
    """Remove a process that has ended."""
    others = tuple(each for each in arbiter.members if not _is_same(each, member))
    return _settled(msgspec.structs.replace(arbiter, members=others), now=now)


def overdue(arbiter: Arbiter, member: LeaseMember, *, now: float) -> Decision:
    """Fence a process that has not released the device long after the end of its lease."""
    if (member.claim, "overdue") not in CLAIM_MOVES:
        return arbiter, ()
    arbiter = _moved(arbiter, member, "overdue", now=now)
    fenced = _find(arbiter, member)
    assert fenced is not None
    return arbiter, (Fence(fenced),)


def remind(arbiter: Arbiter) -> tuple[Effect, ...]:
    """Send again all messages that were not answered."""
    effects: list[Effect] = []
    for member in arbiter.members:
        match member.claim:
            case Claim.GRANTED:
                effects.append(_grant(arbiter.device, member))
            case Claim.RECALLED | Claim.YIELDING:
                effects.append(Send(member.process, LeaseRecalled(arbiter.device, member.token)))
            case Claim.FENCED:
                effects.append(Fence(member))
            case _:
                pass
    return tuple(effects)


def _requested(arbiter: Arbiter, member: LeaseMember, message: LeaseRequested, *, now: float) -> Decision:
    if message.number < member.number or member.is_presumed:
        # A holder of a predecessor has to release that lease first: this request may be older.
        return arbiter, ()
    if message.number == member.number:
        # Sent again: the process has not received the grant.
        lost = member.claim is Claim.GRANTED
        return arbiter, ((_grant(arbiter.device, member),) if lost else ())
    member = msgspec.structs.replace(member, number=message.number, order=message.order)
    return _settled(_moved(_put(arbiter, member), member, "requested", now=now), now=now)


def _acknowledged(
    arbiter: Arbiter, member: LeaseMember, message: LeaseAcknowledged, *, now: float
) -> Decision:
    if not member.occupies or (message.token != member.token and not member.is_presumed):
        return arbiter, ()
    arbiter = msgspec.structs.replace(arbiter, reached=max(arbiter.reached, message.order))
    by = "yields" if message.recalled else "acknowledged"
    knows = message.recalled or member.claim in (Claim.GRANTED, Claim.HOLDING)
    if not knows or member.claim is Claim.FENCED:
        # It has not received the recall, or answers too late: its lease is not extended.
        return _settled(arbiter, now=now)
    member = msgspec.structs.replace(member, until=now + LEASE_S)
    arbiter = _put(arbiter, member)
    if (member.claim, by) in CLAIM_MOVES:
        arbiter = _moved(arbiter, member, by, now=now)
    arbiter, effects = _settled(arbiter, now=now)
    extended = LeaseExtended(arbiter.device, member.token, member.until)
    return arbiter, (*effects, *(() if message.recalled else (Send(member.process, extended),)))


def _settled(arbiter: Arbiter, *, now: float) -> Decision:
    """Grant the device to waiting processes of the side in turn; recall leases if the other side waits."""
    waiting = [member for member in arbiter.members if member.claim is Claim.WAITING]
    occupied = any(member.occupies for member in arbiter.members)
    if not occupied:
        sides = {member.side for member in waiting}
        # The side that had the last turn gets the next one only if the other wants none.
        turn = next((side for side in sorted(sides) if len(sides) == 1 or side != arbiter.turn), arbiter.turn)
        arbiter = msgspec.structs.replace(arbiter, turn=turn, reached=-1)
    rivals = any(member.side != arbiter.turn for member in waiting)
    effects: list[Effect] = []
    for member in waiting:
        if member.side != arbiter.turn or (occupied and rivals and not _joins(arbiter, member)):
            continue
        arbiter, granted = _grant_turn(arbiter, member, now=now)
        effects.append(granted)
    if rivals:
        arbiter, recalls = _recall_all(arbiter, now=now)
        effects += recalls
    return arbiter, tuple(effects)


def _joins(arbiter: Arbiter, member: LeaseMember) -> bool:
    """Whether a process may join a turn although the other side waits: a process of this turn may wait for it, within
    work that it has yet to start."""
    return 0 <= member.order <= arbiter.reached


def _grant_turn(arbiter: Arbiter, member: LeaseMember, *, now: float) -> tuple[Arbiter, Effect]:
    token = arbiter.last_token + 1
    member = msgspec.structs.replace(member, token=token, until=now + LEASE_S)
    arbiter = msgspec.structs.replace(arbiter, last_token=token, reached=max(arbiter.reached, member.order))
    return _moved(_put(arbiter, member), member, "turn", now=now), _grant(arbiter.device, member)


def _recall_all(arbiter: Arbiter, *, now: float) -> tuple[Arbiter, list[Effect]]:
    effects: list[Effect] = []
    for member in arbiter.members:
        if (member.claim, "rival") in CLAIM_MOVES:
            arbiter = _moved(arbiter, member, "rival", now=now)
            effects.append(Send(member.process, LeaseRecalled(arbiter.device, member.token)))
    return arbiter, effects


def _grant(device: str, member: LeaseMember) -> Send:
    return Send(member.process, LeaseGranted(device, member.token, member.number, member.until))


def _moved(arbiter: Arbiter, member: LeaseMember, by: str, *, now: float) -> Arbiter:
    claim = CLAIM_MOVES[member.claim, by]
    return _put(arbiter, msgspec.structs.replace(member, claim=claim, since=now))


def _is_same(one: LeaseMember, other: LeaseMember) -> bool:
    return (one.process, one.incarnation) == (other.process, other.incarnation)


def _find(arbiter: Arbiter, member: LeaseMember) -> LeaseMember | None:
    return next((each for each in arbiter.members if _is_same(each, member)), None)


def _put(arbiter: Arbiter, member: LeaseMember) -> Arbiter:
    members = [each for each in arbiter.members if not _is_same(each, member)]
    members = sorted([*members, member], key=lambda each: (each.process, each.incarnation))
    return msgspec.structs.replace(arbiter, members=tuple(members))
