"""Pipeline stages: the order of their passes, and training with the bits of one rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.config import schema
from kintsugi.config.schema import ActorSection, CriticSection
from kintsugi.config.stages import Stage
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.partition import local_shapes, part_of
from kintsugi.model.seats import Mesh, Seat
from kintsugi.training.pipeline import Action, Work, completed, schedule
from tests.unit.training.world import TINY, Batch, Outcome, new_batch, new_pairs, new_stage, train

SHAPES: dict[str, ModelConfig] = {
    "llama": msgspec.structs.replace(
        TINY, family="llama", tie_embeddings=False, attention_bias=False, num_layers=5
    ),
    "qwen2": msgspec.structs.replace(TINY, tie_embeddings=False, num_layers=3),
    "qwen3": msgspec.structs.replace(
        TINY, family="qwen3", tie_embeddings=False, attention_bias=False, qk_norm=True, num_layers=3
    ),
}
TIED = {
    f"tied {name}": msgspec.structs.replace(config, tie_embeddings=True) for name, config in SHAPES.items()
}
SHAPES |= TIED
SETTINGS = ActorSection(learning_rate=1e-2, max_grad_norm=0.5)
STAGES: dict[str, Stage] = {
    "sft": new_stage(name="sft", actor=SETTINGS),
    "grpo": new_stage(name="grpo", beta=0.1, updates_per_step=2, actor=SETTINGS),
    "ppo": new_stage(name="ppo", beta=0.1, actor=SETTINGS),
    "dpo": new_stage(name="dpo", beta=0.1, actor=SETTINGS),
    "reward_model": new_stage(name="reward_model", actor=SETTINGS),
}
LENGTHS = [(4 + (index * 5) % 17, 1 + index % 3) for index in range(16)]


def order(stage: int, stages: int, num_batches: int) -> list[Action]:
    return list(schedule(stage=stage, stages=stages, num_batches=num_batches))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 7])
def test_every_stage_passes_every_micro_batch_forward_and_then_backward_in_order(
    stages: int, num_batches: int
) -> None:
    for stage in range(stages):
        actions = order(stage, stages, num_batches)
        assert [each.batch for each in actions if each.work is Work.FORWARD] == list(range(num_batches))
        assert [each.batch for each in actions if each.work is Work.BACKWARD] == list(range(num_batches))
        places = {action: place for place, action in enumerate(actions)}
        assert all(
            places[Action(Work.FORWARD, n)] < places[Action(Work.BACKWARD, n)] for n in range(num_batches)
        )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_keeps_activations_of_no_more_micro_batches_than_stages_from_it_on(stages: int) -> None:
    for stage in range(stages):
        alive = most = 0
        for action in order(stage, stages, 9):
            alive += -1 if action.work is Work.BACKWARD else 1
            most = max(most, alive)
        assert most == stages - stage


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [1, 4, 9])
def test_passes_of_equal_length_take_as_long_as_the_bubble_says(stages: int, num_batches: int) -> None:
    queues = [order(stage, stages, num_batches) for stage in range(stages)]
    assert num_units(queues) == 2 * (num_batches + stages - 1)


def num_units(queues: Sequence[list[Action]]) -> int:
    """Units of time in which all stages do one pass each, unless what they need has not arrived; none waits for ever.
    Completions take no time."""
    stages = len(queues)
    done: dict[tuple[int, Action], int] = {}
    now = 0

    def has_arrived(stage: int, action: Action) -> bool:
        if action.work is Work.COMPLETION:
            return done.get((0, Action(Work.BACKWARD, action.batch)), now) < now
        neighbour = stage + 1 if action.work is Work.BACKWARD else stage - 1
        return neighbour in (-1, stages) or done.get((neighbour, action), now) < now

    while any(queues):
        finished = []
        for stage, queue in enumerate(queues):
            while queue and queue[0].work is Work.COMPLETION and has_arrived(stage, queue[0]):
                queue.pop(0)
            if queue and queue[0].work is not Work.COMPLETION and has_arrived(stage, queue[0]):
                finished.append((stage, queue.pop(0)))
        assert finished or not any(queues), "every stage waits"
        done |= dict.fromkeys(finished, now)
        now += bool(finished)
    return now


SHARDS = [(1, 1, 1, 1), (4, 4), (3, 1, 2), (8,)]
"""Micro-batches of each shard."""


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_with_tied_embeddings_a_shard_is_complete_before_the_backward_passes_of_the_next(
    stages: int, shards: Sequence[int]
) -> None:
    ends = [total - 1 for total in accumulate(shards)]
    actions = list(completed(order(stages - 1, stages, sum(shards)), stages=stages, ends=ends))
    assert [each.batch for each in actions if each.work is Work.COMPLETION] == list(range(sum(shards)))
    held: set[int] = set()
    for action in actions:
        if action.work is Work.COMPLETION:
            held.remove(action.batch)
        if action.work is Work.BACKWARD:
            shard = bisect_left(ends, action.batch)
            assert all(bisect_left(ends, batch) == shard for batch in held)
            held.add(action.batch)
            assert len(held) <= stages, "gradients that are kept until the first stage sends its part"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_within_a_shard_a_completion_waits_for_no_pass_that_another_order_would_have_made_earlier(
    stages: int,
) -> None:
    """Passes of equal length take as long as without tied embeddings if completions take no time."""
    num_batches = 9
    queues = [order(stage, stages, num_batches) for stage in range(stages)]
    queues[-1] = list(completed(queues[-1], stages=stages, ends={num_batches - 1}))
    assert num_units(queues) == 2 * (num_batches + stages - 1)


@pytest.mark.parametrize("config", [SHAPES["llama"], SHAPES["tied llama"]], ids=["llama", "tied"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_have_every_parameter_once_and_layers_in_order(stages: int, config: ModelConfig) -> None:
    parts = [part_of(config, Seat(stage=stage, stages=stages)) for stage in range(stages)]
    assert [layer for part in parts for layer in part.layers] == list(range(config.num_layers))
    assert max(len(part.layers) for part in parts) - min(len(part.layers) for part in parts) <= 1
    names = [
        name
        for stage in range(stages)
        for name in local_shapes(config, Seat(stage=stage, stages=stages), with_value_head=True)
    ]
    assert sorted(names) == sorted(local_shapes(config, with_value_head=True))


def rewarded(batch: Batch) -> Batch:
    """The same samples, each with a reward."""
    items = (
        msgspec.structs.replace(item, values={**item.values, "reward": index % 3 / 2})
        for index, item in enumerate(batch.items)
    )
    return Batch(batch.trajectories, tuple(items))


def weights_of(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, tensor in outcome.weights.items():
            assert name not in found or torch.equal(found[name], tensor), f"{name} differs between ranks"
            found[name] = tensor
    return found


def outcomes(
    name: str,
    shape: str,
    mesh: Mesh,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
) -> list[Outcome]:
    batch = new_pairs(8) if name in ("dpo", "reward_model") else rewarded(new_batch(LENGTHS))
    return train(
        batch,
        stage=STAGES[name],
        world_size=replicas * mesh.boxes,
        num_shards=4,
        mesh=mesh,
        config=SHAPES[shape],
        dtype=dtype,
        deterministic=deterministic,
    )


def assert_equal(found: Sequence[Outcome], expected: Outcome) -> None:
    weights = weights_of(found)
    assert weights.keys() == expected.weights.keys()
    different = [name for name, tensor in weights.items() if not torch.equal(tensor, expected.weights[name])]
    assert not different
    for outcome in found:
        apart = {"update_ratio"}  # Estimated from other weights.
        assert {name: value for name, value in outcome.metrics.items() if name not in apart} == {
            name: value for name, value in expected.metrics.items() if name not in apart
        }


QUICK = [
    ("sft", "llama", Mesh(stages=2), 1),
    ("grpo", "qwen2", Mesh(stages=2), 1),
    ("sft", "qwen3", Mesh(stages=3), 1),
    ("grpo", "tied qwen2", Mesh(stages=2), 1),
    ("sft", "tied qwen3", Mesh(stages=3), 1),
]
CASES = [
    ("grpo", "llama", Mesh(shards=2, stages=2), 1),
    ("grpo", "qwen3", Mesh(stages=2), 2),
    ("ppo", "qwen2", Mesh(stages=2), 1),
    ("dpo", "llama", Mesh(stages=3), 1),
    ("reward_model", "qwen2", Mesh(stages=2), 1),
    ("grpo", "tied llama", Mesh(shards=2, stages=2), 1),
    ("grpo", "tied qwen3", Mesh(stages=3), 2),
    ("ppo", "tied qwen2", Mesh(stages=2), 1),
    ("dpo", "tied llama", Mesh(stages=3), 1),
    ("reward_model", "tied qwen2", Mesh(stages=2), 1),
]


@pytest.mark.parametrize(
    ("name", "shape", "mesh", "replicas"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
    ids=[f"{n}-{s}-{m}-{r}" for n, s, m, r in [*QUICK, *CASES]],
)
def test_stages_end_with_the_bits_of_one_rank(name: str, shape: str, mesh: Mesh, replicas: int) -> None:
    (expected,) = outcomes(name, shape, Mesh())
    found = outcomes(name, shape, mesh, replicas=replicas)
    assert_equal(found, expected)
    values = [outcome.outputs for rank, outcome in enumerate(found) if mesh.seat(rank).is_last]
    merged = {
        output: {key: value for each in values for key, value in each[output].items()}
        for output in expected.outputs
    }
    assert merged == expected.outputs
    assert not any(outcome.outputs for rank, outcome in enumerate(found) if not mesh.seat(rank).is_last)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3", "tied qwen3"])
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_that_compute_in_bfloat16_end_with_the_bits_of_one_rank(stages: int, shape: str) -> None:
    (expected,) = outcomes("grpo", shape, Mesh(), dtype=torch.bfloat16)
    assert_equal(outcomes("grpo", shape, Mesh(stages=stages), dtype=torch.bfloat16), expected)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        (Mesh(stages=2), torch.float32),
        pytest.param(Mesh(shards=2, stages=2), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(Mesh(stages=3), torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tied_embeddings_learn_alike_in_shards_of_several_micro_batches(
    mesh: Mesh, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "CPU_BLOCK_TOKENS", 16)
    (expected,) = outcomes("grpo", "tied qwen2", Mesh(), dtype=dtype)
    assert_equal(outcomes("grpo", "tied qwen2", mesh, dtype=dtype), expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["llama", "tied llama"])
def test_without_equal_bits_stages_train_nearly_alike(shape: str) -> None:
    (expected,) = outcomes("grpo", shape, Mesh(), deterministic=False)
    found = outcomes("grpo", shape, Mesh(stages=2), replicas=2, deterministic=False)
    weights = weights_of(found)
    assert weights.keys() == expected.weights.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected.weights[name], atol=1e-3), name


def test_a_critic_that_warms_up_lets_the_actor_wait_in_every_stage() -> None:
    stage = new_stage(name="ppo", actor=SETTINGS, critic=CriticSection(warmup_steps=1))
    batch = rewarded(new_batch(LENGTHS))

    def of(mesh: Mesh) -> list[Outcome]:
        return train(
            batch,
            stage=stage,
            world_size=mesh.boxes,
            num_shards=4,
            num_steps=1,
            mesh=mesh,
            config=SHAPES["llama"],
        )

    (expected,) = of(Mesh())
    assert_equal(of(Mesh(stages=2)), expected)
