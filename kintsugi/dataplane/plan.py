"""Candidate plans for one batch, what each would cost, and the choice.

Two things can be chosen without touching what is computed. *Who asks whom*: every rank asks every holder itself
(direct), or one rank of a host asks the holders of other hosts for all of its neighbours, who read it from the host's
memory (relay): fewer requests between hosts, and one more hop. *Which rank computes which shards*: shards stay in
their contiguous blocks, so that a rank brings as few subtrees to the gradient's sum as before, but blocks may change
places among the ranks to lie nearer to their samples. The sum is over shards in a fixed tree, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kintsugi.buffer.packing import shards_of_rank
from kintsugi.dataplane.cost import Links
from kintsugi.dataplane.needs import Needs, estimated_bytes
from kintsugi.transfers import Routes
from kintsugi.types import LogicalShard

WORTH_CHANGING = 0.9
"""Another kind of plan than the last must cost less than this share of it."""


class Plan(msgspec.Struct, frozen=True):
    """Who computes and fetches what in one step, and why."""

    name: str
    """Of its kind, for people: "direct", "relay on host-1"."""
    blocks: tuple[int, ...]
    """By rank: which of the contiguous blocks of shards (`shards_of_rank`) is its own."""
    routes: tuple[Routes, ...]
    """By rank."""
    hosts: dict[str, str] = {}
    """Of ranks and holders, as they were when the plan was made."""
    estimated_s: float = 0.0
    reason: str = ""


def in_order(num_ranks: int) -> Plan:
    """Block by block in the order of the ranks, every rank for itself."""
    return Plan("direct", tuple(range(num_ranks)), (Routes(),) * num_ranks)


class Candidate(NamedTuple):
    """A plan that could be made, and the seconds that it would take."""

    name: str
    needs: Needs
    relayed: tuple[str, ...]
    """Hosts on which one rank fetches for all."""
    seconds: float


def candidates(
    shards: Sequence[LogicalShard], *, ranks: Sequence[str], hosts: Mapping[str, str], links: Links
) -> list[Candidate]:
    """The simplest first. Where relaying helps some hosts, those relay; where it helps none, all, for comparison."""
    straight = tuple(range(len(ranks)))
    near = local_blocks(shards, ranks=ranks, hosts=hosts)
    placements = {straight: "", near: "" if near == straight else ", shards near their samples"}
    found: list[Candidate] = []
    for blocks, suffix in placements.items():
        needs = Needs(shards, blocks, ranks=ranks, hosts=hosts)
        able = needs.can_relay()
        helped = [
            host
            for host in able
            if needs.host_s(host, relays=True, links=links) < needs.host_s(host, relays=False, links=links)
        ]
        relayed = tuple(helped or able)
        kinds = {(): "direct", relayed: f"relay on {', '.join(relayed)}" if relayed else "direct"}
        found += [
            Candidate(f"{name}{suffix}", needs, by, needs.estimate(relayed=by, links=links))
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
    links: Links,
    last: str = "",
    bytes_per_s: float | None = None,
) -> Plan:
    """The cheapest candidate, or one of the kind that was chosen `last` where another saves too little to change.
    `bytes_per_s` is what one host may take from others at most."""
    every = candidates(shards, ranks=ranks, hosts=hosts, links=links)
    best = min(every, key=lambda candidate: candidate.seconds)
    kept = next((candidate for candidate in every if candidate.name == last), best)
    chosen = best if best.seconds < WORTH_CHANGING * kept.seconds else kept
    others = [f"{each.name} {each.seconds * 1e3:.2f} ms" for each in every if each is not chosen]
    reason = "; ".join([f"{chosen.name}: {chosen.seconds * 1e3:.2f} ms expected", *others])
    return made(chosen, links=links, reason=reason, bytes_per_s=bytes_per_s)


def made(candidate: Candidate, *, links: Links, reason: str = "", bytes_per_s: float | None = None) -> Plan:
    """The plan with its routes."""
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
            # Neighbours' scalars are no business of who only fetches for them.
            plain = tuple(msgspec.structs.replace(item, values={}) for item in relay)
            routes[first] = Routes(relay=plain, batch_bytes=batch)
            for rank in others:
                via = dict.fromkeys(needs.remote_of(rank), needs.ranks[first])
                routes[rank] = Routes(via=via, batch_bytes=batch)
        if bytes_per_s is not None:
            routes |= _limited({rank: routes[rank] for rank in members}, needs, bytes_per_s=bytes_per_s)
    in_rank_order = tuple(routes[rank] for rank in range(len(needs.ranks)))
    return Plan(candidate.name, needs.blocks, in_rank_order, dict(needs.hosts), candidate.seconds, reason)


def _limited(routes: Mapping[int, Routes], needs: Needs, *, bytes_per_s: float) -> dict[int, Routes]:
    """The ranks of one host, each with an equal share for every holder on another host that it asks itself. Who has to
    ask one after all, because it was not relayed, keeps to that share too."""
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
