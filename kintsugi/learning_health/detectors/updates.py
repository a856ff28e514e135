"""Detectors of updates that change nothing, are cut, left out, or computed from old samples."""

from __future__ import annotations

from kintsugi.learning_health.detectors.rewards import CONFIG, METRICS
from kintsugi.learning_health.finding import LearningEvidence, LearningFinding, LearningKind
from kintsugi.learning_health.history import StageHistory, mean_of, median_of, trailing

UNCHANGED = 1e-7
"""Relative change of the weights below which float32 weights stay as they are."""
UNCHANGED_STEPS = 5
CLIPPED_STEPS, CLIPPED_FACTOR = 10, 10.0
"""Steps in a row with a gradient this many times above the limit."""
SKIPPED_STEPS, SKIPPED_WINDOW = 2, 5
STALE_STEPS, STALE_AGE, STALE_KL, STALE_CAPPED = 5, 4.0, 0.05, 0.1


def no_update(history: StageHistory) -> LearningFinding | None:
    """Find updates that leave the weights as they are, although there is a gradient."""
    facts = history.facts
    waits_until = facts.first_step + facts.critic_steps
    stretch = trailing(
        history.steps,
        lambda each: (
            each.step >= waits_until
            and each.get("update_ratio") < UNCHANGED
            and each.get("grad_norm") > 0
            and not each.get("skipped") > 0
        ),
    )
    if len(stretch) < UNCHANGED_STEPS:
        return None
    first, last = stretch[0], stretch[-1]
    return LearningFinding(
        kind=LearningKind.NO_UPDATE,
        since_step=first.step,
        step=last.step,
        confidence=0.95,
        summary=(
            f"the weights do not change since step {first.step}: an update is {last.get('update_ratio'):.1g} of their "
            f"norm at a learning rate of {last.get('learning_rate'):.3g}"
        ),
        evidence=(
            LearningEvidence(
                METRICS,
                last.step,
                f"update_ratio {last.get('update_ratio'):.2g}, learning_rate {last.get('learning_rate'):.3g}, "
                f"grad_norm {last.get('grad_norm'):.3g}",
            ),
        ),
        advice="raise `actor.learning_rate`, and check `actor.schedule` and `actor.warmup_steps`",
    )


def clipped_gradient(history: StageHistory) -> LearningFinding | None:
    """Find a stage in which every gradient is far above the limit, so that only its direction is used."""
    limit = history.facts.max_grad_norm
    stretch = trailing(history.steps, lambda each: each.get("grad_norm") >= CLIPPED_FACTOR * limit)
    if len(stretch) < CLIPPED_STEPS or limit <= 0:
        return None
    first, last = stretch[0], stretch[-1]
    norm = median_of(stretch, "grad_norm")
    return LearningFinding(
        kind=LearningKind.GRADIENT_CLIPPED,
        since_step=first.step,
        step=last.step,
        confidence=0.85,
        summary=(
            f"every gradient since step {first.step} is clipped: its norm is {norm:.3g} in the median, "
            f"{norm / limit:.0f} times the limit"
        ),
        evidence=(
            LearningEvidence(METRICS, last.step, f"grad_norm {last.get('grad_norm'):.3g}"),
            LearningEvidence(CONFIG, last.step, f"actor.max_grad_norm {limit:g}"),
        ),
        advice=(
            "set `actor.max_grad_norm` to about the usual norm, so that only outliers are clipped; if the norm itself "
            "is unusual, look for a sum where a mean was meant (`algorithm.denominator`), or rewards of a large scale"
        ),
    )


def skipped_updates(history: StageHistory) -> LearningFinding | None:
    """Find updates that are left out again and again because gradients are not finite."""
    window = history.steps[-SKIPPED_WINDOW:]
    skipped = [each for each in window if each.get("skipped") > 0 or each.get("critic_skipped") > 0]
    if len(skipped) < SKIPPED_STEPS:
        return None
    every = [each for each in history.steps if each.get("skipped") > 0 or each.get("critic_skipped") > 0]
    return LearningFinding(
        kind=LearningKind.UPDATES_SKIPPED,
        since_step=every[0].step,
        step=window[-1].step,
        confidence=0.97,
        summary=(
            f"updates are left out because gradients are not finite: in {len(skipped)} of the last {len(window)} "
            f"steps, first at step {every[0].step}"
        ),
        evidence=(LearningEvidence(METRICS, skipped[-1].step, f"skipped {skipped[-1].get('skipped'):g}"),),
        advice=(
            "look for a division by 0 or a logarithm of 0 in a custom loss, and for infinite rewards; in bfloat16 try "
            "float32 (`actor.dtype`), and lower `actor.learning_rate`"
        ),
    )


def stale_batches(history: StageHistory) -> LearningFinding | None:
    """Find samples that are so old that the policy has moved away from the one that produced them."""
    if history.facts.is_on_policy:
        return None
    stretch = trailing(
        history.steps,
        lambda each: (
            each.get("staleness_mean") >= STALE_AGE
            and (
                abs(each.get("behaviour_kl")) >= STALE_KL
                or each.get("importance_capped_share") >= STALE_CAPPED
            )
        ),
    )
    if len(stretch) < STALE_STEPS:
        return None
    first, last = stretch[0], stretch[-1]
    age, divergence = mean_of(stretch, "staleness_mean"), mean_of(stretch, "behaviour_kl")
    return LearningFinding(
        kind=LearningKind.STALE_BATCHES,
        since_step=first.step,
        step=last.step,
        confidence=0.85,
        summary=(
            f"samples are {age:.1f} steps old on average since step {first.step}, and the policy has moved "
            f"{divergence:.2g} nats per token away from the one that produced them"
        ),
        evidence=(
            LearningEvidence(
                METRICS,
                last.step,
                f"staleness_mean {last.get('staleness_mean'):.1f}, behaviour_kl {last.get('behaviour_kl'):.3g}",
            ),
        ),
        advice=(
            "lower `asynchrony.max_staleness`, or add model workers so that samples are trained sooner; a lower "
            "`actor.learning_rate` bears older samples"
        ),
    )
