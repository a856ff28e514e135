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
    """Place one agent on each host, master and manager on the first, and everything else round-robin over the hosts. A
    run that samples nothing has neither manager nor servers.

    The round continues from one role to the next, so that the loads of two hosts differ by at most one process.
    """
    hosts = [f"host-{index}" for index in range(config.cluster.hosts)]
    plan = [ProcessPlan(process_id(Role.AGENT, index), Role.AGENT, host) for index, host in enumerate(hosts)]
    single = (Role.MASTER, Role.MANAGER) if has_servers(config) else (Role.MASTER,)
    plan += [ProcessPlan(process_id(role, 0), role, hosts[0]) for role in single]
    turn = cycle(hosts)
    plan += [ProcessPlan(process_id(role, index), role, next(turn)) for role, index in _spread(config)]
    return tuple(plan)


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
