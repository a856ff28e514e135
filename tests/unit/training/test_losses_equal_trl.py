"""On a saved batch, loss and gradient of every weight are those of TRL 1.16's own trainers.

The numbers are made by `benchmarks/trl_losses.py`. Theirs come from padded rows and transformers' model, ours from
packed tokens and our own; sampler, reference and advantages are given, so what is compared is the loss. TRL's names:
`loss_type` grpo, dapo, dr_grpo; GSPO is `importance_sampling_level="sequence"`; the KL is with its default
`use_bias_correction_kl`. TRL has no PPO or REINFORCE++, and weighs the KL in GSPO by the sequence's ratio.
"""

from __future__ import annotations

import json
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import AlgorithmSection, resolved
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout
from kintsugi.model.transformer import Transformer
from kintsugi.training.losses import (
    dpo_loss,
    policy_loss,
    reward_model_loss,
    sequence_sums,
    sft_loss,
    token_weights,
)

SAVED: dict[str, Any] = json.loads(Path(__file__).with_name("trl_losses.json").read_text(encoding="utf-8"))
SAMPLES, PAIRS = SAVED["samples"], SAVED["pairs"]
TOKENS = [sample["prompt"] + sample["completion"] for sample in SAMPLES]


def saved_model() -> Transformer:
    config = ModelConfig.from_huggingface({"model_type": "llama", **SAVED["model"]})
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(SAVED["weights"][name]).view_as(parameter))
    return model


def hidden_states(model: Transformer) -> Tensor:
    layout = PackedLayout.from_lengths([len(tokens) for tokens in TOKENS])
    return model.forward_packed(torch.tensor(list(chain(*TOKENS))), layout.positions, layout)


class CompletionTokens:
    """Every completion token of the batch, packed, and what the policy thinks of it."""

    def __init__(self, model: Transformer) -> None:
        lengths = [len(sample["completion"]) for sample in SAMPLES]
        ends = list(accumulate(len(tokens) for tokens in TOKENS))
        places = [torch.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        sources = torch.cat(places) - 1
        targets = torch.cat([torch.tensor(sample["completion"]) for sample in SAMPLES])
        hidden = hidden_states(model)
        self.logprobs, self.entropy = model.token_logprobs(hidden[sources], targets, temperature=1.0)
        self.sequence_index = torch.repeat_interleave(torch.arange(len(SAMPLES)), torch.tensor(lengths))
        self.advantages = torch.tensor([sample["advantage"] for sample in SAMPLES])[self.sequence_index]

    def saved(self, name: str) -> Tensor:
        return torch.cat([torch.tensor(sample[name], dtype=torch.float32) for sample in SAMPLES])

    def per_sequence(self) -> Tensor:
        return sequence_sums(self.logprobs, sequence_index=self.sequence_index, num_sequences=len(SAMPLES))


def assert_equal_to_trl(case: str, loss: Tensor, model: Transformer, **heads: Tensor) -> None:
    expected = SAVED["cases"][case]
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    parameters = {**dict(model.named_parameters()), **heads}
    assert set(expected["gradient"]) == set(parameters)
    for name, gradient in expected["gradient"].items():
        found = parameters[name].grad
        assert found is not None
        assert found.flatten().tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    ("case", "section"),
    [
        ("grpo", AlgorithmSection(name="grpo", denominator="sequences")),
        ("grpo with kl", AlgorithmSection(name="grpo", denominator="sequences", beta=0.1)),
        ("dapo", AlgorithmSection(name="dapo")),
        ("dapo with kl and entropy", AlgorithmSection(name="dapo", beta=0.1, entropy_weight=0.05)),
        ("dr_grpo", AlgorithmSection(name="dr_grpo")),
        ("gspo", AlgorithmSection(name="gspo")),
        ("rloo", AlgorithmSection(name="rloo")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_policy_loss_equals_trls(case: str, section: AlgorithmSection) -> None:
    algorithm, model = resolved(section), saved_model()
    tokens = CompletionTokens(model)
    # TRL's RLOO knows no tokens inside a completion that the policy did not choose.
    chosen = tokens.saved("chosen_by_policy")
    mask = torch.ones_like(chosen) if case == "rloo" else chosen
    clip_low, clip_high = SAVED["clip"]
    losses = policy_loss(
        tokens.logprobs,
        tokens.saved("old_logprobs"),
        tokens.advantages,
        mask,
        sequence_index=tokens.sequence_index,
        num_sequences=len(SAMPLES),
        clip_low=clip_low,
        clip_high=clip_high,
        ratio=algorithm.ratio,
        reference_logprobs=tokens.saved("reference_logprobs") if algorithm.beta else None,
        beta=algorithm.beta,
        kl=algorithm.kl,
        entropy=tokens.entropy,
        entropy_weight=algorithm.entropy_weight,
    )
    assert losses.sums["clip_ratio"].item() > 0
    weights = token_weights(
        mask,
        sequence_index=tokens.sequence_index,
        num_sequences=len(SAMPLES),
        totals={
            "tokens": float(mask.sum()),
            "sequences": float(len(SAMPLES)),
            "constant": float(len(SAMPLES) * SAVED["max_new_tokens"]),
        },
        denominator=algorithm.denominator,
    )
    assert_equal_to_trl(case, (losses.losses * weights).sum(), model)


def test_supervised_loss_equals_trls() -> None:
    model = saved_model()
    tokens = CompletionTokens(model)
    losses = sft_loss(tokens.logprobs, torch.ones_like(tokens.logprobs)).losses
    assert_equal_to_trl("sft", losses.sum() / len(losses), model)


def test_dpo_equals_trls() -> None:
    model = saved_model()
    sums = CompletionTokens(model).per_sequence()
    result = dpo_loss(
        sums[PAIRS["chosen"]],
        sums[PAIRS["rejected"]],
        reference_chosen=torch.tensor(PAIRS["reference_chosen"]),
        reference_rejected=torch.tensor(PAIRS["reference_rejected"]),
        beta=PAIRS["beta"],
    )
    assert_equal_to_trl("dpo", result.losses.sum() / 2, model)


def test_the_reward_models_loss_equals_trls() -> None:
    model = saved_model()
    head = torch.tensor([SAVED["weights"]["score.weight"]], requires_grad=True)
    last = torch.tensor([len(tokens) for tokens in TOKENS]).cumsum(0) - 1
    scores = (hidden_states(model)[last] @ head.t()).squeeze(-1)
    result = reward_model_loss(scores[PAIRS["chosen"]], scores[PAIRS["rejected"]])
    assert_equal_to_trl("reward_model", result.losses.sum() / 2, model, **{"score.weight": head})
