"""Lease of a device that ranks and generation servers of one host share; `device_lease/` has both state machines.

All messages are one-way and repeated until they have had their effect: each of them may be lost, duplicated or
reordered. A token stands for itself and all smaller ones: a process that has released 7 holds none up to 7 and takes
none of them that arrives late.
"""

from __future__ import annotations

from kintsugi.protocol.body import MessageBody


class LeaseBody(MessageBody, frozen=True):
    device: str
    """Identity of the device, as processes register it; "cpu" for the CPUs of the host."""


class LeaseRequested(LeaseBody, frozen=True):
    """The sender requests the device; it holds no lease and has released every earlier one."""

    number: int
    """Number of the request; grows. A grant repeats it, so that one for an earlier request is recognised."""
    order: int = -1
    """Number of the collective work for which the device is needed. Ranks wait for each other within one, so the lease
    is granted to all of them. -1: the work of this process alone."""


class LeaseGranted(LeaseBody, frozen=True):
    """The receiver may use the device until `until`, on the monotonic clock of the host."""

    token: int
    number: int
    until: float


class LeaseAcknowledged(LeaseBody, frozen=True):
    """The sender uses the device for work `order`, and wants to keep it or, if `recalled`, to release it as soon as it
    can. Repeated while it holds the lease."""

    token: int
    order: int = -1
    recalled: bool = False


class LeaseExtended(LeaseBody, frozen=True):
    """The receiver may use the device until this later time."""

    token: int
    until: float


class LeaseRecalled(LeaseBody, frozen=True):
    """The other side waits for the device: release it as soon as your work on it has ended."""

    token: int


class LeaseReleased(LeaseBody, frozen=True):
    """No work of the sender runs on the device, and none will under this token."""

    token: int


ToArbiter = LeaseRequested | LeaseAcknowledged | LeaseReleased
ToHolder = LeaseGranted | LeaseExtended | LeaseRecalled
