"""A small batch, and ranks that train on it: as threads of one process, over real gloo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from kintsugi.config.schema import (
    LEARN_PAIRS,
    ActorSection,
    AlgorithmSection,
    AsynchronySection,
    CriticSection,
    ReferenceSection,
    resolved,
)
from kintsugi.config.stages import Stage
from kintsugi.graph.algorithms import build_graph
from kintsugi.model.architecture import ModelConfig, value_config
from kintsugi.model.attention import PackedLayout
from kintsugi.model.plan import Companions
from kintsugi.model.seats import Mesh
from kintsugi.model.tensor_file import TensorFile
from kintsugi.model.tensor_slices import SliceName, view
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.training import RunCall
from kintsugi.samples.sharding import logical_shards, shards_of_rank
from kintsugi.training.calls import CallResult
from kintsugi.training.group import Groups
from kintsugi.training.initial_weights import new_model
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import sample_of
from kintsugi.training.process_group import ProcessGroup, join_group, join_groups
from kintsugi.training.rank_state import Update
from kintsugi.training.state import TrainingState
from kintsugi.training.tensor_row import tensor_group
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer
from kintsugi.types import FinishReason, Role, ShardItem, Trajectory

TINY = ModelConfig(
    family="qwen2",
    vocab_size=14,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    tie_embeddings=True,
    attention_bias=True,
)
T = TypeVar("T")

LONGEST = 24
CPU = torch.device("cpu")


def new_state(
    stage: Stage,
    *,
    config: ModelConfig = TINY,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    recompute: bool = False,
    shares_weights: bool = False,
) -> TrainingState:
    model = Transformer(config, device=device)
    initialize(model, seed=3)
    state = TrainingState(
        model,
        companions=companions_of(stage),
        compute_dtype=dtype,
        recompute=recompute,
        shares_weights=shares_weights,
    )
    state.start_stage(stage, step=stage.first_step - 1)
    return state


@torch.no_grad()
def fill_from_seed(model: Transformer, *, seed: int) -> None:
    """Initialise a model, or slices of it, as the whole model is."""
    whole = Transformer(model.config, with_value_head=True, device=model.device)
    initialize(whole, seed=seed)
    named = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        where = SliceName.parse(name)
        parameter.copy_(view(named[where.name], where))


class StoredTensors:
    """A state that is stored in tensors of the test."""

    has_any_box = False

    def __init__(self, tensors: Mapping[str, Tensor], *, box: str = "") -> None:
        self.box = box
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.places = {place.name: place for place in TensorFile(self._tensors).places}

    def read(
        self, into: Mapping[str, Tensor], *, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> None:
        for name, tensor in into.items():
            tensor.copy_(self._tensors[name])


def new_stage(
    *,
    actor: ActorSection | None = None,
    critic: CriticSection | None = None,
    reference: ReferenceSection | None = None,
    asynchrony: AsynchronySection | None = None,
    first_step: int = 1,
    **algorithm: object,
) -> Stage:
    section = resolved(msgspec.convert({"name": "grpo", **algorithm}, AlgorithmSection))
    return Stage(
        section.name,
        first_step,
        section,
        actor or ActorSection(),
        0,
        critic or CriticSection(),
        reference or ReferenceSection(),
        asynchrony=asynchrony or AsynchronySection(),
    )


def companions_of(stage: Stage, *, config: ModelConfig = TINY) -> Companions:
    """As they are planned for a run of this stage alone."""
    return Companions(
        value_head=stage.algorithm.name == "reward_model",
        critic=value_config(config) if stage.has_critic else None,
        moving_reference=stage.moves_reference,
    )


def trajectory(key: str, *, num_tokens: int, num_loss_tokens: int, seed: int) -> Trajectory:
    random = np.random.default_rng(seed)
    mask = np.zeros(num_tokens, dtype=np.uint8)
    mask[num_tokens - num_loss_tokens :] = 1
    logprobs = np.where(mask, -2.6 + random.normal(size=num_tokens) * 0.2, 0.0)
    return Trajectory(
        key=key,
        tokens=random.integers(0, TINY.vocab_size, num_tokens).astype("<i4").tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        versions=np.where(mask, 0, -1).astype("<i4").tobytes(),
        finish=FinishReason.EOS,
    )


@dataclass(frozen=True)
class Batch:
    """Trajectories by key, and what the master knows of them."""

    trajectories: dict[str, Trajectory]
    items: tuple[ShardItem, ...]

    @property
    def totals(self) -> dict[str, float]:
        learned = [item for item in self.items if item.num_loss_tokens and item.values.get("mask", 1.0)]
        return {
            "tokens": float(sum(item.num_loss_tokens for item in learned)),
            "sequences": float(len(learned)),
            "constant": float(len(learned) * LONGEST),
            "groups": float(len({item.key.rpartition("/")[0] for item in learned})),
        }

    def call(
        self, stage: Stage, *, step: int, rank: int, world_size: int, num_shards: int, interface: str = ""
    ) -> RunCall:
        shards = logical_shards(
            self.items, num_shards=num_shards, keep_groups=stage.algorithm.name in LEARN_PAIRS
        )
        mine = shards_of_rank(num_shards, rank=rank, world_size=world_size)
        interface = interface or ("sft_train" if stage.algorithm.name == "sft" else "policy_train")
        return RunCall(
            call=interface,
            interface=interface,
            step=step,
            shards=tuple(shards[index] for index in mine),
            num_shards=num_shards,
            totals=self.totals,
            generation=1,
            arguments={"temperature": 1.0},
            stage=stage.name,
            prepares=interface == calls_of(stage)[-1],
        )


def calls_of(stage: Stage) -> list[str]:
    """The interfaces of a stage's model calls, in the graph's order."""
    graph = build_graph(stage)
    return [graph.calls[name].interface for name in graph.order if graph.calls[name].role is Role.MODEL]


def rewarded(batch: Batch) -> Batch:
    """The same batch as an algorithm finds it whose tokens have advantages of their own: every third sample was cut off
    by length, and every seventh is masked."""
    items = [
        msgspec.structs.replace(
            item,
            values={
                "reward": float(index % 2) - 0.25,
                "truncated": float(index % 3 == 0),
                "mask": float(index % 7 > 0),
            },
        )
        for index, item in enumerate(batch.items)
    ]
    return Batch(batch.trajectories, tuple(items))


def new_pairs(num_pairs: int) -> Batch:
    """Chosen and rejected completions of different lengths."""
    lengths = [(4 + (index * 5) % 17, 1 + index % 3) for index in range(2 * num_pairs)]
    return new_batch(lengths, group_size=2)


def new_batch(lengths: Sequence[tuple[int, int]], *, group_size: int = 4) -> Batch:
    """One sample per (tokens, loss tokens)."""
    trajectories, items = {}, []
    for index, (num_tokens, num_loss_tokens) in enumerate(lengths):
        key = f"grpo:0:{index // group_size}:0/{index % group_size}"
        sample = trajectory(key, num_tokens=num_tokens, num_loss_tokens=num_loss_tokens, seed=index)
        advantage = float(np.random.default_rng(1000 + index).normal())
        digest = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(sample))
        trajectories[key] = sample
        items.append(
            ShardItem(key, "rollout-0", digest, num_tokens, num_loss_tokens, {"advantage": advantage})
        )
    return Batch(trajectories, tuple(items))


def every_length() -> Batch:
    """Lengths 1 to the longest; the sample of one token can have no loss, and one long sample is fully masked."""
    lengths = [
        (length, (length * 7) % (length - 1) + 1 if length > 1 else 0) for length in range(1, LONGEST + 1)
    ]
    return new_batch([*lengths, (LONGEST, 0), (LONGEST, LONGEST - 1)])


def sampled_by(model: Transformer, batch: Batch, *, temperature: float) -> Batch:
    """The same batch as if `model` had sampled it."""
    trajectories = {}
    for item in batch.items:
        sample = batch.trajectories[item.key]
        tokens = torch.frombuffer(bytearray(sample.tokens), dtype=torch.int32).long()
        layout = PackedLayout.from_lengths([len(tokens)])
        hidden = model.forward_packed(tokens, layout.positions, layout)
        logits = model.logits(hidden)[:-1] / temperature
        chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        mask = torch.frombuffer(bytearray(sample.loss_mask), dtype=torch.uint8)
        logprobs = torch.cat((torch.zeros(1), chosen.detach())) * mask
        trajectories[item.key] = msgspec.structs.replace(sample, logprobs=logprobs.numpy().tobytes())
    return Batch(trajectories, batch.items)


def run_call(batch: Batch, call: RunCall, *, calls: ModelCalls, group: ProcessGroup | Groups) -> CallResult:
    shards = {
        shard.index: [sample_of(item, batch.trajectories[item.key]) for item in shard.items]
        for shard in call.shards
    }
    groups = group if isinstance(group, Groups) else Groups.of(group)
    return calls.run(call, shards, groups=groups)


@dataclass
class Outcome:
    """Where a rank stands after its steps."""

    digests: list[str]
    gradient: Tensor
    """Of the last update as it was summed over ranks."""
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    outputs: dict[str, dict[str, float]]
    """Scalars of this rank's samples."""


class RecordingState(TrainingState):
    """Keeps the gradient that it was given."""

    given: Tensor

    def update(self, gradient: Tensor, *, part: str = "actor", groups: Groups | None = None) -> Update:
        self.given = gradient.clone()
        return super().update(gradient, part=part, groups=groups)


def train(
    batch: Batch | Callable[[int], Batch],
    *,
    stage: Stage,
    world_size: int,
    num_shards: int,
    deterministic: bool = True,
    num_steps: int = 2,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    boxes: int = 1,
    mesh: Mesh | None = None,
    config: ModelConfig = TINY,
    num_slices: int = 1,
    gathers_layers: bool = False,
    recompute: bool = False,
) -> list[Outcome]:
    """The outcome of every rank of a world; its steps have the same batch, or each its own. `boxes`: the number of
    parts into which the state is cut, or in the `mesh` more precisely. `num_slices`: logical tensor slices of the
    models. `gathers_layers`: no rank has whole weights."""
    mesh = mesh or Mesh(boxes)
    batch_of = (lambda step: batch) if isinstance(batch, Batch) else batch

    def rank_main(rank: int, group: Groups) -> Outcome:
        seat = mesh.seat(rank)
        tensors, has_head = tensor_group(seat, num_slices=num_slices), stage.algorithm.name == "reward_model"
        model = new_model(config, with_value_head=has_head, device=device, seat=seat, tensors=tensors)
        fill_from_seed(model, seed=3)
        state = RecordingState(
            model,
            companions=companions_of(stage, config=config),
            compute_dtype=dtype,
            seat=seat,
            tensors=tensors,
            gathers_layers=gathers_layers,
            recompute=recompute,
        )
        state.start_stage(stage, step=0)
        calls = ModelCalls(state, deterministic=deterministic)
        digests: list[str] = []
        metrics: dict[str, float] = {}
        outputs: dict[str, dict[str, float]] = {}
        for step in range(1, num_steps + 1):
            present = batch_of(step)
            for interface in calls_of(stage):
                call = present.call(
                    stage,
                    step=step,
                    rank=mesh.data_index(rank),
                    world_size=world_size // mesh.model_ranks,
                    num_shards=num_shards,
                    interface=interface,
                )
                result = run_call(present, call, calls=calls, group=group)
                metrics |= result.metrics
                for name, values in result.outputs.items():
                    outputs.setdefault(name, {}).update(values)
            digests.append(state.digest())
            state.commit(step)
            calls.forget()
        found = state.gathered_weights(group.data) if gathers_layers else state.weights()
        weights = {name: tensor.clone() for name, tensor in found.items()}
        return Outcome(digests, state.given, weights, metrics, outputs)

    return in_mesh(mesh, rank_main, world_size=world_size, device=device, is_tied=config.tie_embeddings)


def in_mesh(
    mesh: Mesh,
    rank_main: Callable[[int, Groups], T],
    *,
    world_size: int,
    device: torch.device = CPU,
    is_tied: bool = False,
) -> list[T]:
    """Run a function on every rank of a mesh, one thread each, and give what they return."""
    ranks = [f"model-{rank}" for rank in range(world_size)]
    keys = new_key_pair()
    server = StoreServer(keys=keys)

    def run(rank: int) -> T:
        groups = join_groups(
            mesh,
            group_id=1,
            ranks=ranks,
            me=ranks[rank],
            store_address=server.address,
            keys=keys,
            device=device,
            timeout_s=30.0,
            is_tied=is_tied,
        )
        try:
            return rank_main(rank, groups)
        finally:
            groups.close()

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(run, range(world_size)))
    server.close()
    return results


def in_world(
    world_size: int, rank_main: Callable[[int, ProcessGroup], T], *, device: torch.device = CPU
) -> list[T]:
    """Run a function on every rank of a group, one thread each, and give what they return."""
    ranks = [f"model-{rank}" for rank in range(world_size)]
    keys = new_key_pair()
    server = StoreServer(keys=keys)

    def run(rank: int) -> T:
        group = join_group(
            group_id=1,
            ranks=ranks,
            me=ranks[rank],
            store_address=server.address,
            keys=keys,
            device=device,
            timeout_s=20.0,
        )
        try:
            return rank_main(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(run, range(world_size)))
    server.close()
    return results
