"""Every detector on a made series: it fires on the fault, and stays silent on the healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kintsugi.learning_health.detectors import policy, rewards, updates
from kintsugi.learning_health.finding import LearningFinding, LearningKind
from kintsugi.learning_health.history import StageFacts, StageHistory, StepFigures
from kintsugi.learning_health.judge import judge
from kintsugi.learning_health.sample_figures import SampleFigures

FACTS = StageFacts(name="grpo", algorithm="grpo", first_step=1)
Figures = Callable[[int], dict[str, float]]
NUM_STEPS = 24


def metrics(step: int, **changed: float) -> dict[str, float]:
    """Metrics of a healthy step: the reward rises, everything else is as usual."""
    usual = {
        "reward/mean": 0.2 + 0.01 * step + 0.02 * (-1) ** step,
        "frac_reward_zero_std": 0.4,
        "entropy": 1.0 - 0.01 * step,
        "completions/clipped_ratio": 0.02,
        "completions/mean_length": 20.0 + 0.1 * step,
        "reward_length_correlation": 0.1,
        "grad_norm": 0.5,
        "learning_rate": 3e-4,
        "update_ratio": 2e-3,
        "skipped": 0.0,
        "kl": 0.001 * step,
        "behaviour_kl": 0.004,
        "staleness_mean": 1.0,
        "logprob_abs_diff_mean": 1e-3,
        "logprob_abs_diff_max": 0.1,
        "ratio_mean": 1.0,
        "loss": 1.5 - 0.01 * step,
    }
    return {**usual, **changed}


def samples(**changed: Any) -> SampleFigures:
    usual = SampleFigures(
        samples=64, lowest=0.0, highest=1.0, with_answer=64, answered=14, prompts=16, agreement=0.98
    )
    return msgspec.structs.replace(usual, **changed)


def history_of(
    figures: Figures = metrics,
    *,
    of_samples: Callable[[int], SampleFigures | None] = lambda step: samples(),
    accuracies: tuple[float, ...] = (),
    **facts: Any,
) -> StageHistory:
    history = StageHistory(msgspec.structs.replace(FACTS, **facts))
    for step in range(1, NUM_STEPS + 1):
        history.add_step(StepFigures(step, figures(step), of_samples(step)))
    for number, accuracy in enumerate(accuracies):
        values = {"eval/problems": 200.0, "eval/accuracy": accuracy}
        values |= {"eval/accuracy_low": accuracy - 0.06, "eval/accuracy_high": accuracy + 0.06}
        history.add_evaluation(StepFigures(5 * number, values))
    return history


def expect(
    finding: LearningFinding | None, kind: LearningKind, *, since: int | None = None
) -> LearningFinding:
    assert finding is not None and finding.kind is kind
    assert finding.evidence and finding.advice and 0.5 < finding.confidence <= 1
    assert since is None or finding.since_step == since
    return finding


HEALTHY = {
    "usual": history_of(),
    "with a reference": history_of(has_reference=True, accuracies=(0.2, 0.25, 0.3)),
    "asynchronous": history_of(is_on_policy=False),
    "demonstrations": history_of(
        of_samples=lambda step: None,
        algorithm="sft",
        samples_completions=False,
        is_pretrained=True,
        vocabulary=14,
    ),
    "solved": history_of(
        lambda step: metrics(
            step, **{"reward/mean": 1.0, "frac_reward_zero_std": 1.0, "entropy": 0.01} if step > 9 else {}
        ),
        of_samples=lambda step: samples(lowest=1.0, agreement=None) if step > 9 else samples(),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_stage(name: str) -> None:
    assert judge(HEALTHY[name]) == ()


def test_equal_rewards_are_found_since_the_step_at_which_they_began() -> None:
    history = history_of(
        lambda step: metrics(step, **{"frac_reward_zero_std": 1.0, "reward/mean": 0.7} if step > 4 else {}),
        of_samples=lambda step: (
            samples(lowest=0.7, highest=0.7, agreement=None) if step > 4 else samples(highest=2.0)
        ),
    )
    found = expect(rewards.equal_rewards(history), LearningKind.EQUAL_REWARDS, since=5)
    assert "every sample earns 0.7" in found.summary


def test_equal_rewards_without_groups_are_found_by_the_samples() -> None:
    history = history_of(
        lambda step: metrics(step, frac_reward_zero_std=1.0),
        of_samples=lambda step: samples(lowest=0.0, highest=0.0, answered=0),
        group_size=1,
    )
    expect(rewards.equal_rewards(history), LearningKind.EQUAL_REWARDS, since=1)
    assert (
        rewards.equal_rewards(history_of(lambda step: metrics(step, frac_reward_zero_std=1.0), group_size=1))
        is None
    )


def test_a_reward_that_overlooks_the_answers_is_told_from_a_task_that_is_too_hard() -> None:
    def with_answers(count: int) -> StageHistory:
        return history_of(
            lambda step: metrics(step, **{"frac_reward_zero_std": 1.0, "reward/mean": 0.0}),
            of_samples=lambda step: samples(
                highest=0.0, answered=count, answered_by_chance=1, agreement=None
            ),
        )

    assert [each.kind for each in judge(with_answers(12))] == [LearningKind.REWARD_FORMAT]
    assert [each.kind for each in judge(with_answers(1))] == [LearningKind.EQUAL_REWARDS]


def test_advantages_of_the_wrong_sign_are_found() -> None:
    history = history_of(of_samples=lambda step: samples(agreement=-0.99))
    expect(rewards.wrong_sign(history), LearningKind.WRONG_DIRECTION, since=1)


def test_a_reward_that_falls_is_found() -> None:
    history = history_of(
        lambda step: metrics(step, **{"reward/mean": 0.4 if step < 8 else 0.05 + 0.01 * (step % 2)})
    )
    expect(rewards.falling_reward(history), LearningKind.WRONG_DIRECTION)


def test_accuracy_that_is_low_once_is_chance_and_twice_a_fall() -> None:
    assert rewards.falling_reward(history_of(accuracies=(0.7, 0.3, 0.65))) is None
    expect(
        rewards.falling_reward(history_of(accuracies=(0.7, 0.3, 0.2))), LearningKind.WRONG_DIRECTION, since=1
    )


def test_a_reward_that_rises_while_accuracy_falls_is_hacked() -> None:
    def rising(step: int) -> dict[str, float]:
        return metrics(step, **{"reward/mean": 0.1 + 0.03 * step})

    expect(
        rewards.reward_hacking(history_of(rising, accuracies=(0.7, 0.5, 0.3, 0.1))),
        LearningKind.REWARD_HACKING,
    )
    assert rewards.reward_hacking(history_of(rising, accuracies=(0.3, 0.5, 0.6, 0.7))) is None


def test_prompts_with_their_own_answers_are_leaks_and_choices_that_all_prompts_have_are_not() -> None:
    leaked = history_of(of_samples=lambda step: samples(leaked=64, leaked_by_chance=3))
    expect(rewards.leaked_answer(leaked), LearningKind.LEAKED_ANSWER, since=1)
    choices = history_of(of_samples=lambda step: samples(leaked=64, leaked_by_chance=64))
    assert rewards.leaked_answer(choices) is None


def test_a_source_that_never_earns_is_named() -> None:
    def mixture(hard: Callable[[int], float]) -> StageHistory:
        return history_of(
            lambda step: metrics(
                step,
                **{"source/easy/reward": 0.3 + 0.01 * step, "source/easy/samples": 48.0},
                **{"source/hard/reward": hard(step), "source/hard/samples": 16.0},
            ),
            is_mixture=True,
        )

    found = expect(rewards.stuck_source(mixture(lambda step: 0.0)), LearningKind.SOURCE_STUCK, since=1)
    assert "source hard" in found.summary and "384 samples" in found.summary
    assert rewards.stuck_source(mixture(lambda step: 0.01 * (step % 3))) is None
    assert rewards.stuck_source(mixture(lambda step: 1.0)) is None  # A source that is solved.


def test_entropy_that_collapses_before_the_task_is_solved_is_found() -> None:
    def collapsing(step: int) -> dict[str, float]:
        return metrics(step, entropy=0.9 if step < 8 else 0.02)

    expect(policy.collapsed_entropy(history_of(collapsing)), LearningKind.ENTROPY_COLLAPSE, since=8)

    def solved(step: int) -> dict[str, float]:
        return metrics(step, **{"entropy": 0.9 if step < 8 else 0.02, "reward/mean": 0.9})

    assert policy.collapsed_entropy(history_of(solved)) is None


def test_entropy_that_collapses_within_three_steps_is_found() -> None:
    def collapsing(step: int) -> dict[str, float]:
        return metrics(step, entropy=0.9 * 0.1 ** (step - 1))

    expect(policy.collapsed_entropy(history_of(collapsing)), LearningKind.ENTROPY_COLLAPSE, since=2)


def test_completions_that_are_all_truncated_are_found() -> None:
    history = history_of(lambda step: metrics(step, **{"completions/clipped_ratio": 1.0}))
    expect(policy.truncated(history), LearningKind.LENGTH, since=1)
    solved = history_of(lambda step: metrics(step, **{"completions/clipped_ratio": 1.0, "reward/mean": 0.99}))
    assert policy.truncated(solved) is None


def test_completions_that_grow_into_the_limit_are_found_and_longer_ones_are_not() -> None:
    def exploding(step: int) -> dict[str, float]:
        return metrics(
            step,
            **{"completions/mean_length": 5.0 * step, "completions/clipped_ratio": min(1.0, 0.04 * step)},
        )

    expect(policy.grown_length(history_of(exploding)), LearningKind.LENGTH)

    def longer(step: int) -> dict[str, float]:
        return metrics(step, **{"completions/mean_length": 5.0 * step})

    assert policy.grown_length(history_of(longer)) is None


@pytest.mark.parametrize(
    ("figures", "facts"),
    [
        (lambda step: metrics(step, update_ratio=0.4), {"is_pretrained": True}),
        (lambda step: metrics(step, kl=0.3 * step), {"has_reference": True}),
        (lambda step: metrics(step, kl=0.5), {}),
        (lambda step: metrics(step, grad_norm=0.5 * 2.0 ** min(step, 12)), {}),
        (
            lambda step: metrics(step, loss=1.0 + 0.2 * step),
            {"samples_completions": False, "algorithm": "sft"},
        ),
    ],
    ids=["update", "kl", "kl within a step", "gradient", "loss"],
)
def test_what_changes_far_too_fast_diverges(figures: Figures, facts: dict[str, Any]) -> None:
    expect(policy.divergence(history_of(figures, **facts)), LearningKind.DIVERGENCE)


def test_large_first_updates_of_a_new_model_are_usual() -> None:
    history = history_of(lambda step: metrics(step, update_ratio=0.15 / step), is_pretrained=False)
    assert policy.divergence(history) is None


def test_a_sampler_that_disagrees_is_found_unless_samples_are_old() -> None:
    def disagreeing(step: int) -> dict[str, float]:
        return metrics(step, logprob_abs_diff_mean=0.3, token_staleness_mean=2.0)

    expect(policy.sampler_mismatch(history_of(disagreeing)), LearningKind.SAMPLER_MISMATCH, since=1)
    assert policy.sampler_mismatch(history_of(disagreeing, is_on_policy=False)) is None


def test_a_reference_that_is_another_model_is_found_at_the_first_step() -> None:
    def other(step: int) -> dict[str, float]:
        return metrics(step, kl=0.8)

    expect(
        policy.reference_mismatch(history_of(other, has_reference=True, reference_given=True)),
        LearningKind.REFERENCE_MISMATCH,
    )

    def moved(step: int) -> dict[str, float]:
        return metrics(step, kl=0.0 if step == 1 else 0.8)

    assert policy.reference_mismatch(history_of(moved, has_reference=True)) is None


def test_a_pair_margin_before_the_first_update_shows_another_reference() -> None:
    history = history_of(lambda step: metrics(step, dpo_margin=1.2), has_reference=True, algorithm="dpo")
    expect(policy.reference_mismatch(history), LearningKind.REFERENCE_MISMATCH)


def test_a_trained_model_that_is_worse_than_chance_has_another_tokenizer() -> None:
    def worse(step: int) -> dict[str, float]:
        return metrics(step, loss=4.5 - 0.1 * step)

    facts: dict[str, Any] = {"algorithm": "sft", "vocabulary": 14, "samples_completions": False}
    expect(
        policy.tokenizer_mismatch(history_of(worse, is_pretrained=True, **facts)),
        LearningKind.TOKENIZER_MISMATCH,
    )
    assert policy.tokenizer_mismatch(history_of(worse, is_pretrained=False, **facts)) is None


def test_completions_that_cannot_be_decoded_show_another_tokenizer() -> None:
    history = history_of(of_samples=lambda step: samples(garbled=40))
    expect(policy.tokenizer_mismatch(history), LearningKind.TOKENIZER_MISMATCH)


def test_updates_without_effect_are_found_but_not_while_only_the_critic_learns() -> None:
    def idle(step: int) -> dict[str, float]:
        return metrics(step, update_ratio=0.0)

    expect(updates.no_update(history_of(idle)), LearningKind.NO_UPDATE, since=1)
    assert updates.no_update(history_of(idle, critic_steps=NUM_STEPS)) is None


def test_gradients_far_above_the_limit_are_found_and_those_just_above_are_not() -> None:
    def clipped(step: int) -> dict[str, float]:
        return metrics(step, grad_norm=25.0)

    expect(updates.clipped_gradient(history_of(clipped)), LearningKind.GRADIENT_CLIPPED, since=1)
    assert updates.clipped_gradient(history_of(lambda step: metrics(step, grad_norm=3.0))) is None


def test_updates_that_are_skipped_repeatedly_are_found_and_a_single_one_is_not() -> None:
    def repeated(step: int) -> dict[str, float]:
        return metrics(step, skipped=1.0 if step > 20 else 0.0)

    expect(updates.skipped_updates(history_of(repeated)), LearningKind.UPDATES_SKIPPED, since=21)
    assert updates.skipped_updates(history_of(lambda step: metrics(step, skipped=float(step == 22)))) is None


def test_old_samples_are_found_where_the_policy_has_moved_away() -> None:
    def stale(step: int) -> dict[str, float]:
        return metrics(step, staleness_mean=8.0, behaviour_kl=0.5)

    expect(updates.stale_batches(history_of(stale, is_on_policy=False)), LearningKind.STALE_BATCHES, since=1)

    def close(step: int) -> dict[str, float]:
        return metrics(step, staleness_mean=8.0, behaviour_kl=0.001)

    assert updates.stale_batches(history_of(close, is_on_policy=False)) is None


def test_a_cause_is_reported_with_its_consequences_instead_of_them() -> None:
    history = history_of(
        lambda step: metrics(
            step, **{"completions/clipped_ratio": 1.0, "frac_reward_zero_std": 1.0, "reward/mean": 0.0}
        ),
        of_samples=lambda step: samples(highest=0.0, answered=0, agreement=None),
    )
    (found,) = judge(history)
    assert (found.kind, found.leads_to) == (LearningKind.LENGTH, (LearningKind.EQUAL_REWARDS,))


def test_a_cause_stays_while_its_consequences_last() -> None:
    opposed = history_of(of_samples=lambda step: samples(agreement=-0.99))
    before = judge(opposed)
    assert [each.kind for each in before] == [LearningKind.WRONG_DIRECTION]
    silent = history_of(
        lambda step: metrics(step, **{"frac_reward_zero_std": 1.0, "reward/mean": 0.0}),
        of_samples=lambda step: samples(highest=0.0, answered=0, agreement=None),
    )
    assert [each.kind for each in judge(silent, earlier=before)] == [LearningKind.WRONG_DIRECTION]
    assert [each.kind for each in judge(silent)] == [LearningKind.EQUAL_REWARDS]
