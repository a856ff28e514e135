from __future__ import annotations

from itertools import combinations

import pytest

from kintsugi.telemetry.eval_stats import pass_at_k, summarize, wilson_interval


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        # (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n) by hand, z = 1.96.
        (0.5, 10, 0.2366, 0.7634),
        (0.9, 500, 0.8706, 0.9233),
        (0.0, 20, 0.0, 0.1611),
        (1.0, 20, 0.8389, 1.0),
    ],
)
def test_the_wilson_interval_is_that_of_the_formula(
    share: float, count: int, low: float, high: float
) -> None:
    assert wilson_interval(share, count=count) == pytest.approx((low, high), abs=5e-5)


def test_nothing_seen_says_nothing() -> None:
    assert wilson_interval(0.0, count=0) == (0.0, 1.0)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for num_correct in range(6):
        verdicts = [True] * num_correct + [False] * (5 - num_correct)
        for k in range(1, 6):
            subsets = list(combinations(verdicts, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(5, num_correct=num_correct, k=k) == pytest.approx(expected)


def test_a_summary_has_greedy_mean_and_pass_with_intervals() -> None:
    greedy = [True, False, True, False]
    sampled = [[True, True, True, True], [False] * 4, [True, False, False, False], [True, True, False, False]]
    figures = summarize(greedy, sampled)
    assert figures["eval/problems"] == 4
    assert figures["eval/accuracy"] == 0.5
    assert figures["eval/mean@4"] == 7 / 16
    # pass@2 of 4, 0, 1, 2 right among four: 1, 0, 1/2, 5/6.
    assert figures["eval/pass@2"] == pytest.approx((1 + 0 + 1 / 2 + 5 / 6) / 4)
    assert figures["eval/pass@4"] == 0.75
    for name in ("eval/accuracy", "eval/mean@4", "eval/pass@2", "eval/pass@4"):
        assert figures[f"{name}_low"] < figures[name] < figures[f"{name}_high"]


def test_an_answer_that_could_not_be_judged_counts_as_wrong() -> None:
    assert summarize([True, False], [[True, True], [True]])["eval/mean@2"] == 0.75


def test_without_samples_only_the_greedy_answer_is_reported() -> None:
    assert set(summarize([True])) == {
        "eval/problems",
        "eval/accuracy",
        "eval/accuracy_low",
        "eval/accuracy_high",
    }
