"""Selection of the weight transports: decided once per version from the locations of ranks and servers, with the
reason.

    same accelerator → in place    same host → shared memory    another host → stream through a meta-server

`weights.transport` overrides this where possible; a collective and the disk are used only if configured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kintsugi.config.schema import Transport
from kintsugi.errors import IntegrityError
from kintsugi.model.tensor_slices import Extent
from kintsugi.protocol.weights import Publish, Published
from kintsugi.types import Piece, StreamSource
from kintsugi.weights.manifest import aligned, is_whole, manifest_of, num_elements

NO_CHIP = "cpu"
"""Identity of the accelerator of a process that has none."""


class ProcessLocation(msgspec.Struct, frozen=True):
    """Location of a process: `ProcessLocation("server-0", "host-0", chip="GPU-a")`."""

    process: str
    host: str
    chip: str = NO_CHIP
    """`device.identity` of its accelerator; CPUs count as none."""


class TransportChoice(msgspec.Struct, frozen=True):
    """Transport to one server."""

    transport: Transport
    reason: str


class PublicationPlan(msgspec.Struct, frozen=True):
    """Orders of the publishing ranks, and the transport to each server."""

    orders: dict[str, Publish]
    choices: dict[str, TransportChoice]

    @property
    def reason(self) -> str:
        """Reason for the log; servers with the same transport and reason are grouped."""
        used_transports: dict[str, list[str]] = {}
        for server, choice in self.choices.items():
            used_transports.setdefault(f"{choice.transport}: {choice.reason}", []).append(server)
        return "; ".join(
            f"{', '.join(servers)} by {transport}" for transport, servers in used_transports.items()
        )


def choose(
    wanted: Transport, *, ranks: Sequence[ProcessLocation], server: ProcessLocation
) -> TransportChoice:
    """Choose the transport to one server.

    >>> choose("auto", ranks=[ProcessLocation("model-0", "a")], server=ProcessLocation("server-0", "a")).transport
    'shared_memory'
    """
    same_host = [rank for rank in ranks if rank.host == server.host]
    same_chip = [rank for rank in same_host if rank.chip == server.chip != NO_CHIP]
    if wanted in ("collective", "stream", "disk"):
        return TransportChoice(wanted, "`weights.transport` says so")
    instead = ""
    if wanted == "in_place" and not same_chip:
        instead = f"in place is not possible, as no rank is on the accelerator of {server.process}; "
    elif wanted == "shared_memory" and not same_host:
        instead = "shared memory is not possible; "
    if same_chip and wanted != "shared_memory":
        return TransportChoice("in_place", f"{same_chip[0].process} is on the same accelerator {server.chip}")
    if same_host:
        return TransportChoice(
            "shared_memory", f"{instead}{same_host[0].process} is on the same host {server.host}"
        )
    return TransportChoice("stream", f"{instead}no rank is on {server.host}")


def plan(
    wanted: Transport,
    *,
    ranks: Sequence[ProcessLocation],
    servers: Sequence[ProcessLocation],
    agents: Mapping[str, str],
    version: int,
    step: int,
    parts: Sequence[ProcessLocation] = (),
) -> PublicationPlan:
    """Decide what each rank publishes. `agents` are the hosts' agents, by host.

    When all servers stream, every rank publishes a share, and all upload in parallel. Otherwise the first rank of every
    host publishes the whole version to near servers, and the first rank of all uploads it for the others. `parts`:
    ranks that hold one model together, each a part of it; then these upload their parts.
    """
    if parts:
        cut = TransportChoice("stream", f"each of {len(parts)} ranks has a part of the weights")
        meta_server = agents.get(parts[0].host) or next(iter(agents.values()), "")
        return _shares(
            parts,
            choices={server.process: cut for server in servers},
            chain=_chain(servers, agents=agents, meta_server=meta_server),
            meta_server=meta_server,
            version=version,
            step=step,
        )
    choices = {server.process: choose(wanted, ranks=ranks, server=server) for server in servers}
    used_transports = {choice.transport for choice in choices.values()}
    meta_server = agents.get(ranks[0].host, "") if "stream" in used_transports else ""
    streaming = [server for server in servers if choices[server.process].transport == "stream"]
    chain = _chain(streaming, agents=agents, meta_server=meta_server)
    if used_transports == {"stream"} and meta_server:
        return _shares(
            ranks, choices=choices, chain=chain, meta_server=meta_server, version=version, step=step
        )
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
                chain=chain if is_first else (),
                servers=broadcast_to if is_first else (),
            )
    return PublicationPlan(orders, choices)


def _chain(
    servers: Sequence[ProcessLocation], *, agents: Mapping[str, str], meta_server: str
) -> tuple[str, ...]:
    """Agents of the other hosts with servers that stream."""
    hosts = {server.host for server in servers}
    return tuple(sorted({agents[host] for host in hosts if host in agents} - {meta_server}))


def _shares(
    ranks: Sequence[ProcessLocation],
    *,
    choices: dict[str, TransportChoice],
    chain: tuple[str, ...],
    meta_server: str,
    version: int,
    step: int,
) -> PublicationPlan:
    """Every rank publishes a share, and all upload in parallel."""
    orders = {
        rank.process: Publish(
            version,
            step,
            transports=("stream",),
            share=(index, len(ranks)),
            meta_server=meta_server,
            chain=chain,
        )
        for index, rank in enumerate(ranks)
    }
    return PublicationPlan(orders, choices)


def _transports_of(
    rank: ProcessLocation,
    *,
    choices: Mapping[str, TransportChoice],
    servers: Sequence[ProcessLocation],
    is_first: bool,
    is_first_of_host: bool,
) -> tuple[Transport, ...]:
    """Transports of this rank; none if another rank publishes. Unless another transport is configured, a host's first
    rank publishes even if no server needs it yet: one may join later."""
    used_transports: set[Transport] = set()
    for server in servers:
        transport = choices[server.process].transport
        serves = {
            "in_place": (rank.host, rank.chip) == (server.host, server.chip),
            "shared_memory": is_first_of_host and rank.host == server.host,
        }
        if serves.get(transport, is_first):
            used_transports.add(transport)
    is_near = {choice.transport for choice in choices.values()} <= {"in_place", "shared_memory", "stream"}
    if is_first_of_host and not used_transports and is_near:
        used_transports.add("shared_memory")
    return tuple(sorted(used_transports))


def join(published: Mapping[str, Published]) -> Published:
    """Merge what the ranks published, in their order: the same version from several ranks, or shares that form a whole.
    IntegrityError, which names a rank, if they do not fit together."""
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
    pieces: dict[tuple[str, Extent], Piece] = {}
    meta_servers: list[str] = []
    chain: tuple[str, ...] = ()
    for rank, each in published.items():
        for piece in each.manifest.pieces:
            key = piece.name, piece.slice
            if key in pieces:
                raise IntegrityError(f"{rank} published {piece.name}, which another rank published as well")
            pieces[key] = piece
        streams = [source for source in each.sources if isinstance(source, StreamSource)]
        meta_servers += [source.process for source in streams if source.owners]
        chain = next((source.chain for source in streams if source.owners), chain)
    end = 0
    for key in sorted(pieces):
        if pieces[key].offset != end:
            raise IntegrityError(
                f"of version {each.manifest.version} something before {key[0]} was not published"
            )
        end += aligned(pieces[key].size)
    if len(meta_servers) != len(published) or len(set(meta_servers)) != 1:
        raise IntegrityError(f"expected all shares at one meta-server, got {meta_servers}")
    for name in {piece.name for piece in pieces.values() if not is_whole(piece)}:
        slices = [piece for piece in pieces.values() if piece.name == name]
        if sum(map(num_elements, slices)) != math.prod(slices[0].shape):
            raise IntegrityError(f"of version {each.manifest.version} a slice of {name} was not published")
    joined = manifest_of(
        [pieces[key] for key in sorted(pieces)], version=each.manifest.version, step=each.manifest.step
    )
    return Published(joined, (StreamSource(meta_servers[0], owners=tuple(published), chain=chain),))
