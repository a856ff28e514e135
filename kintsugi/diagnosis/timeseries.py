"""Time series of readings, offsets of clocks that may be set during a run, and interval arithmetic. Pure.

>>> busy = union([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
>>> busy, seconds(busy)
([(0.0, 3.0), (5.0, 6.0)], 4.0)
>>> common(busy, [(2.0, 5.5)]), without(busy, [(2.0, 5.5)])
([(2.0, 3.0), (5.0, 5.5)], [(0.0, 2.0), (5.5, 6.0)])
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator


class TimeSeries:
    """One reading over time."""

    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        """Add a value, usually at the end; after a clock was set back it is inserted in order."""
        times = self.times
        if times and time < times[-1]:
            index = bisect_right(times, time)
            times.insert(index, time)
            self.values.insert(index, value)
            return
        times.append(time)
        self.values.append(value)

    def between(self, since: float, until: float) -> list[float]:
        """Return the values of [since, until]."""
        return self.values[bisect_left(self.times, since) : bisect_right(self.times, until)]

    def points(self, since: float, until: float) -> Iterator[tuple[float, float]]:
        """Return the (time, value) pairs of [since, until]."""
        first, last = bisect_left(self.times, since), bisect_right(self.times, until)
        return zip(self.times[first:last], self.values[first:last], strict=True)

    def at(self, time: float, *, within_s: float = 1.6) -> float | None:
        """Return the value nearest to a time, if one is close enough."""
        index = bisect_left(self.times, time)
        near = [i for i in (index - 1, index) if 0 <= i < len(self.times)]
        if not near:
            return None
        best = min(near, key=lambda i: abs(self.times[i] - time))
        return self.values[best] if abs(self.times[best] - time) <= within_s else None

    def spacing_s(self) -> float:
        """Return the mean time between values."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    def forget_before(self, time: float) -> None:
        index = bisect_left(self.times, time)
        del self.times[:index], self.values[:index]


class TimeSeriesSet(defaultdict[str, TimeSeries]):
    """Time series of one process, host or link, by name."""

    def __init__(self) -> None:
        super().__init__(TimeSeries)


class HostClocks:
    """Offsets of a host's clock against the master's over time: clocks may be set during a run.

    Records from before the first comparison are corrected by that first comparison.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._known: list[tuple[float, float]] = []
        """(correction, error) from the time of the same index on."""

    def add(self, time: float, *, offset_s: float, error_s: float) -> None:
        # An offset within its error counts as none: the master's own host is compared too.
        correction_s = offset_s if abs(offset_s) > error_s else 0.0
        index = bisect_right(self._times, time)
        if index:
            before, accuracy_s = self._known[index - 1]
            if abs(correction_s - before) <= accuracy_s <= error_s:
                return
        self._times.insert(index, time)
        self._known.insert(index, (correction_s, error_s))

    def correction_s(self, time: float) -> float:
        if not self._times:
            return 0.0
        return self._known[max(0, bisect_right(self._times, time) - 1)][0]

    def forget_before(self, time: float) -> None:
        """Drop earlier offsets, except the last one, which still holds."""
        index = max(0, bisect_right(self._times, time) - 1)
        del self._times[:index], self._known[:index]


Interval = tuple[float, float]
"""(begin, end)."""
Intervals = list[Interval]
"""Disjoint and sorted intervals, as `union` returns them."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return the times that are in any of the intervals."""
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
    """Return the times that are in both."""
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
    """Return the times of the first that are not in the second."""
    ends = [float("-inf"), *(end for _, end in second)]
    begins = [*(begin for begin, _ in second), float("inf")]
    return common(first, list(zip(ends, begins, strict=True)))


def seconds(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def seconds_within(intervals: Intervals, begin: float, end: float) -> float:
    """Return the seconds of [begin, end] that the intervals cover, in logarithmic time: there may be many intervals."""
    total = 0.0
    for index in range(max(0, bisect_right(intervals, (begin, begin)) - 1), len(intervals)):
        if intervals[index][0] >= end:
            break
        total += max(0.0, min(end, intervals[index][1]) - max(begin, intervals[index][0]))
    return total
