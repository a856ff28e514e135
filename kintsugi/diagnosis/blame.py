"""Which end of bad connections is the bad one: the process that they have in common, or the host. Pure.

One connection has two ends, and says nothing about which of them it is. Several do: the end that the bad ones have in
common, and whose other connections are bad too, is where the trouble is. Where the bad ones have no process in common
but a host, and hardly anything else comes through between it and others as usual, it is the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kintsugi.diagnosis.evidence import MASTER, Bundle, LinkKey, known_role

SAMPLE_S = 1.1
"""Figures come once a second: one may tell of what was before."""
SAME_LOOK_S = 0.3
"""Hosts are looked at one shortly after the other."""
GAP_S = 4.2
"""Bad moments so close to each other are one trouble."""
ALL = 0.7
MANY = 0.4
UNCLEAR_S = 2.0
"""So much longer is waited where it may be either."""

Pair = tuple[str, str]


class Point(NamedTuple):
    """A connection at a moment; `value` is a time, a number of segments or of tries."""

    time: float
    key: LinkKey
    value: float

    @property
    def pair(self) -> Pair:
        return pair_of(self.key)


def pair_of(key: LinkKey) -> Pair:
    return (min(key[:2]), max(key[:2]))


class Blame(NamedTuple):
    """One end of bad connections: a process, or all of a host, which its agent stands for."""

    process: str
    points: list[Point]
    host: str = ""


def blamed(
    bundle: Bundle, points: list[Point], *, used: set[Pair], shown_s: float, at: float
) -> Iterator[Blame]:
    """One trouble after the other; of each one end after the other, the one first that explains most. By `shown_s`
    after the first bad moment the others would be bad too, if they are."""
    for episode in episodes(points):
        left = episode
        since, until = episode[0].time, episode[-1].time + SAME_LOOK_S
        bad = {point.pair for point in episode}
        hosts = _hosts_in_common(bundle, bad, used=_in_use(bundle, since=since - SAMPLE_S, until=until))
        # A single one between hosts may be the first of several.
        is_first = len(bad) == 1 and bundle.host(episode[0].pair[0]) != bundle.host(episode[0].pair[1])
        if (hosts or is_first) and at < since + shown_s:
            continue
        good = _in_use(bundle, since=since + shown_s - SAME_LOOK_S, until=until) - bad
        if host := next((host for host in hosts if _is_cut_off(bundle, host, bad, good)), ""):
            of_host = [point for point in left if crosses(bundle, point.pair, host)]
            yield Blame(bundle.observer_of[host], of_host, host)
            left = [point for point in left if not crosses(bundle, point.pair, host)]
        while left:
            process = _common_end({point.pair for point in left}, used)
            of_process = [point for point in left if process in point.key[:2]]
            may_be_its_peers = _lead_to_one_host(bundle, process, {point.pair for point in of_process}, used)
            if not may_be_its_peers or at >= since + shown_s + UNCLEAR_S:
                yield Blame(process, of_process)
            left = [point for point in left if process not in point.key[:2]]


def _hosts_in_common(bundle: Bundle, bad: set[Pair], *, used: set[Pair]) -> list[str]:
    """Hosts that (nearly) all bad connections lead to, several of their processes at that; the master's own last: of
    two that do not reach each other, it is the other one that is missing."""
    found = []
    for host in bundle.observer_of:
        crossing = {pair for pair in bad if crosses(bundle, pair, host)}
        ends = {end for pair in crossing for end in pair}
        here = {end for end in ends if bundle.host(end) == host}
        there = ends - here
        if len(crossing) < ALL * len(bad) or len(here) < 2:
            continue
        # A single one at the other side may be the bad end itself, unless others reach it.
        if len(there) > 1 or any(there.intersection(pair) for pair in used - bad):
            found.append(host)
    return sorted(found, key=lambda host: host == bundle.host(MASTER))


def _is_cut_off(bundle: Bundle, host: str, bad: set[Pair], good: set[Pair]) -> bool:
    """Whether (nearly) all that leads to it is bad, and not only what somebody has to do with it. Where no process has
    all of them at its end, one bad host is more likely than several bad processes."""
    num_bad, num_good = (sum(crosses(bundle, pair, host) for pair in pairs) for pairs in (bad, good))
    has_common_end = bool(set.intersection(*map(set, bad)))
    return num_bad >= (ALL if has_common_end else MANY) * (num_bad + num_good)


def _lead_to_one_host(bundle: Bundle, process: str, bad: set[Pair], used: set[Pair]) -> bool:
    """Whether a few of its connections are bad, all with one other host, and the rest are not: it may be that host, of
    which others will tell soon."""
    hosts = {bundle.host(end) for pair in bad for end in pair if end != process}
    share = len(bad) / sum(process in pair for pair in used | bad)
    return len(bad) > 1 and len(hosts) == 1 and bundle.host(process) not in hosts and share < ALL


def crosses(bundle: Bundle, pair: Pair, host: str) -> bool:
    """Whether it leads from a host to another."""
    return (bundle.host(pair[0]) == host) != (bundle.host(pair[1]) == host)


def _in_use(bundle: Bundle, *, since: float, until: float) -> set[Pair]:
    """Connections on which something was acknowledged."""
    return {
        pair_of(key)
        for key, tracks in bundle.links.items()
        if is_inside(key) and any(tracks["out"].between(since, until))
    }


def episodes(points: list[Point]) -> list[list[Point]]:
    groups: list[list[Point]] = []
    for point in points:
        if groups and point.time - groups[-1][-1].time <= GAP_S:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _common_end(bad: set[Pair], used: set[Pair]) -> str:
    """The process that most bad connections share, and most of whose connections are bad."""

    def rating(process: str) -> tuple[float, float, bool, str]:
        covered = sum(process in pair for pair in bad)
        share = covered / sum(process in pair for pair in used | bad)
        # Somebody whose every connection is bad explains more than one who only has many of them.
        return (covered * share, share, process != MASTER, process)

    return max({process for pair in bad for process in pair}, key=rating)


def is_inside(key: LinkKey) -> bool:
    """Between two processes of the run."""
    return key[0] != key[1] and None not in (known_role(key[0]), known_role(key[1]))
