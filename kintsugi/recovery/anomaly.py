"""Far slower than it should be: a process compared with its peers and with its own past.

A slow process is no dead one, so nothing is done quickly here. Both comparisons must agree: who is slower than its
peers but as fast as ever may just have more to do, and when all peers become slow together, it is the machine or the
task. Pure: durations and the time are passed in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from statistics import median

from kintsugi.recovery.detection import Suspicion, SuspicionKind

FACTOR = 5.0
"""This many times slower is far outside what load and uneven work do."""
MARGIN_S = 0.5
"""Less than this in absolute terms hurts nobody, however many times slower it is."""
IN_A_ROW = 5
"""Neither one slow answer nor one quick one says anything."""
MIN_HISTORY = 20
"""Before that, "its own past" is mostly the warming-up."""
MAX_HISTORY = 64
"""Enough for a median, and few enough to follow a run whose work grows."""
MAX_PEERS = 64
"""So many give a good median; with thousands, one observation must not cost a look at all of them."""
RECOVERED_FACTOR = 2.0
"""Within this it is as fast as it was; between this and `FACTOR` a suspicion neither arises nor ends."""


class _Past:
    """The last durations and their median; adding one takes constant time for a constant length."""

    def __init__(self) -> None:
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._in_order) == MAX_HISTORY:
            oldest = self._in_order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._in_order.append(value)
        insort(self._sorted, value)

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def median(self) -> float:
        half = len(self._sorted) // 2
        return (self._sorted[half] + self._sorted[~half]) / 2


@dataclass(slots=True, eq=False)
class _Series:
    """One measure of one incarnation."""

    incarnation: str
    past: _Past = field(default_factory=_Past)
    latest: float = 0.0
    observed: float = float("-inf")
    slow_in_a_row: int = 0
    slow_since: float = 0.0
    quick_in_a_row: int = 0
    suspicion: Suspicion | None = None


class Anomaly:
    """Takes durations, for instance of a kind of request, and says once when a process has become far too slow."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], OrderedDict[str, _Series]] = {}
        """(peers, measure) → process → its durations, those last that were observed last."""

    def observe(
        self, process: str, incarnation: str, *, peers_key: str, measure: str, value: float, now: float
    ) -> Suspicion | None:
        """`value` seconds of `measure`, of a process that is compared with all others of the same `peers_key`.

        Gives the suspicion at the moment it arises; `suspected` has it until the process is quick again.
        """
        group = self._groups.setdefault((peers_key, measure), OrderedDict())
        series = group.get(process)
        if series is None or series.incarnation != incarnation:
            series = group[process] = _Series(incarnation)
        series.latest, series.observed = value, now
        group.move_to_end(process)
        if series.suspicion is not None:
            self._look_for_recovery(series, group)
            return None
        if len(series.past) < MIN_HISTORY or not _is_far_slower(value, series.past.median):
            series.slow_in_a_row = 0
            series.past.add(value)
            return None
        # Slow durations are kept out of the past until it is known whose they are: they would hide themselves.
        series.slow_in_a_row += 1
        if series.slow_in_a_row == 1:
            series.slow_since = now
        peers_s = _peers_median(series, group)
        if peers_s is not None and not _is_far_slower(value, peers_s):
            # The others are no quicker: this is how long it takes from now on.
            series.slow_in_a_row = 0
            series.past.add(value)
            return None
        if peers_s is None or series.slow_in_a_row < IN_A_ROW:
            return None
        series.suspicion = Suspicion(
            process,
            incarnation,
            SuspicionKind.SLOW,
            f"{measure} of {process} takes {value:.2f} s, {series.slow_in_a_row} times in a row; "
            f"{peers_s:.2f} s is the median of its peers, {series.past.median:.2f} s that of its own past",
            now,
            now - series.slow_since,
        )
        return series.suspicion

    def suspected(self) -> tuple[Suspicion, ...]:
        """Who is too slow at present."""
        every = (series.suspicion for group in self._groups.values() for series in group.values())
        return tuple(suspicion for suspicion in every if suspicion is not None)

    def forget(self, process: str) -> None:
        """A process is gone: nobody is compared with it any more."""
        for group in self._groups.values():
            group.pop(process, None)

    @staticmethod
    def _look_for_recovery(series: _Series, group: OrderedDict[str, _Series]) -> None:
        expected_s = max(series.past.median, _peers_median(series, group) or 0.0)
        if series.latest > RECOVERED_FACTOR * expected_s:
            series.quick_in_a_row = 0
            return
        series.quick_in_a_row += 1
        if series.quick_in_a_row == IN_A_ROW:
            series.suspicion = None
            series.slow_in_a_row = series.quick_in_a_row = 0


def _is_far_slower(value: float, expected_s: float) -> bool:
    return value >= FACTOR * expected_s and value - expected_s >= MARGIN_S


def _peers_median(series: _Series, group: OrderedDict[str, _Series]) -> float | None:
    """Of the others' latest durations, those observed since this one became slow: an older one would say how quick the
    machine was before. None while there is none."""
    fresh = takewhile(lambda other: other.observed >= series.slow_since, reversed(group.values()))
    latest = [other.latest for other in islice(fresh, MAX_PEERS) if other is not series]
    return median(latest) if latest else None
