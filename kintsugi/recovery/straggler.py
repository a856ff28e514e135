"""Straggler detection: a process is compared with its peers and with its own past.

A slow process is not dead, so detection takes its time. Both comparisons must agree: a process that is slower than its
peers but as fast as ever may just have more work, and when all peers become slow together, the cause is the machine or
the task. Pure: durations and the time are passed in.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from statistics import median

from kintsugi.recovery.liveness import Suspicion, SuspicionKind

FACTOR = 5.0
"""Factor that load and uneven work do not explain."""
MARGIN_S = 0.5
"""Absolute difference below which slowness does no harm, whatever the factor."""
IN_A_ROW = 5
"""Number of consecutive slow (or fast) answers that count."""
MIN_HISTORY = 20
"""Length of a process's own past before it is used; the first entries are mostly warm-up."""
MAX_HISTORY = 64
"""Enough for a median, and few enough to follow a run with growing work."""
MAX_PEERS = 64
"""Enough for a good median; with thousands of peers, one observation must not look at all of them."""
RECOVERED_FACTOR = 2.0
"""Factor within which a process counts as recovered; between this and `FACTOR` a suspicion neither arises nor ends."""


class _Past:
    """Last durations and their median; adding one takes constant time for a constant length."""

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
    """Durations of one measure of one incarnation."""

    incarnation: str
    past: _Past = field(default_factory=_Past)
    latest: float = 0.0
    observed: float = float("-inf")
    slow_in_a_row: int = 0
    slow_since: float = 0.0
    quick_in_a_row: int = 0
    suspicion: Suspicion | None = None


class StragglerDetector:
    """Takes durations, for instance of a kind of request, and reports once that a process has become far too slow."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], OrderedDict[str, _Series]] = {}
        """(peers, measure) → process → its durations, in the order of the latest observations."""

    def observe(
        self, process: str, incarnation: str, *, peers_key: str, measure: str, value: float, now: float
    ) -> Suspicion | None:
        """Take `value` seconds of `measure`, of a process that is compared with all others of the same `peers_key`.

        Return the suspicion at the moment it arises; `suspected` lists it until the process is fast again.
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
        # Slow durations are kept out of the past until their cause is known: they would hide themselves.
        series.slow_in_a_row += 1
        if series.slow_in_a_row == 1:
            series.slow_since = now
        peers_s = _peers_median(series, group)
        if peers_s is not None and not _is_far_slower(value, peers_s):
            # The peers are no faster: this is the usual duration from now on.
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
        """Return the processes that are too slow at present."""
        every = (series.suspicion for group in self._groups.values() for series in group.values())
        return tuple(suspicion for suspicion in every if suspicion is not None)

    def forget(self, process: str) -> None:
        """Remove a lost process from all comparisons."""
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
    """Return the median of the peers' durations observed since this process became slow; older ones show the earlier
    speed of the machine. None while there is none."""
    fresh = takewhile(lambda other: other.observed >= series.slow_since, reversed(group.values()))
    latest = [other.latest for other in islice(fresh, MAX_PEERS) if other is not series]
    return median(latest) if latest else None
