"""The holder's side of a device lease, as a pure state machine: messages in, next state and replies out.

The process may use the device in HOLDING and, to finish running work, in YIELDING. If the lease is recalled before any
work has started, the process may still do the work that it requested; otherwise two processes could pass the device
back and forth for ever. A message that arrives late, twice or out of order is answered with the current state: the
fencing token of the lease, or that there is none.
"""

from __future__ import annotations

import msgspec

from kintsugi.device_lease.states import HOLD_MOVES, Hold
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


class Holder(msgspec.Struct, frozen=True):
    """State of a process's lease on one device."""

    device: str
    hold: Hold = Hold.IDLE
    number: int = 0
    """Number of its latest request."""
    order: int = -1
    """Order of the work that it requests or does."""
    token: int = 0
    """Fencing token of the lease; 0 without a lease."""
    fence: int = 0
    """Fencing tokens up to this one are void."""
    until: float = 0.0
    unused: bool = False
    """Whether no work has started under this lease."""

    @property
    def may_begin(self) -> bool:
        return self.hold is Hold.HOLDING or (self.hold is Hold.YIELDING and self.unused)


Step = tuple[Holder, tuple[ToArbiter, ...]]


def _moved(holder: Holder, by: str, **changes: object) -> Holder:
    return msgspec.structs.replace(holder, hold=HOLD_MOVES[holder.hold, by], **changes)


def want(holder: Holder, *, order: int = -1) -> Step:
    """Request the device for work. If the lease is held already, only the order of the work is updated."""
    if holder.hold is Hold.IDLE:
        holder = _moved(holder, "want", number=holder.number + 1, order=order)
        return holder, (_request(holder),)
    if holder.order == order:
        return holder, ()
    holder = msgspec.structs.replace(holder, order=order)
    return holder, resend(holder)


def withdraw(holder: Holder) -> Holder:
    """Stop waiting; a grant that arrives later is released."""
    return _moved(holder, "withdraw") if holder.hold is Hold.WAITING else holder


def receive(holder: Holder, message: ToHolder) -> Step:
    """Handle a message of the arbiter."""
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
        # From a previous arbiter, or late: the present lease is newer.
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
    replies: tuple[ToArbiter, ...] = (LeaseReleased(holder.device, token),)
    if holder.hold is Hold.WAITING and token > holder.fence:
        # The recalled grant may be for the present request and is void: a new request is needed.
        holder = msgspec.structs.replace(holder, number=holder.number + 1)
        replies = (*replies, _request(holder))
    return msgspec.structs.replace(holder, fence=max(holder.fence, token)), replies


def expire(holder: Holder) -> Step:
    """End a lease that was not extended in time: no more work is started."""
    if holder.hold is not Hold.HOLDING:
        return holder, ()
    holder = _moved(holder, "expired", unused=False)
    return holder, (_acknowledge(holder),)


def begin(holder: Holder) -> Holder:
    """Start work on the device."""
    assert holder.may_begin
    return msgspec.structs.replace(holder, unused=False)


def prolong(holder: Holder) -> Holder:
    """Allow one more piece of work under a recalled lease, because the turn would be too short otherwise."""
    assert holder.hold is Hold.YIELDING
    return msgspec.structs.replace(holder, unused=True)


def yielded(holder: Holder) -> Step:
    """Release the lease, once nothing of the process runs on the device."""
    released = LeaseReleased(holder.device, holder.fence)
    return _moved(holder, "yielded", token=0, until=0.0, unused=False), (released,)


def resend(holder: Holder) -> tuple[ToArbiter, ...]:
    """Messages that the arbiter may not have received."""
    if holder.hold is Hold.WAITING:
        return (_request(holder),)
    return (_acknowledge(holder),) if holder.token else ()


def _request(holder: Holder) -> LeaseRequested:
    return LeaseRequested(holder.device, holder.number, holder.order)


def _acknowledge(holder: Holder) -> LeaseAcknowledged:
    return LeaseAcknowledged(holder.device, holder.token, holder.order, recalled=holder.hold is Hold.YIELDING)
