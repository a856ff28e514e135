"""Figures over time, and clocks that are set while time goes on: what evidence is made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator


class Track:
    """One figure over time."""

    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        """Mostly in order; what a clock that was set back says is put where it belongs."""
        times = self.times
        if times and time < times[-1]:
            index = bisect_right(times, time)
            times.insert(index, time)
            self.values.insert(index, value)
            return
        times.append(time)
        self.values.append(value)

    def between(self, since: float, until: float) -> list[float]:
        """Values of [since, until]."""
        return self.values[bisect_left(self.times, since) : bisect_right(self.times, until)]

    def points(self, since: float, until: float) -> Iterator[tuple[float, float]]:
        """(time, value) pairs of [since, until]."""
        first, last = bisect_left(self.times, since), bisect_right(self.times, until)
        return zip(self.times[first:last], self.values[first:last], strict=True)

    def at(self, time: float, *, within_s: float = 1.6) -> float | None:
        """The value nearest to a moment, if there is one close enough."""
        index = bisect_left(self.times, time)
        near = [i for i in (index - 1, index) if 0 <= i < len(self.times)]
        if not near:
            return None
        best = min(near, key=lambda i: abs(self.times[i] - time))
        return self.values[best] if abs(self.times[best] - time) <= within_s else None

    def spacing_s(self) -> float:
        """How far its values are apart, on average."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0

    def forget_before(self, time: float) -> None:
        index = bisect_left(self.times, time)
        del self.times[:index], self.values[:index]


class Tracks(defaultdict[str, Track]):
    """The figures of one process, host or link, by name."""

    def __init__(self) -> None:
        super().__init__(Track)


class Clocks:
    """How far a host's clock was ahead of the master's, from moments of its own on: clocks are set while a run goes on.

    What a host wrote before its clock was first compared is corrected by that first comparison.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._known: list[tuple[float, float]] = []
        """What is taken off from then on, and how wrong the comparison may be."""

    def add(self, time: float, *, offset_s: float, error_s: float) -> None:
        # What can not be told from nothing is nothing: one host's clock is compared with itself too.
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
        """The last of those before still holds."""
        index = max(0, bisect_right(self._times, time) - 1)
        del self._times[:index], self._known[:index]
