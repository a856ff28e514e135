"""Pipeline stages: the order of their passes, and training with the bits of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import ActorSection, CriticSection
from kintsugi.config.stages import Stage
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.partition import local_shapes, part_of
from kintsugi.model.seats import Mesh, Seat
from kintsugi.training.pipeline import Action, schedule
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
        assert [each.batch for each in actions if not each.is_backward] == list(range(num_batches))
        assert [each.batch for each in actions if each.is_backward] == list(range(num_batches))
        places = {action: place for place, action in enumerate(actions)}
        assert all(places[Action(False, n)] < places[Action(True, n)] for n in range(num_batches))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_stage_keeps_activations_of_no_more_micro_batches_than_stages_from_it_on(stages: int) -> None:
    for stage in range(stages):
        alive = most = 0
        for action in order(stage, stages, 9):
            alive += -1 if action.is_backward else 1
            most = max(most, alive)
        assert most == stages - stage


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [1, 4, 9])
def test_passes_of_equal_length_take_as_long_as_the_bubble_says(stages: int, num_batches: int) -> None:
    """All stages do one pass per unit of time, unless what they need has not arrived; none waits for ever."""
    queues = [order(stage, stages, num_batches) for stage in range(stages)]
    done: dict[tuple[int, Action], int] = {}
    now = 0
    while any(queues):
        finished = []
        for stage, queue in enumerate(queues):
            if queue:
                action = queue[0]
                neighbour = stage + 1 if action.is_backward else stage - 1
                if neighbour in (-1, stages) or done.get((neighbour, action), now) < now:
                    finished.append((stage, queue.pop(0)))
        assert finished, "every stage waits"
        done |= dict.fromkeys(finished, now)
        now += 1
    assert now == 2 * (num_batches + stages - 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_have_every_parameter_once_and_layers_in_order(stages: int) -> None:
    config = SHAPES["llama"]
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
]
CASES = [
    ("grpo", "llama", Mesh(shards=2, stages=2), 1),
    ("grpo", "qwen3", Mesh(stages=2), 2),
    ("ppo", "qwen2", Mesh(stages=2), 1),
    ("dpo", "llama", Mesh(stages=3), 1),
    ("reward_model", "qwen2", Mesh(stages=2), 1),
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
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_that_compute_in_bfloat16_end_with_the_bits_of_one_rank(stages: int) -> None:
    (expected,) = outcomes("grpo", "qwen3", Mesh(), dtype=torch.bfloat16)
    assert_equal(outcomes("grpo", "qwen3", Mesh(stages=stages), dtype=torch.bfloat16), expected)


@pytest.mark.slow
def test_without_equal_bits_stages_train_nearly_alike() -> None:
    (expected,) = outcomes("grpo", "llama", Mesh(), deterministic=False)
    found = outcomes("grpo", "llama", Mesh(stages=2), replicas=2, deterministic=False)
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
