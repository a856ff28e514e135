"""Which server gets a request: a pure function of what the manager knows, with its reason.

Routing never changes bits: a sample's noise is keyed by what it is, and every server decodes the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Health(StrEnum):
    """What may be sent to a server.

    | health  | meaning                                              | gets requests             |
    |---------|------------------------------------------------------|---------------------------|
    | HEALTHY | holds the current weights, last answer was good      | yes                       |
    | SUSPECT | holds the current weights, last answer was a fault   | only if nobody is healthy |
    | STALE   | lives, but was not admitted with the current weights | no, until it is           |
    | DEAD    | is no longer in the address book                     | no                        |
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


class ServerView(msgspec.Struct, frozen=True):
    """One server as the router sees it: `ServerView("server-0", Health.HEALTHY, version=3, tokens_in_flight=640)`."""

    process: str
    health: Health
    version: int
    """Of the weights it acknowledged last; -1 before the first."""
    tokens_in_flight: int = 0
    """Tokens that its unanswered requests may still need."""


class Choice(msgspec.Struct, frozen=True):
    """The server to use, or None to wait; and why."""

    server: str | None
    reason: str


def choose(servers: Sequence[ServerView], *, version: int) -> Choice:
    """The server with the fewest tokens in flight among those that may serve `version`; the first name on a tie.

    >>> busy, idle = ServerView("server-0", Health.HEALTHY, 3, 90), ServerView("server-1", Health.HEALTHY, 3, 10)
    >>> choose([busy, idle], version=3)
    Choice(server='server-1', reason='10 tokens in flight, the fewest of 2 healthy servers')
    """
    for health in (Health.HEALTHY, Health.SUSPECT):
        usable = [server for server in servers if server.health is health and server.version >= version]
        if usable:
            best = min(usable, key=lambda server: (server.tokens_in_flight, server.process))
            return Choice(
                best.process,
                f"{best.tokens_in_flight} tokens in flight, the fewest of {len(usable)} {health} servers",
            )
    if not servers:
        return Choice(None, f"no server is known, version {version} is wanted")
    states = ", ".join(f"{server.process} {server.health} at version {server.version}" for server in servers)
    return Choice(None, f"no server can serve version {version}: {states}")
