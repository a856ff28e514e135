from __future__ import annotations

import math

import pytest
import torch

from kintsugi.training.losses import grpo_loss, k3_divergence, sft_loss, token_weights


def test_supervised_loss_is_the_negative_log_likelihood_of_unmasked_tokens() -> None:
    result = sft_loss(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert result.losses.tolist() == [0.0, 2.0, 3.0]


def test_the_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0])
    result = grpo_loss(logprobs, logprobs.detach(), advantages, torch.ones(2), clip_low=0.2, clip_high=0.2)
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 2.0]
    assert result.sums["ratio"].item() == 2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.5, -1.0, True), (0.5, 1.0, False), (1.25, 1.0, False)],
)
def test_only_a_ratio_that_went_too_far_in_its_favour_is_clipped(
    ratio: float, advantage: float, cut: bool
) -> None:
    old = torch.tensor([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    result = grpo_loss(logprobs, old, torch.tensor([advantage]), torch.ones(1), clip_low=0.2, clip_high=0.28)
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad.item() == 0.0) is cut
    assert result.sums["clip_ratio"].item() == float(cut)


def test_the_divergence_estimate_is_never_negative_and_zero_at_equality() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, anchor = -torch.rand(2, 1000, generator=generator).mul(4)
    assert bool((k3_divergence(policy, anchor) >= 0).all())
    assert k3_divergence(policy, policy).abs().max().item() == 0.0


def test_the_penalty_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = grpo_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(1),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
        ref_logprobs=torch.tensor([-3.0]),
        beta=0.1,
    )
    result.losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.1 * (1 - math.exp(-2.0)))
    assert result.sums["kl"].item() == pytest.approx(math.exp(-2.0) - 1 + 2)


def test_a_masked_token_changes_neither_loss_nor_statistics_even_if_it_is_nan() -> None:
    nan = float("nan")
    result = grpo_loss(
        torch.tensor([nan, -1.0]),
        torch.tensor([-1.0, -1.5]),
        torch.ones(2),
        torch.tensor([0.0, 1.0]),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert result.losses[0].item() == 0.0
    assert result.sums["logprob_abs_diff"].item() == 0.5
    assert result.maxima["logprob_abs_diff"].item() == 0.5
    assert all(bool(total.isfinite()) for total in result.sums.values())


MASK = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
"""Three sequences with 1, 2 and no loss tokens."""


def weights(denominator: str, totals: dict[str, float]) -> list[float]:
    assert denominator in ("tokens", "sequences", "constant")
    return token_weights(
        MASK,
        sequence_index=SEQUENCES,
        num_sequences=3,
        totals=totals,
        denominator=denominator,  # type: ignore[arg-type]
    ).tolist()


def test_every_token_of_the_batch_weighs_the_same() -> None:
    assert weights("tokens", {"tokens": 4.0}) == [0.0, 0.25, 0.0, 0.25, 0.25, 0.0]


def test_every_sequence_weighs_the_same_whatever_its_length() -> None:
    assert weights("sequences", {"sequences": 2.0}) == [0.0, 0.5, 0.0, 0.25, 0.25, 0.0]


def test_the_constant_does_not_ask_for_lengths() -> None:
    assert weights("constant", {"constant": 32.0}) == [0.0, 1 / 32, 0.0, 1 / 32, 1 / 32, 0.0]


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
def test_a_batch_with_nothing_to_learn_divides_by_nothing(denominator: str) -> None:
    assert weights(denominator, {denominator: 0.0}) == [0.0] * 6
