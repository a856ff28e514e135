"""Which server gets a request: a pure function of what the manager knows, with its reason.

Routing never changes bits: a sample's noise is keyed by what it is, and every server decodes the same shapes.

| strategy      | a request goes to                                                                               |
|---------------|-------------------------------------------------------------------------------------------------|
| least_loaded  | the server with the fewest tokens in flight                                                     |
| round_robin   | each server in its turn                                                                         |
| prefix_affine | the same server as others that begin alike, whose keys and values are there already; the least  |
|               | loaded one where that would leave it too far behind the others                                  |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import xxhash

from kintsugi.config import Strategy

PREFIX_BYTES = 4 * 32
"""Requests whose first 32 tokens are the same count as beginning alike."""
AFFINITY_REQUESTS = 8
"""How far the preferred server may be behind the least loaded one, in requests of the size of this one."""


class Health(StrEnum):
    """What may be sent to a server.

    | health  | meaning                                              | gets requests             |
    |---------|------------------------------------------------------|---------------------------|
    | HEALTHY | holds the current weights, last answer was good      | yes                       |
    | SUSPECT | holds the current weights, last answer was a fault   | only if nobody is healthy |
    | STALE   | lives, but was not admitted with the current weights | no, until it is           |
    | DEAD    | has left the address book and was not replaced       | no                        |
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
    retired: bool = False
    """It is to be stopped and gets nothing more, however healthy it is."""
    full: bool = False
    """It has as many requests as may be under way with it."""

    def __str__(self) -> str:
        state = "retired" if self.retired else "full" if self.full else self.health
        return f"{self.process} {state} at version {self.version}"


class Choice(msgspec.Struct, frozen=True):
    """The server to use, or None to wait; and why."""

    server: str | None
    reason: str


def choose(
    servers: Sequence[ServerView],
    *,
    version: int,
    strategy: Strategy = "least_loaded",
    prompt: bytes = b"",
    num_tokens: int = 0,
    turn: int = 0,
) -> Choice:
    """The server for a request of `num_tokens` with this prompt, the `turn`-th that is sent, among those that may serve
    `version`; the first name on a tie.

    >>> busy, idle = ServerView("server-0", Health.HEALTHY, 3, 90), ServerView("server-1", Health.HEALTHY, 3, 10)
    >>> choose([busy, idle], version=3)
    Choice(server='server-1', reason='10 tokens in flight, the fewest of 2 healthy servers')
    """
    for health in (Health.HEALTHY, Health.SUSPECT):
        usable = sorted(
            (
                each
                for each in servers
                if each.health is health and each.version >= version and not (each.retired or each.full)
            ),
            key=lambda server: server.process,
        )
        if not usable:
            continue
        among = f"of {len(usable)} {health} servers"
        match strategy:
            case "least_loaded":
                return _least_loaded(usable, among)
            case "round_robin":
                return Choice(usable[turn % len(usable)].process, f"its turn {among}")
            case "prefix_affine":
                return _prefix_affine(usable, among, prompt=prompt, num_tokens=num_tokens)
    if not servers:
        return Choice(None, f"no server is known, version {version} is wanted")
    return Choice(None, f"no server can serve version {version}: {', '.join(map(str, servers))}")


def _least_loaded(usable: Sequence[ServerView], among: str) -> Choice:
    best = min(usable, key=lambda server: server.tokens_in_flight)
    return Choice(best.process, f"{best.tokens_in_flight} tokens in flight, the fewest {among}")


def _prefix_affine(usable: Sequence[ServerView], among: str, *, prompt: bytes, num_tokens: int) -> Choice:
    """By rendezvous hashing: when a server comes or goes, only its own share of the prefixes moves."""
    prefix = prompt[:PREFIX_BYTES]
    preferred = max(usable, key=lambda server: xxhash.xxh3_64_intdigest(prefix + server.process.encode()))
    least = _least_loaded(usable, among)
    behind = preferred.tokens_in_flight - min(server.tokens_in_flight for server in usable)
    if behind > AFFINITY_REQUESTS * num_tokens:
        return Choice(
            least.server, f"{preferred.process} has its prefix but is {behind} tokens behind: {least.reason}"
        )
    return Choice(preferred.process, f"has its prefix, {among}")
