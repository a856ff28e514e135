"""Which way weights go: decided once per version from where ranks and servers are, and said why.

    same accelerator → in place    same host → shared memory    another host → stream through a meta-server

`weights.transport` overrides it where it is possible; a collective and the disk are only taken when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kintsugi.config import Transport
from kintsugi.errors import IntegrityError
from kintsugi.messages import Publish, Published
from kintsugi.types import Piece, StreamSource
from kintsugi.weights.manifest import aligned, manifest_of

NO_CHIP = "cpu"
"""What stands for the identity of an accelerator where there is none."""


class Place(msgspec.Struct, frozen=True):
    """Where a process is: `Place("server-0", "host-0", chip="GPU-a")`."""

    process: str
    host: str
    chip: str = NO_CHIP
    """`device.identity` of its accelerator; every CPU counts as none."""


class Choice(msgspec.Struct, frozen=True):
    """One server's way."""

    transport: Transport
    reason: str


class Plan(msgspec.Struct, frozen=True):
    """What every rank that publishes is asked, and the way of each server."""

    orders: dict[str, Publish]
    choices: dict[str, Choice]

    @property
    def reason(self) -> str:
        """For the log: servers that go the same way for the same reason stand together."""
        ways: dict[str, list[str]] = {}
        for server, choice in self.choices.items():
            ways.setdefault(f"{choice.transport}: {choice.reason}", []).append(server)
        return "; ".join(f"{', '.join(servers)} by {way}" for way, servers in ways.items())


def choose(wanted: Transport, *, ranks: Sequence[Place], server: Place) -> Choice:
    """The way to one server.

    >>> choose("auto", ranks=[Place("model-0", "a")], server=Place("server-0", "a")).transport
    'shared_memory'
    """
    same_host = [rank for rank in ranks if rank.host == server.host]
    same_chip = [rank for rank in same_host if rank.chip == server.chip != NO_CHIP]
    if wanted in ("collective", "stream", "disk"):
        return Choice(wanted, "`weights.transport` says so")
    instead = ""
    if wanted == "in_place" and not same_chip:
        instead = f"in place is not possible, as no rank is on the accelerator of {server.process}; "
    elif wanted == "shared_memory" and not same_host:
        instead = "shared memory is not possible; "
    if same_chip and wanted != "shared_memory":
        return Choice("in_place", f"{same_chip[0].process} is on the same accelerator {server.chip}")
    if same_host:
        return Choice("shared_memory", f"{instead}{same_host[0].process} is on the same host {server.host}")
    return Choice("stream", f"{instead}no rank is on {server.host}")


def plan(
    wanted: Transport,
    *,
    ranks: Sequence[Place],
    servers: Sequence[Place],
    agents: Mapping[str, str],
    version: int,
    step: int,
) -> Plan:
    """Who lays what out. `agents` are the hosts' agents, by host.

    When all servers stream, every rank publishes a share, and all upload at once. Else the first rank of every host
    lays the whole version out, for those who are near, and the first of all uploads it for those who are not.
    """
    choices = {server.process: choose(wanted, ranks=ranks, server=server) for server in servers}
    ways = {choice.transport for choice in choices.values()}
    meta_server = agents.get(ranks[0].host, "") if "stream" in ways else ""
    if ways == {"stream"} and meta_server:
        orders = {
            rank.process: Publish(
                version, step, transports=("stream",), share=(index, len(ranks)), meta_server=meta_server
            )
            for index, rank in enumerate(ranks)
        }
        return Plan(orders, choices)
    broadcast_to = tuple(name for name, choice in choices.items() if choice.transport == "collective")
    publishers = {rank.host: rank for rank in reversed(ranks)}
    orders = {}
    for rank in ranks:
        is_first = rank is ranks[0]
        transports = _transports_of(
            rank,
            choices=choices,
            servers=servers,
            is_first=is_first,
            is_first_of_host=publishers[rank.host] is rank,
        )
        if transports:
            orders[rank.process] = Publish(
                version,
                step,
                transports=transports,
                meta_server=meta_server if is_first else "",
                servers=broadcast_to if is_first else (),
            )
    return Plan(orders, choices)


def _transports_of(
    rank: Place,
    *,
    choices: Mapping[str, Choice],
    servers: Sequence[Place],
    is_first: bool,
    is_first_of_host: bool,
) -> tuple[Transport, ...]:
    """What this rank lays out; nothing where another does. A host's first rank does, unless something else was asked
    for, though no server needs it yet: one may come later."""
    ways: set[Transport] = set()
    for server in servers:
        way = choices[server.process].transport
        serves = {
            "in_place": (rank.host, rank.chip) == (server.host, server.chip),
            "shared_memory": is_first_of_host and rank.host == server.host,
        }
        if serves.get(way, is_first):
            ways.add(way)
    is_near = {choice.transport for choice in choices.values()} <= {"in_place", "shared_memory", "stream"}
    if is_first_of_host and not ways and is_near:
        ways.add("shared_memory")
    return tuple(sorted(ways))


def join(published: Mapping[str, Published]) -> Published:
    """What the ranks laid out, in their order, as one: the same version from several, or shares of one that make a
    whole. IntegrityError, which names a rank, when they do not fit together."""
    (first_rank, first), *others = published.items()
    if _is_shared(published):
        return _join_shares(published)
    for rank, other in others:
        if other.manifest.digest != first.manifest.digest:
            raise IntegrityError(
                f"ranks published different weights: {first_rank} {first.manifest.digest}, "
                f"{rank} {other.manifest.digest}"
            )
    return Published(first.manifest, tuple(source for each in published.values() for source in each.sources))


def _is_shared(published: Mapping[str, Published]) -> bool:
    owners = [{piece.mesh.get("dp", 0) for piece in each.manifest.pieces} for each in published.values()]
    return len(published) > 1 and any(owner - {0} for owner in owners)


def _join_shares(published: Mapping[str, Published]) -> Published:
    pieces: dict[str, Piece] = {}
    meta_servers: list[str] = []
    for rank, each in published.items():
        for piece in each.manifest.pieces:
            if piece.name in pieces:
                raise IntegrityError(f"{rank} published {piece.name}, which another rank published as well")
            pieces[piece.name] = piece
        streams = [source for source in each.sources if isinstance(source, StreamSource)]
        meta_servers += [source.process for source in streams if source.owners]
    end = 0
    for name in sorted(pieces):
        if pieces[name].offset != end:
            raise IntegrityError(
                f"of version {each.manifest.version} something before {name} was not published"
            )
        end += aligned(pieces[name].size)
    if len(meta_servers) != len(published) or len(set(meta_servers)) != 1:
        raise IntegrityError(f"expected all shares at one meta-server, got {meta_servers}")
    joined = manifest_of(
        [pieces[name] for name in sorted(pieces)], version=each.manifest.version, step=each.manifest.step
    )
    return Published(joined, (StreamSource(meta_servers[0], owners=tuple(published)),))
