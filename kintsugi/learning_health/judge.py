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
LATER_STEPS = 10
"""Steps by which a cause may show later than what it leads to: some are only seen over several steps."""
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
    _K.REWARD_HACKING: frozenset({_K.WRONG_DIRECTION, _K.EQUAL_REWARDS, _K.LENGTH, _K.ENTROPY_COLLAPSE}),
    _K.ENTROPY_COLLAPSE: frozenset({_K.WRONG_DIRECTION, _K.EQUAL_REWARDS, _K.REWARD_FORMAT}),
}
"""Consequences that a finding explains."""


def judge(history: StageHistory, *, earlier: Sequence[LearningFinding] = ()) -> tuple[LearningFinding, ...]:
    """Return the findings of a stage that no other one explains, causes first, each with what it leads to.

    A cause can become invisible while its consequences last: rewards that are all equal have no sign any more. One of
    `earlier`, the findings of the step before, therefore stays as long as it explains a finding of now. A finding that
    lasts keeps its first step, also when it was less clear in between.
    """
    found: dict[LearningKind, LearningFinding] = {}
    for detector in DETECTORS:
        finding = detector(history)
        if finding is not None:
            found[finding.kind] = _since_the_first(found.get(finding.kind, finding), finding)
    for before in earlier:
        if (now := found.get(before.kind)) is not None:
            found[before.kind] = _since_the_first(now, before)
    kept = {
        each.kind: each
        for each in earlier
        if each.kind not in found and any(_may_explain(each, other) for other in found.values())
    }
    candidates = [*kept.values(), *found.values()]
    consequences = {
        cause.kind: tuple(other.kind for other in candidates if _explains(cause, other, candidates))
        for cause in candidates
    }
    explained = {kind for kinds in consequences.values() for kind in kinds}
    return tuple(
        msgspec.structs.replace(each, leads_to=consequences[each.kind])
        for each in candidates
        if each.kind not in explained
    )


def _since_the_first(finding: LearningFinding, other: LearningFinding) -> LearningFinding:
    """Return a finding with the earlier first step of two of its kind."""
    return msgspec.structs.replace(finding, since_step=min(finding.since_step, other.since_step))


def _explains(cause: LearningFinding, other: LearningFinding, candidates: Sequence[LearningFinding]) -> bool:
    """Return whether a finding explains another one. Of two that may explain each other, the first candidate does."""
    if not _may_explain(cause, other):
        return False
    return not _may_explain(other, cause) or candidates.index(cause) < candidates.index(other)


def _may_explain(cause: LearningFinding, other: LearningFinding) -> bool:
    """Return whether one kind leads to the other, and did not begin long after it."""
    return (
        other.kind in EXPLAINS.get(cause.kind, _NONE) and cause.since_step <= other.since_step + LATER_STEPS
    )
