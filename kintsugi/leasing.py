"""What is said about a device that ranks and generation servers of one host share.

`messages.py` lists them with all other messages; `lease/` has the two machines that say them. All are one-way, and said
again until what they ask for has happened: none of them has to arrive, or only once, or in order.

A token means all that are not greater: who has given back 7 holds none up to 7 and will take none that comes late.
"""

from __future__ import annotations

import msgspec


class _Body(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    device: str
    """Its identity, as processes name it when they register; "cpu" for the processors of the host."""


class LeaseRequested(_Body, frozen=True):
    """The sender wants the device, holds nothing, and has given back whatever it was granted before."""

    number: int
    """Of the request; grows. A grant names it, so that one for an earlier request is not mistaken for it."""
    order: int = -1
    """Of the work that it wants to do, where those of its side may wait for each other within it: all of them are let
    into it. -1: it waits for nobody."""


class LeaseGranted(_Body, frozen=True):
    """The device is the receiver's until `until`, on the monotonic clock of the host."""

    token: int
    number: int
    until: float


class LeaseAcknowledged(_Body, frozen=True):
    """The sender has it, at work `order`, and wants to keep it; or, `recalled`, it will give it back as soon as it can.
    Said again as long as that is so."""

    token: int
    order: int = -1
    recalled: bool = False


class LeaseExtended(_Body, frozen=True):
    """It is the receiver's for longer."""

    token: int
    until: float


class LeaseRecalled(_Body, frozen=True):
    """The other side waits for the device: give it back as soon as nothing of yours runs on it."""

    token: int


class LeaseReleased(_Body, frozen=True):
    """Nothing of the sender's runs on the device, nor will under this token."""

    token: int


ToArbiter = LeaseRequested | LeaseAcknowledged | LeaseReleased
ToHolder = LeaseGranted | LeaseExtended | LeaseRecalled
