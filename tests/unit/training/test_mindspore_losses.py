"""MindSpore and torch find the same losses, gradients, log-probabilities and updates on a saved batch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kintsugi.config.schema import AlgorithmSection, Config, ModelSection, NewModel
from kintsugi.config.stages import stages
from kintsugi.model.plan import plan_architecture
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.training.batch import pack
from kintsugi.training.group import Groups
from kintsugi.training.host_weights import initialize as initialize_host
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.objectives import PolicyGradient, Supervised, token_logprobs
from kintsugi.training.packing import sample_of
from kintsugi.training.state import TrainingState
from kintsugi.training.step_cache import StepCache
from tests.cluster.mindspore_interpreter import PYTHON, needs_mindspore
from tests.unit.training.test_model_calls import alone
from tests.unit.training.world import CPU, new_batch

PROGRAM = Path(__file__).with_name("mindspore_program.py")
ROOT = Path(__file__).parents[3]
BATCH = new_batch([(8, 3), (12, 7), (5, 1), (9, 2), (16, 5), (7, 4), (3, 1), (20, 9)])
ALGORITHMS = {
    "sft": AlgorithmSection(name="sft"),
    "grpo": AlgorithmSection(name="grpo", entropy_weight=0.01),
    "rloo": AlgorithmSection(name="rloo"),
    "gspo": AlgorithmSection(name="gspo", clip_low=0.2, clip_high=0.2),
    "recompute": AlgorithmSection(
        name="dr_grpo", proximal="recompute", importance="mask", importance_cap=1.1
    ),
}


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    [("sft", "llama"), ("grpo", "qwen2"), ("rloo", "llama"), ("gspo", "qwen3"), ("recompute", "llama")],
)
def test_losses_gradients_and_logprobs_of_both_frameworks_agree(
    name: str, family: str, tmp_path: Path
) -> None:
    new = NewModel(
        family=family,  # type: ignore[arg-type]
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        max_positions=64,
    )
    config = Config(name="test", model=ModelSection(new=new), algorithm=ALGORITHMS[name])
    stage = stages(config)[-1]
    model = Transformer(plan_architecture(config))
    initialize(model, seed=3)
    weights: dict[str, Any] = {key: value.detach().numpy().copy() for key, value in model.named_parameters()}
    call = BATCH.call(stage, step=stage.first_step, rank=0, world_size=1, num_shards=1)
    given = {"config": config, "call": call, "trajectories": BATCH.trajectories}
    (tmp_path / "batch").write_bytes(msgspec.msgpack.encode(given))
    np.savez(tmp_path / "weights.npz", **weights)
    output = tmp_path / "found.npz"
    subprocess.run(
        [str(PYTHON), str(PROGRAM), str(tmp_path / "batch"), str(tmp_path / "weights.npz"), str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
    )
    found = np.load(output)

    state = TrainingState(model)
    state.start_stage(stage, step=stage.first_step - 1)
    samples = [sample_of(item, BATCH.trajectories[item.key]) for shard in call.shards for item in shard.items]
    batch = pack(sorted(samples, key=lambda sample: sample.key), device=CPU)
    objective = (Supervised if name == "sft" else PolicyGradient)(state, StepCache())
    expected = objective.loss(batch, call)
    with torch.no_grad():
        logprobs, _ = token_logprobs(state.model, batch, temperature=1.0)
    contribution = ModelCalls(state, deterministic=True)._contributions(
        {0: [batch]}, call=call, objective=objective, groups=Groups.of(alone()), learns=True
    )([batch])
    views = state._layout.actor.views(contribution.gradient.clone())
    assert abs(float(found["loss"]) - float(expected.loss.detach())) < 1e-5
    assert np.abs(found["logprobs"] - logprobs.numpy()).max() < 1e-5
    for key, view in views.items():
        np.testing.assert_allclose(found[f"gradient/{key}"], view.numpy(), atol=1e-5, rtol=1e-4)
    sums = [float(expected.sums[key]) for key in sorted(expected.sums)]
    np.testing.assert_allclose(found["sums"], sums, atol=1e-4)
    state.begin_update()
    state.update(contribution.gradient)
    for key, view in state._layout.actor.views(state._weights).items():
        np.testing.assert_allclose(found[f"updated/{key}"], view.numpy(), atol=1e-4)


def test_a_new_model_has_the_same_weights_in_both_frameworks() -> None:
    config = Config(name="test", model=ModelSection(new=NewModel()))
    model = Transformer(plan_architecture(config))
    initialize(model, seed=5)
    host = {key: np.empty(value.shape, dtype=np.float32) for key, value in model.named_parameters()}
    initialize_host(host, 5, num_layers=model.config.num_layers)
    for key, value in model.named_parameters():
        np.testing.assert_allclose(host[key], value.detach().numpy(), atol=1e-6)
