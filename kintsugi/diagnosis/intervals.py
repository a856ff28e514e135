"""Stretches of time, and what they have in common: who did something when, whoever else did it too. Pure.

>>> busy = union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
>>> busy, seconds(busy)
([(0.0, 3.0), (5.0, 6.0)], 4.0)
>>> common(busy, [(2.0, 5.5)]), without(busy, [(2.0, 5.5)])
([(2.0, 3.0), (5.0, 5.5)], [(0.0, 2.0), (5.5, 6.0)])
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]
"""(begin, end)."""
Intervals = list[Interval]
"""Apart from each other and in order, as `union` gives them."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """All moments that are in any of them."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def common(first: Intervals, second: Intervals) -> Intervals:
    """All moments that are in both."""
    shared: Intervals = []
    here = there = 0
    while here < len(first) and there < len(second):
        begin = max(first[here][0], second[there][0])
        end = min(first[here][1], second[there][1])
        if begin < end:
            shared.append((begin, end))
        if first[here][1] <= second[there][1]:
            here += 1
        else:
            there += 1
    return shared


def without(first: Intervals, second: Intervals) -> Intervals:
    """All moments of the first that are not in the second."""
    ends = [float("-inf"), *(end for _, end in second)]
    begins = [*(begin for begin, _ in second), float("inf")]
    return common(first, list(zip(ends, begins, strict=True)))


def seconds(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def seconds_within(intervals: Intervals, begin: float, end: float) -> float:
    """How much of one stretch they have. There may be a hundred thousand of them, and as many questions."""
    total = 0.0
    for index in range(max(0, bisect_right(intervals, (begin, begin)) - 1), len(intervals)):
        if intervals[index][0] >= end:
            break
        total += max(0.0, min(end, intervals[index][1]) - max(begin, intervals[index][0]))
    return total
