"""Batches whose samples lie on hosts of the test's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from kintsugi.samples.sharding import logical_shards
from kintsugi.types import LogicalShard, ShardItem

RANKS = ("model-0", "model-1", "model-2", "model-3")
HOSTS = {
    "model-0": "host-0",
    "model-1": "host-1",
    "model-2": "host-0",
    "model-3": "host-1",
    "rollout-0": "host-0",
    "rollout-1": "host-1",
}


def item(number: int, *, holder: str, num_tokens: int = 40) -> ShardItem:
    return ShardItem(f"t:0:{number:03}:0/0", holder, "", num_tokens, 3, {"advantage": 1.0})


def batch(holders: Sequence[str], *, num_shards: int = 4, num_tokens: int = 40) -> tuple[LogicalShard, ...]:
    """One sample per holder named, in this order."""
    items = [item(i, holder=holder, num_tokens=num_tokens) for i, holder in enumerate(holders)]
    return logical_shards(items, num_shards=num_shards)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[LogicalShard, ...], tuple[str, ...], Mapping[str, str]]:
    """Shards of a batch, ranks, and the host of everybody."""
    num_hosts = draw(st.integers(1, 4))
    num_ranks = draw(st.integers(1, 6))
    num_holders = draw(st.integers(1, 5))
    ranks = tuple(f"model-{i}" for i in range(num_ranks))
    places = st.integers(0, num_hosts - 1).map(lambda number: f"host-{number}")
    hosts = {name: draw(places) for name in (*ranks, *(f"rollout-{i}" for i in range(num_holders)))}
    lengths = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
    items = [
        item(i, holder=f"rollout-{draw(st.integers(0, num_holders - 1))}", num_tokens=length)
        for i, length in enumerate(lengths)
    ]
    return logical_shards(items, num_shards=draw(st.integers(num_ranks, 12))), ranks, hosts
