"""Advantages per token against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kintsugi.training.advantages import gae, moments, reward_to_go, token_rewards, whiten
from kintsugi.training.losses import KlEstimator

REWARDS = torch.tensor([0.0, 0.0, 1.0])
VALUES = torch.tensor([0.5, 0.25, 0.5, 0.75])
"""Before each of three tokens, and after the last."""


def test_a_true_end_earns_nothing_more_whatever_the_critic_says() -> None:
    """γ = λ = ½. Differences: 0 + ⅛ − ½ = −⅜; 0 + ¼ − ¼ = 0; 1 + 0 − ½ = ½. Sums with ¼: ½; ⅛; −⅜ + 1/32."""
    found = gae(REWARDS, VALUES, truncated=False, gamma=0.5, gae_lambda=0.5)
    assert found.advantages.tolist() == [-0.34375, 0.125, 0.5]
    assert found.returns.tolist() == [0.15625, 0.375, 1.0]


def test_a_truncated_completion_goes_on_at_the_critics_value() -> None:
    """The last difference is 1 + ½·¾ − ½ = ⅞ instead; ⅞/4 before it; −⅜ + ⅞/16 before that."""
    found = gae(REWARDS, VALUES, truncated=True, gamma=0.5, gae_lambda=0.5)
    assert found.advantages.tolist() == [-0.3203125, 0.21875, 0.875]


def test_with_lambda_one_returns_are_the_discounted_rewards() -> None:
    found = gae(torch.tensor([1.0, 2.0, 4.0]), VALUES, truncated=False, gamma=0.5, gae_lambda=1.0)
    assert found.returns.tolist() == [3.0, 4.0, 4.0]
    assert reward_to_go(torch.tensor([1.0, 2.0, 4.0]), gamma=0.5).tolist() == [3.0, 4.0, 4.0]


def test_with_lambda_nought_only_the_next_state_counts() -> None:
    found = gae(REWARDS, VALUES, truncated=False, gamma=1.0, gae_lambda=0.0)
    assert found.advantages.tolist() == [-0.25, 0.25, 0.5]


def test_a_sequence_without_actions_has_no_advantages() -> None:
    found = gae(torch.zeros(0), torch.tensor([0.3]), truncated=False, gamma=1.0, gae_lambda=0.95)
    assert (found.advantages.tolist(), found.returns.tolist()) == ([], [])
    assert token_rewards(1.0, torch.zeros(0), None, beta=0.0, kl="k1").tolist() == []


def test_without_a_reference_the_reward_stands_at_the_last_action_alone() -> None:
    assert token_rewards(2.0, torch.tensor([-1.0, -2.0]), None, beta=0.1, kl="k1").tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("estimator", "penalties"),
    [
        ("k1", [1.0, -1.0]),
        ("k2", [0.5, 0.5]),
        ("k3", [math.exp(-1.0), math.e - 2.0]),
    ],
)
def test_every_action_pays_for_leaving_the_reference(estimator: KlEstimator, penalties: list[float]) -> None:
    """Log-ratios 1 and −1."""
    found = token_rewards(2.0, torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]), beta=0.5, kl=estimator)
    assert found.tolist() == pytest.approx([-0.5 * penalties[0], 2.0 - 0.5 * penalties[1]])


def test_whitening_is_over_all_tokens_of_the_batch() -> None:
    """1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14 over 3."""
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    total = moments(parts[:1]) + moments(parts[1:])
    assert total.tolist() == [4.0, 12.0, 50.0]
    deviation = math.sqrt(14 / 3 + 1e-8)
    found = torch.cat([whiten(part, total) for part in parts])
    assert found.tolist() == pytest.approx([-2 / deviation, -1 / deviation, 0.0, 3 / deviation])


@pytest.mark.parametrize("entries", [[0.1], [0.1, 0.1, 0.1], []])
def test_advantages_that_do_not_differ_are_whitened_to_nothing(entries: list[float]) -> None:
    advantages = torch.tensor(entries)
    assert whiten(advantages, moments([advantages])).tolist() == pytest.approx([0.0] * len(entries), abs=1e-6)


def test_whitening_bears_a_mean_far_from_nought() -> None:
    advantages = torch.tensor([10_000.0, 10_001.0, 10_002.0])
    assert whiten(advantages, moments([advantages])).tolist() == pytest.approx([-1.0, 0.0, 1.0])
