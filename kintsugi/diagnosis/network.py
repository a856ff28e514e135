"""Which end of the bad connections is the bad one, and what is bad about it. Pure.

The kernel measures every connection: the time to an acknowledgement, what was sent again, how often it tried in vain.
One connection has two ends, and says nothing about which of them it is. Several do: the end that the bad ones have in
common, and whose other connections are bad too, is where the trouble is.

Three signs, of which each has its own shape:

    nothing comes back     the kernel doubles the time until it tries again, and nothing is acknowledged meanwhile
    late                   every acknowledgement takes longer: the time that the kernel averages rises, and stays
    lost                   segments are sent again in one second after the other, and had not arrived
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from kintsugi.diagnosis.baseline import Baselines
from kintsugi.diagnosis.evidence import MASTER, Bundle, LinkKey, known_role
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Evidence, FaultKind

RTT_FACTOR = 5.0
LEAST_RTT_S = 0.055
"""A receiver may put its acknowledgement off for 40 ms, and that is measured too."""
USUAL_RTT_S = 0.03
"""What is usual is not taken for more than this."""
FALLING = 0.93
"""An average that falls tells of something that is over."""
CLEARLY_LATE_S = 0.1
SURELY_LATE_S = 0.2
"""What is lost and sent again is late too; but its average does not rise so far."""
OVER_S = 3.2
"""Losses are counted over so long."""
LASTING_S = 1.2
"""From the first to the last of them: what two hosts tell of one moment is no longer apart."""
LOST_PER_S = 1.5
MANY_PER_S = 4.0
MOST_AT_ONCE = 6.0
"""More in one second count as this many: a queue that is let go is one event, and no loss."""
LOST_FACTOR = 6.0
BACKOFF = 3
IN_VAIN_S = 1.6
"""So long nothing was acknowledged though it was sent again."""
SAMPLE_S = 1.1
"""Figures come once a second: one may tell of what was before."""
SAME_LOOK_S = 0.3
"""Hosts are looked at one shortly after the other."""
SILENT_S = 2.5
FEW = 2.5
"""Segments: more that were lost on their way to who is said to be cut off were on a way that is there."""
GAP_S = 4.2
MOST_SHOWN = 4
ALL = 0.7


class Point(NamedTuple):
    """A connection at a moment; `value` is a time, a number of segments or of tries."""

    time: float
    key: LinkKey
    value: float

    @property
    def pair(self) -> tuple[str, str]:
        return (min(self.key[:2]), max(self.key[:2]))


class _Signs:
    """All bad moments of all connections inside the run, sorted by time."""

    def __init__(self, bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> None:
        self.late: list[Point] = []
        self.lost: list[Point] = []
        self.in_vain: list[Point] = []
        self.used: set[tuple[str, str]] = set()
        self.usual: dict[LinkKey, float] = {}
        for key, tracks in bundle.links.items():
            if not _is_inside(key):
                continue
            sent = tracks["out"]
            if (moved := sent.between(since, at)) and max(moved) > 0:
                self.used.add((min(key[:2]), max(key[:2])))
            self._late(key, bundle, baselines, since=since, at=at)
            self._lost(key, bundle, since=since, at=at)
            self._in_vain(key, bundle, since=since, at=at)
        for points in (self.late, self.lost, self.in_vain):
            points.sort()

    def _late(self, key: LinkKey, bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> None:
        """Where something was acknowledged since the sample before: else the average is that of long ago."""
        tracks = bundle.links[key]
        track, sent = tracks["rtt_s"], tracks["out"]
        usual = baselines.of(track)
        self.usual[key] = middle = min(usual.middle, USUAL_RTT_S) if usual else 0.0
        bound = max(LEAST_RTT_S, RTT_FACTOR * middle)
        first = bisect_left(track.times, since)
        before = track.values[first - 1] if first else 0.0
        for index in range(first, bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            if value > bound and value >= FALLING * before and sent.at(time, within_s=0.3):
                self.late.append(Point(time, key, value))
            before = value

    def _lost(self, key: LinkKey, bundle: Bundle, *, since: float, at: float) -> None:
        """Sent again while something comes through: where nothing does, it is no loss but the end. Less than nothing
        is what had been taken for lost before."""
        tracks = bundle.links[key]
        track, sent = tracks["lost"], tracks["out"]
        for index in range(bisect_left(track.times, since), bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            if value and sent.at(time, within_s=0.3):
                self.lost.append(Point(time, key, max(-MOST_AT_ONCE, min(value, MOST_AT_ONCE))))

    def _in_vain(self, key: LinkKey, bundle: Bundle, *, since: float, at: float) -> None:
        tracks = bundle.links[key]
        track, sent = tracks["backoff"], tracks["out"]
        began: float | None = None
        for index in range(bisect_left(track.times, since), bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            if value < 1 or sent.at(time, within_s=0.3):
                began = None if value < 1 else time
                continue
            began = time if began is None else began
            if value >= BACKOFF and time - began >= IN_VAIN_S:
                self.in_vain.append(Point(time, key, value))


def network_troubles(bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> list[Finding]:
    at = min(at, _told_until(bundle, at=at))
    signs = _Signs(bundle, baselines, since=max(since, baselines.settled), at=at)
    found = [
        _cut_or_lost(bundle, signs, process, points) for process, points in _blamed(signs, signs.in_vain)
    ]
    found += [
        _late_or_lost(bundle, signs, process, points)
        for process, points in _blamed(signs, signs.late)
        if _is_clear(points)
    ]
    # Who is cut off or late makes the others send again too.
    signs.lost = [
        point
        for point in signs.lost
        if not any(each.process in point.key[:2] and _is_while(each, point) for each in found)
    ]
    found += [
        _lost(bundle, signs, process, points) for process, points in _lossy(bundle, baselines, signs, at=at)
    ]
    return found


def _told_until(bundle: Bundle, *, at: float) -> float:
    """Up to when all hosts have told of their connections: from one of the two ends it looks as if it were the other.
    Who has been silent for long is not waited for."""
    last = [time for time in bundle.looked_at.values() if at - time <= SILENT_S]
    return min(last, default=at) + SAME_LOOK_S


def _is_clear(points: list[Point]) -> bool:
    """One late acknowledgement happens; an average that is high, or rises twice, tells of more."""
    times: dict[LinkKey, int] = {}
    for point in points:
        times[point.key] = times.get(point.key, 0) + 1
    return max(times.values()) > 1 or max(point.value for point in points) >= CLEARLY_LATE_S


def _is_inside(key: LinkKey) -> bool:
    """Between two processes of the run."""
    return key[0] != key[1] and None not in (known_role(key[0]), known_role(key[1]))


def _is_while(finding: Finding, point: Point) -> bool:
    return finding.onset - GAP_S <= point.time <= finding.until + GAP_S


# Which end.


def _blamed(signs: _Signs, points: list[Point]) -> Iterator[tuple[str, list[Point]]]:
    """One trouble after the other; of each one end after the other, the one first that explains most."""
    for episode in _episodes(points):
        left = episode
        while left:
            process = _common_end({point.pair for point in left}, signs.used)
            yield process, [point for point in left if process in point.key[:2]]
            left = [point for point in left if process not in point.key[:2]]


def _episodes(points: list[Point]) -> list[list[Point]]:
    groups: list[list[Point]] = []
    for point in points:
        if groups and point.time - groups[-1][-1].time <= GAP_S:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _common_end(bad: set[tuple[str, str]], used: set[tuple[str, str]]) -> str:
    """The process that most bad connections share, and most of whose connections are bad."""

    def rating(process: str) -> tuple[float, float, bool, str]:
        covered = sum(process in pair for pair in bad)
        share = covered / sum(process in pair for pair in used | bad)
        # Somebody whose every connection is bad explains more than one who only has many of them.
        return (covered * share, share, process != MASTER, process)

    return max({process for pair in bad for process in pair}, key=rating)


def _lossy(
    bundle: Bundle, baselines: Baselines, signs: _Signs, *, at: float
) -> Iterator[tuple[str, list[Point]]]:
    """Processes that lose more than others, and more than they used to: in several seconds, over all connections."""
    left = signs.lost
    while left:
        by_process: dict[str, list[Point]] = {}
        for point in left:
            for process in point.key[:2]:
                by_process.setdefault(process, []).append(point)
        bad = {
            process: flagged
            for process, points in by_process.items()
            if (flagged := _too_many(points, usual=_usual_loss(bundle, baselines, process, at=at)))
        }
        if not bad:
            return
        process = max(bad, key=lambda each: (sum(point.value for point in bad[each]), each))
        for episode in _episodes(bad[process]):
            yield process, episode
        left = [point for point in left if process not in point.key[:2]]


def _too_many(points: list[Point], *, usual: float) -> list[Point]:
    """Those of times in which too much was lost."""
    bound = max(LOST_PER_S, LOST_FACTOR * usual) * OVER_S
    flagged: list[Point] = []
    first, told, total = 0, 0, 0.0
    for index, point in enumerate(points):
        total += point.value
        while points[first].time < point.time - OVER_S:
            total -= points[first].value
            first += 1
        if total < bound or point.value < 0:
            continue
        window = [each for each in points[first : index + 1] if each.value > 0]
        is_common = len({each.pair for each in window}) > 1 or total >= 2 * bound
        if is_common and point.time - window[0].time >= LASTING_S:
            flagged += [each for each in points[max(first, told) : index + 1] if each.value > 0]
            told = index + 1
    return flagged


def _usual_loss(bundle: Bundle, baselines: Baselines, process: str, *, at: float) -> float:
    """Segments per second that all its connections together lose when nothing is wrong."""
    return sum(
        usual.middle
        for key, tracks in bundle.links.items()
        if process in key[:2] and (usual := baselines.figure(tracks, "lost")) is not None
    )


# What it is.


def _cut_or_lost(bundle: Bundle, signs: _Signs, process: str, points: list[Point]) -> Finding:
    """Where much is lost, one of its connections may be in vain for seconds while something comes through by others."""
    worst = max(points, key=lambda point: point.value)
    # Each try waits twice as long as the one before, from 0.2 s on.
    onset = min(point.time - 0.2 * (2**point.value - 1) for point in points)
    lost = [
        point
        for point in signs.lost
        if process in point.key[:2] and onset + SAMPLE_S < point.time <= points[-1].time and point.value > 0
    ]
    if len({point.pair for point in lost}) > 1 or sum(point.value for point in lost) > FEW:
        return _lost(bundle, signs, process, lost)
    words = "nothing is acknowledged, though it was sent again and again"
    return _finding(bundle, signs, process, points, FaultKind.NETWORK_CUT, onset, worst, words, 0.78)


def _late_or_lost(bundle: Bundle, signs: _Signs, process: str, points: list[Point]) -> Finding:
    """What is lost is sent again in every second; what is only late too at first, until it is known to have come."""
    worst = max(points, key=lambda point: point.value)
    lost = [
        point
        for point in signs.lost
        if process in point.key[:2] and points[0].time - OVER_S <= point.time <= points[-1].time + 1.0
    ]
    seconds = {round(point.time) for point in lost if point.value > 0}
    per_s = sum(point.value for point in lost) / max(OVER_S, points[-1].time - points[0].time + 1.0)
    late = {point.pair for point in points}
    share = len(late) / max(1, sum(process in pair for pair in signs.used))
    is_lost = per_s >= MANY_PER_S or (worst.value < SURELY_LATE_S and share < ALL)
    if is_lost and per_s >= LOST_PER_S and len(seconds) > 2:
        return _lost(bundle, signs, process, lost)
    words = f"an acknowledgement takes {worst.value * 1000:.0f} ms, usually {signs.usual[worst.key] * 1000:.1f} ms"
    onset = points[0].time - 0.8
    return _finding(bundle, signs, process, points, FaultKind.NETWORK_DELAY, onset, worst, words, 0.68)


def _lost(bundle: Bundle, signs: _Signs, process: str, points: list[Point]) -> Finding:
    worst = max(points, key=lambda point: point.value)
    count, seconds = sum(point.value for point in points), points[-1].time - points[0].time + 1.0
    words = f"{count:.0f} segments had to be sent again within {seconds:.0f} s"
    onset = points[0].time - 1.0
    return _finding(bundle, signs, process, points, FaultKind.NETWORK_LOSS, onset, worst, words, 0.66)


def _finding(
    bundle: Bundle,
    signs: _Signs,
    process: str,
    points: list[Point],
    kind: FaultKind,
    onset: float,
    worst: Point,
    words: str,
    strength: float,
) -> Finding:
    touched = {point.pair for point in points}
    peers = tuple(sorted({each for pair in touched for each in pair if each != process}))
    witnesses = {point.key[0] for point in points}
    share = len(touched) / max(1, sum(process in pair for pair in signs.used))
    strength += 0.07 * min(len(touched) - 1, 2) + 0.06 * (share >= ALL) + 0.04 * (len(witnesses) > 1)
    with_whom = peers[0] if len(peers) == 1 else f"{len(peers)} others"
    shown = sorted(points, key=lambda point: -point.value)[:MOST_SHOWN]
    return Finding(
        process=process,
        kind=kind,
        onset=onset,
        until=points[-1].time,
        strength=min(0.93, strength),
        what=f"its connection with {with_whom}: {words}",
        evidence=tuple(
            Evidence(
                _source(bundle, point.key),
                point.time,
                f"{point.key[0]} to {point.key[1]}: {_said(kind, point)}",
            )
            for point in shown
        ),
        others=peers,
        rules_out=_rules_out(process, peers, signs.used, touched),
    )


def _said(kind: FaultKind, point: Point) -> str:
    if kind is FaultKind.NETWORK_DELAY:
        return f"rtt_s {point.value:.3f}"
    if kind is FaultKind.NETWORK_CUT:
        return f"backoff {point.value:.0f}, nothing acknowledged"
    return f"{point.value:.1f} segments a second sent again that had not arrived"


def _rules_out(
    process: str, peers: tuple[str, ...], used: set[tuple[str, str]], touched: set[tuple[str, str]]
) -> tuple[str, ...]:
    said = []
    for peer in peers[:3]:
        fine = [pair for pair in used if peer in pair and process not in pair and pair not in touched]
        if fine:
            said.append(f"{peer}: its connections with {len(fine)} others are as usual")
    return tuple(said)


def _source(bundle: Bundle, key: LinkKey) -> str:
    return f"figures/{bundle.observer_of.get(bundle.host(key[0]), 'agent-0')}.jsonl"
