"""What the master computes about the samples of a batch: rewards in their final form, advantages, denominators.

Pure functions of scalars, without torch. Groups are told apart by ticket, never by text or position.

A sample is *valid* when it is in the batch (what was quarantined never gets there) and not masked. A masked sample
(`mask_truncated`, and it ended by length) neither learns nor counts: not in its group's statistics, not in a
denominator. A group with fewer than two valid samples has no baseline, so all its advantages are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt

from kintsugi.stages import Stage
from kintsugi.types import Finish, SampleMeta, ShardItem, staleness, ticket_of

STD_EPSILON = 1e-4
"""Added to the group's standard deviation, as TRL does."""

Scalars = dict[str, dict[str, float]]
"""Values by name and sample key; each function says which of them comes first."""


def group_advantages(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """Each reward less the group's mean; scaled: divided by (std + 1e-4), std with n − 1 in the denominator.

    >>> group_advantages([1.0, 0.0], scale_by_std=False)
    [0.5, -0.5]
    """
    if has_equal_rewards(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    scale = standard_deviation(rewards) + STD_EPSILON if scale_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def leave_one_out(rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """Each reward less the mean of the others', which does not depend on the sample itself: an unbiased baseline.

    >>> leave_one_out([1.0, 0.0, 0.5], scale_by_std=False)
    [0.75, -0.75, 0.0]
    """
    if has_equal_rewards(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    scale = standard_deviation(rewards) + STD_EPSILON if scale_by_std else 1.0
    return [(reward - (total - reward) / others) / scale for reward in rewards]


def standard_deviation(values: Sequence[float]) -> float:
    """With n − 1 in the denominator, of at least two values."""
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def has_equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether a group's valid rewards can not tell its samples apart, also because there are fewer than two."""
    return all(reward == rewards[0] for reward in rewards)


def overlong_cost(num_tokens: int, *, max_new_tokens: int, buffer: int, penalty: float) -> float:
    """DAPO's soft punishment: nothing up to `buffer` tokens before the limit, then linearly up to `penalty`.

    >>> [overlong_cost(n, max_new_tokens=16, buffer=4, penalty=1.0) for n in (12, 13, 16)]
    [0.0, 0.25, 1.0]
    """
    if buffer == 0:
        return 0.0
    return penalty * min(max(num_tokens - (max_new_tokens - buffer), 0) / buffer, 1.0)


def is_masked(stage: Stage, meta: SampleMeta) -> bool:
    """Whether nothing is learned from a sample."""
    return stage.algorithm.mask_truncated and meta.finish is Finish.LENGTH


def shaped_reward(stage: Stage, meta: SampleMeta, *, max_new_tokens: int) -> float:
    """The reward as far as the sample alone decides it: before a reward model's score and before any KL."""
    algorithm = stage.algorithm
    return meta.reward - overlong_cost(
        meta.num_loss_tokens,
        max_new_tokens=max_new_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )


def is_uninformative(stage: Stage, group: Sequence[SampleMeta], *, max_new_tokens: int) -> bool:
    """Whether a group's valid samples all earned the same, or there are fewer than two: DAPO replaces such groups.

    Decided on the shaped reward without KL, which moves no two samples apart that the task holds equal. A reward
    model's score is known only in the batch and is hardly ever equal, so with one no group is uninformative beforehand.
    """
    valid = [meta for meta in group if not is_masked(stage, meta)]
    if stage.reward_model is not None and len(valid) > 1:
        return False
    return has_equal_rewards([shaped_reward(stage, meta, max_new_tokens=max_new_tokens) for meta in valid])


def initial_values(
    stage: Stage, metas: Sequence[SampleMeta], *, max_new_tokens: int, version: int
) -> Scalars:
    """Sample key → what its item carries before any call: `reward` (shaped), `truncated`, `mask` (0: learn nothing),
    `staleness` against the weights `version` with which the step begins; where rollouts are only kept, the rewards by
    function too."""
    keeps = stage.algorithm.name == "rollout"
    return {
        meta.key: {
            "reward": shaped_reward(stage, meta, max_new_tokens=max_new_tokens),
            "truncated": float(meta.finish is Finish.LENGTH),
            "mask": float(not is_masked(stage, meta)),
            "staleness": float(staleness(meta.version, step=version + 1)),
            **{f"reward/{name}": value for name, value in meta.reward_components.items() if keeps},
        }
        for meta in metas
    }


def batch_totals(stage: Stage, metas: Sequence[SampleMeta], *, max_new_tokens: int) -> dict[str, float]:
    """Denominators over the whole optimizer batch, before it is cut; masked samples do not count.

    `tokens`, `sequences` and `constant` are those of `algorithm.denominator`; `groups` are prompts, rows or pairs.
    """
    learned = [meta for meta in metas if meta.num_loss_tokens > 0 and not is_masked(stage, meta)]
    return {
        "tokens": float(sum(meta.num_loss_tokens for meta in learned)),
        "sequences": float(len(learned)),
        "constant": float(len(learned) * max_new_tokens),
        "groups": float(len({meta.ticket for meta in learned})),
    }


def final_reward(stage: Stage, item: ShardItem) -> float:
    """What a group algorithm compares: reward and weighted score, less β × the sample's KL where that is a reward."""
    return stage.total_reward(item.values) - stage.algorithm.beta * item.values.get("reference_kl", 0.0)


def advantages(stage: Stage, items: Sequence[ShardItem], *, baseline: Callable[..., list[float]]) -> Scalars:
    """`advantage` → sample key → value, group by group, over each group's valid samples; 0 for the masked ones."""
    groups: dict[str, list[ShardItem]] = {}
    for item in sorted(items, key=lambda item: item.key):
        groups.setdefault(ticket_of(item.key), []).append(item)
    found = dict.fromkeys((item.key for item in items), 0.0)
    for group in groups.values():
        valid = [item for item in group if item.values["mask"] > 0]
        rewards = [final_reward(stage, item) for item in valid]
        found.update(
            zip(
                (item.key for item in valid),
                baseline(rewards, scale_by_std=stage.algorithm.scale_by_std),
                strict=True,
            )
        )
    return {"advantage": found}


MASTER_CALLS: Mapping[str, Callable[[Stage, Sequence[ShardItem]], Scalars]] = {
    "group_advantages": partial(advantages, baseline=group_advantages),
    "leave_one_out": partial(advantages, baseline=leave_one_out),
}
"""The interfaces of calls that the master carries out: output key → sample key → value."""
