"""Memory that the processes of a run need at their peaks, estimated before any of them starts. Imports no torch.

On a host with accelerators a rank or server needs memory of its card and of its host; without one, all of it is the
host's. The estimate is used by `kintsugi check`, before a run is started, and by a server that sizes its KV cache and
must leave the ranks on its card what they will need.

A rank holds, per trained parameter, 12 bytes of state (weights and two moments), 4 of gradient and, where it computes
in bfloat16, 2 of weights to compute with; then what one micro-batch takes. Of several shards it holds one part of the
state, and always separate weights to compute with: 12 / shards + 4 + 2 (4 in float32). With pipeline stages only the
parameters of its own layers count. A tied embedding counts for the last stage; the first one has a copy to compute
with, and the last one keeps a gradient of it for each micro-batch that the first has not passed backward. Where
weights are gathered layer by layer it holds (12 + 4) / shards, and of a few units at a time weights and gradients; the
inputs of all layers are kept for all samples of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kintsugi.config.schema import LEARN_PAIRS, Config
from kintsugi.config.stages import has_servers, stages
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.partition import layer_of, local_shapes, part_of
from kintsugi.model.plan import Companions
from kintsugi.model.seats import Seat, mesh_of, seat_of
from kintsugi.model.tensor_slices import cut_axis
from kintsugi.types import Role, process_id, role_of

PLAIN_PROCESS_BYTES = 60_000_000
"""Memory of a process without torch: interpreter, messages, sockets (measured: 27–68 MB resident)."""
TORCH_PROCESS_BYTES = 330_000_000
"""Memory of a process with torch imported (measured on CPU, forked from the fork server: 200–250 MB resident, most of
it shared)."""
CUDA_PROCESS_BYTES = 800_000_000
"""Host memory of a process that uses a GPU (measured on an H200: 770 MB resident)."""
CUDA_CONTEXT_BYTES = 1_000_000_000
"""Memory of a process on its GPU that torch does not count: context, kernels, workspaces of cuBLAS."""
SLACK = 0.05
"""Share of a rank's allocations that its allocator holds in addition, in blocks that do not fit what is needed next."""
_LOGPROB_CHUNK_TOKENS = 1024
"""Tokens for which logits exist at once."""
_PIECE_BYTES = 256 << 20
"""Size of the pieces in which gradients are exchanged and norms are taken."""
_STATE_BYTES, _GRADIENT_BYTES = 12, 4
_ALWAYS_HELD = frozenset({"process", "state", "compute weights", "snapshots"})
"""Parts of a process's memory that it uses at every moment; others come and go."""


def published_versions(config: Config) -> int:
    """Versions of the weights that a rank keeps on a card for servers there. A synchronous run publishes the next one
    only when every server has the last one; a server that is late, or new in that moment, finds it overwritten and
    loads the next. That one may be what the rank computes with (`shares_weights`)."""
    return 1 if config.asynchrony.max_staleness == 0 else 2


def shares_weights(config: Config) -> bool:
    """Whether the version that a rank publishes on its card is the weights that it computes with, which change only
    with the next update. Not where an earlier version is kept, where they are moved away when the card is lent, or
    where they are the state itself or a part of a model."""
    actor = config.actor
    return (
        published_versions(config) == 1
        and actor.dtype == "bfloat16"
        and actor.logical_slices == 1
        and mesh_of(actor.layout).boxes == 1
        and config.cluster.share_device != "offload"
    )


class ProcessMemory(msgspec.Struct, frozen=True):
    """Bytes of one process at its peak, by what they are for."""

    host: Mapping[str, int]
    device: Mapping[str, int] = {}

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


class DeviceReading(msgspec.Struct, frozen=True):
    """Memory of an accelerator: `DeviceReading("c5a0…", "NVIDIA H200", total_bytes=150_754_820_096,
    free_bytes=150_100_000_000)`"""

    identity: str
    name: str
    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class RunMemory(msgspec.Struct, frozen=True):
    """Estimates for one configuration, its models, and the cards of the machine that is to run it."""

    config: Config
    model: ModelConfig
    companions: Companions
    num_devices: int
    """Accelerators of the machine; 0: everything is computed by CPUs."""

    @property
    def _width(self) -> int:
        return 2 if self.config.actor.dtype == "bfloat16" else 4

    @property
    def num_actor(self) -> int:
        """Parameters of the actor."""
        return num_parameters(self.model, with_value_head=self.companions.value_head)

    @property
    def num_critic(self) -> int:
        critic = self.companions.critic
        return 0 if critic is None else num_parameters(critic, with_value_head=True)

    @property
    def num_reference(self) -> int:
        """Parameters of a frozen reference; 0 if there is none, or it moves with the state."""
        frozen = any(stage.has_reference and not stage.moves_reference for stage in stages(self.config))
        return num_parameters(self.companions.reference or self.model) if frozen else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state, as it is saved; a rank holds, copies and sends its part."""
        moving = 4 * self.num_actor if self.companions.moving_reference else 0
        return _STATE_BYTES * (self.num_actor + self.num_critic) + moving

    def box_bytes(self, seat: Seat) -> int:
        """Bytes of the part of the state that a rank holds."""
        moving = 4 * self.num_actor if self.companions.moving_reference else 0
        return -(-(_STATE_BYTES * self.num_trained(seat) + moving) // seat.shards)

    def num_trained(self, seat: Seat) -> int:
        """Trained parameters of the layers that a rank computes."""
        return self._num_local(self.model, seat, self.companions.value_head) + self._num_critic_of(seat)

    def _num_critic_of(self, seat: Seat) -> int:
        critic = self.companions.critic
        return 0 if critic is None else self._num_local(critic, seat, True)

    def _num_local(self, config: ModelConfig, seat: Seat, with_value_head: bool = False) -> int:
        shapes = local_shapes(config, seat, with_value_head=with_value_head)
        own = {name: seat.tensors if cut_axis(name) is not None else 1 for name in shapes}
        return sum(math.prod(shape) // own[name] for name, shape in shapes.items())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint: the state, a frozen reference, and the weights as a Hugging Face folder."""
        return self.state_bytes + self._width * (self.num_reference + self.num_actor)

    def of_role(self, role: Role) -> ProcessMemory:
        """Memory of a process of this role; of the rank or server that needs most, if they differ."""
        processes = [name for name in self.computing() if role_of(name) is role]
        if not processes:
            return ProcessMemory({"process": PLAIN_PROCESS_BYTES})
        return max(map(self.of_process, processes), key=lambda each: (each.device_bytes, each.host_bytes))

    def of_process(self, process: str) -> ProcessMemory:
        """Memory of a rank or a server."""
        return self._rank(process) if role_of(process) is Role.MODEL else self._server()

    def of_host(self, roles: Iterable[Role]) -> int:
        """Bytes of the host's memory that processes of these roles need."""
        return sum(self.of_role(role).host_bytes for role in roles)

    def computing(self) -> list[str]:
        """Processes that hold a model: ranks, then servers."""
        config = self.config
        is_embedded = config.generation.backend == "embedded" and has_servers(config)
        ranks = [process_id(Role.MODEL, index) for index in range(config.actor.workers)]
        servers = config.generation.servers if is_embedded else 0
        return ranks + [process_id(Role.SERVER, index) for index in range(servers)]

    def on_device(self, index: int) -> list[str]:
        """Ranks and servers that use one card."""
        return [
            name for name in self.computing() if device_index(name, num_devices=self.num_devices) == index
        ]

    def needed_on_device(self, index: int) -> int:
        """Bytes without which the run fails on a card: peaks of its ranks, and servers with room for one request.

        With `cluster.share_device: offload` ranks and KV caches are there in turn.
        """
        names = self.on_device(index)
        num_servers = sum(role_of(name) is Role.SERVER for name in names)
        peaks, cache = self._rank_bytes(names, away=False), num_servers * self.request_bytes
        if self.config.cluster.share_device == "offload":
            in_turn = max(peaks, cache + self._rank_bytes(names, away=True))
            return num_servers * self.server_bytes + in_turn
        return num_servers * self.server_bytes + cache + peaks

    @property
    def needed_on_host(self) -> int:
        """Bytes of host memory that ranks and servers use at their peaks, with room for one request in each cache."""
        return sum(sum(self.host_parts(name).values()) for name in self.computing())

    @property
    def held_on_host(self) -> int:
        """Bytes of host memory that they use at every moment once steps are made."""
        parts = [self.host_parts(name) for name in self.computing()]
        return sum(size for each in parts for name, size in each.items() if name in _ALWAYS_HELD)

    def host_parts(self, process: str) -> dict[str, int]:
        """Host memory of a rank or server, whose cache holds one request."""
        parts = dict(self.of_process(process).host)
        return parts | {"KV cache": self.request_bytes} if "KV cache" in parts else parts

    def most_cache_bytes(self, process: str, *, total_bytes: int, foreign_bytes: int = 0) -> int:
        """Bytes that a server may use for its KV cache on a card of `total_bytes`, of which other programs use
        `foreign_bytes`. It depends on no process's present use, so it is the same whichever process starts first."""
        names = self.on_device(device_index(process, num_devices=self.num_devices))
        num_servers = max(1, sum(role_of(name) is Role.SERVER for name in names))
        ranks = self._rank_bytes(names, away=self.config.cluster.share_device == "offload")
        taken = foreign_bytes + ranks + num_servers * self.server_bytes
        return max(0, total_bytes - taken) // num_servers

    def _rank_bytes(self, names: Sequence[str], *, away: bool) -> int:
        """Bytes of these processes' ranks on their card, at their peak or while they are offloaded."""
        ranks = [self.of_process(name).device for name in names if role_of(name) is Role.MODEL]
        kept = ("context", "published")
        return sum(size for rank in ranks for name, size in rank.items() if not away or name in kept)

    @property
    def server_bytes(self) -> int:
        """Bytes of a server on its card, or on its host, apart from the KV cache: two versions of the weights, of which
        one is being loaded, and one decode step."""
        weights = 2 * self._width * num_parameters(self.model)
        context = CUDA_CONTEXT_BYTES if self.num_devices else 0
        return weights + self._decoding_bytes + context

    @property
    def _decoding_bytes(self) -> int:
        return 4 * self.config.generation.slots * (self.model.vocab_size + 8 * self.model.hidden_size)

    @property
    def _token_bytes(self) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self._width * self.model.num_layers * self.model.kv_size

    @property
    def request_bytes(self) -> int:
        """Bytes of the KV cache of the longest request; all of a cache whose size is given."""
        given = self.config.generation.kv_cache_gib
        if given is not None:
            return int(given * 2**30)
        return self._token_bytes * self.config.generation.max_length

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache that a server would use if it could."""
        given = self.config.generation.kv_cache_gib
        return self.request_bytes if given is not None else self.request_bytes * self.config.generation.slots

    def _server(self) -> ProcessMemory:
        weights = 2 * self._width * num_parameters(self.model)
        computed = {"weights": weights, "KV cache": self.cache_bytes, "decoding": self._decoding_bytes}
        return self._placed(computed, {})

    def _rank(self, process: str) -> ProcessMemory:
        seat = seat_of(process, mesh_of(self.config.actor.layout))
        kept = {
            "snapshots": 2 * self.box_bytes(seat) + self._width * self._num_reference_of(seat),
            "published": 2 * self._width * self.num_actor,
        }
        computed = self._trained(seat) | self._frozen(seat) | self._micro_batch(seat)
        computed |= self._start(computed)
        if self.num_devices:
            index = device_index(process, num_devices=self.num_devices)
            if any(role_of(name) is Role.SERVER for name in self.on_device(index)):
                del kept["published"]
                versions = 0 if shares_weights(self.config) else published_versions(self.config)
                computed["published"] = versions * self._width * self.num_actor
            computed["slack"] = int(SLACK * sum(computed.values()))
        return self._placed(computed, kept)

    def _placed(self, computed: Mapping[str, int], kept: Mapping[str, int]) -> ProcessMemory:
        """Put what is computed with on the card, if there is one."""
        if not self.num_devices:
            return ProcessMemory({"process": TORCH_PROCESS_BYTES, **computed, **kept})
        return ProcessMemory(
            {"process": CUDA_PROCESS_BYTES, **kept}, {**computed, "context": CUDA_CONTEXT_BYTES}
        )

    def _num_reference_of(self, seat: Seat) -> int:
        """Parameters of a frozen reference that a rank holds."""
        config = self.companions.reference or self.model
        if not self.num_reference:
            return 0
        copied = part_of(config, seat).has_copy
        return self._num_local(config, seat) + copied * config.vocab_size * config.hidden_size // seat.tensors

    def _trained(self, seat: Seat) -> dict[str, int]:
        """State, gradients and compute weights of the trained models."""
        if self.config.actor.layout.gathers_layers:
            return self._trained_by_units(seat)
        actor = self.config.actor
        trained, critic = self.num_trained(seat), self._num_critic_of(seat)
        # Sums of shards that wait for others, one per level of their tree; one model is trained at a time.
        waiting = (actor.num_shards // actor.data_parallel).bit_length() - 1
        found = {
            "state": self.box_bytes(seat),
            "gradient": _GRADIENT_BYTES * (trained + waiting * max(trained - critic, critic)),
        }
        if self._width < 4 or actor.layout.shards > 1:
            found["compute weights"] = self._width * trained
        part = part_of(self.model, seat)
        if part.is_tied and part.uses_embedding:
            matrices = 1 if part.has_copy else seat.stages
            size = self.model.vocab_size // seat.tensors * self.model.hidden_size
            found["tied embedding"] = matrices * self._width * size
        return found

    def _trained_by_units(self, seat: Seat) -> dict[str, int]:
        """The same where no rank has whole weights: the weights of a unit that is computed and of the next one, and
        the gradients of it and of the one before, here and from other ranks, with sums of shards that wait."""
        actor, critic = self.config.actor, self.companions.critic
        models = [(self.model, self.companions.value_head), *([(critic, True)] if critic is not None else [])]
        sizes = [size for each in models for size in self._unit_sizes(*each)]
        largest, second = sorted(sizes)[-1:-3:-1]
        waiting = (actor.num_shards // actor.data_parallel).bit_length() - 1
        return {
            "state": self.box_bytes(seat),
            "gradient": -(-_GRADIENT_BYTES * self.num_trained(seat) // seat.shards),
            "layers in use": self._width * (2 * largest + second)
            + _GRADIENT_BYTES * ((2 + waiting) * largest + second),
        }

    def _start(self, computed: Mapping[str, int]) -> dict[str, int]:
        """Memory at the start that exceeds what layers and activations take later: without whole weights a rank keeps
        those of the actor for a reference or critic that begins with them, until the first stage has begun."""
        if not (self.config.actor.layout.gathers_layers and stages(self.config)[0].begins_as_actor):
            return {}
        later = sum(computed.get(name, 0) for name in ("layers in use", "activations", "logits", "exchange"))
        return {"initial weights": max(0, self._width * self.num_actor - later)}

    def _unit_sizes(self, config: ModelConfig, with_value_head: bool) -> list[int]:
        """Parameters of embedding, layers and head."""
        sizes: dict[str, int] = {}
        for name, shape in local_shapes(config, with_value_head=with_value_head).items():
            layer = layer_of(name)
            unit = str(layer) if layer is not None else "head" if "embed" not in name else "embedding"
            sizes[unit] = sizes.get(unit, 0) + math.prod(shape)
        return list(sizes.values())

    @property
    def _rank_tokens(self) -> int:
        """Most tokens that a rank computes in one step."""
        longest = self.config.generation.max_length
        samples = max(
            each.algorithm.batch_size
            * (2 if each.algorithm.name in LEARN_PAIRS else each.algorithm.group_size)
            for each in stages(self.config)
        )
        return -(-samples // self.config.actor.data_parallel) * longest

    def _frozen(self, seat: Seat) -> dict[str, int]:
        """Models that are only evaluated."""
        moving = self.num_actor if self.companions.moving_reference and self._width < 4 else 0
        reward = self.companions.reward_model
        scored = 0 if reward is None else self._num_local(reward, seat, True)
        found = {
            "reference": self._width * (self._num_reference_of(seat) + moving),
            "reward model": self._width * scored,
        }
        return {name: size for name, size in found.items() if size}

    def _micro_batch(self, seat: Seat) -> dict[str, int]:
        """Activations of one micro-batch, logits of one chunk, and what the update needs besides. A pipeline stage
        keeps the activations of a micro-batch for itself and for each stage after it; with tied embeddings the last one
        keeps one more where a shard ends."""
        model, actor, width = self.model, self.config.actor, self._width
        longest = self.config.generation.max_length
        if any(stage.algorithm.name in LEARN_PAIRS for stage in stages(self.config)):
            longest *= 2  # Both completions of a pair are in one pass.
        most = actor.block_tokens(deterministic=self.config.deterministic, is_cpu=not self.num_devices)
        of_slices = (
            3 * (model.query_size + model.kv_size)
            + model.kv_size
            + 3 * model.query_size
            + 4 * model.intermediate_size
        )
        layer = width * (4 * model.hidden_size + of_slices // seat.tensors)
        part = part_of(model, seat)
        num_layers, at_once = len(part.layers), seat.stages - seat.stage
        if part.is_tied and part.is_last and self.config.deterministic:
            at_once += actor.num_shards > actor.data_parallel
        kept = width * model.hidden_size * num_layers + layer if actor.recompute else layer * num_layers
        ends = width * 6 * model.hidden_size
        vocab_size = model.vocab_size // seat.tensors
        output = vocab_size * model.hidden_size * (4 + width)
        pieces = 1 if actor.workers == 1 else 4
        activations = at_once * max(most, longest) * (kept + ends)
        if actor.layout.gathers_layers:
            stream = width * model.hidden_size * (num_layers + 2)
            activations = max(most, longest) * (layer + ends) + self._rank_tokens * stream
        found = {
            "activations": activations,
            "logits": 3 * 4 * _LOGPROB_CHUNK_TOKENS * vocab_size + output,
            "exchange": pieces * min(_PIECE_BYTES, 4 * self.num_actor),
        }
        return found if seat.is_last else {name: size for name, size in found.items() if name != "logits"}


def device_index(process: str, *, num_devices: int) -> int:
    """`[device_index(name, num_devices=4) for name in ("model-0", "model-1", "server-0")] == [0, 1, 3]`."""
    number = int(process.rpartition("-")[2])
    if role_of(process) is Role.SERVER:
        number = -1 - number
    return number % num_devices
