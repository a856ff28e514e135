"""The policy loss when another policy sampled than the one that updates must stay close to.

Notation as in `losses.py`: π the policy, μ the sampler, prox the proximal policy; ρ = π/prox, w = prox/μ.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.training.losses import Ratio, TokenLosses, policy_loss, proximal_estimate

RATIOS: tuple[Ratio, ...] = ("token", "sequence", "sequence_mean")
SEQUENCES = torch.arange(6).repeat_interleave(7)
"""Six sequences of seven tokens."""


def uniform(*, seed: int, size: float) -> Tensor:
    """One number a token, from −size to size."""
    return torch.empty(len(SEQUENCES)).uniform_(-size, size, generator=torch.Generator().manual_seed(seed))


ADVANTAGES = uniform(seed=0, size=2.0)
SHARES = uniform(seed=1, size=0.1).abs()
"""Of each token's loss in a mean, so that gradients are scaled as in a step."""
START = -uniform(seed=2, size=3.0).abs() - 0.1
"""Log-probabilities with which a step begins."""


def loss_of(logprobs: Tensor, sampler: Tensor, **options: Any) -> TokenLosses:
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, **options}
    return policy_loss(
        logprobs,
        sampler,
        settings.pop("advantages", ADVANTAGES[: len(logprobs)]),
        torch.ones(len(logprobs)),
        sequence_index=SEQUENCES[: len(logprobs)],
        num_sequences=int(SEQUENCES[: len(logprobs)].max()) + 1,
        **settings,
    )


def with_gradient(logprobs: Tensor, sampler: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of their mean."""
    leaf = logprobs.clone().requires_grad_()
    if options.pop("own_proximal", False):
        options["proximal_logprobs"] = leaf.detach()
    losses = loss_of(leaf, sampler, **options).losses
    (gradient,) = torch.autograd.grad((losses * SHARES[: len(logprobs)]).sum(), leaf)
    return losses.detach(), gradient


def single(*, rho: float, weight: float, advantage: float, **options: Any) -> tuple[TokenLosses, float]:
    """One token with these ratios: its loss, and the slope of it."""
    sampler = torch.tensor([-3.0])
    proximal = sampler + math.log(weight)
    logprobs = (proximal + math.log(rho)).requires_grad_()
    result = loss_of(
        logprobs, sampler, proximal_logprobs=proximal, advantages=torch.tensor([advantage]), **options
    )
    (slope,) = torch.autograd.grad(result.losses.sum(), logprobs)
    return result, slope.item()


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_sampler_as_proximal_policy_is_plain_ppo_to_the_bit(ratio: Ratio) -> None:
    moved = START + uniform(seed=3, size=0.3)
    plain = with_gradient(moved, START, ratio=ratio)
    decoupled = with_gradient(moved, START, ratio=ratio, proximal_logprobs=START, importance_cap=5.0)
    assert all(map(torch.equal, decoupled, plain))


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_update_on_fresh_samples_is_plain_ppo_to_the_bit(ratio: Ratio) -> None:
    """Sampler and trainer round differently; neither is far enough off to be clipped or capped."""
    sampler = START + uniform(seed=4, size=1e-5)
    plain = with_gradient(START, sampler, ratio=ratio)
    decoupled = with_gradient(START, sampler, ratio=ratio, own_proximal=True, importance_cap=5.0)
    assert all(map(torch.equal, decoupled, plain))
    assert float(plain[1].abs().min()) > 0


@pytest.mark.parametrize("ratio", RATIOS)
def test_later_updates_on_fresh_samples_are_plain_ppo_to_rounding(ratio: Ratio) -> None:
    sampler, moved = START + uniform(seed=4, size=1e-6), START + uniform(seed=3, size=0.03)
    plain = with_gradient(moved, sampler, ratio=ratio)
    decoupled = with_gradient(moved, sampler, ratio=ratio, proximal_logprobs=START, importance_cap=5.0)
    torch.testing.assert_close(decoupled, plain, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -2.2, -2.2),
        (1.5, 1.0, -2.4, 0.0),
        (1.5, -1.0, 3.0, 3.0),
        (0.5, -1.0, 1.6, 0.0),
        (0.5, 1.0, -1.0, -1.0),
    ],
)
def test_the_clip_is_around_the_proximal_policy_and_the_weight_outside_of_it(
    rho: float, advantage: float, loss: float, slope: float
) -> None:
    """w is 2, the range ±0.2: −2 min(ρA, clip(ρ)A)."""
    result, found = single(rho=rho, weight=2.0, advantage=advantage, importance_cap=5.0)
    assert result.losses.tolist() == pytest.approx([loss])
    assert found == pytest.approx(slope)
    assert result.sums["clip_ratio"].item() == float(slope == 0.0)
    assert result.sums["ratio"].item() == pytest.approx(2 * rho), "to the sampler"


def test_a_weight_is_kept_at_its_cap() -> None:
    result, slope = single(rho=1.1, weight=8.0, advantage=1.0, importance_cap=5.0)
    assert result.losses.tolist() == pytest.approx([-5.5])
    assert slope == pytest.approx(-5.5)
    assert result.sums["importance_capped"].item() == 1.0
    assert result.sums["importance_weight"].item() == 5.0
    assert result.maxima["importance_weight"].item() == pytest.approx(8.0), "before it was capped"


def test_a_weight_below_one_stays_as_it_is() -> None:
    result, slope = single(rho=1.0, weight=0.01, advantage=1.0, importance_cap=5.0)
    assert slope == pytest.approx(-0.01)
    assert result.sums["importance_capped"].item() == 0.0


def test_a_token_above_the_cap_may_leave_the_loss_with_all_its_terms() -> None:
    terms = {
        "reference_logprobs": torch.tensor([-2.0]),
        "beta": 0.1,
        "entropy": torch.tensor([1.0]),
        "entropy_weight": 0.1,
        "importance_cap": 5.0,
    }
    left, slope = single(rho=1.1, weight=8.0, advantage=1.0, importance="mask", **terms)
    assert (left.losses.item(), slope, left.sums["importance_weight"].item()) == (0.0, 0.0, 0.0)
    kept, slope = single(rho=1.1, weight=4.0, advantage=1.0, importance="mask", **terms)
    capped, same_slope = single(rho=1.1, weight=4.0, advantage=1.0, **terms)
    assert (kept.losses.item(), slope) == (capped.losses.item(), same_slope)
    assert slope != 0.0


def test_weights_are_taken_over_what_ratios_are_taken_over() -> None:
    """Two tokens with prox/μ of 2 and 8: a product of 16, a geometric mean of 4."""
    sampler = torch.tensor([-3.0, -3.0])
    proximal = sampler + torch.tensor([2.0, 8.0]).log()

    def weights(ratio: Ratio) -> float:
        found = loss_of(proximal, sampler, proximal_logprobs=proximal, ratio=ratio, importance_cap=10.0)
        return found.sums["importance_weight"].item() / 2

    assert [weights(ratio) for ratio in RATIOS] == pytest.approx([5.0, 10.0, 4.0])


def test_a_sequence_above_the_cap_leaves_the_loss_as_a_whole() -> None:
    sampler = torch.full((14,), -3.0)
    proximal = sampler.clone()
    proximal[0] += math.log(9.0)
    losses = loss_of(
        proximal,
        sampler,
        proximal_logprobs=proximal,
        ratio="sequence",
        importance="mask",
        importance_cap=5.0,
    ).losses
    assert not losses[:7].any() and bool(losses[7:].all())


def test_the_penalty_is_weighted_no_more_than_the_cap_allows() -> None:
    """Its slope is ρ · min(w, cap) · β · log π/ref."""
    reference = torch.tensor([-3.0 + math.log(8.0) - 2.0])
    for weight, capped in ((8.0, 5.0), (0.5, 0.5)):
        result, slope = single(
            rho=1.1,
            weight=weight,
            advantage=0.0,
            importance_cap=5.0,
            reference_logprobs=reference,
            beta=0.1,
            kl="k1",
        )
        log_ratio = math.log(1.1 * weight / 8.0) + 2.0
        assert slope == pytest.approx(1.1 * capped * 0.1 * log_ratio)
        assert result.losses.item() == pytest.approx(slope)


def test_how_far_the_policy_is_from_its_sampler_is_reported_with_a_reference_too() -> None:
    moved = START + uniform(seed=3, size=0.3)
    without, with_one = loss_of(moved, START), loss_of(moved, START, reference_logprobs=moved)
    assert with_one.sums["kl"].item() == 0.0
    assert with_one.sums["behaviour_kl"].item() == without.sums["kl"].item() > 0.0


def test_truncated_weights_give_the_exact_policy_gradient_of_another_samplers_completions() -> None:
    """In expectation over all completions of two tokens from three, with no cap in reach: ∇E[reward] under π."""
    completions = list(product(range(3), repeat=2))
    policy, other = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    policy.requires_grad_()
    rewards = torch.linspace(-1, 2, len(completions), dtype=torch.float64)

    def logprobs_of(logits: Tensor) -> Tensor:
        """Of the first token, and of the second given the first; one row a completion."""
        table = logits.log_softmax(-1)
        rows = [torch.stack((table[0, first], table[1 + first, second])) for first, second in completions]
        return torch.stack(rows)

    logprobs, sampler = logprobs_of(policy), logprobs_of(other)
    exact = -(logprobs.sum(1).exp() * rewards).sum()
    losses = policy_loss(
        logprobs.flatten(),
        sampler.flatten(),
        rewards.repeat_interleave(2),
        torch.ones(2 * len(completions)),
        sequence_index=torch.arange(len(completions)).repeat_interleave(2),
        num_sequences=len(completions),
        clip_low=0.2,
        clip_high=0.2,
        ratio="sequence",
        proximal_logprobs=logprobs.detach().flatten(),
        importance_cap=1e9,
    ).losses
    # A completion's loss stands at both of its tokens.
    expected = (sampler.sum(1).exp() * losses.view(-1, 2).mean(1)).sum()
    found = torch.autograd.grad(expected, policy, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(exact, policy))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("proximal", [None, -100.0, 0.0], ids=["plain", "second update", "one update"])
def test_a_ratio_that_overflows_spoils_neither_value_nor_gradient(
    ratio: Ratio, advantage: float, proximal: float | None
) -> None:
    """e^100 is more than a float32 can hold; what was clipped stays clipped, and its neighbours' gradients numbers."""
    logprobs, sampler = torch.full((7,), -0.5).requires_grad_(), torch.full((7,), -100.0)
    options: dict[str, Any] = {
        "advantages": torch.full((7,), advantage),
        "ratio": ratio,
        "importance_cap": 5.0,
    }
    if proximal is not None:
        options["proximal_logprobs"] = torch.full((7,), proximal)
    result = loss_of(
        logprobs, sampler, beta=0.1, kl="k3", reference_logprobs=torch.full((7,), -0.5), **options
    )
    (gradient,) = torch.autograd.grad(result.losses.sum(), logprobs)
    assert all(bool(each.isfinite().all()) for each in (result.losses, gradient, *result.sums.values()))
    if proximal != 0.0 and advantage > 0:
        assert not gradient.any(), "clipped"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("importance", ["cap", "mask"])
def test_the_gradient_is_the_slope_of_the_loss(ratio: Ratio, importance: str) -> None:
    """By differences, in float64, with tokens on both sides of clip and cap and some of them masked."""
    sampler, proximal, start, advantages = (
        values[:21].double()
        for values in (
            START,
            START + uniform(seed=6, size=0.4),
            START + uniform(seed=7, size=0.6),
            ADVANTAGES,
        )
    )
    mask = torch.ones(21)
    mask[[2, 3, 9]] = 0

    def total(logprobs: Tensor) -> Tensor:
        found = policy_loss(
            logprobs,
            sampler,
            advantages,
            mask,
            sequence_index=SEQUENCES[:21],
            num_sequences=3,
            clip_low=0.2,
            clip_high=0.2,
            ratio=ratio,
            proximal_logprobs=proximal,
            importance="mask" if importance == "mask" else "cap",
            importance_cap=1.2,
        )
        return (found.losses * SHARES[:21]).sum()

    assert torch.autograd.gradcheck(total, start.requires_grad_())


def test_the_estimate_of_the_proximal_policy_is_the_sampler_where_nothing_is_stale() -> None:
    moved = START + uniform(seed=3, size=0.3)
    estimate = proximal_estimate(moved, START, staleness=torch.zeros(len(START)))
    assert torch.equal(estimate, START)


def test_the_estimate_is_exact_when_every_step_moves_a_token_equally_far() -> None:
    """Sampled 3 steps before the one that the step began with, which π is one further step away from."""
    sampler, a_step = torch.tensor([-4.0, -1.0]), torch.tensor([0.25, -0.5])
    policy = (sampler + 4 * a_step).requires_grad_()
    estimate = proximal_estimate(policy, sampler, staleness=torch.tensor([3.0, 3.0]))
    torch.testing.assert_close(estimate, sampler + 3 * a_step)
    assert not estimate.requires_grad
