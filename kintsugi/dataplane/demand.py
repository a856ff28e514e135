"""Demand for samples: the bytes that each rank needs from each holder, and the estimated time to fetch them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil

from kintsugi.dataplane.link_cost import LinkCosts, LinkLoad
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.types import LogicalShard, ShardItem

TOKEN_BYTES = 13
"""Encoded size per token of a trajectory: token, mask, log-probability, version."""
SAMPLE_BYTES = 120
"""Encoded size of a trajectory's field names and key."""
SMALLEST_BATCH, LARGEST_BATCH = 256 << 10, 16 << 20
REQUEST_SHARE = 0.05
"""Batches are so large that the cost of the request is at most this share of their transfer time."""


def estimated_bytes(item: ShardItem) -> int:
    """Estimated size of a sample on the wire.

    >>> estimated_bytes(ShardItem("t:0:0:0/0", "rollout-0", "", num_tokens=100, num_loss_tokens=40))
    1420
    """
    return SAMPLE_BYTES + TOKEN_BYTES * item.num_tokens


def batched(items: Sequence[ShardItem], *, batch_bytes: int) -> list[list[ShardItem]]:
    """Cut items, in their order, into requests of at most `batch_bytes`; a larger sample is a request of its own.

    With one request per sample, the requests would dominate the cost. With one request for all samples, nothing could
    be verified, counted or repeated before the last byte.

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


class SampleDemand:
    """Bytes that each rank needs from each holder, for one assignment of shard blocks to ranks."""

    def __init__(
        self,
        shards: Sequence[LogicalShard],
        blocks: tuple[int, ...],
        *,
        ranks: Sequence[str],
        hosts: Mapping[str, str],
    ) -> None:
        """`blocks`: index of the contiguous block of shards of each rank, or of several ranks in a row that compute the
        same samples. `hosts`: hosts of ranks and holders."""
        in_a_row = len(ranks) // len(blocks)
        self.blocks = blocks
        self.ranks = ranks
        self.hosts = hosts
        self.items: list[list[ShardItem]] = [
            [
                item
                for index in shards_of_rank(len(shards), rank=block, world_size=len(blocks))
                for item in shards[index].items
            ]
            for block in blocks
            for _ in range(in_a_row)
        ]
        self.of_rank: list[dict[str, int]] = [_bytes_by_holder(items) for items in self.items]
        self.neighbours: dict[str, list[int]] = {}
        """Host → its ranks; the first of them may relay for the others."""
        for rank, process in enumerate(ranks):
            self.neighbours.setdefault(hosts[process], []).append(rank)
        self._sources = sorted({hosts[holder] for needed in self.of_rank for holder in needed})

    def is_remote(self, holder: str, host: str) -> bool:
        return self.hosts[holder] != host

    def remote_of(self, rank: int) -> list[str]:
        """Holders on other hosts with samples for this rank."""
        host = self.hosts[self.ranks[rank]]
        return sorted(holder for holder in self.of_rank[rank] if self.is_remote(holder, host))

    def can_relay(self) -> list[str]:
        """Hosts with several ranks that need samples from other hosts."""
        return [
            host
            for host, members in self.neighbours.items()
            if sum(bool(self.remote_of(rank)) for rank in members) > 1
        ]

    def batch_bytes(self, host: str, *, links: LinkCosts) -> int:
        """Size of a request for which the cost of requesting is small on all links to this host."""
        costs = [links.stream(source, host) for source in self._sources]
        wanted = max(
            (cost.request_s / (REQUEST_SHARE * max(cost.byte_s, 1e-12)) for cost in costs), default=0.0
        )
        return int(min(LARGEST_BATCH, max(SMALLEST_BATCH, wanted)))

    def estimate(self, *, relayed: Collection[str], links: LinkCosts) -> float:
        """Seconds until the last rank has its samples, if these hosts relay. Links work in parallel; the transfers that
        leave one host share its bandwidth."""
        leaving: dict[str, float] = {}
        slowest_s = 0.0
        for host in self.neighbours:
            slowest_s = max(slowest_s, self.host_s(host, relays=host in relayed, links=links))
            for source, load in self._loads(host, relays=host in relayed, links=links).items():
                if source != host:
                    sent_s = load.size * links.stream(source, host).byte_s
                    leaving[source] = leaving.get(source, 0.0) + sent_s
        return max(slowest_s, *leaving.values(), 0.0)

    def host_s(self, host: str, *, relays: bool, links: LinkCosts) -> float:
        """Seconds until the ranks of one host have their samples. Transfers into a host share its bandwidth; relayed
        samples are passed on when all of them have arrived."""
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

    def _loads(self, host: str, *, relays: bool, links: LinkCosts) -> dict[str, LinkLoad]:
        """Load by source host: bytes for this host's ranks, and requests at the busiest holder there."""
        batch_bytes = self.batch_bytes(host, links=links)
        requests: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for rank in self.neighbours[host]:
            for holder, size in self.of_rank[rank].items():
                requests[holder] = requests.get(holder, 0) + ceil(size / batch_bytes)
                sizes[holder] = sizes.get(holder, 0) + size
        loads: dict[str, LinkLoad] = {}
        for holder, size in sizes.items():
            together = relays and self.is_remote(holder, host)
            asked = ceil(size / batch_bytes) if together else requests[holder]
            known = loads.get(self.hosts[holder], LinkLoad(0, 0))
            loads[self.hosts[holder]] = LinkLoad(max(known.requests, asked), known.size + size)
        return loads

    def _passed_on(self, host: str) -> LinkLoad:
        """Load of the host's shared memory: samples that its first rank relays to the others."""
        sizes = [
            sum(self.of_rank[rank][holder] for holder in self.remote_of(rank))
            for rank in self.neighbours[host][1:]
        ]
        return LinkLoad(sum(size > 0 for size in sizes), sum(sizes))


def _bytes_by_holder(items: Sequence[ShardItem]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.holder] = sizes.get(item.holder, 0) + estimated_bytes(item)
    return sizes
