"""Statistics of a held-out evaluation: greedy accuracy, mean@k, unbiased pass@k, each with its interval. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb, sqrt

import msgspec
import xxhash

from kintsugi.types import Row

CONFIDENCE_Z = 1.959963984540054
"""Two-sided 95 %."""


def wilson_interval(share: float, *, count: int, z: float = CONFIDENCE_Z) -> tuple[float, float]:
    """Return the Wilson score interval of a share of `count` independent problems.

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
    """Return the probability that one of k samples is right, estimated without bias from `num_samples` ≥ k of them.

    >>> pass_at_k(4, num_correct=1, k=2)
    0.5
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def summarize(greedy: Sequence[bool], sampled: Sequence[Sequence[bool]] = ()) -> dict[str, float]:
    """Return every metric of one evaluation, by its name in `metrics.jsonl`.

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


def problems_digest(rows: Iterable[Row]) -> str:
    """Return a digest of the held-out problems and their order, by which runs are comparable."""
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(msgspec.json.encode((row.prompt, row.columns), enc_hook=str, order="deterministic"))
    return digest.hexdigest()


def _with_interval(name: str, share: float, *, count: int) -> dict[str, float]:
    low, high = wilson_interval(min(1.0, max(0.0, share)), count=count)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def difference_interval(
    *, both: int, only_first: int, only_second: int, neither: int, z: float = CONFIDENCE_Z
) -> tuple[float, float]:
    """Return the interval of second − first, two shares of the same problems: Newcombe's score interval for pairs.

    Unlike a bootstrap it stays honest where few problems tell the two apart: none in ten is not "no difference".

    >>> low, high = difference_interval(both=36, only_first=2, only_second=12, neither=0)
    >>> round(low, 3), round(high, 3)
    (0.057, 0.34)
    """
    count = both + only_first + only_second + neither
    first, second = (both + only_first) / count, (both + only_second) / count
    return _hybrid(
        first,
        second,
        counts=(count, count),
        correlation=_correlation(both, only_first, only_second, neither),
        z=z,
    )


def unpaired_interval(
    first: float, second: float, *, counts: tuple[int, int], z: float = CONFIDENCE_Z
) -> tuple[float, float]:
    """Return the interval of second − first, two shares of different problems: Newcombe's hybrid score interval."""
    return _hybrid(first, second, counts=counts, correlation=0.0, z=z)


def _hybrid(
    first: float, second: float, *, counts: tuple[int, int], correlation: float, z: float
) -> tuple[float, float]:
    """Combine the Wilson intervals of two shares: sum of squares, less the covariance of pairs."""
    first_low, first_high = wilson_interval(first, count=counts[0], z=z)
    second_low, second_high = wilson_interval(second, count=counts[1], z=z)

    def spread(one: float, other: float) -> float:
        return sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    difference = second - first
    return (
        difference - spread(second - second_low, first_high - first),
        difference + spread(second_high - second, first - first_low),
    )


def _correlation(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Return phi of the table with Newcombe's continuity correction; 0 where a margin is empty."""
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    if margins == 0:
        return 0.0
    determinant: float = both * neither - only_first * only_second
    if determinant > 0:
        determinant = max(determinant - (both + only_first + only_second + neither) / 2, 0)
    return determinant / sqrt(margins)


def mcnemar(*, only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value that both are equally good, from the problems with different results.

    >>> mcnemar(only_first=0, only_second=5)
    0.0625
    """
    count = only_first + only_second
    tail = sum(comb(count, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << count))
