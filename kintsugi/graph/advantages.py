"""Computations of the master on the samples of a batch: final rewards, advantages, denominators.

Pure functions of scalars, without torch. Groups are identified by ticket, never by text or position.

A sample is *valid* when it is in the batch (what was quarantined never gets there) and not masked. A masked sample
(`mask_truncated`, and it ended by length) neither learns nor counts: not in its group's statistics, not in a
denominator. A group with fewer than two valid samples has no baseline, so all its advantages are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite, sqrt

from kintsugi.config.custom_algorithm import FIELD, custom_algorithm
from kintsugi.config.stages import Stage
from kintsugi.errors import UserError
from kintsugi.types import FinishReason, SampleMeta, ShardItem, staleness, ticket_of

STD_EPSILON = 1e-4
"""Added to the group's standard deviation, as TRL does."""

Scalars = dict[str, dict[str, float]]
"""Values by name and sample key; each function documents which of them is the outer key."""


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
    """Each reward less the mean of the other rewards, which does not depend on the sample itself: an unbiased baseline.

    >>> leave_one_out([1.0, 0.0, 0.5], scale_by_std=False)
    [0.75, -0.75, 0.0]
    """
    if has_equal_rewards(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    scale = standard_deviation(rewards) + STD_EPSILON if scale_by_std else 1.0
    return [(reward - (total - reward) / others) / scale for reward in rewards]


def standard_deviation(values: Sequence[float]) -> float:
    """Standard deviation with n − 1 in the denominator, of at least two values."""
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def has_equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether all valid rewards of a group are equal, which includes groups with fewer than two."""
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
    """Whether a sample is excluded from learning."""
    return stage.algorithm.mask_truncated and meta.finish is FinishReason.LENGTH


def shaped_reward(stage: Stage, meta: SampleMeta, *, max_new_tokens: int) -> float:
    """Reward that depends on the sample alone: before the score of a reward model and before any KL."""
    algorithm = stage.algorithm
    return meta.reward - overlong_cost(
        meta.num_loss_tokens,
        max_new_tokens=max_new_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
    )


def is_uninformative(stage: Stage, group: Sequence[SampleMeta], *, max_new_tokens: int) -> bool:
    """Whether a group's valid samples all earned the same, or there are fewer than two: DAPO replaces such groups.

    Decided on the shaped reward without KL, because KL must not separate samples that the task scores equally. The
    score of a reward model is known only in the batch and is hardly ever equal, so with one no group of two or more
    valid samples is uninformative.
    """
    valid = [meta for meta in group if not is_masked(stage, meta)]
    if stage.reward_model is not None and len(valid) > 1:
        return False
    return has_equal_rewards([shaped_reward(stage, meta, max_new_tokens=max_new_tokens) for meta in valid])


def initial_values(
    stage: Stage, metas: Sequence[SampleMeta], *, max_new_tokens: int, version: int
) -> Scalars:
    """Sample key → values before any call: `reward` (shaped), `truncated`, `mask` (0: excluded from learning),
    `staleness` against the weights `version` with which the step begins; for runs that only keep rollouts, also the
    rewards by function."""
    keeps = stage.algorithm.name == "rollout"
    return {
        meta.key: {
            "reward": shaped_reward(stage, meta, max_new_tokens=max_new_tokens),
            "truncated": float(meta.finish is FinishReason.LENGTH),
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
    """Reward that a group algorithm compares: reward plus weighted score, less β × KL where KL is part of it."""
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

CUSTOM_ADVANTAGES = "custom_advantages"
"""Interface of the master's call that runs `CustomAlgorithm.group_advantages`."""


def master_call(stage: Stage, interface: str, items: Sequence[ShardItem]) -> Scalars:
    """Carry out one call of the master: a built-in one, or the custom algorithm's advantages."""
    if interface == CUSTOM_ADVANTAGES:
        return advantages(stage, items, baseline=partial(_custom_advantages, stage))
    return MASTER_CALLS[interface](stage, items)


def _custom_advantages(stage: Stage, rewards: Sequence[float], *, scale_by_std: bool) -> list[float]:
    """Call the user's function and check its result; a group of fewer than two valid samples has no baseline."""
    custom = custom_algorithm(stage.algorithm)
    assert custom is not None and custom.group_advantages is not None
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    try:
        found = [float(each) for each in custom.group_advantages(list(rewards), scale_by_std=scale_by_std)]
    except Exception as error:
        raise _refusal(stage, rewards, f"{type(error).__name__}: {error}") from error
    if len(found) != len(rewards) or not all(map(isfinite, found)):
        raise _refusal(stage, rewards, str(found))
    return found


def _refusal(stage: Stage, rewards: Sequence[float], found: str) -> UserError:
    return UserError(
        f"`{FIELD}`: expected {len(rewards)} finite numbers from `group_advantages` of {stage.algorithm.custom} for "
        f"rewards {list(rewards)}, got {found}"
    )
