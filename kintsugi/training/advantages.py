"""Advantages per token, for the algorithms in which a token is an action: PPO and REINFORCE++.

All tensors belong to *one* sequence and have one entry per action: its loss tokens in order, those of several turns
joined. Tokens of the environment between two turns are not actions; they only change the state. The state of an action
is the one before its token. With L actions the critic therefore gives L + 1 values: for the states in which the L
tokens were chosen, and for the state after the last one.

Whitening is over the whole batch: `moments` per part, added up exactly over shards and ranks, then `whiten`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kintsugi.training.losses import KlEstimator, kl_estimate

WHITENING_EPSILON = 1e-8
"""Constant added to the variance."""


class TokenAdvantages(NamedTuple):
    """Advantages of the actor's tokens (before whitening), and the targets of the critic."""

    advantages: Tensor
    returns: Tensor


def token_rewards(
    reward: float,
    logprobs: Tensor,
    reference_logprobs: Tensor | None,
    *,
    beta: float,
    kl: KlEstimator,
) -> Tensor:
    """Rewards per action, [L] in float32: −`beta` × the KL estimate everywhere, plus `reward` at the last one.

    `logprobs` are the sampler's, so the penalty is that of the policy that acted. Without a reference (`beta` 0, or
    the KL is in the loss) there is no penalty.
    """
    rewards = torch.zeros_like(logprobs, dtype=torch.float32)
    if reference_logprobs is not None:
        rewards -= beta * kl_estimate(logprobs, reference_logprobs, estimator=kl)
    if len(rewards):
        rewards[-1] += reward
    return rewards


def gae(
    rewards: Tensor, values: Tensor, *, truncated: bool, gamma: float, gae_lambda: float
) -> TokenAdvantages:
    """Generalised advantage estimation over one sequence's actions (arXiv 1506.02438).

    `rewards` is [L], `values` [L + 1]: before each action, and after the last. After a completion that ended with its
    end token no reward follows, so the value of its last state counts as 0. A truncated completion would have
    continued, so the value of its last state stands for the missing rewards. After the last token of a turn comes the
    state in which the next turn's first token is chosen. Returns are advantages + values.
    """
    assert len(values) == len(rewards) + 1, f"{len(values)} values for {len(rewards)} actions"
    following = values[1:].clone()
    if not truncated and len(rewards):
        following[-1] = 0.0
    deltas = rewards + gamma * following - values[:-1]
    advantages = discounted_sums(deltas, factor=gamma * gae_lambda)
    return TokenAdvantages(advantages, advantages + values[:-1])


def reward_to_go(rewards: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each action on."""
    return discounted_sums(rewards, factor=gamma)


def discounted_sums(values: Tensor, *, factor: float) -> Tensor:
    """s[t] = values[t] + factor × s[t + 1], from the end."""
    sums: list[float] = []
    running = 0.0
    for value in reversed(values.tolist()):
        running = value + factor * running
        sums.append(running)
    return torch.tensor(sums[::-1], dtype=torch.float32, device=values.device)


def moments(advantages: Iterable[Tensor]) -> Tensor:
    """Moments [count, sum, sum of squares] in float64; the moments of several parts may be added."""
    total = torch.zeros(3, dtype=torch.float64)
    for entries in advantages:
        exact = entries.double()
        total += torch.stack([exact.new_tensor(len(exact)), exact.sum(), exact.square().sum()]).cpu()
    return total


def whiten(advantages: Tensor, total: Tensor) -> Tensor:
    """(A − mean) / √(variance + 1e-8) with the whole batch's `moments`, variance with n − 1 in the denominator.

    A batch of a single token, or of equal advantages, is whitened to 0.
    """
    count, entries_sum, squares_sum = total.tolist()
    mean = entries_sum / max(count, 1.0)
    variance = max(squares_sum - count * mean * mean, 0.0) / max(count - 1.0, 1.0)
    return ((advantages.double() - mean) / (variance + WHITENING_EPSILON) ** 0.5).float()
