"""Each loss against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.training.losses import (
    Denominator,
    KlEstimator,
    Ratio,
    TokenLosses,
    dpo_loss,
    explained_variance,
    kl_estimate,
    kl_loss,
    policy_loss,
    reward_model_loss,
    sequence_sums,
    sft_loss,
    token_weights,
    value_loss,
)

NAN = float("nan")


def simple_policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, **options: Any) -> TokenLosses:
    """Of one sequence, all of whose tokens count."""
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, **options}
    index = torch.zeros(len(logprobs), dtype=torch.long)
    mask = settings.pop("mask", torch.ones(len(logprobs)))
    return policy_loss(logprobs, old, advantages, mask, sequence_index=index, num_sequences=1, **settings)


def gradient(losses: TokenLosses, of: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(losses.losses.sum(), of)
    return found.tolist()


def test_supervised_loss_is_the_negative_log_likelihood_of_unmasked_tokens() -> None:
    result = sft_loss(torch.tensor([NAN, -2.0, -3.0]), torch.tensor([0.0, 1.0, 1.0]))
    assert result.losses.tolist() == [0.0, 2.0, 3.0]


def test_the_gradient_at_ratio_one_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = simple_policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -2.0]))
    assert gradient(result, logprobs) == [-0.5, 2.0]
    assert result.losses.tolist() == [-0.5, 2.0]
    assert result.sums["ratio"].item() == 2.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "cut"),
    [
        (1.5, 1.0, -1.28, True),
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),
        (0.5, 1.0, -0.5, False),
        (1.25, 1.0, -1.25, False),
    ],
)
def test_only_a_ratio_that_went_too_far_in_its_favour_is_clipped(
    ratio: float, advantage: float, loss: float, cut: bool
) -> None:
    old = torch.tensor([-1.0])
    logprobs = (old + math.log(ratio)).requires_grad_()
    result = simple_policy_loss(logprobs, old, torch.tensor([advantage]), clip_high=0.28)
    assert result.losses.tolist() == pytest.approx([loss])
    assert gradient(result, logprobs) == pytest.approx([0.0 if cut else -ratio * advantage])
    assert result.sums["clip_ratio"].item() == float(cut)


def two_sequences(ratio: Ratio, *, clip: float) -> tuple[TokenLosses, Tensor]:
    """Tokens with ratios 2, ½·e, masked; and 3: products e and 3, geometric means √e and 3; advantages 1 and −1."""
    old = torch.tensor([-1.0, -1.0, NAN, -2.0])
    log_ratio = torch.tensor([math.log(2.0), 1 - math.log(2.0), NAN, math.log(3.0)])
    logprobs = (old + log_ratio).requires_grad_()
    result = policy_loss(
        logprobs,
        old,
        torch.tensor([1.0, 1.0, 1.0, -1.0]),
        torch.tensor([1.0, 1.0, 0.0, 1.0]),
        sequence_index=torch.tensor([0, 0, 0, 1]),
        num_sequences=2,
        clip_low=clip,
        clip_high=clip,
        ratio=ratio,
    )
    return result, logprobs


def test_a_sequences_ratio_may_be_the_product_of_its_tokens_ratios() -> None:
    result, logprobs = two_sequences("sequence", clip=10.0)
    assert result.losses.tolist() == pytest.approx([-math.e, -math.e, 0.0, 3.0])
    assert gradient(result, logprobs) == pytest.approx([-2 * math.e, -2 * math.e, 0.0, 3.0])


def test_a_sequences_ratio_may_be_the_geometric_mean_of_its_tokens_ratios() -> None:
    result, logprobs = two_sequences("sequence_mean", clip=10.0)
    mean = math.exp(0.5)
    assert result.losses.tolist() == pytest.approx([-mean, -mean, 0.0, 3.0])
    assert gradient(result, logprobs) == pytest.approx([-mean, -mean, 0.0, 3.0])


def test_a_sequence_is_clipped_as_a_whole() -> None:
    result, logprobs = two_sequences("sequence_mean", clip=0.5)
    assert result.losses.tolist() == pytest.approx([-1.5, -1.5, 0.0, 3.0])
    assert gradient(result, logprobs) == pytest.approx([0.0, 0.0, 0.0, 3.0])
    assert result.sums["clip_ratio"].item() == 2.0


def test_a_masked_token_changes_nothing_even_if_it_is_nan() -> None:
    logprobs = torch.tensor([NAN, -1.0], requires_grad=True)
    result = simple_policy_loss(
        logprobs,
        torch.tensor([-1.0, -1.5]),
        torch.tensor([NAN, 1.0]),
        mask=torch.tensor([0.0, 1.0]),
        reference_logprobs=torch.tensor([NAN, -1.0]),
        beta=0.1,
        entropy=torch.tensor([NAN, 0.5]),
        entropy_weight=0.1,
    )
    assert result.losses[0].item() == 0.0
    assert gradient(result, logprobs)[0] == 0.0
    assert result.sums["logprob_abs_diff"].item() == 0.5
    assert result.maxima["logprob_abs_diff"].item() == 0.5
    assert all(bool(total.isfinite()) for total in result.sums.values())


def test_an_entropy_bonus_is_taken_off_the_loss() -> None:
    logprobs = torch.tensor([-1.0])
    entropy = torch.tensor([2.0], requires_grad=True)
    result = simple_policy_loss(logprobs, logprobs, torch.tensor([1.0]), entropy=entropy, entropy_weight=0.1)
    assert result.losses.tolist() == pytest.approx([-1.2])
    assert gradient(result, entropy) == pytest.approx([-0.1])


@pytest.mark.parametrize(("estimator", "value"), [("k1", 2.0), ("k2", 2.0), ("k3", math.exp(-2.0) - 1 + 2.0)])
def test_the_penalty_pulls_towards_the_reference(estimator: KlEstimator, value: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = simple_policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(1),
        reference_logprobs=torch.tensor([-3.0]),
        beta=0.1,
        kl=estimator,
    )
    assert result.losses.tolist() == pytest.approx([0.1 * value])
    assert gradient(result, logprobs) == pytest.approx([0.1 * 2.0])
    assert result.sums["kl"].item() == pytest.approx(value)


def test_a_reference_that_weighs_nothing_in_the_loss_is_still_reported() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    result = simple_policy_loss(
        logprobs, logprobs.detach(), torch.zeros(1), reference_logprobs=torch.tensor([-3.0]), kl="k1"
    )
    assert (gradient(result, logprobs), result.sums["kl"].item()) == ([0.0], 2.0)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_these_estimates_are_never_negative_and_zero_at_equality(estimator: KlEstimator) -> None:
    policy, anchor = -torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)).mul(4)
    assert bool((kl_estimate(policy, anchor, estimator=estimator) >= 0).all())
    assert kl_estimate(policy, policy, estimator=estimator).abs().max().item() == 0.0


POLICY, REFERENCE, SAMPLER = torch.randn(
    3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)
"""Logits over a vocabulary of 3."""


def exact_kl(logits: Tensor, other: Tensor) -> Tensor:
    log_p, log_q = logits.log_softmax(0), other.log_softmax(0)
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", [POLICY, SAMPLER], ids=["on policy", "off policy"])
def test_in_expectation_the_penalty_has_the_gradient_of_the_exact_divergence(
    sampler: Tensor, estimator: KlEstimator
) -> None:
    policy = POLICY.clone().requires_grad_()
    old = sampler.log_softmax(0)
    weight = (POLICY.log_softmax(0) - old).exp()
    losses = kl_loss(policy.log_softmax(0), REFERENCE.log_softmax(0), weight=weight, estimator=estimator)
    expected = (old.exp() * losses).sum()
    exact = exact_kl(policy, REFERENCE)
    torch.testing.assert_close(torch.autograd.grad(expected, policy), torch.autograd.grad(exact, policy))
    log_ratio = POLICY.log_softmax(0) - REFERENCE.log_softmax(0)
    biased = (POLICY.softmax(0) * log_ratio.square() / 2).sum()
    torch.testing.assert_close(expected, biased if estimator == "k2" else exact)
    assert abs(float(biased - exact.detach())) > 1e-3


def test_without_a_reference_the_divergence_from_the_sampler_is_reported() -> None:
    """Exactly, in expectation over what the sampler writes."""
    old, new = SAMPLER.log_softmax(0), POLICY.log_softmax(0)
    reported = [
        old[token].exp() * simple_policy_loss(new[token, None], old[token, None], torch.zeros(1)).sums["kl"]
        for token in range(3)
    ]
    torch.testing.assert_close(sum(reported), exact_kl(SAMPLER, POLICY))


def test_differentiating_an_estimate_gives_the_right_gradient_for_k2_only() -> None:
    def derivative(estimator: KlEstimator) -> Tensor:
        policy = POLICY.clone().requires_grad_()
        estimates = kl_estimate(policy.log_softmax(0), REFERENCE.log_softmax(0), estimator=estimator)
        return torch.autograd.grad((POLICY.softmax(0) * estimates).sum(), policy)[0]

    policy = POLICY.clone().requires_grad_()
    (forward,) = torch.autograd.grad(exact_kl(policy, REFERENCE), policy)
    (reverse,) = torch.autograd.grad(exact_kl(REFERENCE, policy), policy)
    torch.testing.assert_close(derivative("k1"), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(derivative("k2"), forward)
    torch.testing.assert_close(derivative("k3"), reverse)
    assert float((forward - reverse).abs().max()) > 1e-2


def test_the_critic_learns_half_the_squared_error() -> None:
    values = torch.tensor([1.0, NAN], requires_grad=True)
    result = value_loss(
        values, torch.zeros(2), torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0]), value_clip=0.0
    )
    assert result.losses.tolist() == [2.0, 0.0]
    assert gradient(result, values) == [-2.0, 0.0]


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.1, 0.5 * 0.9**2, -0.9),
        (0.5, 0.5 * 0.8**2, 0.0),
        (-0.5, 0.5 * 1.5**2, -1.5),
    ],
    ids=["near", "far towards the return", "far from the return"],
)
def test_a_value_stops_counting_once_it_moved_far_towards_its_return(
    value: float, loss: float, slope: float
) -> None:
    """The value at sampling was 0, the return is 1, the clip 0.2."""
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(values, torch.zeros(1), torch.ones(1), torch.ones(1), value_clip=0.2)
    assert result.losses.tolist() == pytest.approx([loss])
    assert gradient(result, values) == pytest.approx([slope])
    assert result.sums["value_clip_ratio"].item() == float(slope == 0.0)


def test_explained_variance_is_one_for_a_perfect_critic_and_nought_for_a_constant_one() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])

    def explained(values: Tensor) -> float:
        sums = value_loss(values, values, returns, torch.ones(3), value_clip=0.0).sums
        return explained_variance({name: float(total) for name, total in sums.items()}, count=3.0)

    assert explained(returns) == pytest.approx(1.0)
    assert explained(torch.full((3,), 7.0)) == pytest.approx(0.0)
    assert explained(-returns) == pytest.approx(-3.0)


def test_the_reward_model_learns_to_prefer_the_chosen() -> None:
    """−log σ(1) and −log σ(−2); the slope is −σ(−margin)."""
    chosen = torch.tensor([2.0, 0.0], requires_grad=True)
    result = reward_model_loss(chosen, torch.tensor([1.0, 2.0]))
    assert result.losses.tolist() == pytest.approx([math.log1p(math.exp(-1)), math.log1p(math.exp(2))])
    assert gradient(result, chosen) == pytest.approx([-1 / (1 + math.exp(1)), -1 / (1 + math.exp(-2))])
    assert {name: total.item() for name, total in result.sums.items()} == {"accuracy": 1.0, "margin": -1.0}


def test_dpo_compares_what_policy_and_reference_think_of_a_pair() -> None:
    """Log-ratios −1 + 3 = 2 for the chosen and −4 + 3 = −1 for the rejected: margin 0.1 · 3."""
    chosen = torch.tensor([-1.0], requires_grad=True)
    result = dpo_loss(
        chosen,
        torch.tensor([-4.0]),
        reference_chosen=torch.tensor([-3.0]),
        reference_rejected=torch.tensor([-3.0]),
        beta=0.1,
    )
    assert result.losses.tolist() == pytest.approx([math.log1p(math.exp(-0.3))])
    assert gradient(result, chosen) == pytest.approx([-0.1 / (1 + math.exp(0.3))])
    assert result.sums["margin"].item() == pytest.approx(0.3)


def test_log_probabilities_are_summed_per_sequence() -> None:
    sums = sequence_sums(
        torch.tensor([1.0, 2.0, 4.0]), sequence_index=torch.tensor([0, 2, 2]), num_sequences=3
    )
    assert sums.tolist() == [1.0, 0.0, 6.0]


MASK = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
"""Three sequences with 1, 2 and no loss tokens."""


def weights(denominator: Denominator, totals: dict[str, float]) -> list[float]:
    return token_weights(
        MASK, sequence_index=SEQUENCES, num_sequences=3, totals=totals, denominator=denominator
    ).tolist()


def test_every_token_of_the_batch_weighs_the_same() -> None:
    assert weights("tokens", {"tokens": 4.0}) == [0.0, 0.25, 0.0, 0.25, 0.25, 0.0]


def test_every_sequence_weighs_the_same_whatever_its_length() -> None:
    assert weights("sequences", {"sequences": 2.0}) == [0.0, 0.5, 0.0, 0.25, 0.25, 0.0]


def test_the_constant_does_not_ask_for_lengths() -> None:
    assert weights("constant", {"constant": 32.0}) == [0.0, 1 / 32, 0.0, 1 / 32, 1 / 32, 0.0]


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
def test_a_batch_with_nothing_to_learn_divides_by_nothing(denominator: Denominator) -> None:
    assert weights(denominator, {denominator: 0.0}) == [0.0] * 6
