from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings

from kintsugi.dataplane.demand import SampleDemand
from kintsugi.dataplane.link_cost import LinkCosts, LinkLoad, TransferCost, TransferTiming
from kintsugi.dataplane.plan import TransferPlan, choose_plan, local_blocks
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.types import LogicalShard
from tests.unit.dataplane.worlds import HOSTS, RANKS, batch, clusters

SPREAD = batch(["rollout-0"] * 8 + ["rollout-1"] * 8)
"""Every rank needs some of either holder."""


def links_of(cost: TransferCost) -> LinkCosts:
    """All links between hosts as they were measured to be; memory as assumed."""
    links = LinkCosts()
    for _ in range(60):
        for source, target in (("host-0", "host-1"), ("host-1", "host-0")):
            first, load = LinkLoad(1, 1000), LinkLoad(2, 2000)
            taken = TransferTiming(load, cost.estimate(load), first.size, cost.estimate(first))
            links.streamed(source, target, timing=taken)
    return links


def keys_by_rank(shards: tuple[LogicalShard, ...], plan: TransferPlan) -> list[set[str]]:
    world_size = len(plan.blocks)
    return [
        {
            item.key
            for index in shards_of_rank(len(shards), rank=block, world_size=world_size)
            for item in shards[index].items
        }
        for block in plan.blocks
    ]


def test_where_asking_is_cheap_everybody_asks_for_himself() -> None:
    plan = choose_plan(SPREAD, ranks=RANKS, hosts=HOSTS, links=LinkCosts())
    assert plan.name == "direct" and plan.blocks == (0, 1, 2, 3)
    assert all(not routes.via and not routes.relay for routes in plan.routes)
    assert "relay on host-0, host-1" in plan.reason and "ms" in plan.reason


def test_where_asking_another_host_is_dear_one_rank_of_each_host_asks_for_all() -> None:
    plan = choose_plan(SPREAD, ranks=RANKS, hosts=HOSTS, links=links_of(TransferCost(1e-3, 30e-3, 3e-9)))
    assert plan.name == "relay on host-0, host-1"
    leader, neighbour = plan.routes[0], plan.routes[2]
    assert neighbour.via == {"rollout-1": "model-0"} and not neighbour.relay
    assert not leader.via and {item.holder for item in leader.relay} == {"rollout-1"}


def test_a_change_that_saves_little_is_not_made() -> None:
    for last in ("direct", "relay on host-0, host-1"):
        # With 2.5 ms per request a relay saves one request and costs about as much.
        plan = choose_plan(
            SPREAD, ranks=RANKS, hosts=HOSTS, links=links_of(TransferCost(20e-3, 2.5e-3, 0)), last=last
        )
        assert plan.name == last


def test_shards_go_to_the_host_that_has_their_samples() -> None:
    shards = batch(["rollout-1", "rollout-0"] * 2)
    blocks = local_blocks(shards, ranks=RANKS, hosts=HOSTS)
    plan = choose_plan(shards, ranks=RANKS, hosts=HOSTS, links=links_of(TransferCost(20e-3, 1e-3, 1e-6)))
    assert plan.name == "direct, shards near their samples" and plan.blocks == blocks
    for rank, keys in zip(RANKS, keys_by_rank(shards, plan), strict=True):
        holders = {item.holder for shard in shards for item in shard.items if item.key in keys}
        assert {HOSTS[holder] for holder in holders} == {HOSTS[rank]}


def test_on_one_host_there_is_nothing_to_choose() -> None:
    plan = choose_plan(SPREAD, ranks=RANKS, hosts=dict.fromkeys(HOSTS, "host-0"), links=LinkCosts())
    assert plan.name == "direct" and plan.blocks == (0, 1, 2, 3)
    assert plan.estimated_s > 0.0


def test_large_transfers_are_asked_for_in_batches_that_make_asking_cheap() -> None:
    (routes, *_) = choose_plan(SPREAD, ranks=RANKS, hosts=HOSTS, links=LinkCosts()).routes
    assert routes.batch_bytes == pytest.approx(3e-4 / 3e-9 / 0.05, rel=0.01)


@pytest.mark.parametrize("request_s", [3e-4, 30e-3], ids=["direct", "relay"])
def test_who_asks_another_host_shares_what_his_host_may_take(request_s: float) -> None:
    links = links_of(TransferCost(1e-3, request_s, 3e-9))
    plan = choose_plan(SPREAD, ranks=RANKS, hosts=HOSTS, links=links, bytes_per_s=1000.0)
    for host, holder in (("host-0", "rollout-1"), ("host-1", "rollout-0")):
        own = [routes for rank, routes in zip(RANKS, plan.routes, strict=True) if HOSTS[rank] == host]
        shares = [each.limits[holder] for each in own if holder not in each.via]
        assert sum(shares) == pytest.approx(1000.0)
        # Who asks after all, because nothing was relayed, is limited as well.
        assert all(each.limits == {holder: shares[0]} for each in own)


Cluster = tuple[tuple[LogicalShard, ...], tuple[str, ...], Mapping[str, str]]


@settings(max_examples=40, deadline=None)
@given(clusters())
def test_every_plan_brings_every_sample_to_exactly_the_rank_that_computes_it(cluster: Cluster) -> None:
    shards, ranks, hosts = cluster
    plans = [
        choose_plan(shards, ranks=ranks, hosts=hosts, links=links_of(TransferCost(0, r, 0)))
        for r in (1e-4, 1.0)
    ]
    for plan in plans:
        assert sorted(plan.blocks) == list(range(len(ranks)))
        keys = keys_by_rank(shards, plan)
        assert sorted(key for mine in keys for key in mine) == sorted(
            item.key for shard in shards for item in shard.items
        )
        holder_of = {item.key: item.holder for shard in shards for item in shard.items}
        for rank, (mine, routes) in enumerate(zip(keys, plan.routes, strict=True)):
            for key in mine:
                leader = routes.via.get(holder_of[key])
                if leader is not None:
                    assert hosts[leader] == hosts[ranks[rank]] != hosts[holder_of[key]]
                    relayed = plan.routes[ranks.index(leader)].relay
                    assert [item.key for item in relayed].count(key) == 1
        assert not any(item.key in keys[rank] for rank, r in enumerate(plan.routes) for item in r.relay)


@settings(max_examples=40, deadline=None)
@given(clusters())
def test_the_choice_is_never_dearer_than_asking_straight(cluster: Cluster) -> None:
    shards, ranks, hosts = cluster
    links = LinkCosts()
    needs = SampleDemand(shards, tuple(range(len(ranks))), ranks=ranks, hosts=hosts)
    straight_s = needs.estimate(relayed=(), links=links)
    assert choose_plan(shards, ranks=ranks, hosts=hosts, links=links).estimated_s <= straight_s + 1e-12


@settings(max_examples=30, deadline=None)
@given(clusters())
def test_the_same_batch_on_the_same_cluster_is_planned_the_same_way(cluster: Cluster) -> None:
    shards, ranks, hosts = cluster
    turned = dict(sorted(hosts.items(), reverse=True))
    first = choose_plan(shards, ranks=ranks, hosts=hosts, links=LinkCosts())
    assert choose_plan(shards, ranks=ranks, hosts=turned, links=LinkCosts()) == first
