"""Losses of custom algorithms on the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kintsugi.errors import UserError
from kintsugi.graph.algorithms import MODEL_INTERFACES
from kintsugi.training.model_calls import ModelCalls
from tests.unit.training.world import every_length, new_stage, new_state, train

FILE = """
from kintsugi import CustomAlgorithm

def clipped(tokens, settings):
    import torch
    ratio = (tokens.logprobs - tokens.proximal_logprobs).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)

same = CustomAlgorithm(base="grpo", token_loss=clipped)
other = CustomAlgorithm(base="grpo", token_loss=lambda tokens, settings: -tokens.logprobs * tokens.advantages)
whole = CustomAlgorithm(base="grpo", token_loss=lambda tokens, settings: tokens.logprobs.mean())
constant = CustomAlgorithm(base="grpo", token_loss=lambda tokens, settings: tokens.logprobs.detach())
nothing = CustomAlgorithm(base="grpo", token_loss=lambda tokens, settings: None)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "losses.py"
    path.write_text(FILE)
    return path


def test_a_loss_that_computes_the_same_as_the_built_in_one_gives_the_same_bits(file: Path) -> None:
    stage, custom = (new_stage(updates_per_step=2, custom=each) for each in (None, f"{file}:same"))
    (built_in,) = train(every_length(), stage=stage, world_size=1, num_shards=4)
    for outcome in train(every_length(), stage=custom, world_size=2, num_shards=4):
        assert outcome.digests == built_in.digests
        assert outcome.metrics == built_in.metrics


def test_another_loss_gives_other_weights(file: Path) -> None:
    stage, custom = (new_stage(updates_per_step=2, custom=each) for each in (None, f"{file}:other"))
    (built_in,) = train(every_length(), stage=stage, world_size=1, num_shards=4)
    (other,) = train(every_length(), stage=custom, world_size=1, num_shards=4)
    assert other.digests != built_in.digests and other.metrics["loss"] != built_in.metrics["loss"]
    assert all(torch.isfinite(tensor).all() for tensor in other.weights.values())


@pytest.mark.parametrize(("name", "found"), [("whole", r"shape \(\)"), ("nothing", "NoneType")])
def test_what_is_not_one_loss_per_token_is_named(file: Path, name: str, found: str) -> None:
    expected = (
        rf"`algorithm.custom`: expected one loss per token from `token_loss` of .*:{name}, .*, got {found}"
    )
    with pytest.raises(UserError, match=expected):
        train(every_length(), stage=new_stage(custom=f"{file}:{name}"), world_size=1, num_shards=4)


def test_a_loss_without_a_gradient_is_named(file: Path) -> None:
    with pytest.raises(
        UserError, match=r"expected a loss with a gradient from `token_loss` of .*:constant, got one"
    ):
        train(every_length(), stage=new_stage(custom=f"{file}:constant"), world_size=1, num_shards=4)


def test_the_interfaces_that_graphs_may_name_are_those_of_the_ranks() -> None:
    calls = ModelCalls(new_state(new_stage()), deterministic=True)
    assert set(calls._interfaces) == MODEL_INTERFACES
