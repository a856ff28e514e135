"""Detectors of rewards that teach nothing, or the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from kintsugi.learning_health.finding import LearningEvidence, LearningFinding, LearningKind
from kintsugi.learning_health.history import StageHistory, StepFigures, mean_of, standard_error, trailing
from kintsugi.learning_health.sample_figures import SampleFigures
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.telemetry.step_metrics import SOURCE

METRICS, SAMPLES = str(RELATIVE.metrics_file), str(RELATIVE.samples_file)
CONFIG = str(RELATIVE.config_file)
PATIENCE = 3
"""Steps that have to show the same before it is reported, where one step is already clear."""
SOLVED_SHARE = 0.95
"""Share of the span of rewards above which a task counts as solved: equal rewards are then no mistake."""
LEAST_ANSWERS, CHANCE_FACTOR = 6, 2.0
"""Completions with the expected answer that show that the reward overlooks it, and how much more frequent they have
to be than completions with the answer of another prompt."""
OPPOSED = -0.5
"""Correlation of reward and advantage below which the sign is wrong."""
EDGE, STANDARD_ERRORS = 5, 4.0
"""Steps at either end that are compared, and how many standard errors apart their means have to be."""
FALL_SHARE = 0.4
"""Share of the initial reward that has to be lost."""
FALL_ADVICE = (
    "if the algorithm or its loss is your own, check the sign of the loss and of the advantages; otherwise lower "
    "`actor.learning_rate` and look at the samples that changed"
)
LEAK_SHARE, LEAK_BY_CHANCE, LEAST_PROMPTS = 0.9, 0.5, 16
SOURCE_STEPS, SOURCE_SAMPLES, SAME_REWARD = 5, 48, 1e-6
"""Steps and samples of a source that show that it is stuck, and the difference of means that is only rounding."""


def equal_rewards(history: StageHistory) -> LearningFinding | None:
    """Find a stage in which all samples of every group earn the same."""
    stretch = trailing(history.steps, lambda each: _has_no_signal(history, each))
    if len(stretch) < PATIENCE or _is_solved(history, stretch):
        return None
    first, last = stretch[0], stretch[-1]
    reward = last.get("reward/mean")
    figures = [each.samples for each in stretch if each.samples is not None]
    is_constant = bool(figures) and _span(figures) == 0
    what = f"every sample earns {reward:g}" if is_constant else "the samples of each group earn the same"
    return LearningFinding(
        kind=LearningKind.EQUAL_REWARDS,
        since_step=first.step,
        step=last.step,
        confidence=0.95,
        summary=f"no group has different rewards since step {first.step}: {what}, so there is nothing to learn from",
        evidence=(
            LearningEvidence(
                METRICS, last.step, f"frac_reward_zero_std 1, reward_std 0, reward/mean {reward:g}"
            ),
            *(_span_evidence(each) for each in stretch[-1:] if each.samples is not None),
        ),
        advice=(
            "look at `kintsugi samples RUN`: if right and wrong answers earn the same, the reward function is at "
            "fault; if all answers are wrong, the task is too hard for the model (easier prompts, a warm-up); if they "
            "are identical, raise `sampling.temperature`"
        ),
    )


def _has_no_signal(history: StageHistory, each: StepFigures) -> bool:
    if history.facts.group_size < 2:
        return each.samples is not None and each.samples.lowest == each.samples.highest
    return each.get("frac_reward_zero_std") >= 1.0


def _is_solved(history: StageHistory, stretch: Sequence[StepFigures]) -> bool:
    """Return whether the latest rewards are the highest that the stage has seen, after lower ones."""
    figures = [each.samples for each in history.steps if each.samples is not None]
    span = _span(figures)
    if not figures or span == 0:
        return False
    lowest = min(each.lowest for each in figures)
    return (mean_of(stretch, "reward/mean") - lowest) / span >= SOLVED_SHARE


def _span(figures: Sequence[SampleFigures]) -> float:
    return max(each.highest for each in figures) - min(each.lowest for each in figures) if figures else 0.0


def _span_evidence(each: StepFigures) -> LearningEvidence:
    if each.samples is None:
        return LearningEvidence(SAMPLES, each.step, "no samples recorded")
    quote = (
        f"rewards of {each.samples.samples} samples from {each.samples.lowest:g} to {each.samples.highest:g}"
    )
    return LearningEvidence(SAMPLES, each.step, quote)


def reward_format(history: StageHistory) -> LearningFinding | None:
    """Find a reward function that never accepts the answers that the completions contain."""
    stretch = trailing(
        history.steps, lambda each: each.samples is not None and each.samples.lowest == each.samples.highest
    )
    figures = [each.samples for each in stretch if each.samples is not None]
    if len(stretch) < PATIENCE or _span(figures) > 0 or figures[-1].lowest > 0:
        return None  # What every sample earns, and is above 0, is not the reward of an answer that was not recognised.
    known, answered = sum(each.with_answer for each in figures), sum(each.answered for each in figures)
    by_chance = sum(each.answered_by_chance for each in figures)
    if answered < LEAST_ANSWERS or answered < CHANCE_FACTOR * by_chance or _is_solved_text(answered, known):
        return None
    first, last = stretch[0], stretch[-1]
    return LearningFinding(
        kind=LearningKind.REWARD_FORMAT,
        since_step=first.step,
        step=last.step,
        confidence=0.9,
        summary=(
            f"{answered} of {known} completions since step {first.step} contain the expected answer, and every one "
            f"earns {figures[-1].lowest:g}, as the wrong ones do: the reward function does not recognise the format"
        ),
        evidence=(
            LearningEvidence(SAMPLES, last.step, f"the answer is in {answered} of {known} completions"),
            LearningEvidence(
                SAMPLES, last.step, f"another prompt's answer is in {by_chance} of them, by chance"
            ),
            _span_evidence(last),
        ),
        advice=(
            "call the reward function on a completion of `kintsugi samples RUN` by hand: either teach the model the "
            "format that it expects (system prompt, warm-up), or let it accept the format of the model"
        ),
    )


def _is_solved_text(answered: int, known: int) -> bool:
    """Return whether nearly all completions have the answer: then equal rewards may be those of a solved task."""
    return answered >= SOLVED_SHARE * known


def wrong_sign(history: StageHistory) -> LearningFinding | None:
    """Find advantages that are high where rewards are low."""
    stretch = trailing(
        history.steps,
        lambda each: (
            each.samples is not None
            and each.samples.agreement is not None
            and each.samples.agreement <= OPPOSED
        ),
    )
    if len(stretch) < PATIENCE:
        return None
    first, last = stretch[0], stretch[-1]
    assert last.samples is not None and last.samples.agreement is not None
    return LearningFinding(
        kind=LearningKind.WRONG_DIRECTION,
        since_step=first.step,
        step=last.step,
        confidence=0.97,
        summary=(
            f"advantages have the opposite sign of rewards since step {first.step} (correlation "
            f"{last.samples.agreement:+.2f} within groups): training makes the better samples less likely"
        ),
        evidence=(
            LearningEvidence(
                SAMPLES, last.step, f"correlation of reward and advantage {last.samples.agreement:+.2f}"
            ),
            LearningEvidence(METRICS, last.step, f"reward/mean {last.get('reward/mean'):.3f}"),
        ),
        advice="check the sign in `group_advantages` of the custom algorithm, and that a higher reward means better",
    )


def falling_reward(history: StageHistory) -> LearningFinding | None:
    """Find a stage whose reward has fallen far below its beginning."""
    steps = [
        each for each in history.steps if each.step - history.facts.first_step >= history.facts.critic_steps
    ]
    if len(steps) < 2 * EDGE:
        return None
    start, end = steps[:EDGE], steps[-EDGE:]
    before, now = mean_of(start, "reward/mean"), mean_of(end, "reward/mean")
    lowest = min((each.samples.lowest for each in steps if each.samples is not None), default=0.0)
    error = (standard_error(start, "reward/mean") ** 2 + standard_error(end, "reward/mean") ** 2) ** 0.5
    if not (before - now > STANDARD_ERRORS * error and before - now >= FALL_SHARE * (before - lowest)):
        return _falling_accuracy(history)
    threshold = (before + now) / 2
    since = trailing(steps, lambda each: each.get("reward/mean") < threshold)
    return LearningFinding(
        kind=LearningKind.WRONG_DIRECTION,
        since_step=since[0].step if since else end[0].step,
        step=end[-1].step,
        confidence=0.8,
        summary=(
            f"the reward falls: from {before:.3f} in steps {start[0].step}–{start[-1].step} to {now:.3f} in steps "
            f"{end[0].step}–{end[-1].step}"
        ),
        evidence=(
            LearningEvidence(METRICS, start[-1].step, f"reward/mean {before:.3f}, mean of {EDGE} steps"),
            LearningEvidence(METRICS, end[-1].step, f"reward/mean {now:.3f}, mean of {EDGE} steps"),
        ),
        advice=FALL_ADVICE,
    )


def _falling_accuracy(history: StageHistory) -> LearningFinding | None:
    """Find held-out accuracy that has fallen beyond what chance explains; a batch of rewards is noisier."""
    fallen = _fallen_accuracy(history)
    if fallen is None:
        return None
    best, last = fallen
    if not last.get("eval/accuracy") <= (1 - FALL_SHARE) * best.get("eval/accuracy"):
        return None
    return LearningFinding(
        kind=LearningKind.WRONG_DIRECTION,
        since_step=best.step + 1,
        step=history.steps[-1].step,
        confidence=0.75,
        summary=(
            f"held-out accuracy falls: from {best.get('eval/accuracy'):.1%} at step {best.step} to "
            f"{last.get('eval/accuracy'):.1%} at step {last.step}"
        ),
        evidence=(_accuracy_evidence(best), _accuracy_evidence(last)),
        advice=FALL_ADVICE,
    )


def _fallen_accuracy(history: StageHistory) -> tuple[StepFigures, StepFigures] | None:
    """Return the best and the latest evaluation, if the latter and the one before are worse by more than the intervals
    at 95 %: of many evaluations, a single one is low by chance."""
    evaluations = [each for each in history.evaluations if each.get("eval/problems") > 0]
    if len(evaluations) < 3:
        return None
    best = max(evaluations[:-2], key=lambda each: each.get("eval/accuracy"))
    is_lower = [each.get("eval/accuracy_high") < best.get("eval/accuracy_low") for each in evaluations[-2:]]
    return (best, evaluations[-1]) if all(is_lower) else None


def reward_hacking(history: StageHistory) -> LearningFinding | None:
    """Find a reward that rises while held-out accuracy falls, beyond what chance explains."""
    fallen = _fallen_accuracy(history)
    if fallen is None:
        return None
    best, last = fallen
    around = [each for each in history.steps if best.step - 1 <= each.step < best.step + EDGE]
    latest = [each for each in history.steps if each.step <= last.step][-EDGE:]
    before, now = mean_of(around, "reward/mean"), mean_of(latest, "reward/mean")
    error = (standard_error(around, "reward/mean") ** 2 + standard_error(latest, "reward/mean") ** 2) ** 0.5
    if not now - before > STANDARD_ERRORS * error:
        return None
    fell, rose = (
        f"{best.get('eval/accuracy'):.1%} → {last.get('eval/accuracy'):.1%}",
        f"{before:.3f} → {now:.3f}",
    )
    return LearningFinding(
        kind=LearningKind.REWARD_HACKING,
        since_step=best.step + 1,
        step=history.steps[-1].step,
        confidence=0.9,
        summary=(
            f"the reward rises ({rose}) while held-out accuracy falls ({fell}) since step {best.step}: the policy "
            "finds reward that is not the task"
        ),
        evidence=(
            _accuracy_evidence(best),
            _accuracy_evidence(last),
            LearningEvidence(METRICS, latest[-1].step, f"reward/mean {rose}"),
        ),
        advice=(
            "look at the samples with the highest reward; weight the parts of the reward that do not measure the task "
            "lower or to 0, and stop from the checkpoint with the best accuracy"
        ),
    )


def _accuracy_evidence(each: StepFigures) -> LearningEvidence:
    low, high = each.get("eval/accuracy_low"), each.get("eval/accuracy_high")
    quote = f"eval/accuracy {each.get('eval/accuracy'):.1%} ({low:.1%} – {high:.1%} at 95 %)"
    return LearningEvidence(METRICS, each.step, quote)


def leaked_answer(history: StageHistory) -> LearningFinding | None:
    """Find prompts that contain their own answers, and not those of other prompts."""
    shown = [each for each in history.steps if each.samples is not None and each.samples.with_answer > 0]
    figures = [each.samples for each in shown if each.samples is not None]
    known = sum(each.with_answer for each in figures)
    leaked, by_chance = sum(each.leaked for each in figures), sum(each.leaked_by_chance for each in figures)
    prompts = sum(each.prompts for each in figures)
    is_clear = leaked >= LEAK_SHARE * known and by_chance <= LEAK_BY_CHANCE * known
    if len(shown) < PATIENCE or prompts < LEAST_PROMPTS or not is_clear:
        return None
    return LearningFinding(
        kind=LearningKind.LEAKED_ANSWER,
        since_step=shown[0].step,
        step=shown[-1].step,
        confidence=0.75,
        summary=(
            f"{leaked / known:.0%} of the prompts contain their expected answer ({by_chance / known:.0%} contain that "
            "of another prompt): the model can copy instead of solving"
        ),
        evidence=(
            LearningEvidence(
                SAMPLES, shown[-1].step, f"the answer is in the prompt of {leaked} of {known} samples"
            ),
        ),
        advice=(
            "check how prompts are made (`data.prompt_column`, few-shot examples, templates); if the task is to quote "
            "from the prompt, this is as it should be"
        ),
    )


def stuck_source(history: StageHistory) -> LearningFinding | None:
    """Find a source of a mixture that earns the same in every step while others earn more."""
    if not history.facts.is_mixture:
        return None
    rewards = {source: _rewards_of(history, source) for source in _sources(history)}
    for source, earned in rewards.items():
        samples = sum(each.get(f"{SOURCE}{source}/samples") for each in earned)
        if len(earned) < SOURCE_STEPS or samples < SOURCE_SAMPLES:
            continue
        means = [each.get(f"{SOURCE}{source}/reward") for each in earned]
        others = [
            each.get(f"{SOURCE}{other}/reward")
            for other, steps in rewards.items()
            if other != source
            for each in steps
        ]
        if max(means) - min(means) <= SAME_REWARD and others and max(others) > max(means) + SAME_REWARD:
            return _stuck_finding(source, earned, samples=int(samples), others=others)
    return None


def _sources(history: StageHistory) -> list[str]:
    """Return the names of the sources, in order."""
    names = {name for each in history.steps for name in each.values if name.startswith(SOURCE)}
    return sorted({name.removeprefix(SOURCE).rpartition("/")[0] for name in names})


def _rewards_of(history: StageHistory, source: str) -> list[StepFigures]:
    """Return the steps with samples of a source."""
    return [each for each in history.steps if isfinite(each.get(f"{SOURCE}{source}/reward"))]


def _stuck_finding(
    source: str, earned: Sequence[StepFigures], *, samples: int, others: Sequence[float]
) -> LearningFinding:
    first, last, mean = earned[0], earned[-1], sum(others) / len(others)
    reward = last.get(f"{SOURCE}{source}/reward")
    return LearningFinding(
        kind=LearningKind.SOURCE_STUCK,
        since_step=first.step,
        step=last.step,
        confidence=0.9,
        summary=(
            f"source {source} teaches nothing: its {samples} samples since step {first.step} earned {reward:g} in "
            f"every step, while the other sources earn {mean:.3f} on average"
        ),
        evidence=(
            LearningEvidence(
                METRICS, last.step, f"{SOURCE}{source}/reward {reward:g} in each of {len(earned)} steps"
            ),
            LearningEvidence(METRICS, last.step, f"other sources: mean reward {mean:.3f}"),
        ),
        advice=(
            f"look at `kintsugi samples RUN` of {source}: its answers may have a format that the reward does not "
            "recognise, or be too hard; lower its weight or remove it"
        ),
    )
