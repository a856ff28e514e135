"""What is bad about connections, and at which end (`blame.py`). Pure.

The kernel measures every connection: the time to an acknowledgement, what was sent again, how often it tried in vain.
Three signs, of which each has its own shape:

    nothing comes back     the kernel doubles the time until it tries again, and nothing is acknowledged meanwhile
    late                   every acknowledgement takes longer: the time that the kernel averages rises, and stays
    lost                   segments are sent again in one second after the other, and had not arrived
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from math import log2
from typing import NamedTuple

from kintsugi.diagnosis.baseline import MANY, Baselines
from kintsugi.diagnosis.blame import (
    ALL,
    GAP_S,
    SAME_LOOK_S,
    SAMPLE_S,
    Blame,
    Pair,
    Point,
    blamed,
    crosses,
    episodes,
    is_inside,
    pair_of,
)
from kintsugi.diagnosis.evidence import MASTER, Bundle, LinkKey
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Evidence, FaultKind

RTT_FACTOR = 5.0
LEAST_RTT_S = 0.055
"""A receiver may put its acknowledgement off for 40 ms, and that is measured too."""
USUAL_RTT_S = 0.03
"""What is usual is not taken for more than this until it has been so for long."""
ABOVE_OFTEN = 1.5
"""So many times what it takes again and again, as while weights are on their way."""
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
UNSENT_S = 3.6
FIRST_TRY_S = 0.2
"""Each try waits twice as long as the one before."""
SILENT_S = 2.5
FEW = 2.5
"""Segments: more that were lost on their way to who is said to be cut off were on a way that is there."""
SHOWN_S = 2.1
"""So long after the first late answer every connection that is used has shown whether it is late too. What comes to
nothing shows within the next look, as it took some tries already."""
MOST_SHOWN = 4
NEARLY_ALL = 0.9


class Trouble(NamedTuple):
    finding: Finding
    ends: frozenset[str]
    """Processes whose connections it explains."""


class _Signs:
    """All bad moments of all connections inside the run, sorted by time."""

    def __init__(self, bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> None:
        self.late: list[Point] = []
        self.lost: list[Point] = []
        self.in_vain: list[Point] = []
        self.used: set[Pair] = set()
        self.usual: dict[LinkKey, float] = {}
        for key, tracks in bundle.links.items():
            if not is_inside(key):
                continue
            sent = tracks["out"]
            if (moved := sent.between(since, at)) and max(moved) > 0:
                self.used.add(pair_of(key))
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
        middle = usual.middle if usual else 0.0
        if usual is not None and usual.count < MANY:
            middle = min(middle, USUAL_RTT_S)
        self.usual[key] = middle
        often = usual.often or 0.0 if usual else 0.0
        bound = max(LEAST_RTT_S, RTT_FACTOR * middle, ABOVE_OFTEN * often)
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
        """Tried again and again; or, where not even that can be sent, on its way for longer than anything takes."""
        tracks = bundle.links[key]
        track, sent, on_its_way = tracks["backoff"], tracks["out"], tracks["unacked"]
        assert len(track.values) == len(on_its_way.values), key
        began: float | None = None
        for index in range(bisect_left(track.times, since), bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            # Both are of every sample.
            is_waiting = value >= 1 or on_its_way.values[index] > 0
            if not is_waiting or sent.at(time, within_s=0.3):
                began = None if not is_waiting else time
                continue
            began = time if began is None else began
            if value >= BACKOFF and time - began >= IN_VAIN_S:
                self.in_vain.append(Point(time, key, value))
            elif time - began >= UNSENT_S:
                # As many tries as there would have been.
                self.in_vain.append(Point(time, key, log2((time - began) / FIRST_TRY_S + 1)))


def network_troubles(bundle: Bundle, baselines: Baselines, *, since: float, at: float) -> list[Finding]:
    at = min(at, _told_until(bundle, at=at))
    signs = _Signs(bundle, baselines, since=max(since, baselines.settled), at=at)
    found = [
        _trouble(bundle, blame, _cut_or_lost(bundle, signs, blame))
        for blame in blamed(bundle, signs.in_vain, used=signs.used, shown_s=SAMPLE_S, at=at)
    ]
    found += [
        _trouble(bundle, blame, _late_or_lost(bundle, signs, blame))
        for blame in blamed(bundle, signs.late, used=signs.used, shown_s=SHOWN_S, at=at)
        if _is_clear(blame.points)
    ]
    # Who is cut off or late makes the others send again too.
    signs.lost = [
        point
        for point in signs.lost
        if not any(each.ends.intersection(point.key[:2]) and _is_while(each.finding, point) for each in found)
    ]
    lost = [_lost(bundle, signs, blame) for blame in _lossy(bundle, baselines, signs, at=at)]
    return [*(each.finding for each in found), *lost]


def _trouble(bundle: Bundle, blame: Blame, finding: Finding) -> Trouble:
    here = {process for process, host in bundle.host_of.items() if blame.host and host == blame.host}
    return Trouble(finding, frozenset({blame.process} | here))


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


def _is_while(finding: Finding, point: Point) -> bool:
    return finding.onset - GAP_S <= point.time <= finding.until + GAP_S


def _lossy(bundle: Bundle, baselines: Baselines, signs: _Signs, *, at: float) -> Iterator[Blame]:
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
        process = max(bad, key=lambda each: (_segments(bad[each]), each))
        host = _lossy_host(bundle, left, worst=process)
        for episode in episodes(bad[process] if not host else sorted({*chain(*bad.values())})):
            yield Blame(bundle.observer_of[host], episode, host) if host else Blame(process, episode)
        ends = {process} if not host else {each for each in by_process if bundle.host(each) == host}
        left = [point for point in left if not ends.intersection(point.key[:2])]


def _lossy_host(bundle: Bundle, points: list[Point], *, worst: str) -> str:
    """The host on whose ways to others nearly all is lost, by several processes at both ends, and not only by the worst
    one; else none."""
    total = _segments(points)
    others = {point.pair for point in points if point.value > 0 and worst not in point.pair}
    for host in sorted(bundle.observer_of, key=lambda each: each == bundle.host(MASTER)):
        crossing = [point for point in points if point.value > 0 and crosses(bundle, point.pair, host)]
        ends = {end for point in crossing for end in point.pair}
        here = {end for end in ends if bundle.host(end) == host}
        several = min(len(here), len(ends - here)) > 1
        if several and _segments(crossing) >= NEARLY_ALL * total and len(others) > 1:
            return host
    return ""


def _segments(points: list[Point]) -> float:
    return sum(point.value for point in points)


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


def _cut_or_lost(bundle: Bundle, signs: _Signs, blame: Blame) -> Finding:
    """Where much is lost, one of its connections may be in vain for seconds while something comes through by others."""
    points = blame.points
    onset = min(point.time - FIRST_TRY_S * (2**point.value - 1) for point in points)
    lost = [
        point
        for point in signs.lost
        if _is_at(bundle, blame, point)
        and onset + SAMPLE_S < point.time <= points[-1].time
        and point.value > 0
    ]
    if len({point.pair for point in lost}) > 1 or _segments(lost) > FEW:
        return _lost(bundle, signs, blame._replace(points=lost))
    words = "nothing is acknowledged, though it was sent again and again"
    return _finding(bundle, signs, blame, FaultKind.NETWORK_CUT, onset, words, 0.78)


def _late_or_lost(bundle: Bundle, signs: _Signs, blame: Blame) -> Finding:
    """What is lost is sent again in every second; what is only late too at first, until it is known to have come."""
    points = blame.points
    worst = max(points, key=lambda point: point.value)
    lost = [
        point
        for point in signs.lost
        if _is_at(bundle, blame, point) and points[0].time - OVER_S <= point.time <= points[-1].time + 1.0
    ]
    seconds = {round(point.time) for point in lost if point.value > 0}
    per_s = _segments(lost) / max(OVER_S, points[-1].time - points[0].time + 1.0)
    share = _share(bundle, signs, blame)
    is_lost = per_s >= MANY_PER_S or (worst.value < SURELY_LATE_S and share < ALL)
    if is_lost and per_s >= LOST_PER_S and len(seconds) > 2:
        return _lost(bundle, signs, blame._replace(points=lost))
    words = f"an acknowledgement takes {worst.value * 1000:.0f} ms, usually {signs.usual[worst.key] * 1000:.1f} ms"
    onset = points[0].time - 0.8
    return _finding(bundle, signs, blame, FaultKind.NETWORK_DELAY, onset, words, 0.68)


def _lost(bundle: Bundle, signs: _Signs, blame: Blame) -> Finding:
    points = blame.points
    seconds = points[-1].time - points[0].time + 1.0
    words = f"{_segments(points):.0f} segments had to be sent again within {seconds:.0f} s"
    return _finding(bundle, signs, blame, FaultKind.NETWORK_LOSS, points[0].time - 1.0, words, 0.66)


def _is_at(bundle: Bundle, blame: Blame, point: Point) -> bool:
    if blame.host:
        return crosses(bundle, point.pair, blame.host)
    return blame.process in point.key[:2]


def _share(bundle: Bundle, signs: _Signs, blame: Blame) -> float:
    """Of the connections of an end that were used, those that are bad."""
    used = sum(
        crosses(bundle, pair, blame.host) if blame.host else blame.process in pair for pair in signs.used
    )
    return len({point.pair for point in blame.points}) / max(1, used)


def _finding(
    bundle: Bundle,
    signs: _Signs,
    blame: Blame,
    kind: FaultKind,
    onset: float,
    words: str,
    strength: float,
) -> Finding:
    process, points, host = blame
    touched = {point.pair for point in points}
    peers = tuple(sorted({each for pair in touched for each in pair if each != process}))
    witnesses = {point.key[0] for point in points}
    share = _share(bundle, signs, blame)
    strength += 0.07 * min(len(touched) - 1, 2) + 0.06 * (share >= ALL) + 0.04 * (len(witnesses) > 1)
    shown = sorted(points, key=lambda point: -point.value)[:MOST_SHOWN]
    return Finding(
        process=process,
        kind=kind,
        onset=onset,
        until=points[-1].time,
        strength=min(0.93, strength),
        what=f"{_with_whom(bundle, blame, peers)}: {words}",
        evidence=tuple(
            Evidence(
                _source(bundle, point.key),
                point.time,
                f"{point.key[0]} to {point.key[1]}: {_said(kind, point)}",
            )
            for point in shown
        ),
        others=peers,
        rules_out=_rules_out(process, peers, signs.used, touched) if not host else _no_process(host, touched),
        of_host=bool(host),
    )


def _with_whom(bundle: Bundle, blame: Blame, peers: tuple[str, ...]) -> str:
    if blame.host:
        others = sorted({bundle.host(peer) for peer in peers} - {blame.host})
        return (
            f"its host's {len({point.pair for point in blame.points})} connections with {', '.join(others)}"
        )
    return f"its connection with {peers[0] if len(peers) == 1 else f'{len(peers)} others'}"


def _no_process(host: str, touched: set[Pair]) -> tuple[str, ...]:
    return (f"a single process: {len(touched)} connections between {host} and others are bad",)


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
