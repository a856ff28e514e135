"""Routing: the server for a request, as a pure function of the manager's state, with its reason.

Routing never changes bits: the random numbers of a sample are keyed by its identity, and all servers decode with the
same shapes.

| strategy      | a request goes to                                                                               |
|---------------|-------------------------------------------------------------------------------------------------|
| least_loaded  | the server with the fewest tokens in flight                                                     |
| round_robin   | each server in turn                                                                             |
| prefix_affine | the server that has the KV cache of other requests with the same prefix; the least loaded one   |
|               | where that would leave the preferred server too far behind the others                           |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import xxhash

from kintsugi.config.schema import Strategy

PREFIX_BYTES = 4 * 32
"""Requests with the same first 32 tokens have the same prefix."""
AFFINITY_REQUESTS = 8
"""How far the preferred server may be behind the least loaded one, in requests of the size of this one."""


class ServerHealth(StrEnum):
    """Health of a server, which decides what may be sent to it.

    | health  | meaning                                              | gets requests             |
    |---------|------------------------------------------------------|---------------------------|
    | HEALTHY | holds the current weights, last reply was good       | yes                       |
    | SUSPECT | holds the current weights, last reply was a fault    | only if none is healthy   |
    | STALE   | lives, but was not admitted with the current weights | no, until it is           |
    | DEAD    | has left the address book and was not replaced       | no                        |
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


class ServerView(msgspec.Struct, frozen=True):
    """One server as the router sees it: `ServerView("server-0", ServerHealth.HEALTHY, version=3,
    tokens_in_flight=640)`."""

    process: str
    health: ServerHealth
    version: int
    """Version of the weights it last acknowledged; -1 before the first."""
    tokens_in_flight: int = 0
    """Tokens that its unanswered requests may still need."""
    retired: bool = False
    """Whether it is being stopped and gets no further requests."""
    full: bool = False
    """Whether it has the largest number of requests that one server may have."""

    def __str__(self) -> str:
        state = "retired" if self.retired else "full" if self.full else self.health
        return f"{self.process} {state} at version {self.version}"


class RoutingChoice(msgspec.Struct, frozen=True):
    """Server to use, or None to wait; and the reason."""

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
) -> RoutingChoice:
    """Choose the server for a request of `num_tokens` with this prompt, the `turn`-th that is sent, among those that
    may serve `version`; the first name on a tie.

    >>> busy = ServerView("server-0", ServerHealth.HEALTHY, 3, 90)
    >>> idle = ServerView("server-1", ServerHealth.HEALTHY, 3, 10)
    >>> choose([busy, idle], version=3)
    RoutingChoice(server='server-1', reason='10 tokens in flight, the fewest of 2 healthy servers')
    """
    for health in (ServerHealth.HEALTHY, ServerHealth.SUSPECT):
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
                return RoutingChoice(usable[turn % len(usable)].process, f"its turn {among}")
            case "prefix_affine":
                return _prefix_affine(usable, among, prompt=prompt, num_tokens=num_tokens)
    if not servers:
        return RoutingChoice(None, f"no server is known, version {version} is wanted")
    return RoutingChoice(None, f"no server can serve version {version}: {', '.join(map(str, servers))}")


def _least_loaded(usable: Sequence[ServerView], among: str) -> RoutingChoice:
    best = min(usable, key=lambda server: server.tokens_in_flight)
    return RoutingChoice(best.process, f"{best.tokens_in_flight} tokens in flight, the fewest {among}")


def _prefix_affine(
    usable: Sequence[ServerView], among: str, *, prompt: bytes, num_tokens: int
) -> RoutingChoice:
    """Choose by rendezvous hashing: when a server joins or leaves, only its own share of the prefixes moves."""
    prefix = prompt[:PREFIX_BYTES]
    preferred = max(usable, key=lambda server: xxhash.xxh3_64_intdigest(prefix + server.process.encode()))
    least = _least_loaded(usable, among)
    behind = preferred.tokens_in_flight - min(server.tokens_in_flight for server in usable)
    if behind > AFFINITY_REQUESTS * num_tokens:
        return RoutingChoice(
            least.server, f"{preferred.process} has its prefix but is {behind} tokens behind: {least.reason}"
        )
    return RoutingChoice(preferred.process, f"has its prefix, {among}")
