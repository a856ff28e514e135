"""Whose turn it is on one device, as a pure machine: `hear`, `end` and `overdue` give the next state and what to do.

Safety rests on no clock: the other side is let in only when everyone who may be using the device has said that it is
not, or has ended. Time decides only when to lose patience: a holder that was asked to give the device back, and whose
lease ran out without a word that it knows, is ended.

A successor knows nobody's token. It takes everyone for a holder whom its predecessor may have granted anything, recalls
what is older than itself, and begins when all of them have answered.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kintsugi.lease.states import CLAIM_MOVES, OCCUPIED, Claim, Side, side_of
from kintsugi.leasing import (
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
"""Extended with every word of the holder."""
GRACE_S = 3.0
"""After the end of a lease, for what the holder had begun; then it is ended."""


class Member(msgspec.Struct, frozen=True):
    """A process that uses the device: `Member("model-0", "1.4")`."""

    process: str
    incarnation: str
    claim: Claim = Claim.IDLE
    number: int = 0
    order: int = -1
    token: int = 0
    since: float = 0.0
    """When it came into this state."""
    until: float = 0.0

    @property
    def side(self) -> Side:
        return side_of(self.process)

    @property
    def occupies(self) -> bool:
        return self.claim in OCCUPIED

    @property
    def is_presumed(self) -> bool:
        """A predecessor of the arbiter may have let it in; it has made no request of this one."""
        return self.occupies and self.number == 0


class Arbiter(msgspec.Struct, frozen=True):
    """Of one device."""

    device: str
    last_token: int
    """Tokens grow, over all arbiters of the device."""
    members: tuple[Member, ...] = ()
    turn: Side | None = None
    """Whose it is, or was last; None while only a predecessor's holders are known."""
    reached: int = -1
    """The latest work that anyone of this turn has begun."""


class Send(msgspec.Struct, frozen=True):
    process: str
    body: ToHolder


class Fence(msgspec.Struct, frozen=True):
    """End this process, and say when it has ended."""

    member: Member


Effect = Send | Fence
Decision = tuple[Arbiter, tuple[Effect, ...]]


def succeed(device: str, *, token: int, members: Iterable[Member]) -> Decision:
    """The arbiter of a device that others may have been granted up to `token`: these are asked to give it back."""
    presumed = tuple(
        msgspec.structs.replace(member, claim=Claim.RECALLED, token=token, number=0, order=-1)
        for member in members
    )
    arbiter = Arbiter(device, token, presumed)
    return arbiter, remind(arbiter)


def hear(arbiter: Arbiter, sender: Member, message: ToArbiter, *, now: float) -> Decision:
    """`sender` is known by its process and incarnation alone."""
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


def end(arbiter: Arbiter, member: Member, *, now: float) -> Decision:
    """The process has ended: it uses nothing."""
    others = tuple(each for each in arbiter.members if not _is_same(each, member))
    return _settled(msgspec.structs.replace(arbiter, members=others), now=now)


def overdue(arbiter: Arbiter, member: Member, *, now: float) -> Decision:
    """It was asked to give the device back and its lease is long over."""
    if (member.claim, "overdue") not in CLAIM_MOVES:
        return arbiter, ()
    arbiter = _moved(arbiter, member, "overdue", now=now)
    fenced = _find(arbiter, member)
    assert fenced is not None
    return arbiter, (Fence(fenced),)


def remind(arbiter: Arbiter) -> tuple[Effect, ...]:
    """What has not been answered, said again."""
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


def _requested(arbiter: Arbiter, member: Member, message: LeaseRequested, *, now: float) -> Decision:
    if message.number < member.number or member.is_presumed:
        # Who was let in by a predecessor has to say that it gave that back: this request may be older.
        return arbiter, ()
    if message.number == member.number:
        # Said again: it has not heard the grant.
        lost = member.claim is Claim.GRANTED
        return arbiter, ((_grant(arbiter.device, member),) if lost else ())
    member = msgspec.structs.replace(member, number=message.number, order=message.order)
    return _settled(_moved(_put(arbiter, member), member, "requested", now=now), now=now)


def _acknowledged(arbiter: Arbiter, member: Member, message: LeaseAcknowledged, *, now: float) -> Decision:
    if not member.occupies or (message.token != member.token and not member.is_presumed):
        return arbiter, ()
    arbiter = msgspec.structs.replace(arbiter, reached=max(arbiter.reached, message.order))
    by = "yields" if message.recalled else "acknowledged"
    knows = message.recalled or member.claim in (Claim.GRANTED, Claim.HOLDING)
    if not knows or member.claim is Claim.FENCED:
        # It does not know that it was recalled, or too late: its time is not extended.
        return _settled(arbiter, now=now)
    member = msgspec.structs.replace(member, until=now + LEASE_S)
    arbiter = _put(arbiter, member)
    if (member.claim, by) in CLAIM_MOVES:
        arbiter = _moved(arbiter, member, by, now=now)
    arbiter, effects = _settled(arbiter, now=now)
    extended = LeaseExtended(arbiter.device, member.token, member.until)
    return arbiter, (*effects, *(() if message.recalled else (Send(member.process, extended),)))


def _settled(arbiter: Arbiter, *, now: float) -> Decision:
    """Let in whose turn it is; ask those back whose turn it was, if anyone waits for it."""
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
        arbiter, granted = _let_in(arbiter, member, now=now)
        effects.append(granted)
    if rivals:
        arbiter, recalls = _recall_all(arbiter, now=now)
        effects += recalls
    return arbiter, tuple(effects)


def _joins(arbiter: Arbiter, member: Member) -> bool:
    """Whether it is let into a turn though the other side waits: someone of this turn may be waiting for it, within a
    piece of work that it has yet to begin."""
    return 0 <= member.order <= arbiter.reached


def _let_in(arbiter: Arbiter, member: Member, *, now: float) -> tuple[Arbiter, Effect]:
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


def _grant(device: str, member: Member) -> Send:
    return Send(member.process, LeaseGranted(device, member.token, member.number, member.until))


def _moved(arbiter: Arbiter, member: Member, by: str, *, now: float) -> Arbiter:
    claim = CLAIM_MOVES[member.claim, by]
    return _put(arbiter, msgspec.structs.replace(member, claim=claim, since=now))


def _is_same(one: Member, other: Member) -> bool:
    return (one.process, one.incarnation) == (other.process, other.incarnation)


def _find(arbiter: Arbiter, member: Member) -> Member | None:
    return next((each for each in arbiter.members if _is_same(each, member)), None)


def _put(arbiter: Arbiter, member: Member) -> Arbiter:
    members = [each for each in arbiter.members if not _is_same(each, member)]
    members = sorted([*members, member], key=lambda each: (each.process, each.incarnation))
    return msgspec.structs.replace(arbiter, members=tuple(members))
