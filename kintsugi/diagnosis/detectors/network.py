"""Faults of connections, and the end that they are at. Pure.

The kernel measures every connection: round-trip time, retransmissions and retransmission timeouts. There are three
patterns:

    cut     the retransmission timeout doubles again and again, and nothing is acknowledged meanwhile
    late    every acknowledgement takes longer: the average round-trip time rises and stays high
    lost    segments are retransmitted in one second after the other, and had not arrived

A single bad connection does not show which of its ends is at fault. Several do: it is the process that they have in
common and whose other connections are bad too. If they have no process in common but a host, and hardly any connection
between that host and others works as usual, it is the host.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain
from math import log2
from typing import NamedTuple

import msgspec

from kintsugi.diagnosis.baseline import MANY, Baselines
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, LinkKey, known_role
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.run_folder.layout import RELATIVE

RTT_FACTOR = 5.0
LEAST_RTT_S = 0.055
"""Least round-trip time that counts: a receiver may delay an acknowledgement by 40 ms."""
USUAL_RTT_S = 0.03
"""Bound of the usual round-trip time until it has been measured for long."""
ABOVE_OFTEN = 1.5
"""Factor above a level that is reached regularly, as while weights are sent."""
FALLING = 0.93
"""An average that falls by this factor shows that the fault is over."""
CLEARLY_LATE_S = 0.1
SURELY_LATE_S = 0.2
"""Round-trip time above which a connection is late: retransmissions of lost segments do not raise it so far."""
OVER_S = 3.2
"""Window over which losses are counted."""
LASTING_S = 1.2
"""Least time from the first to the last loss; samples of two hosts of one moment are closer."""
LOST_PER_S = 1.5
MANY_PER_S = 4.0
MOST_AT_ONCE = 6.0
"""Bound of the losses of one second: a dropped queue is one event."""
LOST_FACTOR = 6.0
BACKOFF = 3
UNACKED_BACKOFF = 2
"""Retransmissions of one segment that are no accident: a single lost segment is acknowledged after the first."""
UNACKED_S = 1.6
"""Least time without an acknowledgement although segments were retransmitted."""
UNSENT_S = 3.6
FIRST_TRY_S = 0.2
"""First retransmission timeout; each further one is twice as long."""
SILENT_S = 2.5
FEW = 2.5
"""Lost segments above which an end is not cut off: they were sent over a route that works."""
BEFORE_S = 6.4
"""Time before nothing is acknowledged in which losses show that the route was bad and not cut."""
SHOWN_S = 2.1
"""Time after the first late acknowledgement until every active connection has shown whether it is late too. A cut shows
within the next sample, since it has taken some retransmissions already."""
MOST_SHOWN = 4
NEARLY_ALL = 0.9


class ConnectionTrouble(NamedTuple):
    finding: Finding
    ends: frozenset[str]
    """Processes whose bad connections it explains."""


class _Signs:
    """All bad samples of all connections inside the run, sorted by time."""

    def __init__(self, bundle: EvidenceBundle, baselines: Baselines, *, since: float, at: float) -> None:
        self.late: list[ConnectionEnd] = []
        self.lost: list[ConnectionEnd] = []
        self.cut: list[ConnectionEnd] = []
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
            self._cut(key, bundle, since=since, at=at)
        for points in (self.late, self.lost, self.cut):
            points.sort()

    def _late(
        self, key: LinkKey, bundle: EvidenceBundle, baselines: Baselines, *, since: float, at: float
    ) -> None:
        """Collect late samples of connections with an acknowledgement since the sample before; other averages are
        old."""
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
                self.late.append(ConnectionEnd(time, key, value))
            before = value

    def _lost(self, key: LinkKey, bundle: EvidenceBundle, *, since: float, at: float) -> None:
        """Collect retransmissions of connections on which something is acknowledged; otherwise it is a cut and no loss.

        A negative value corrects an earlier one: the segments had arrived.
        """
        tracks = bundle.links[key]
        track, sent = tracks["lost"], tracks["out"]
        for index in range(bisect_left(track.times, since), bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            if value and sent.at(time, within_s=0.3):
                self.lost.append(ConnectionEnd(time, key, max(-MOST_AT_ONCE, min(value, MOST_AT_ONCE))))

    def _cut(self, key: LinkKey, bundle: EvidenceBundle, *, since: float, at: float) -> None:
        """Collect samples without an acknowledgement: retransmitted repeatedly, or in flight for far too long."""
        tracks = bundle.links[key]
        track, sent, on_its_way = tracks["backoff"], tracks["out"], tracks["unacked"]
        assert len(track.values) == len(on_its_way.values), key
        began: float | None = None
        for index in range(bisect_left(track.times, since), bisect_right(track.times, at)):
            time, value = track.times[index], track.values[index]
            # Every sample has both values.
            is_waiting = value >= 1 or on_its_way.values[index] > 0
            if not is_waiting or sent.at(time, within_s=0.3):
                began = None if not is_waiting else time
                continue
            began = time if began is None else began
            if value >= BACKOFF and time - began >= UNACKED_S:
                self.cut.append(ConnectionEnd(time, key, value))
            elif time - began >= UNSENT_S:
                # The number of retransmissions that there would have been.
                self.cut.append(ConnectionEnd(time, key, log2((time - began) / FIRST_TRY_S + 1)))


def network_troubles(
    bundle: EvidenceBundle, baselines: Baselines, *, since: float, at: float
) -> list[Finding]:
    at = min(at, _recorded_until(bundle, at=at))
    signs = _Signs(bundle, baselines, since=max(since, baselines.settled), at=at)
    found = [
        _trouble(bundle, blame, _cut_or_lost(bundle, signs, blame, at=at))
        for blame in blamed(bundle, signs.cut, used=signs.used, shown_s=SAMPLE_S, at=at)
        if not _may_lose(bundle, signs, blame, at=at)
    ]
    found += [
        _trouble(bundle, blame, _late_or_lost(bundle, signs, blame))
        for blame in blamed(bundle, signs.late, used=signs.used, shown_s=SHOWN_S, at=at)
        if _is_clear(blame.points)
    ]
    # A process that is cut off or late causes retransmissions at its peers.
    signs.lost = [
        point
        for point in signs.lost
        if not any(each.ends.intersection(point.key[:2]) and _is_while(each.finding, point) for each in found)
    ]
    lost = [_lost(bundle, signs, blame) for blame in _lossy(bundle, baselines, signs, at=at)]
    return [*(each.finding for each in found), *lost]


def has_unacknowledged(bundle: EvidenceBundle, process: str, *, at: float) -> bool:
    """Return whether segments of a connection of a process were retransmitted repeatedly and are not acknowledged."""
    return any(
        process in key[:2]
        and is_inside(key)
        and max(tracks["backoff"].between(at - SILENT_S, at), default=0.0) >= UNACKED_BACKOFF
        for key, tracks in bundle.links.items()
    )


def is_well_connected(bundle: EvidenceBundle, process: str, *, since: float, at: float) -> bool:
    """Return whether several connections between the host of a process and others are acknowledged, none waits for an
    acknowledgement, and hardly a segment was lost."""
    host, passing, lost = bundle.host(process), set(), 0.0
    for key, tracks in bundle.links.items():
        if not is_inside(key) or not crosses(bundle, pair_of(key), host):
            continue
        if max(tracks["backoff"].between(since, at), default=0.0) >= UNACKED_BACKOFF:
            return False
        lost += sum(tracks["lost"].between(since, at))
        if any(tracks["out"].between(since, at)):
            passing.add(pair_of(key))
    return len(passing) > 1 and lost < FEW


def _trouble(bundle: EvidenceBundle, blame: BlamedEnd, finding: Finding) -> ConnectionTrouble:
    here = {process for process, host in bundle.host_of.items() if blame.host and host == blame.host}
    return ConnectionTrouble(finding, frozenset({blame.process} | here))


def _recorded_until(bundle: EvidenceBundle, *, at: float) -> float:
    """Return the time up to which all hosts have recorded their connections: with samples of one end only, the other
    end would be blamed. A host that has been silent for long is ignored."""
    last = [time for time in bundle.sampled_at.values() if at - time <= SILENT_S]
    return min(last, default=at) + SAME_ROUND_S


def _is_clear(points: list[ConnectionEnd]) -> bool:
    """Return whether samples are more than one late acknowledgement: a high average, or two rises of one connection."""
    times: dict[LinkKey, int] = {}
    for point in points:
        times[point.key] = times.get(point.key, 0) + 1
    return max(times.values()) > 1 or max(point.value for point in points) >= CLEARLY_LATE_S


def _is_while(finding: Finding, point: ConnectionEnd) -> bool:
    return finding.onset - GAP_S <= point.time <= finding.until + GAP_S


def _lossy(bundle: EvidenceBundle, baselines: Baselines, signs: _Signs, *, at: float) -> Iterator[BlamedEnd]:
    """Yield ends that lose more than others and more than usual, in several seconds and over all connections."""
    left = signs.lost
    while left:
        by_process: dict[str, list[ConnectionEnd]] = {}
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
            yield BlamedEnd(bundle.observer_of[host], episode, host) if host else BlamedEnd(process, episode)
        ends = {process} if not host else {each for each in by_process if bundle.host(each) == host}
        left = [point for point in left if not ends.intersection(point.key[:2])]


def _lossy_host(bundle: EvidenceBundle, points: list[ConnectionEnd], *, worst: str) -> str:
    """Return the host whose connections with others have nearly all losses, with several processes at both ends and not
    only the worst one; empty if there is none."""
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


def _segments(points: list[ConnectionEnd]) -> float:
    return sum(point.value for point in points)


def _too_many(points: list[ConnectionEnd], *, usual: float) -> list[ConnectionEnd]:
    """Return the samples of windows in which too much was lost."""
    bound = max(LOST_PER_S, LOST_FACTOR * usual) * OVER_S
    flagged: list[ConnectionEnd] = []
    first, taken, total = 0, 0, 0.0
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
            flagged += [each for each in points[max(first, taken) : index + 1] if each.value > 0]
            taken = index + 1
    return flagged


def _usual_loss(bundle: EvidenceBundle, baselines: Baselines, process: str, *, at: float) -> float:
    """Return the usual loss of all connections of a process together, in segments per second."""
    return sum(
        usual.middle
        for key, tracks in bundle.links.items()
        if process in key[:2] and (usual := baselines.named(tracks, "lost")) is not None
    )


# Findings.


def _cut_or_lost(bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd, *, at: float) -> Finding:
    """Return a cut; a loss if other connections of the end have losses, since one of them may then stall for
    seconds."""
    points = blame.points
    onset = _cut_onset(blame)
    if lost := _losses_beside(bundle, signs, blame, onset=onset, at=at):
        finding = _lost(bundle, signs, blame._replace(points=lost))
        return msgspec.structs.replace(
            finding, onset=min(finding.onset, onset), until=max(finding.until, points[-1].time)
        )
    words = "nothing is acknowledged despite repeated retransmissions"
    return _finding(bundle, signs, blame, FaultKind.NETWORK_CUT, onset, words, 0.78)


def _may_lose(bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd, *, at: float) -> bool:
    """Return whether it is not clear yet that an end is cut off: other connections of it are acknowledged after its
    onset. Where half of the packets are lost, one connection stalls before the losses of others are many."""
    if at >= blame.points[0].time + UNCLEAR_S:
        return False
    onset = _cut_onset(blame)
    bad = {point.pair for point in blame.points}
    between_hosts = all(bundle.host(pair[0]) != bundle.host(pair[1]) for pair in bad)
    passing = any(
        bundle.host(pair[0]) != bundle.host(pair[1]) or not between_hosts
        for pair in _in_use(bundle, since=onset + SAMPLE_S, until=at) - bad
        if _is_at(bundle, blame, ConnectionEnd(onset, (*pair, 0), 0.0))
    )
    return passing and not _losses_beside(bundle, signs, blame, onset=onset, at=at)


def _cut_onset(blame: BlamedEnd) -> float:
    return min(point.time - FIRST_TRY_S * (2**point.value - 1) for point in blame.points)


def _losses_beside(
    bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd, *, onset: float, at: float
) -> list[ConnectionEnd]:
    """Return the losses that show that an end is not cut off: at the same time, for seconds before, or on a connection
    that works and repeats again."""
    first, last = blame.points[0].time, blame.points[-1].time
    here = [point for point in signs.lost if _is_at(bundle, blame, point) and point.time <= last]
    lost = [point for point in here if onset + SAMPLE_S < point.time and point.value > 0]
    if len({point.pair for point in lost}) > 1 or _segments(lost) > FEW:
        return lost
    before = [point for point in here if onset - BEFORE_S <= point.time < onset - SAMPLE_S]
    if _segments(before) > FEW and len({round(point.time) for point in before}) > 1:
        return sorted([*before, *lost])
    since = max(onset + SAMPLE_S, first - UNACKED_S)
    repeated = _repeated_again(bundle, blame, since=since, until=last)
    return repeated or _stalled_again(bundle, blame, since=since, until=min(at, last + GAP_S))


def _repeated_again(
    bundle: EvidenceBundle, blame: BlamedEnd, *, since: float, until: float
) -> list[ConnectionEnd]:
    """Return retransmissions on a connection of the end that came after something had been acknowledged there: where
    half of the packets are lost, one segment may be repeated for seconds, and yet others pass. Where a cut has ended,
    nothing is repeated after the first acknowledgement."""
    found: list[ConnectionEnd] = []
    for key, tracks in bundle.links.items():
        if not is_inside(key) or not _is_at(bundle, blame, ConnectionEnd(since, key, 0.0)):
            continue
        acknowledged = next((time for time, value in tracks["out"].points(since, until) if value > 0), until)
        found += [
            ConnectionEnd(time, key, value)
            for time, value in tracks["lost"].points(acknowledged + SAME_ROUND_S, until)
            if value > 0
        ]
    return sorted(found)


def _stalled_again(
    bundle: EvidenceBundle, blame: BlamedEnd, *, since: float, until: float
) -> list[ConnectionEnd]:
    """Return samples of connections of the end that stall again, after something had been acknowledged there."""
    found: list[ConnectionEnd] = []
    for key in {point.key for point in blame.points}:
        tracks = bundle.links[key]
        acknowledged = next((time for time, value in tracks["out"].points(since, until) if value > 0), until)
        found += [
            ConnectionEnd(time, key, value)
            for time, value in tracks["backoff"].points(acknowledged + SAME_ROUND_S, until)
            if value >= UNACKED_BACKOFF and not tracks["out"].at(time, within_s=SAME_ROUND_S)
        ]
    return sorted(found)


def _late_or_lost(bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd) -> Finding:
    """Return a delay or a loss. Losses cause retransmissions in every second, delays only at first."""
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


def _lost(bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd) -> Finding:
    points = blame.points
    seconds = points[-1].time - points[0].time + 1.0
    words = f"{_segments(points):.0f} segments had to be retransmitted within {seconds:.0f} s"
    return _finding(bundle, signs, blame, FaultKind.NETWORK_LOSS, points[0].time - 1.0, words, 0.66)


def _is_at(bundle: EvidenceBundle, blame: BlamedEnd, point: ConnectionEnd) -> bool:
    if blame.host:
        return crosses(bundle, point.pair, blame.host)
    return blame.process in point.key[:2]


def _share(bundle: EvidenceBundle, signs: _Signs, blame: BlamedEnd) -> float:
    """Return the share of bad connections among the active ones of an end."""
    used = sum(
        crosses(bundle, pair, blame.host) if blame.host else blame.process in pair for pair in signs.used
    )
    return len({point.pair for point in blame.points}) / max(1, used)


def _finding(
    bundle: EvidenceBundle,
    signs: _Signs,
    blame: BlamedEnd,
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
        what=f"{_connections_of(bundle, blame, peers)}: {words}",
        evidence=tuple(
            Evidence(
                _source(bundle, point.key),
                point.time,
                f"{point.key[0]} to {point.key[1]}: {_quote(kind, point)}",
            )
            for point in shown
        ),
        others=peers,
        rules_out=_rules_out(process, peers, signs.used, touched) if not host else _no_process(host, touched),
        of_host=bool(host),
    )


def _connections_of(bundle: EvidenceBundle, blame: BlamedEnd, peers: tuple[str, ...]) -> str:
    if blame.host:
        others = sorted({bundle.host(peer) for peer in peers} - {blame.host})
        return (
            f"its host's {len({point.pair for point in blame.points})} connections with {', '.join(others)}"
        )
    return f"its connection with {peers[0] if len(peers) == 1 else f'{len(peers)} others'}"


def _no_process(host: str, touched: set[Pair]) -> tuple[str, ...]:
    return (f"a single process: {len(touched)} connections between {host} and others are bad",)


def _quote(kind: FaultKind, point: ConnectionEnd) -> str:
    if kind is FaultKind.NETWORK_DELAY:
        return f"rtt_s {point.value:.3f}"
    if kind is FaultKind.NETWORK_CUT:
        return f"backoff {point.value:.0f}, nothing acknowledged"
    return f"{point.value:.1f} segments a second retransmitted that had not arrived"


def _rules_out(
    process: str, peers: tuple[str, ...], used: set[tuple[str, str]], touched: set[tuple[str, str]]
) -> tuple[str, ...]:
    found = []
    for peer in peers[:3]:
        fine = [pair for pair in used if peer in pair and process not in pair and pair not in touched]
        if fine:
            found.append(f"{peer}: its connections with {len(fine)} others are as usual")
    return tuple(found)


def _source(bundle: EvidenceBundle, key: LinkKey) -> str:
    return str(RELATIVE.readings_file(bundle.observer_of.get(bundle.host(key[0]), "agent-0")))


SAMPLE_S = 1.1
"""Readings come once a second: one may cover the time before an event."""
SAME_ROUND_S = 0.3
"""Time between the samples of different hosts in one round."""
GAP_S = 4.2
"""Bad samples this close to each other are one episode."""
ALL = 0.7
MANY_SHARE = 0.4
UNCLEAR_S = 2.0
"""Further time to wait where either end may be at fault."""

Pair = tuple[str, str]


class ConnectionEnd(NamedTuple):
    """A bad sample of a connection; `value` is a time, or a number of segments or retransmissions."""

    time: float
    key: LinkKey
    value: float

    @property
    def pair(self) -> Pair:
        return pair_of(self.key)


def pair_of(key: LinkKey) -> Pair:
    return (min(key[:2]), max(key[:2]))


class BlamedEnd(NamedTuple):
    """The end at fault: a process, or a whole host, represented by its agent."""

    process: str
    points: list[ConnectionEnd]
    host: str = ""


def blamed(
    bundle: EvidenceBundle, points: list[ConnectionEnd], *, used: set[Pair], shown_s: float, at: float
) -> Iterator[BlamedEnd]:
    """Yield the ends at fault of each episode, the one that explains most first.

    After `shown_s` from the first bad sample, other connections would be bad too if they are affected.
    """
    for episode in episodes(points):
        left = episode
        since, until = episode[0].time, episode[-1].time + SAME_ROUND_S
        bad = {point.pair for point in episode}
        hosts = _hosts_in_common(bundle, bad, used=_in_use(bundle, since=since - SAMPLE_S, until=until))
        # A single bad connection between hosts may be the first of several.
        is_first = len(bad) == 1 and bundle.host(episode[0].pair[0]) != bundle.host(episode[0].pair[1])
        if (hosts or is_first) and at < since + shown_s:
            continue
        good = _in_use(bundle, since=since + shown_s - SAME_ROUND_S, until=until) - bad
        if host := next((host for host in hosts if _is_cut_off(bundle, host, bad, good)), ""):
            of_host = [point for point in left if crosses(bundle, point.pair, host)]
            yield BlamedEnd(bundle.observer_of[host], of_host, host)
            left = [point for point in left if not crosses(bundle, point.pair, host)]
        while left:
            process = _common_end({point.pair for point in left}, used)
            of_process = [point for point in left if process in point.key[:2]]
            may_be_its_peers = _lead_to_one_host(bundle, process, {point.pair for point in of_process}, used)
            if not may_be_its_peers or at >= since + shown_s + UNCLEAR_S:
                yield BlamedEnd(process, of_process)
            left = [point for point in left if process not in point.key[:2]]


def _hosts_in_common(bundle: EvidenceBundle, bad: set[Pair], *, used: set[Pair]) -> list[str]:
    """Return hosts that nearly all bad connections lead to, with several of their processes; the master's host last: of
    two hosts that do not reach each other, the other one is cut off."""
    found = []
    for host in bundle.observer_of:
        crossing = {pair for pair in bad if crosses(bundle, pair, host)}
        ends = {end for pair in crossing for end in pair}
        here = {end for end in ends if bundle.host(end) == host}
        there = ends - here
        if len(crossing) < ALL * len(bad) or len(here) < 2:
            continue
        # A single process at the other side may be at fault itself, unless others reach it.
        if len(there) > 1 or any(there.intersection(pair) for pair in used - bad):
            found.append(host)
    return sorted(found, key=lambda host: host == bundle.host(MASTER))


def _is_cut_off(bundle: EvidenceBundle, host: str, bad: set[Pair], good: set[Pair]) -> bool:
    """Return whether nearly all connections to a host are bad. If no process is common to the bad ones, a smaller
    share is enough: one bad host is more likely than several bad processes."""
    num_bad, num_good = (sum(crosses(bundle, pair, host) for pair in pairs) for pairs in (bad, good))
    has_common_end = bool(set.intersection(*map(set, bad)))
    return num_bad >= (ALL if has_common_end else MANY_SHARE) * (num_bad + num_good)


def _lead_to_one_host(bundle: EvidenceBundle, process: str, bad: set[Pair], used: set[Pair]) -> bool:
    """Return whether only a few connections of a process are bad, all with one other host: that host may be at fault,
    and further samples will show it."""
    hosts = {bundle.host(end) for pair in bad for end in pair if end != process}
    share = len(bad) / sum(process in pair for pair in used | bad)
    return len(bad) > 1 and len(hosts) == 1 and bundle.host(process) not in hosts and share < ALL


def crosses(bundle: EvidenceBundle, pair: Pair, host: str) -> bool:
    """Return whether a connection leads from a host to another one."""
    return (bundle.host(pair[0]) == host) != (bundle.host(pair[1]) == host)


def _in_use(bundle: EvidenceBundle, *, since: float, until: float) -> set[Pair]:
    """Return the connections on which something was acknowledged."""
    return {
        pair_of(key)
        for key, tracks in bundle.links.items()
        if is_inside(key) and any(tracks["out"].between(since, until))
    }


def episodes(points: list[ConnectionEnd]) -> list[list[ConnectionEnd]]:
    groups: list[list[ConnectionEnd]] = []
    for point in points:
        if groups and point.time - groups[-1][-1].time <= GAP_S:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _common_end(bad: set[Pair], used: set[Pair]) -> str:
    """Return the process that most bad connections share, and most of whose connections are bad."""

    def rating(process: str) -> tuple[float, float, bool, str]:
        covered = sum(process in pair for pair in bad)
        share = covered / sum(process in pair for pair in used | bad)
        # A process with only bad connections explains more than one that has many of them.
        return (covered * share, share, process != MASTER, process)

    return max({process for pair in bad for process in pair}, key=rating)


def is_inside(key: LinkKey) -> bool:
    """Return whether a connection is between two processes of the run."""
    return key[0] != key[1] and None not in (known_role(key[0]), known_role(key[1]))
