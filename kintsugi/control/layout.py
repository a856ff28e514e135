"""Which processes a run has, on which host each one starts, and how much memory each will take. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import msgspec

from kintsugi.config import Config
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.stages import has_servers, stages
from kintsugi.types import Role, process_id


class ProcessPlan(msgspec.Struct, frozen=True):
    """`ProcessPlan("server-1", Role.SERVER, "host-0")`"""

    process: str
    role: Role
    host: str


def plan_layout(config: Config) -> tuple[ProcessPlan, ...]:
    """An agent per host; master and manager on the first; everything else round-robin over the hosts. What samples
    nothing has neither manager nor servers.

    The round goes on from one role to the next, so that hosts differ by one process at most and none is left
    without work while another has two.
    """
    hosts = [f"host-{index}" for index in range(config.cluster.hosts)]
    plan = [ProcessPlan(process_id(Role.AGENT, index), Role.AGENT, host) for index, host in enumerate(hosts)]
    single = (Role.MASTER, Role.MANAGER) if has_servers(config) else (Role.MASTER,)
    plan += [ProcessPlan(process_id(role, 0), role, hosts[0]) for role in single]
    turn = cycle(hosts)
    plan += [ProcessPlan(process_id(role, index), role, next(turn)) for role, index in _spread(config)]
    return tuple(plan)


def plan_servers(config: Config, count: int) -> tuple[ProcessPlan, ...]:
    """The generation servers of a run that shall have this many: whatever else runs stays where it is."""
    generation = msgspec.structs.replace(config.generation, servers=count)
    plan = plan_layout(msgspec.structs.replace(config, generation=generation))
    return tuple(each for each in plan if each.role is Role.SERVER)


def most_servers(config: Config) -> int | None:
    """More servers than samples of a step would have nothing to do; None where what is sampled has no such bound."""
    main = stages(config)[-1]
    return main.algorithm.batch_size * main.algorithm.group_size if main.samples_completions else None


def num_spread_processes(config: Config) -> int:
    """Processes that may run on any host."""
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


_PLAIN_PROCESS_BYTES = 60_000_000
"""Interpreter, messages, sockets: what a process without torch takes (measured: 27–68 MB resident)."""
_TORCH_PROCESS_BYTES = 330_000_000
"""The same with torch imported (measured on CPU, forked from the template: 200–250 MB resident, most of it shared)."""
_LOGPROB_CHUNK_TOKENS = 1024
"""Logits exist for this many tokens at once."""


def estimate_memory(config: Config, model: ModelConfig) -> dict[Role, int]:
    """Bytes per process of each role, to tell before the start whether a run fits; good to a factor of about 1.5."""
    parameters = num_parameters(model)
    width = 2 if config.actor.dtype == "bfloat16" else 4
    per_token = model.num_layers * (
        6 * model.hidden_size + 2 * (model.query_size + model.kv_size) + 3 * model.intermediate_size
    )
    activations = width * config.actor.micro_batch_tokens * per_token
    logits = 2 * 4 * _LOGPROB_CHUNK_TOKENS * model.vocab_size
    main = stages(config)[-1]
    frozen = 4 * parameters * (main.has_reference + (main.reward_model is not None))
    # Weights, gradients and two moments in fp32, the shards' gradient sums, and a committed copy to roll back to.
    trained = 4 * parameters * (1 + 1 + 2 + 1 + 3) * (1 + main.has_critic)
    cache = (
        2 * width * model.num_layers * model.kv_size * config.generation.slots * config.generation.max_length
    )
    decoding = 4 * config.generation.slots * (model.vocab_size + 8 * model.hidden_size)
    return {
        Role.AGENT: _PLAIN_PROCESS_BYTES,
        Role.MASTER: _PLAIN_PROCESS_BYTES,
        Role.MANAGER: _PLAIN_PROCESS_BYTES,
        Role.MODEL: _TORCH_PROCESS_BYTES + trained + activations + logits + frozen,
        Role.ROLLOUT: _PLAIN_PROCESS_BYTES,
        # The weights in use and the next version while it is being verified.
        Role.SERVER: _TORCH_PROCESS_BYTES + 2 * width * parameters + cache + decoding,
    }
