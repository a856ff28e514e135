"""Gradients of whole algorithms against the analytic policy gradient, by enumeration.

Vocabulary 3, at most 2 tokens, a softmax policy with arbitrary logits: all completions, and all groups of them, can be
written down with their probabilities. So an algorithm's expected gradient is a finite sum, compared to the derivative
of the expected reward itself, without any sampling error. Once all completions have two tokens; once token 2 ends
a completion, so that lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kintsugi.graph.advantages import group_advantages, leave_one_out
from kintsugi.training.advantages import gae, reward_to_go, token_rewards
from kintsugi.training.losses import policy_loss, token_weights

Completion = tuple[int, ...]

ALL_OF_TWO: list[Completion] = list(product(range(3), repeat=2))
WITH_AN_END: list[Completion] = [(2,), *product((0, 1), range(3))]
BETA = 0.3
MAX_NEW_TOKENS = 5
"""Any constant; Dr.GRPO divides by it."""


class Policy:
    """Logits of the first token, and of the second given the first."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def logprobs(self, completion: Completion) -> Tensor:
        """Of each of its tokens."""
        table = self.logits.log_softmax(-1)
        states = [0, *(1 + token for token in completion[:-1])]
        return torch.stack([table[state, token] for state, token in zip(states, completion, strict=True)])


POLICY, REFERENCE = Policy(seed=0), Policy(seed=1)


def reward_of(completion: Completion) -> float:
    """Arbitrary, and different for every completion."""
    return float(sum((3.0 + token) ** (place + 1) for place, token in enumerate(completion)) % 7) - 2.0


def analytic_gradient(completions: Sequence[Completion], *, beta: float = 0.0) -> Tensor:
    """Of −(E[reward] − beta × KL(policy ‖ reference)), the KL between distributions over completions."""
    objective = torch.zeros((), dtype=torch.float64)
    for completion in completions:
        logprob = POLICY.logprobs(completion).sum()
        divergence = logprob - REFERENCE.logprobs(completion).sum().detach()
        objective = objective + logprob.exp() * (reward_of(completion) - beta * divergence)
    return torch.autograd.grad(-objective, POLICY.logits)[0]


def expected_gradient(
    groups: Sequence[Sequence[Completion]], advantages: Sequence[Sequence[Tensor]], **options: Any
) -> Tensor:
    """The sum over all groups of their probability × the gradient of the group's loss, in one packed batch.

    A group is a batch of its own: its denominators are taken over it alone.
    """
    members = [completion for group in groups for completion in group]
    lengths = torch.tensor([len(completion) for completion in members])
    index = torch.repeat_interleave(torch.arange(len(members)), lengths)
    logprob_of = {completion: POLICY.logprobs(completion) for completion in set(members)}
    logprobs = torch.cat([logprob_of[completion] for completion in members])
    losses = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.cat([entries for group in advantages for entries in group]).double(),
        torch.ones(len(logprobs)),
        sequence_index=index,
        num_sequences=len(members),
        clip_low=0.2,
        clip_high=0.2,
        ratio=options["ratio"],
    ).losses
    weights = torch.cat(
        [
            token_weights(
                torch.ones(sum(len(completion) for completion in group)),
                sequence_index=torch.repeat_interleave(
                    torch.arange(len(group)), torch.tensor([len(completion) for completion in group])
                ),
                num_sequences=len(group),
                totals={"sequences": float(len(group)), "constant": float(len(group) * MAX_NEW_TOKENS)},
                denominator=options["denominator"],
            )
            for group in groups
        ]
    )
    group_of = torch.repeat_interleave(
        torch.arange(len(groups)), torch.tensor([sum(map(len, group)) for group in groups])
    )
    probabilities = torch.stack(
        [torch.stack([logprob_of[member].sum() for member in group]).sum().exp() for group in groups]
    ).detach()
    assert float(probabilities.sum()) == pytest.approx(1.0)
    return torch.autograd.grad((losses * weights * probabilities[group_of]).sum(), POLICY.logits)[0]


def spread(values: Sequence[float], group: Sequence[Completion]) -> list[Tensor]:
    """A sample's advantage at each of its tokens."""
    return [
        torch.full((len(completion),), value, dtype=torch.float64)
        for value, completion in zip(values, group, strict=True)
    ]


@pytest.fixture(params=[ALL_OF_TWO, WITH_AN_END], ids=["equal lengths", "different lengths"])
def completions(request: pytest.FixtureRequest) -> list[Completion]:
    found: list[Completion] = request.param
    return found


@pytest.mark.parametrize("group_size", [2, 3])
def test_leave_one_outs_mean_gradient_is_the_policy_gradient(
    completions: list[Completion], group_size: int
) -> None:
    groups = list(product(completions, repeat=group_size))
    advantages = [
        spread(leave_one_out([reward_of(member) for member in group], scale_by_std=False), group)
        for group in groups
    ]
    found = expected_gradient(groups, advantages, ratio="sequence", denominator="sequences")
    torch.testing.assert_close(found, analytic_gradient(completions), rtol=1e-6, atol=1e-7)


def test_leave_one_out_with_the_divergence_in_the_reward_maximises_the_penalised_objective(
    completions: list[Completion],
) -> None:
    groups = list(product(completions, repeat=2))
    penalty = {
        member: float((POLICY.logprobs(member) - REFERENCE.logprobs(member)).sum().detach())
        for member in completions
    }
    advantages = [
        spread(
            leave_one_out(
                [reward_of(member) - BETA * penalty[member] for member in group], scale_by_std=False
            ),
            group,
        )
        for group in groups
    ]
    found = expected_gradient(groups, advantages, ratio="sequence", denominator="sequences")
    torch.testing.assert_close(found, analytic_gradient(completions, beta=BETA), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("group_size", [2, 3])
def test_dr_grpos_mean_gradient_is_the_policy_gradient_up_to_its_factor(
    completions: list[Completion], group_size: int
) -> None:
    """(n − 1)/n, because a sample is in its own baseline, and one by the constant denominator."""
    groups = list(product(completions, repeat=group_size))
    advantages = [
        spread(group_advantages([reward_of(member) for member in group], scale_by_std=False), group)
        for group in groups
    ]
    found = expected_gradient(groups, advantages, ratio="token", denominator="constant")
    factor = (group_size - 1) / group_size / MAX_NEW_TOKENS
    torch.testing.assert_close(found, factor * analytic_gradient(completions), rtol=1e-6, atol=1e-7)


def token_level(completions: Sequence[Completion], advantages: Sequence[Tensor]) -> Tensor:
    """The expected gradient of single samples, each token with an advantage of its own; the sum over tokens."""
    groups = [(completion,) for completion in completions]
    found = expected_gradient(
        groups, [[entries] for entries in advantages], ratio="token", denominator="constant"
    )
    return found * MAX_NEW_TOKENS


def penalised_rewards(completion: Completion) -> Tensor:
    return token_rewards(
        reward_of(completion),
        POLICY.logprobs(completion).detach(),
        REFERENCE.logprobs(completion).detach(),
        beta=BETA,
        kl="k1",
    )


def test_rewards_to_go_give_the_gradient_of_the_penalised_objective(completions: list[Completion]) -> None:
    """Before whitening; whitening subtracts a constant, which changes nothing, and divides by one."""
    advantages = [reward_to_go(penalised_rewards(completion), gamma=1.0) for completion in completions]
    expected = analytic_gradient(completions, beta=BETA)
    torch.testing.assert_close(token_level(completions, advantages), expected, rtol=1e-5, atol=1e-6)


def test_a_critic_of_any_quality_leaves_the_gradient_alone_when_lambda_is_one(
    completions: list[Completion],
) -> None:
    """A value of the state *before* a token depends on no choice that it is compared with."""
    wrong = torch.randn(1 + 3 + 9, generator=torch.Generator().manual_seed(2))

    def values(completion: Completion) -> Tensor:
        states = [0, 1 + completion[0]] + [4 + 3 * completion[0] + token for token in completion[1:]]
        return wrong[states]

    advantages = [
        gae(
            penalised_rewards(completion), values(completion), truncated=False, gamma=1.0, gae_lambda=1.0
        ).advantages
        for completion in completions
    ]
    expected = analytic_gradient(completions, beta=BETA)
    torch.testing.assert_close(token_level(completions, advantages), expected, rtol=1e-5, atol=1e-6)


def test_a_perfect_critic_gives_the_same_gradient_from_single_differences(
    completions: list[Completion],
) -> None:
    """λ = 0; the value after a first token is the expectation over the second."""

    def value_after(prefix: Completion) -> float:
        going_on = [c for c in completions if c[: len(prefix)] == prefix and len(c) > len(prefix)]
        shares = [float(POLICY.logprobs(c)[len(prefix) :].sum().exp().detach()) for c in going_on]
        return sum(share * reward_of(c) for share, c in zip(shares, going_on, strict=True))

    advantages = [
        gae(
            token_rewards(reward_of(c), torch.zeros(len(c), dtype=torch.float64), None, beta=0.0, kl="k1"),
            torch.tensor([value_after(c[:length]) for length in range(len(c) + 1)]),
            truncated=False,
            gamma=1.0,
            gae_lambda=0.0,
        ).advantages
        for c in completions
    ]
    torch.testing.assert_close(
        token_level(completions, advantages), analytic_gradient(completions), rtol=1e-5, atol=1e-6
    )
