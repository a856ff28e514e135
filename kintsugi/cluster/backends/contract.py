"""The contract of a back end: start a supervisor on each of so many hosts, tell of hosts that came or went, replace one
host, give all back.

    start ─► HostCame ─► (the supervisor joins the run by itself) ─► HostWent ─► replace ─► HostCame ─► … ─► give_back
      └────► HostWent: the engine could not start it           HostDoubted: lost if its supervisor is silent too

A back end places and ends supervisors; it carries neither data nor messages of the run. Whether a host is alive is
known by the heartbeats of its supervisor, not by its engine: `HostWent` only makes it known sooner. The same tests run
for every implementation (`tests/unit/cluster/test_backends.py`), the simulator's included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class HostOrder(msgspec.Struct, frozen=True):
    """One host to start: `HostOrder("host-1", b"…")`."""

    host: str
    ticket: bytes
    """One-time secret for the supervisor, as it reads it from its standard input."""


class HostCame(msgspec.Struct, frozen=True, tag=True):
    """The engine has started the supervisor of a host."""

    host: str
    place: str
    """Name of the machine in the words of the engine."""


class HostWent(msgspec.Struct, frozen=True, tag=True):
    """The supervisor of a host could not be started, or has ended, as the engine sees it."""

    host: str
    why: str


class HostLeaves(msgspec.Struct, frozen=True, tag=True):
    """The engine wants the machine of a host back, which still runs: its processes are moved in order, between two
    steps, and then the host is given up."""

    host: str
    why: str


class HostDoubted(msgspec.Struct, frozen=True, tag=True):
    """The engine does not know whether a host is alive, for instance because its own daemon there is silent."""

    host: str
    why: str
    """Empty: it is no longer in doubt."""


HostEvent = HostCame | HostWent | HostLeaves | HostDoubted


class Backend(Protocol):
    """An engine that starts supervisors. No method but `give_back` blocks."""

    def start(self, orders: Sequence[HostOrder]) -> None:
        """Begin to start a supervisor on a machine of its own for each order. Failures are told by `poll`."""

    def poll(self) -> list[HostEvent]:
        """Return what has happened since the last call, in order. Called several times a second."""

    def replace(self, order: HostOrder) -> None:
        """Begin to start a supervisor in place of one that is lost, on the same or on another machine. The others go
        on."""

    def asked_to_end(self, host: str, why: str) -> None:
        """The supervisor of a host says that its engine has asked it to end. Unless more than this host is meant,
        `poll` returns HostLeaves for it."""

    def give_back(self, *, timeout_s: float) -> None:
        """End what was started and is still there, and return all machines to the engine. Blocks at most this long,
        and does nothing when it is called again."""
