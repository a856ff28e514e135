"""What a probe of a server's weights can tell."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kintsugi.errors import ModelError
from kintsugi.generation.backends import probe
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer, initialize

ARCHITECTURE = ModelConfig(
    family="llama",
    vocab_size=40,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=64,
    tie_embeddings=True,
)
OLD, NEW = [-1.0, -2.0, -3.0], [-1.1, -2.1, -3.1]


def test_a_server_that_agrees_passes_with_its_difference() -> None:
    verdict = probe.judge({0: -1.1, 2: -3.2}, NEW, before=None)
    assert verdict.reason == "" and verdict.difference == pytest.approx(0.05)


@pytest.mark.parametrize("found", [{0: -9.0, 1: -2.1}, {0: float("nan"), 1: -2.1}])
def test_a_server_that_computes_another_model_does_not(found: dict[int, float]) -> None:
    assert "expected at most 0.5" in probe.judge(found, NEW, before=None).reason


def test_a_server_that_kept_the_weights_before_is_found_where_versions_can_be_told_apart() -> None:
    stale = {token: value + 0.001 for token, value in enumerate(OLD)}
    precise, rough = probe.Accepted(OLD, 0.001), probe.Accepted(OLD, 0.05)
    assert "what the weights before give" in probe.judge(stale, NEW, before=precise).reason
    assert probe.judge(stale, NEW, before=rough).reason == ""
    assert probe.judge(dict(enumerate(NEW)), NEW, before=precise).reason == ""


def test_a_server_that_took_a_part_of_the_weights_is_found_though_it_is_closer_to_the_new_ones() -> None:
    partly = {token: value + 0.03 for token, value in enumerate(NEW)}
    reason = probe.judge(partly, NEW, before=probe.Accepted(OLD, 1e-5)).reason
    assert "expected at most 0.0002" in reason and "it has not taken all of them" in reason
    assert probe.judge(partly, NEW, before=probe.Accepted(OLD, 0.01)).reason == "", "usual in bfloat16"
    assert probe.judge(partly, NEW, before=None).reason == "", "nothing is known of its arithmetic"


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_expected_answer_is_the_trainers(tie_embeddings: bool) -> None:
    model = Transformer(msgspec.structs.replace(ARCHITECTURE, tie_embeddings=tie_embeddings))
    initialize(model, seed=3)
    tokens = torch.tensor(probe.prompt(ARCHITECTURE.vocab_size))
    layout = PackedLayout.from_lengths([len(tokens)])
    with torch.inference_mode():
        logits = model.logits(model.forward_packed(tokens, layout.positions, layout))
    found = probe.answer(model.config, dict(model.named_parameters()))
    assert found == pytest.approx(torch.log_softmax(logits[-1], dim=-1).tolist(), abs=1e-5)


def test_weights_of_another_model_have_no_answer() -> None:
    model = Transformer(ARCHITECTURE)
    tensors = dict(model.named_parameters())
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match="exactly the model's parameters"):
        probe.answer(ARCHITECTURE, tensors)
