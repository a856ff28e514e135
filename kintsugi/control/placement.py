"""Processes of a run and the host of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import msgspec

from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers, stages
from kintsugi.types import Role, process_id


class ProcessPlan(msgspec.Struct, frozen=True):
    """`ProcessPlan("server-1", Role.SERVER, "host-0")`"""

    process: str
    role: Role
    host: str


def plan_layout(config: Config) -> tuple[ProcessPlan, ...]:
    """Place one agent on each host, master and manager on the first, and everything else round-robin over the hosts
    that have slots and are no spares. A run that samples nothing has neither manager nor servers.

    The round continues from one role to the next, so that the loads of two hosts with equal slots differ by at most one
    process. A host with more slots has turns of its own after those of the others.

    Ranks of a state that is cut and held several times are neighbours where they hold the state together, so that the
    holders of one part are on different hosts: four ranks with two parts are 0 and 1 on one host, 2 and 3 on the other.
    Ranks that compute a model together are neighbours too.
    """
    hosts = [f"host-{index}" for index in range(config.cluster.hosts)]
    plan = [ProcessPlan(process_id(Role.AGENT, index), Role.AGENT, host) for index, host in enumerate(hosts)]
    single = (Role.MASTER, Role.MANAGER) if has_servers(config) else (Role.MASTER,)
    plan += [ProcessPlan(process_id(role, 0), role, hosts[0]) for role in single]
    turn = cycle(_turns(config))
    spread = [ProcessPlan(process_id(role, index), role, next(turn)) for role, index in _spread(config)]
    layout = config.actor.layout
    if layout.model_ranks > 1 or 1 < layout.shards < config.actor.workers:
        spread = _together(spread)
    return (*plan, *spread)


def _together(plans: list[ProcessPlan]) -> list[ProcessPlan]:
    """Give the hosts of the ranks to them in the order of the hosts; the other processes stay where they are."""
    ranks = [plan for plan in plans if plan.role is Role.MODEL]
    places = sorted((plan.host for plan in ranks), key=host_index)
    moved = [msgspec.structs.replace(plan, host=host) for plan, host in zip(ranks, places, strict=True)]
    return [*moved, *(plan for plan in plans if plan.role is not Role.MODEL)]


def host_index(host: str) -> int:
    """`host_index("host-12") == 12`."""
    return int(host.rpartition("-")[2])


def hosts_without_slots(config: Config) -> frozenset[str]:
    """Return the hosts that run no ranks, servers or rollout workers, also not in place of others."""
    return frozenset(f"host-{index}" for index, slots in enumerate(config.cluster.slots) if slots == 0)


def _turns(config: Config) -> list[str]:
    """Return the hosts of one round, each as often as it has slots."""
    cluster = config.cluster
    slots = (cluster.slots or (1,) * cluster.hosts)[: cluster.hosts - cluster.spare_hosts]
    rounds = range(max(slots, default=0))
    turns = [f"host-{index}" for number in rounds for index, count in enumerate(slots) if count > number]
    return turns or ["host-0"]


def plan_servers(config: Config, count: int) -> tuple[ProcessPlan, ...]:
    """Return the placement of this many generation servers; all other processes stay where they are."""
    generation = msgspec.structs.replace(config.generation, servers=count)
    plan = plan_layout(msgspec.structs.replace(config, generation=generation))
    return tuple(each for each in plan if each.role is Role.SERVER)


def most_servers(config: Config) -> int | None:
    """Return the number of samples of a step, as more servers would be idle; None where the samples have no such
    bound."""
    main = stages(config)[-1]
    return main.algorithm.batch_size * main.algorithm.group_size if main.samples_completions else None


def num_spread_processes(config: Config) -> int:
    """Return the number of processes that may run on any host."""
    return sum(1 for _ in _spread(config))


def _spread(config: Config) -> Iterator[tuple[Role, int]]:
    counts = {
        Role.MODEL: config.actor.workers,
        Role.ROLLOUT: config.rollout.workers,
        Role.SERVER: config.generation.servers if has_servers(config) else 0,
    }
    for role, count in counts.items():
        for index in range(count):
            yield role, index
