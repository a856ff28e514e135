from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kintsugi.config.schema import (
    ActorSection,
    AlgorithmSection,
    ClusterSection,
    Config,
    GenerationSection,
    LayoutSection,
    ModelSection,
    NewModel,
)
from kintsugi.control.placement import num_spread_processes, plan_layout
from kintsugi.types import Role


def config_with(*, hosts: int = 1, workers: int = 2, servers: int = 2) -> Config:
    return Config(
        name="a",
        model=ModelSection(new=NewModel()),
        actor=ActorSection(workers=workers),
        generation=GenerationSection(servers=servers),
        cluster=ClusterSection(hosts=hosts),
    )


def test_one_host_runs_at_least_one_of_everything() -> None:
    roles = Counter(process.role for process in plan_layout(config_with()))
    assert roles == {
        Role.AGENT: 1,
        Role.MASTER: 1,
        Role.MANAGER: 1,
        Role.MODEL: 2,
        Role.ROLLOUT: 2,
        Role.SERVER: 2,
    }


def test_every_host_has_an_agent_and_the_first_has_master_and_manager() -> None:
    hosts = {process.process: process.host for process in plan_layout(config_with(hosts=3))}
    assert [hosts[f"agent-{index}"] for index in range(3)] == ["host-0", "host-1", "host-2"]
    assert hosts["master-0"] == hosts["manager-0"] == "host-0"


def test_hosts_differ_by_one_worker_at_most() -> None:
    for hosts in range(1, 8):
        config = config_with(hosts=hosts, workers=1, servers=4)
        spread = [
            process
            for process in plan_layout(config)
            if process.role in (Role.MODEL, Role.ROLLOUT, Role.SERVER)
        ]
        counts = Counter(process.host for process in spread)
        assert len(spread) == num_spread_processes(config) == 7
        assert len(counts) == hosts
        assert max(counts.values()) - min(counts.values()) <= 1


def test_two_hosts_share_every_role() -> None:
    placed = {(process.role, process.host) for process in plan_layout(config_with(hosts=2))}
    assert {
        (role, host) for role in (Role.MODEL, Role.ROLLOUT, Role.SERVER) for host in ("host-0", "host-1")
    } <= placed


def test_what_samples_nothing_has_neither_manager_nor_servers() -> None:
    config = msgspec.structs.replace(config_with(hosts=2), algorithm=AlgorithmSection(name="reward_model"))
    roles = Counter(process.role for process in plan_layout(config))
    assert roles == {Role.AGENT: 2, Role.MASTER: 1, Role.MODEL: 2, Role.ROLLOUT: 2}
    assert num_spread_processes(config) == 4


def test_ranks_that_hold_the_state_once_are_spread_as_whole_ones_and_those_of_one_model_are_neighbours() -> (
    None
):
    config = config_with(hosts=2, workers=4)

    def hosts_of(layout: LayoutSection) -> list[str]:
        cut = msgspec.structs.replace(config, actor=msgspec.structs.replace(config.actor, layout=layout))
        return [plan.host for plan in plan_layout(cut) if plan.role is Role.MODEL]

    assert hosts_of(LayoutSection(shards=4)) == hosts_of(LayoutSection()) == ["host-0", "host-1"] * 2
    for layout in (LayoutSection(stages=2), LayoutSection(tensors=4), LayoutSection(shards=2)):
        assert hosts_of(layout) == ["host-0", "host-0", "host-1", "host-1"]


@pytest.mark.parametrize(
    ("workers", "shards", "hosts"), [(4, 2, 2), (6, 3, 2), (6, 2, 3), (8, 2, 2), (24, 2, 12)]
)
def test_the_ranks_that_hold_one_part_are_on_different_hosts(workers: int, shards: int, hosts: int) -> None:
    config = config_with(hosts=hosts, workers=workers)
    cut = msgspec.structs.replace(config.actor, layout=LayoutSection(shards=shards))
    found = plan_layout(msgspec.structs.replace(config, actor=cut))
    placed = {plan.process: plan.host for plan in found}
    for shard in range(shards):
        holders = {placed[f"model-{rank}"] for rank in range(shard, workers, shards)}
        assert len(holders) == min(hosts, workers // shards)
    before = plan_layout(config)
    assert Counter(plan.host for plan in found) == Counter(plan.host for plan in before)
    assert [plan for plan in found if plan.role is not Role.MODEL] == [
        plan for plan in before if plan.role is not Role.MODEL
    ]
