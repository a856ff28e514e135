"""What a held-out evaluation says: greedy accuracy, mean@k, unbiased pass@k, each with its interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

CONFIDENCE_Z = 1.959963984540054
"""Two-sided 95 %."""


def wilson_interval(share: float, *, count: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """The Wilson score interval of a share seen over `count` independent problems.

    >>> low, high = wilson_interval(0.5, count=10)
    >>> round(low, 4), round(high, 4)
    (0.2366, 0.7634)
    """
    assert 0.0 <= share <= 1.0, f"a share lies between 0 and 1, got {share}"
    if count == 0:
        return 0.0, 1.0
    spread = z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z * sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    # At 0 and 1 the interval ends at the share itself; rounding must not leave it outside.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def pass_at_k(num_samples: int, *, num_correct: int, k: int) -> float:
    """The chance that one of k samples is right, estimated without bias from `num_samples` ≥ k of them.

    >>> pass_at_k(4, num_correct=1, k=2)
    0.5
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def summarize(greedy: Sequence[bool], sampled: Sequence[Sequence[bool]] = ()) -> dict[str, float]:
    """Every figure of one evaluation, by its name in `metrics.jsonl`.

    `greedy` has one verdict per problem; `sampled` has k per problem, or nothing; a sample that could not be judged is
    missing and counts as wrong. Samples of one problem are not independent, so every interval counts problems.

    >>> sorted(summarize([True, False]))
    ['eval/accuracy', 'eval/accuracy_high', 'eval/accuracy_low', 'eval/problems']
    """
    count = len(greedy)
    assert count > 0, "an evaluation needs a problem"
    metrics = {
        "eval/problems": float(count),
        **_with_interval("eval/accuracy", sum(greedy) / count, count=count),
    }
    k = max(map(len, sampled), default=0)
    if k == 0:
        return metrics
    correct = [sum(verdicts) for verdicts in sampled]
    metrics |= _with_interval(f"eval/mean@{k}", sum(correct) / (k * count), count=count)
    for tries in sorted({2**power for power in range(1, k.bit_length())} | ({k} if k > 1 else set())):
        estimates = [pass_at_k(k, num_correct=right, k=tries) for right in correct]
        metrics |= _with_interval(f"eval/pass@{tries}", sum(estimates) / count, count=count)
    return metrics


def _with_interval(name: str, share: float, *, count: int) -> dict[str, float]:
    low, high = wilson_interval(min(1.0, max(0.0, share)), count=count)
    return {name: share, f"{name}_low": low, f"{name}_high": high}
