"""From all findings of a stage to those that are reported: one that another explains is its consequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kintsugi.learning_health.detectors import policy, rewards, updates
from kintsugi.learning_health.finding import LearningFinding, LearningKind
from kintsugi.learning_health.history import StageHistory

Detector = Callable[[StageHistory], LearningFinding | None]

DETECTORS: tuple[Detector, ...] = (
    updates.skipped_updates,
    policy.tokenizer_mismatch,
    policy.sampler_mismatch,
    policy.reference_mismatch,
    rewards.wrong_sign,
    rewards.leaked_answer,
    policy.divergence,
    updates.no_update,
    updates.stale_batches,
    policy.truncated,
    policy.grown_length,
    policy.collapsed_entropy,
    rewards.reward_hacking,
    rewards.falling_reward,
    rewards.reward_format,
    rewards.equal_rewards,
    rewards.stuck_source,
    updates.clipped_gradient,
)
"""All detectors, those of causes before those of what they may lead to. Findings are reported in this order."""

_K = LearningKind
_NONE: frozenset[LearningKind] = frozenset()
EXPLAINS: dict[LearningKind, frozenset[LearningKind]] = {
    _K.UPDATES_SKIPPED: frozenset({_K.NO_UPDATE, _K.GRADIENT_CLIPPED, _K.STALE_BATCHES}),
    _K.TOKENIZER_MISMATCH: frozenset(
        {_K.DIVERGENCE, _K.GRADIENT_CLIPPED, _K.EQUAL_REWARDS, _K.LENGTH, _K.ENTROPY_COLLAPSE}
    ),
    _K.SAMPLER_MISMATCH: frozenset(
        {_K.DIVERGENCE, _K.WRONG_DIRECTION, _K.ENTROPY_COLLAPSE, _K.REFERENCE_MISMATCH, _K.GRADIENT_CLIPPED}
        | {_K.LENGTH, _K.EQUAL_REWARDS}
    ),
    _K.REFERENCE_MISMATCH: frozenset(
        {_K.DIVERGENCE, _K.WRONG_DIRECTION, _K.GRADIENT_CLIPPED, _K.REWARD_HACKING}
    ),
    _K.WRONG_DIRECTION: frozenset({_K.EQUAL_REWARDS, _K.ENTROPY_COLLAPSE, _K.LENGTH, _K.REWARD_HACKING}),
    _K.LEAKED_ANSWER: frozenset({_K.REWARD_HACKING, _K.ENTROPY_COLLAPSE}),
    _K.DIVERGENCE: frozenset(
        {_K.WRONG_DIRECTION, _K.ENTROPY_COLLAPSE, _K.LENGTH, _K.EQUAL_REWARDS, _K.GRADIENT_CLIPPED}
        | {_K.REWARD_HACKING, _K.REWARD_FORMAT, _K.STALE_BATCHES}
    ),
    _K.LENGTH: frozenset(
        {_K.EQUAL_REWARDS, _K.REWARD_FORMAT, _K.REWARD_HACKING, _K.ENTROPY_COLLAPSE, _K.WRONG_DIRECTION}
    ),
    _K.REWARD_FORMAT: frozenset({_K.EQUAL_REWARDS}),
    _K.STALE_BATCHES: frozenset({_K.WRONG_DIRECTION, _K.ENTROPY_COLLAPSE, _K.EQUAL_REWARDS, _K.LENGTH}),
    _K.REWARD_HACKING: frozenset({_K.WRONG_DIRECTION, _K.EQUAL_REWARDS}),
    _K.ENTROPY_COLLAPSE: frozenset({_K.WRONG_DIRECTION, _K.EQUAL_REWARDS, _K.REWARD_FORMAT}),
}
"""Consequences that a finding explains."""


def judge(history: StageHistory, *, earlier: Sequence[LearningFinding] = ()) -> tuple[LearningFinding, ...]:
    """Return the findings of a stage that no other one explains, causes first, each with what it leads to.

    A cause can become invisible while its consequences last: rewards that are all equal have no sign any more. One of
    `earlier`, the findings of the step before, therefore stays as long as it explains a finding of now.
    """
    found: dict[LearningKind, LearningFinding] = {}
    for detector in DETECTORS:
        finding = detector(history)
        if finding is not None:
            found.setdefault(finding.kind, finding)
    kept = {
        each.kind: each
        for each in earlier
        if each.kind not in found and EXPLAINS.get(each.kind, _NONE) & found.keys()
    }
    roots: list[LearningFinding] = []
    explained: set[LearningKind] = set()
    for kind, finding in (*kept.items(), *found.items()):
        if kind in explained:
            continue
        leads_to = tuple(
            other
            for other in found
            if other in EXPLAINS.get(kind, _NONE) and other not in {root.kind for root in roots}
        )
        explained |= set(leads_to)
        roots.append(msgspec.structs.replace(finding, leads_to=leads_to))
    return tuple(roots)
