"""Links between processes: the kernel's TCP connections, named by the processes at their ends.

A connection belongs to the process that has its inode open. The process at the other end is found by its listening
address (the address book, and the listeners of this host: collectives have their own), or by the other end itself if
that is on this host too. Connections of the same two processes to the same listener are one link; its totals continue
when a connection is replaced by another.

When many ranks are connected with each other, most connections are idle. An idle link is recorded rarely. When it
becomes active, its state in the sample before is recorded first, so that differences are the same as if every sample
had been recorded.

Of more links than can be recorded, those in trouble come first, then those that were not recorded for longest: with n
ranks there are n² of them, and the diagnosis has to read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from kintsugi.telemetry.collect.tcp import TcpInfo, TcpSocket
from kintsugi.telemetry.readings import LinkReading

Address = tuple[str, int]
Key = tuple[str, str, int]
"""Process, its peer, and the port of the listening end."""

WORST_FIRST = (
    "SYN_SENT",
    "SYN_RECV",
    "CLOSE_WAIT",
    "FIN_WAIT1",
    "FIN_WAIT2",
    "CLOSING",
    "LAST_ACK",
    "ESTABLISHED",
)
WILDCARDS = ("0.0.0.0", "::")
MOST_LINKS = 1024
"""Links whose totals are kept without a connection: unknown peers use a new port each time."""
RARELY = 5
"""An idle link is recorded in one of this many samples."""
TOTALS = ("retransmits", "needless", "out_bytes", "in_bytes", "receiver_limited_s")
Counts = tuple[float, ...]
"""Values in the order of `TOTALS`."""
NOTHING: Counts = (0.0,) * len(TOTALS)
_counts = attrgetter(*TOTALS)
_fixed = attrgetter(*(name for name in TcpInfo.__struct_fields__ if name != "last_received_s"))
"""Fields that do not change on an idle connection."""


RECORDED_A_SECOND = 4096
"""Links of a whole run that are recorded in each sample; about a megabyte."""
LEAST_RECORDED = 64


def num_recorded(num_own: int, *, num_processes: int) -> int:
    """Return how many links a host with `num_own` of the run's processes records in each sample."""
    return max(LEAST_RECORDED, RECORDED_A_SECOND * num_own // max(1, num_own, num_processes))


class LinkSampler(NamedTuple):
    """Readings of one sample."""

    before: list[LinkReading]
    """Readings of the sample before, which were left out then and are needed now that the link is active."""
    now: list[LinkReading]


class _Recorded(NamedTuple):
    """State of a link when it was last recorded."""

    marks: list[object]
    num_left_out: int
    """Samples since then."""


class LinkTable:
    """Turns the connections of one moment into readings; keeps the totals of closed connections of a link."""

    def __init__(self) -> None:
        self._counted: dict[int, Counts] = {}
        """Cookie of each open connection → its totals in the last sample."""
        self._totals: dict[Key, Counts] = {}
        self._recorded: dict[Key, _Recorded] = {}
        self._left_out: dict[Key, list[TcpSocket]] = {}
        """Idle links of the last sample that were not recorded."""
        self._num_looks = 0
        self._last_look: dict[Key, int] = {}
        """Number of the sample in which a link was last recorded."""

    def look(
        self,
        sockets: Iterable[TcpSocket],
        *,
        owners: Mapping[int, str],
        book: Mapping[Address, str],
        most: int = RECORDED_A_SECOND,
    ) -> LinkSampler:
        """Return the readings to record, `most` of this moment. `owners`: inode → process of this host; `book`:
        listening address → process."""
        owned = [each for each in sockets if each.inode in owners]
        names = _Names(owned, owners, book)
        groups: dict[Key, list[TcpSocket]] = {}
        for each in owned:
            if each.state != "LISTEN":
                groups.setdefault(names.key(each), []).append(each)
        found, recorded, left_out = LinkSampler([], []), dict[Key, _Recorded](), dict[Key, list[TcpSocket]]()
        counted: dict[int, Counts] = {}
        postponed = self._postponed(groups, most=most)
        for key, group in sorted(groups.items()):
            if key in postponed:
                counted |= {
                    c: self._counted[c] for c in (each.cookie for each in group) if c in self._counted
                }
                continue
            marks, last = [_mark(each) for each in group], self._recorded.get(key)
            is_same = last is not None and last.marks == marks and None not in marks
            if last is not None and is_same and last.num_left_out < RARELY - 1:
                recorded[key], left_out[key] = _Recorded(marks, last.num_left_out + 1), group
                counted |= {each.cookie: self._counted[each.cookie] for each in group}
                continue
            if key in self._left_out and not is_same:
                found.before.append(self._sample(key, self._left_out[key]))
            self._count(key, group, counted)
            found.now.append(self._sample(key, group))
            recorded[key] = _Recorded(marks, 0)
            self._last_look[key] = self._num_looks
        self._counted, self._recorded, self._left_out = counted, recorded, left_out
        if len(self._totals) > MOST_LINKS:
            self._totals = {key: self._totals[key] for key in groups if key in self._totals}
        self._last_look = {key: look for key, look in self._last_look.items() if key in groups}
        return found

    def _postponed(self, groups: Mapping[Key, list[TcpSocket]], *, most: int) -> set[Key]:
        """Return the links that exceed `most`, and wait for a later sample."""
        self._num_looks += 1
        if len(groups) <= most:
            return set()
        by_need = sorted(
            groups,
            key=lambda key: (not any(map(_is_in_trouble, groups[key])), self._last_look.get(key, 0), key),
        )
        return set(by_need[most:])

    def _count(self, key: Key, group: list[TcpSocket], counted: dict[int, Counts]) -> None:
        totals = self._totals.get(key, NOTHING)
        for each in group:
            if each.info is None:
                continue
            counted[each.cookie] = now = _counts(each.info)
            before = self._counted.get(each.cookie, NOTHING)
            totals = tuple(
                [
                    total + max(0.0, late - early)
                    for total, late, early in zip(totals, now, before, strict=True)
                ]
            )
        self._totals[key] = totals

    def _sample(self, key: Key, group: list[TcpSocket]) -> LinkReading:
        of, peer, port = key
        infos = [each.info for each in group if each.info is not None]
        retransmits, needless, out_bytes, in_bytes, receiver_limited_s = self._totals[key]
        values = {
            "connections": float(len(group)),
            "send_queue_bytes": float(sum([each.send_queue for each in group])),
            "receive_queue_bytes": float(sum([each.receive_queue for each in group])),
            **(_worst(infos) if infos else {}),
            "retransmits": retransmits,
            "needless": needless,
            "out_bytes": out_bytes,
            "in_bytes": in_bytes,
            "receiver_limited_s": round(receiver_limited_s, 6),
        }
        states = {each.state for each in group}
        state = next((each for each in WORST_FIRST if each in states), min(states))
        return LinkReading(of, peer, port, state, values)


def _is_in_trouble(each: TcpSocket) -> bool:
    return each.state != "ESTABLISHED" or each.info is None or bool(each.info.backoff or each.info.lost)


def _mark(each: TcpSocket) -> object:
    """Return a value that changes with any activity of an idle connection; None for an active one."""
    info = each.info
    if info is None or each.send_queue or info.unacked or info.backoff:
        return None
    return each.cookie, each.state, each.receive_queue, _fixed(info)


def _worst(infos: list[TcpInfo]) -> dict[str, float]:
    """Return the worst measurements of the connections of a link; amounts in flight are summed."""
    measured = [info.min_rtt_s for info in infos if 0 < info.min_rtt_s < 4000]
    return {
        "rtt_s": max([info.rtt_s for info in infos]),
        "rtt_variance_s": max([info.rtt_variance_s for info in infos]),
        "min_rtt_s": min(measured, default=0.0),
        "rto_s": max([info.rto_s for info in infos]),
        "backoff": float(max([info.backoff for info in infos])),
        "unacked": float(sum([info.unacked for info in infos])),
        "lost": float(sum([info.lost for info in infos])),
        "last_received_s": min([info.last_received_s for info in infos]),
    }


class _Names:
    """Names of the processes at the other ends of connections."""

    def __init__(
        self, owned: Iterable[TcpSocket], owners: Mapping[int, str], book: Mapping[Address, str]
    ) -> None:
        self._owners, self._book = owners, book
        self._listeners: dict[Address, str] = {}
        self._ends: dict[tuple[Address, Address], str] = {}
        for each in owned:
            if each.state == "LISTEN":
                self._listeners.setdefault(each.local, owners[each.inode])
            else:
                self._ends[each.local, each.remote] = owners[each.inode]

    def key(self, each: TcpSocket) -> Key:
        of = self._owners[each.inode]
        listens = self._listener(each.remote)
        if listens is not None:
            return of, listens, each.remote[1]
        accepted = self._listener(each.local) is not None
        port = each.local[1] if accepted else each.remote[1]
        # Of a connecting peer on another host only the address is known: its port is different each time.
        stranger = each.remote[0] if accepted else f"{each.remote[0]}:{each.remote[1]}"
        return of, self._ends.get((each.remote, each.local), stranger), port

    def _listener(self, address: Address) -> str | None:
        """Return the process that listens at an address. The book comes first: sockets can be held by several
        processes."""
        if (named := self._book.get(address) or self._listeners.get(address)) is not None:
            return named
        anywhere = (self._listeners.get((wildcard, address[1])) for wildcard in WILDCARDS)
        return next((name for name in anywhere if name is not None), None)


def address_in(endpoint: str) -> Address | None:
    """`address_in("tcp://127.0.0.1:4001") == ("127.0.0.1", 4001)`; None for an empty endpoint."""
    host, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host.strip("[]"), int(port)) if separator and port.isdecimal() else None
