"""Who needs how much of whom, and what it would take to bring it there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

from kintsugi.buffer.packing import shards_of_rank
from kintsugi.dataplane.cost import Links, Load
from kintsugi.types import LogicalShard, ShardItem

TOKEN_BYTES = 13
"""Of a trajectory: token, mask, log-probability, version."""
SAMPLE_BYTES = 120
"""Its names and its key."""
SMALLEST_BATCH, LARGEST_BATCH = 256 << 10, 16 << 20
REQUEST_SHARE = 0.05
"""Batches are large enough that asking for them takes at most this share of their time."""


def estimated_bytes(item: ShardItem) -> int:
    """On the wire.

    >>> estimated_bytes(ShardItem("t:0:0:0/0", "rollout-0", "", num_tokens=100, num_loss_tokens=40))
    1420
    """
    return SAMPLE_BYTES + TOKEN_BYTES * item.num_tokens


def batched(items: Sequence[ShardItem], *, batch_bytes: int) -> list[list[ShardItem]]:
    """Items in their order, cut so that no request asks for more than this; a larger sample stands alone.

    One by one, small samples would pay for a request each; all at once, nothing of a large transfer could be verified,
    counted or repeated before the last byte.

    >>> items = [ShardItem(f"t:0:0:0/{i}", "rollout-0", "", 100, 40) for i in range(3)]
    >>> [len(batch) for batch in batched(items, batch_bytes=3000)]
    [2, 1]
    """
    batches: list[list[ShardItem]] = []
    filled = 0
    for item in items:
        size = estimated_bytes(item)
        if not batches or filled + size > batch_bytes:
            batches.append([])
            filled = 0
        batches[-1].append(item)
        filled += size
    return batches


class Needs:
    """What each rank needs of each holder, in bytes, when the shards lie in these blocks."""

    def __init__(
        self,
        shards: Sequence[LogicalShard],
        blocks: tuple[int, ...],
        *,
        ranks: Sequence[str],
        hosts: Mapping[str, str],
    ) -> None:
        """`blocks`, by rank: which of the contiguous blocks of shards is its own. `hosts`: of ranks and holders."""
        self.blocks, self.ranks, self.hosts = blocks, ranks, hosts
        self.items: list[list[ShardItem]] = [
            [
                item
                for index in shards_of_rank(len(shards), rank=block, world_size=len(ranks))
                for item in shards[index].items
            ]
            for block in blocks
        ]
        self.of_rank: list[dict[str, int]] = [_bytes_by_holder(items) for items in self.items]
        self.neighbours: dict[str, list[int]] = {}
        """Host → its ranks; the first of them is the one to relay for the others."""
        for rank, process in enumerate(ranks):
            self.neighbours.setdefault(hosts[process], []).append(rank)
        self._sources = sorted({hosts[holder] for needed in self.of_rank for holder in needed})

    def is_remote(self, holder: str, host: str) -> bool:
        return self.hosts[holder] != host

    def remote_of(self, rank: int) -> list[str]:
        """Holders on other hosts that have something for this rank."""
        host = self.hosts[self.ranks[rank]]
        return sorted(holder for holder in self.of_rank[rank] if self.is_remote(holder, host))

    def can_relay(self) -> list[str]:
        """Hosts of which several ranks need something from another host."""
        return [
            host
            for host, members in self.neighbours.items()
            if sum(bool(self.remote_of(rank)) for rank in members) > 1
        ]

    def batch_bytes(self, host: str, *, links: Links) -> int:
        """So much in a request that asking hardly counts, on the link to this host where it counts most."""
        costs = [links.stream(source, host) for source in self._sources]
        wanted = max(
            (cost.request_s / (REQUEST_SHARE * max(cost.byte_s, 1e-12)) for cost in costs), default=0.0
        )
        return int(min(LARGEST_BATCH, max(SMALLEST_BATCH, wanted)))

    def estimate(self, *, relayed: Collection[str], links: Links) -> float:
        """Seconds until the last rank has its samples, where these hosts relay. Links work at the same time; what
        leaves one host by several of them shares its bandwidth."""
        leaving: dict[str, float] = {}
        slowest_s = 0.0
        for host in self.neighbours:
            slowest_s = max(slowest_s, self.host_s(host, relays=host in relayed, links=links))
            for source, load in self._loads(host, relays=host in relayed, links=links).items():
                if source != host:
                    sent_s = load.size * links.stream(source, host).byte_s
                    leaving[source] = leaving.get(source, 0.0) + sent_s
        return max(slowest_s, *leaving.values(), 0.0)

    def host_s(self, host: str, *, relays: bool, links: Links) -> float:
        """Until the ranks of one host have theirs. What enters it shares its bandwidth; what is relayed is passed on
        when all of it is there."""
        local_s = waiting_s = entering_s = 0.0
        for source, load in self._loads(host, relays=relays, links=links).items():
            cost = links.stream(source, host)
            if source == host:
                local_s = cost.estimate(load)
            else:
                bytes_s = load.size * cost.byte_s
                entering_s += bytes_s
                waiting_s = max(waiting_s, cost.estimate(load) - bytes_s)
        memory_s = links.memory(host).estimate(self._passed_on(host)) if relays else 0.0
        return max(local_s, waiting_s + entering_s + memory_s)

    def _loads(self, host: str, *, relays: bool, links: Links) -> dict[str, Load]:
        """By the host that it comes from: what this host's ranks ask for, requests at the busiest holder there."""
        batch_bytes = self.batch_bytes(host, links=links)
        requests: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for rank in self.neighbours[host]:
            for holder, size in self.of_rank[rank].items():
                requests[holder] = requests.get(holder, 0) + ceil(size / batch_bytes)
                sizes[holder] = sizes.get(holder, 0) + size
        loads: dict[str, Load] = {}
        for holder, size in sizes.items():
            together = relays and self.is_remote(holder, host)
            asked = ceil(size / batch_bytes) if together else requests[holder]
            known = loads.get(self.hosts[holder], Load(0, 0))
            loads[self.hosts[holder]] = Load(max(known.requests, asked), known.size + size)
        return loads

    def _passed_on(self, host: str) -> Load:
        """What the first of a host's ranks lays out for the others."""
        sizes = [
            sum(self.of_rank[rank][holder] for holder in self.remote_of(rank))
            for rank in self.neighbours[host][1:]
        ]
        return Load(sum(size > 0 for size in sizes), sum(sizes))


def _bytes_by_holder(items: Sequence[ShardItem]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.holder] = sizes.get(item.holder, 0) + estimated_bytes(item)
    return sizes
