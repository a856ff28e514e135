"""One process's side of the lease, as a pure machine: what it hears, and what it says to that.

It may use the device in HOLDING and, to finish what it began, in YIELDING. Recalled before it has begun anything, it
may still do what it asked for, or two who want the device would hand it to each other for ever. Whatever arrives late,
twice or out of order is answered with the truth: the token that it holds, or that it holds none.
"""

from __future__ import annotations

import msgspec

from kintsugi.lease.states import HOLD_MOVES, Hold
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


class Holder(msgspec.Struct, frozen=True):
    """What a process knows of its lease on one device."""

    device: str
    hold: Hold = Hold.IDLE
    number: int = 0
    """Of its latest request."""
    order: int = -1
    """Of the work it wants to do, or does."""
    token: int = 0
    """What it holds; 0 for nothing."""
    fence: int = 0
    """No token up to this one is worth anything any more."""
    until: float = 0.0
    unused: bool = False
    """It has begun nothing under this token."""

    @property
    def may_begin(self) -> bool:
        return self.hold is Hold.HOLDING or (self.hold is Hold.YIELDING and self.unused)


Step = tuple[Holder, tuple[ToArbiter, ...]]


def _moved(holder: Holder, by: str, **changes: object) -> Holder:
    return msgspec.structs.replace(holder, hold=HOLD_MOVES[holder.hold, by], **changes)


def want(holder: Holder, *, order: int = -1) -> Step:
    """It has work for the device. Where it holds it already, only the arbiter's idea of the work changes."""
    if holder.hold is Hold.IDLE:
        holder = _moved(holder, "want", number=holder.number + 1, order=order)
        return holder, (_request(holder),)
    if holder.order == order:
        return holder, ()
    holder = msgspec.structs.replace(holder, order=order)
    return holder, say_again(holder)


def withdraw(holder: Holder) -> Holder:
    """It does not wait any longer; a grant that comes all the same will be given back."""
    return _moved(holder, "withdraw") if holder.hold is Hold.WAITING else holder


def hear(holder: Holder, message: ToHolder) -> Step:
    match message:
        case LeaseGranted():
            return _granted(holder, message)
        case LeaseExtended(token=token, until=until):
            extends = token == holder.token and holder.hold is Hold.HOLDING
            return (
                msgspec.structs.replace(holder, until=max(until, holder.until)) if extends else holder
            ), ()
        case LeaseRecalled():
            return _recalled(holder, message.token)


def _granted(holder: Holder, message: LeaseGranted) -> Step:
    token = message.token
    if token == holder.token:
        return holder, (_acknowledge(holder),)
    wanted = holder.hold is Hold.WAITING and message.number == holder.number
    if wanted and token > holder.fence:
        holder = _moved(holder, "granted", token=token, fence=token, until=message.until, unused=True)
        return holder, (_acknowledge(holder),)
    if holder.token > 0:
        # Of an arbiter that is no more, or late: what it holds is newer.
        return holder, ()
    holder = msgspec.structs.replace(holder, fence=max(holder.fence, token))
    return holder, (LeaseReleased(holder.device, token),)


def _recalled(holder: Holder, token: int) -> Step:
    if holder.token > token:
        return holder, ()
    if holder.token > 0:
        fence = max(holder.fence, token)
        if holder.hold is Hold.HOLDING:
            holder = _moved(holder, "recalled", fence=fence)
        else:
            holder = msgspec.structs.replace(holder, fence=fence)
        return holder, (_acknowledge(holder),)
    says: tuple[ToArbiter, ...] = (LeaseReleased(holder.device, token),)
    if holder.hold is Hold.WAITING and token > holder.fence:
        # The grant that this one recalls may be for the present request, and is void: a new one has to be made.
        holder = msgspec.structs.replace(holder, number=holder.number + 1)
        says = (*says, _request(holder))
    return msgspec.structs.replace(holder, fence=max(holder.fence, token)), says


def expire(holder: Holder) -> Step:
    """Its time is over and nobody extended it: it begins nothing more."""
    if holder.hold is not Hold.HOLDING:
        return holder, ()
    holder = _moved(holder, "expired", unused=False)
    return holder, (_acknowledge(holder),)


def begin(holder: Holder) -> Holder:
    """Work begins on the device."""
    assert holder.may_begin
    return msgspec.structs.replace(holder, unused=False)


def prolong(holder: Holder) -> Holder:
    """Its turn would be too short: recalled as it is, it may begin once more."""
    assert holder.hold is Hold.YIELDING
    return msgspec.structs.replace(holder, unused=True)


def yielded(holder: Holder) -> Step:
    """Nothing of it runs on the device any more."""
    released = LeaseReleased(holder.device, holder.fence)
    return _moved(holder, "yielded", token=0, until=0.0, unused=False), (released,)


def say_again(holder: Holder) -> tuple[ToArbiter, ...]:
    """What the arbiter may not have heard."""
    if holder.hold is Hold.WAITING:
        return (_request(holder),)
    return (_acknowledge(holder),) if holder.token else ()


def _request(holder: Holder) -> LeaseRequested:
    return LeaseRequested(holder.device, holder.number, holder.order)


def _acknowledge(holder: Holder) -> LeaseAcknowledged:
    return LeaseAcknowledged(holder.device, holder.token, holder.order, recalled=holder.hold is Hold.YIELDING)
