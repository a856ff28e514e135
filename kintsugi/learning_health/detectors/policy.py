"""Detectors of a policy that collapses, grows, diverges, or is compared with the wrong model."""

from __future__ import annotations

from math import isfinite, log

from kintsugi.learning_health.detectors.rewards import CONFIG, EDGE, METRICS, PATIENCE, SAMPLES, SOLVED_SHARE
from kintsugi.learning_health.finding import LearningEvidence, LearningFinding, LearningKind
from kintsugi.learning_health.history import StageHistory, StepFigures, mean_of, median_of, trailing

COLLAPSED_SHARE, COLLAPSED_NATS = 0.2, 0.3
"""Share of the initial entropy, and nats per token, below which the policy is nearly deterministic, …"""
DECLINED_SHARE = 0.5
"""Share of the initial entropy below which the collapse is under way: rewards may fall before it is complete."""
UNSOLVED_SHARE = 0.6
"""… which is premature below this share of the span of rewards."""
TRUNCATED_SHARE = 0.98
GROWN_FACTOR, GROWN_TRUNCATED = 1.5, 0.3
"""Growth of mean length, and of the share of truncated completions, that counts as an explosion."""
PAID_LENGTH = 0.6
"""Correlation of reward and length above which length itself is rewarded."""
UPDATE_RATIO = 0.1
"""Change of the weights by one update, relative to their norm, that destroys a trained model."""
NEW_UPDATE_RATIO = 0.3
"""The same for a model that begins with random weights."""
KL_NATS = 2.0
"""KL to the reference per token above which nothing of the reference is left."""
STEP_KL_NATS = 0.2
"""KL of the policy that sampled to the updated one, mean over the updates of a step; usual is below 0.02."""
GRADIENT_GROWTH, LOSS_GROWTH = 30.0, 1.5
SAMPLER_NATS = 0.05
"""Mean difference of log-probabilities of sampler and trainer; bfloat16 on both sides gives about 0.01."""
OWN_KL_NATS, GIVEN_KL_NATS, DPO_MARGIN = 1e-3, 0.1, 0.1
"""KL to the reference at the first step: with the stage's own weights as reference it is 0."""
WORSE_THAN_UNIFORM_NATS = 0.3
GARBLED_SHARE = 0.3


def collapsed_entropy(history: StageHistory) -> LearningFinding | None:
    """Find a policy that became nearly deterministic before it solved the task."""
    steps = history.steps
    if not history.facts.samples_completions or len(steps) < EDGE + PATIENCE:
        return None
    # A fast collapse is over by the third step, so the mean of the first steps would be too low.
    before = max(each.get("entropy") for each in steps[:PATIENCE])
    limit = min(COLLAPSED_SHARE * before, COLLAPSED_NATS)
    stretch = trailing(steps, lambda each: each.get("entropy") < limit)
    if len(stretch) < PATIENCE or _solved_share(history, stretch[-EDGE:]) >= UNSOLVED_SHARE:
        return None
    first, last = stretch[0], stretch[-1]
    decline = trailing(steps, lambda each: each.get("entropy") < DECLINED_SHARE * before)
    reward = mean_of(stretch[-EDGE:], "reward/mean")
    return LearningFinding(
        kind=LearningKind.ENTROPY_COLLAPSE,
        since_step=decline[0].step,
        step=last.step,
        confidence=0.85,
        summary=(
            f"entropy collapsed from {before:.3g} to {last.get('entropy'):.3g} nats per token by step {first.step}, at "
            f"a mean reward of {reward:.3f}: the policy no longer explores"
        ),
        evidence=(
            LearningEvidence(METRICS, steps[0].step, f"entropy {before:.3g}, highest of {PATIENCE} steps"),
            LearningEvidence(METRICS, last.step, f"entropy {last.get('entropy'):.3g}"),
            LearningEvidence(
                METRICS, last.step, f"frac_reward_zero_std {last.get('frac_reward_zero_std'):.2f}"
            ),
        ),
        advice=(
            "lower `actor.learning_rate`, raise `algorithm.clip_high`, add `algorithm.entropy_weight` or a KL term "
            "(`algorithm.beta`), and resume from a checkpoint before the collapse"
        ),
    )


def _solved_share(history: StageHistory, steps: list[StepFigures]) -> float:
    """Return where the mean reward is between the lowest and the highest that a sample earned."""
    figures = [each.samples for each in history.steps if each.samples is not None]
    if not figures:
        return 0.0
    lowest, highest = min(each.lowest for each in figures), max(each.highest for each in figures)
    return 0.0 if highest == lowest else (mean_of(steps, "reward/mean") - lowest) / (highest - lowest)


def truncated(history: StageHistory) -> LearningFinding | None:
    """Find completions that all end at the length limit, unless they earn all that there is to earn."""
    stretch = trailing(history.steps, lambda each: each.get("completions/clipped_ratio") >= TRUNCATED_SHARE)
    if len(stretch) < PATIENCE or _solved_share(history, stretch[-EDGE:]) >= SOLVED_SHARE:
        return None
    first, last = stretch[0], stretch[-1]
    share, length = last.get("completions/clipped_ratio"), last.get("completions/mean_length")
    limit = history.facts.max_new_tokens
    return LearningFinding(
        kind=LearningKind.LENGTH,
        since_step=first.step,
        step=last.step,
        confidence=0.9,
        summary=(
            f"{share:.0%} of the completions are truncated since step {first.step}: they reach the limit of {limit} "
            "tokens before they end"
        ),
        evidence=(
            LearningEvidence(
                METRICS, last.step, f"completions/clipped_ratio {share:.2f}, mean_length {length:.1f}"
            ),
            LearningEvidence(CONFIG, last.step, f"sampling.max_new_tokens {limit}"),
        ),
        advice=(
            "raise `sampling.max_new_tokens` (and `generation.max_length`), or find out why the model does not end: "
            "chat template, end token of the tokenizer, a warm-up without end tokens"
        ),
    )


def grown_length(history: StageHistory) -> LearningFinding | None:
    """Find completions that grow into the length limit, or are paid for by length."""
    steps = history.steps
    if not history.facts.samples_completions or len(steps) < 2 * EDGE:
        return None
    start, end = steps[:EDGE], steps[-EDGE:]
    before, now = mean_of(start, "completions/mean_length"), mean_of(end, "completions/mean_length")
    cut_before, cut_now = (mean_of(part, "completions/clipped_ratio") for part in (start, end))
    paid = [each for each in steps if each.get("reward_length_correlation") >= PAID_LENGTH]
    is_paid = len(paid) >= EDGE  # Where all completions have grown to the limit, nothing correlates any more.
    if not (now >= GROWN_FACTOR * before and (cut_now - cut_before >= GROWN_TRUNCATED or is_paid)):
        return None
    threshold = (before + now) / 2
    grown = trailing(steps, lambda each: each.get("completions/mean_length") > threshold) or end
    correlation = mean_of(paid if is_paid else end, "reward_length_correlation")
    return LearningFinding(
        kind=LearningKind.LENGTH,
        since_step=paid[0].step if is_paid else grown[0].step,
        step=end[-1].step,
        confidence=0.85,
        summary=(
            f"completions grow from {before:.1f} to {now:.1f} tokens, {cut_now:.0%} of them are truncated, and reward "
            f"and length correlate with {correlation:+.2f}"
        ),
        evidence=(
            LearningEvidence(METRICS, start[-1].step, f"completions/mean_length {before:.1f}"),
            LearningEvidence(METRICS, end[-1].step, f"completions/mean_length {now:.1f}"),
            LearningEvidence(
                METRICS, (paid if is_paid else end)[-1].step, f"reward_length_correlation {correlation:+.2f}"
            ),
        ),
        advice=(
            "look whether the longest samples are better; punish overlong answers (`algorithm.overlong_buffer`), use a "
            "length-neutral `algorithm.denominator`, or take length out of the reward"
        ),
    )


def divergence(history: StageHistory) -> LearningFinding | None:
    """Find updates that change the weights, the policy or the loss far too fast."""
    for look in (_large_updates, _large_kl, _exploding):
        if (found := look(history)) is not None:
            return found
    return None


def _divergence(
    history: StageHistory, since: int, *, summary: str, quote: str, at: int, confidence: float
) -> LearningFinding:
    rate = f"actor.learning_rate {history.facts.learning_rate:g}"
    return LearningFinding(
        kind=LearningKind.DIVERGENCE,
        since_step=since,
        step=history.steps[-1].step,
        confidence=confidence,
        summary=summary,
        evidence=(LearningEvidence(METRICS, at, quote), LearningEvidence(CONFIG, at, rate)),
        advice=(
            "lower `actor.learning_rate` (by a factor of 10 as a first try), add `actor.warmup_steps`, lower "
            "`algorithm.updates_per_step`, and resume from a checkpoint before this"
        ),
    )


def _large_updates(history: StageHistory) -> LearningFinding | None:
    limit = UPDATE_RATIO if history.facts.first_step > 1 or history.facts.is_pretrained else NEW_UPDATE_RATIO
    large = [each for each in history.steps if each.get("update_ratio") >= limit]
    if not large:
        return None
    most = max(large, key=lambda each: each.get("update_ratio"))
    return _divergence(
        history,
        large[0].step,
        summary=(
            f"the update of step {most.step} changed the weights by {most.get('update_ratio'):.0%} of their norm; "
            f"above {limit:.0%} little is left of what the model knew"
        ),
        quote=f"update_ratio {most.get('update_ratio'):.3g}, grad_norm {most.get('grad_norm'):.3g}",
        at=most.step,
        confidence=0.9,
    )


def _large_kl(history: StageHistory) -> LearningFinding | None:
    """Find a policy far from its reference; without one, a policy that its own updates moved far within a step."""
    facts = history.facts
    if facts.has_reference:
        limit, what = KL_NATS, "to the reference"
        large = trailing(history.steps, lambda each: abs(each.get("kl")) >= limit)
    else:
        limit, what = STEP_KL_NATS, "between the policy that sampled and its own updates"
        large = [each for each in history.steps if facts.is_on_policy and abs(each.get("kl")) >= limit]
    if len(large) < PATIENCE:
        return None
    first, last = large[0], large[-1]
    return _divergence(
        history,
        first.step,
        summary=(
            f"the KL divergence {what} is {last.get('kl'):.2f} nats per token at step {last.step}, above {limit:g} in "
            f"{len(large)} steps since step {first.step}"
        ),
        quote=f"kl {last.get('kl'):.3g}, clip_ratio {last.get('clip_ratio'):.3g}",
        at=last.step,
        confidence=0.85,
    )


def _exploding(history: StageHistory) -> LearningFinding | None:
    """Find a gradient or a loss of demonstrations that has grown by orders of magnitude."""
    steps = history.steps
    if len(steps) < 2 * EDGE:
        return None
    start, end = steps[:EDGE], steps[-EDGE:]
    gradient = median_of(end, "grad_norm") / max(median_of(start, "grad_norm"), 1e-12)
    is_loss = not history.facts.samples_completions
    loss = mean_of(end, "loss") / mean_of(start, "loss") if is_loss and mean_of(start, "loss") > 0 else 1.0
    is_large = median_of(end, "grad_norm") > 10 * history.facts.max_grad_norm
    if not ((gradient >= GRADIENT_GROWTH and is_large) or loss >= LOSS_GROWTH):
        return None
    grown = (
        f"the loss grew from {mean_of(start, 'loss'):.3g} to {mean_of(end, 'loss'):.3g}"
        if loss >= LOSS_GROWTH
        else f"the gradient norm grew from {median_of(start, 'grad_norm'):.3g} to {median_of(end, 'grad_norm'):.3g}"
    )
    return _divergence(
        history,
        end[0].step,
        summary=f"{grown} between steps {start[-1].step} and {end[-1].step}",
        quote=grown,
        at=end[-1].step,
        confidence=0.8,
    )


def sampler_mismatch(history: StageHistory) -> LearningFinding | None:
    """Find a sampler and a trainer that disagree about the same tokens under the same weights."""
    stretch = trailing(
        history.steps,
        lambda each: (
            (history.facts.is_on_policy or each.get("token_staleness_mean") == 0)
            and each.get("logprob_abs_diff_mean") >= SAMPLER_NATS
        ),
    )
    if len(stretch) < PATIENCE:
        return None
    first, last = stretch[0], stretch[-1]
    difference, ratio = last.get("logprob_abs_diff_mean"), last.get("ratio_mean")
    return LearningFinding(
        kind=LearningKind.SAMPLER_MISMATCH,
        since_step=first.step,
        step=last.step,
        confidence=0.95,
        summary=(
            f"sampler and trainer disagree by {difference:.2g} nats per token since step {first.step}, before the "
            "first update of a step, where they have the same weights"
        ),
        evidence=(
            LearningEvidence(
                METRICS, last.step, f"logprob_abs_diff_mean {difference:.3g} (usual: below 0.02)"
            ),
            LearningEvidence(
                METRICS,
                last.step,
                f"logprob_abs_diff_max {last.get('logprob_abs_diff_max'):.3g}, ratio_mean {ratio:.3g}",
            ),
        ),
        advice=(
            "compare tokens, loss mask and temperature of both sides for one sample: a mask that is off by one, "
            "another temperature, other weights or another precision in the server. Until then correct by "
            "`algorithm.importance: truncate`"
        ),
    )


def reference_mismatch(history: StageHistory) -> LearningFinding | None:
    """Find a reference that is not the model with which the stage began: their KL at the first step is not 0."""
    facts = history.facts
    first = next((each for each in history.steps if each.step == facts.first_step), None)
    if not facts.has_reference or first is None or len(history.steps) < PATIENCE:
        return None
    if facts.algorithm == "dpo":
        name, limit = "dpo_margin", DPO_MARGIN
    else:
        name, limit = "kl", GIVEN_KL_NATS if facts.reference_given else OWN_KL_NATS
    found = first.get(name)
    if not abs(found) > limit:
        return None
    return LearningFinding(
        kind=LearningKind.REFERENCE_MISMATCH,
        since_step=first.step,
        step=history.steps[-1].step,
        confidence=0.9 if facts.algorithm != "dpo" else 0.8,
        summary=(
            f"the reference is not the model that training starts from: {name} is {found:.3g} at the first step, "
            "before any update, instead of 0"
        ),
        evidence=(LearningEvidence(METRICS, first.step, f"{name} {found:.3g} at the first step"),),
        advice=(
            "set `reference.path` to the model of `model.path`, or leave it out: the reference is then the weights "
            "with which the stage begins. Check its tokenizer too"
        ),
    )


def tokenizer_mismatch(history: StageHistory) -> LearningFinding | None:
    """Find a trained model that predicts its data worse than a uniform distribution, or completions that cannot be
    decoded."""
    facts = history.facts
    if not history.steps or len(history.steps) < PATIENCE:
        return None
    first = history.steps[0]
    if (
        facts.algorithm == "sft"
        and facts.is_pretrained
        and facts.vocabulary > 1
        and first.step == facts.first_step
    ):
        loss, uniform = first.get("loss"), log(facts.vocabulary)
        if isfinite(loss) and loss > uniform + WORSE_THAN_UNIFORM_NATS:
            return _tokenizer_finding(
                history,
                since=first.step,
                summary=(
                    f"the model predicts the data worse than chance: its loss at the first step is {loss:.2f}, a "
                    f"uniform choice among {facts.vocabulary} tokens gives {uniform:.2f}"
                ),
                evidence=LearningEvidence(
                    METRICS, first.step, f"loss {loss:.3g}, entropy {first.get('entropy'):.3g}"
                ),
            )
    stretch = trailing(
        history.steps,
        lambda each: (
            each.samples is not None and each.samples.garbled >= GARBLED_SHARE * each.samples.samples
        ),
    )
    if len(stretch) < PATIENCE:
        return None
    assert stretch[-1].samples is not None
    garbled, samples = stretch[-1].samples.garbled, stretch[-1].samples.samples
    return _tokenizer_finding(
        history,
        since=stretch[0].step,
        summary=f"{garbled} of {samples} completions contain characters that could not be decoded",
        evidence=LearningEvidence(
            SAMPLES, stretch[-1].step, f"{garbled} of {samples} completions are garbled"
        ),
    )


def _tokenizer_finding(
    history: StageHistory, *, since: int, summary: str, evidence: LearningEvidence
) -> LearningFinding:
    return LearningFinding(
        kind=LearningKind.TOKENIZER_MISMATCH,
        since_step=since,
        step=history.steps[-1].step,
        confidence=0.85,
        summary=summary,
        evidence=(evidence,),
        advice=(
            "compare tokenizer.json of `model.path` with that of the model's origin (vocabulary, order, special "
            "tokens), and check that text prompts get the chat template that the model expects"
        ),
    )
