"""Candidate plans for one batch, their estimated costs, and the choice.

Two things can be chosen without a change of what is computed. *Routes*: every rank requests its samples from every
holder (direct), or one rank of a host requests those of all its neighbours from the holders of other hosts, and the
neighbours read them from shared memory (relay), which means fewer requests between hosts and one more hop. *Placement*:
shards stay in contiguous blocks, so that each rank has few subtrees of the gradient sum, but blocks may be assigned to
ranks near their samples. The gradient sum is a fixed tree over shards, independent of the placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kintsugi.dataplane.demand import SampleDemand, estimated_bytes
from kintsugi.dataplane.link_cost import LinkCosts
from kintsugi.protocol.sample_transfer import Routes
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.types import LogicalShard

WORTH_CHANGING = 0.9
"""A plan of another kind replaces the last one only if it costs less than this fraction."""


class TransferPlan(msgspec.Struct, frozen=True):
    """Assignment of shards and routes to the ranks for one step, and its reason."""

    name: str
    """Name of its kind: "direct", "relay on host-1"."""
    blocks: tuple[int, ...]
    """Index of the contiguous block of shards (`shards_of_rank`) by data-parallel index: ranks that compute one model
    together (`Mesh.model_ranks`) have the same."""
    routes: tuple[Routes, ...]
    """Routes by rank."""
    hosts: dict[str, str] = {}
    """Hosts of ranks and holders when the plan was made."""
    estimated_s: float = 0.0
    reason: str = ""


def in_order(num_ranks: int, *, model_ranks: int = 1) -> TransferPlan:
    """Default plan: block i belongs to the data-parallel index i, and every rank fetches for itself."""
    return TransferPlan("direct", tuple(range(num_ranks // model_ranks)), (Routes(),) * num_ranks)


class CandidatePlan(NamedTuple):
    """A possible plan and its estimated seconds."""

    name: str
    needs: SampleDemand
    relayed: tuple[str, ...]
    """Hosts on which one rank relays for all."""
    seconds: float


def candidates(
    shards: Sequence[LogicalShard],
    *,
    ranks: Sequence[str],
    hosts: Mapping[str, str],
    links: LinkCosts,
    model_ranks: int = 1,
) -> list[CandidatePlan]:
    """Candidates, the simplest first. If relaying helps some hosts, those relay; if none, all, for comparison. Ranks
    that compute the same samples together, `model_ranks` in a row, fetch directly, in order."""
    straight = tuple(range(len(ranks) // model_ranks))
    if model_ranks > 1:
        needs = SampleDemand(shards, straight, ranks=ranks, hosts=hosts)
        return [CandidatePlan("direct", needs, (), needs.estimate(relayed=(), links=links))]
    near = local_blocks(shards, ranks=ranks, hosts=hosts)
    placements = {straight: "", near: "" if near == straight else ", shards near their samples"}
    found: list[CandidatePlan] = []
    for blocks, suffix in placements.items():
        needs = SampleDemand(shards, blocks, ranks=ranks, hosts=hosts)
        able = needs.can_relay()
        helped = [
            host
            for host in able
            if needs.host_s(host, relays=True, links=links) < needs.host_s(host, relays=False, links=links)
        ]
        relayed = tuple(helped or able)
        kinds = {(): "direct", relayed: f"relay on {', '.join(relayed)}" if relayed else "direct"}
        found += [
            CandidatePlan(f"{name}{suffix}", needs, by, needs.estimate(relayed=by, links=links))
            for by, name in kinds.items()
        ]
    return found


def local_blocks(
    shards: Sequence[LogicalShard], *, ranks: Sequence[str], hosts: Mapping[str, str]
) -> tuple[int, ...]:
    """Blocks placed where most of their bytes are, as far as there are ranks there; by rank.

    Greedy: the block with the most bytes on one host chooses first. Ties go to the lower block and host name, so
    the same batch on the same cluster is placed the same way.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, process in enumerate(ranks):
        ranks_of.setdefault(hosts[process], []).append(rank)
    wishes: list[tuple[int, int, str]] = []
    for block in range(len(ranks)):
        near = dict.fromkeys(ranks_of, 0)
        for index in shards_of_rank(len(shards), rank=block, world_size=len(ranks)):
            for item in shards[index].items:
                if hosts[item.holder] in near:
                    near[hosts[item.holder]] += estimated_bytes(item)
        wishes += [(-size, block, host) for host, size in near.items()]
    placed: set[int] = set()
    blocks_of: dict[str, list[int]] = {host: [] for host in ranks_of}
    for _, block, host in sorted(wishes):
        if block not in placed and len(blocks_of[host]) < len(ranks_of[host]):
            placed.add(block)
            blocks_of[host].append(block)
    block_of = {
        rank: block
        for host, members in ranks_of.items()
        for rank, block in zip(members, sorted(blocks_of[host]), strict=True)
    }
    return tuple(block_of[rank] for rank in range(len(ranks)))


def choose_plan(
    shards: Sequence[LogicalShard],
    *,
    ranks: Sequence[str],
    hosts: Mapping[str, str],
    links: LinkCosts,
    last: str = "",
    bytes_per_s: float | None = None,
    model_ranks: int = 1,
) -> TransferPlan:
    """Choose the cheapest candidate, or one of the kind chosen `last` if the others save too little. `bytes_per_s` is
    the bandwidth limit of one host for samples from other hosts."""
    every = candidates(shards, ranks=ranks, hosts=hosts, links=links, model_ranks=model_ranks)
    best = min(every, key=lambda candidate: candidate.seconds)
    kept = next((candidate for candidate in every if candidate.name == last), best)
    chosen = best if best.seconds < WORTH_CHANGING * kept.seconds else kept
    others = [f"{each.name} {each.seconds * 1e3:.2f} ms" for each in every if each is not chosen]
    reason = "; ".join([f"{chosen.name}: {chosen.seconds * 1e3:.2f} ms expected", *others])
    return made(chosen, links=links, reason=reason, bytes_per_s=bytes_per_s)


def made(
    candidate: CandidatePlan, *, links: LinkCosts, reason: str = "", bytes_per_s: float | None = None
) -> TransferPlan:
    """Build the plan of a candidate, with routes."""
    needs = candidate.needs
    routes: dict[int, Routes] = {}
    for host, members in needs.neighbours.items():
        batch = needs.batch_bytes(host, links=links)
        for rank in members:
            routes[rank] = Routes(batch_bytes=batch)
        if host in candidate.relayed:
            first, *others = members
            relay = [
                item for rank in others for item in needs.items[rank] if needs.is_remote(item.holder, host)
            ]
            # The relaying rank does not need the scalars of its neighbours' samples.
            plain = tuple(msgspec.structs.replace(item, values={}) for item in relay)
            routes[first] = Routes(relay=plain, batch_bytes=batch)
            for rank in others:
                via = dict.fromkeys(needs.remote_of(rank), needs.ranks[first])
                routes[rank] = Routes(via=via, batch_bytes=batch)
        if bytes_per_s is not None:
            routes |= _limited({rank: routes[rank] for rank in members}, needs, bytes_per_s=bytes_per_s)
    in_rank_order = tuple(routes[rank] for rank in range(len(needs.ranks)))
    return TransferPlan(
        candidate.name, needs.blocks, in_rank_order, dict(needs.hosts), candidate.seconds, reason
    )


def _limited(routes: Mapping[int, Routes], needs: SampleDemand, *, bytes_per_s: float) -> dict[int, Routes]:
    """Divide a host's bandwidth limit equally over its ranks' streams from holders on other hosts. A rank that has to
    fetch a sample itself because the relay failed keeps to the same share."""
    asked = {
        rank: sorted(
            {holder for holder in needs.remote_of(rank) if holder not in route.via}
            | {item.holder for item in route.relay}
        )
        for rank, route in routes.items()
    }
    share = bytes_per_s / max(1, sum(len(holders) for holders in asked.values()))
    return {
        rank: msgspec.structs.replace(route, limits=dict.fromkeys([*asked[rank], *route.via], share))
        for rank, route in routes.items()
    }
